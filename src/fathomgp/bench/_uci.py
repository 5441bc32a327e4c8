"""The UCI regression benchmark: the standard splits, any method, one row of scores a fit."""

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathomgp._version import __version__
from fathomgp.bench._methods import label
from fathomgp.bench._results import ResultFile
from fathomgp.data import Dataset, load_dataset, standard_split
from fathomgp.errors import DataError, FathomError
from fathomgp.estimators import DeepGPRegressor
from fathomgp.metrics import evaluate

KEY = ("dataset", "split", "method", "depth", "settings")
SCORES = ("loglik", "rmse", "crps", "coverage95", "seconds")
COLUMNS = (*KEY, "n", "d", *SCORES, "version")


@dataclass(frozen=True)
class Job:
    """One fit of the benchmark.

    Attributes:
        dataset: its name.
        split: the number of the standard split.
        method: the name of the method.
        settings: the estimator's settings.
    """

    dataset: str
    split: int
    method: str
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What tables call the method."""
        return label(self.method, self.settings)

    @property
    def key(self) -> dict[str, Any]:
        """The columns of :data:`KEY`."""
        settings = json.dumps(dict(self.settings), sort_keys=True)
        depth = self.settings.get("depth", 1)
        return {
            "dataset": self.dataset,
            "split": self.split,
            "method": self.method,
            "depth": depth,
            "settings": settings,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a job: a row of results, or the error that prevented it."""

    job: Job
    row: Mapping[str, Any] | None
    error: FathomError | None = None


def plan_jobs(datasets: Sequence[str], splits: Sequence[int], methods: Mapping[str, Mapping[str, Any]]) -> list[Job]:
    """Every method on every split of every dataset; methods alternate, so that an early stop compares all of them."""
    return [Job(name, split, method, methods[method]) for name in datasets for split in splits for method in methods]


def open_results(path: Any) -> ResultFile:
    """The file of results, with what earlier runs put there."""
    return ResultFile(path, COLUMNS, KEY)


def run_jobs(jobs: Iterable[Job], results: ResultFile) -> Iterator[Outcome]:
    """Run the jobs that the file does not hold yet, each row written at once. A failed job does not stop the rest."""
    load = functools.lru_cache(maxsize=1)(load_dataset)
    for job in jobs:
        if results.find(job.key) is not None:
            continue
        try:
            row = run_job(job, load(job.dataset))
        except FathomError as error:
            yield Outcome(job, None, error)
            continue
        results.append(row)
        yield Outcome(job, row)


def run_job(job: Job, dataset: Dataset) -> dict[str, Any]:
    """Fit to the training part of a split and score the test part, in the units of y."""
    if dataset.Y is None or dataset.target_kind != "real":
        raise DataError(f"{dataset.name} has no real-valued target: choose a regression set (see fathomgp data list).")
    train, test = standard_split(dataset, job.split)
    X, y = dataset.X.astype(np.float64), dataset.Y[:, 0]
    estimator = DeepGPRegressor(**job.settings, random_state=job.split, verbose=False)
    began = time.perf_counter()
    estimator.fit(X[train], y[train])
    seconds = time.perf_counter() - began
    scores = evaluate(estimator.predict_distribution(X[test]), y[test])
    figures = {
        "loglik": scores["log_density"],
        "rmse": scores["rmse"],
        "crps": scores["crps"],
        "coverage95": scores["coverage_95"],
        "seconds": seconds,
    }
    rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
    return job.key | {"n": len(X), "d": X.shape[1]} | rounded | {"version": __version__}
