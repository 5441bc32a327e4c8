"""Test scores while a fit goes on, against steps and seconds: Figure 3 of Havasi et al. (2018).

The middle panel compares ways to learn the hyperparameters (`fathomgp bench mcem`), the right one algorithms against
the clock (`fathomgp bench convergence`). A run writes a row every few seconds and a checkpoint every minute beside its
CSV file: started again, it goes on where it stopped.
"""

import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fathomgp._version import __version__
from fathomgp.bench._figures import save_figure
from fathomgp.bench._results import ResultFile
from fathomgp.compilation import program
from fathomgp.data import ArraySource, Standardizer, load_dataset, standard_split
from fathomgp.fitting import Checkpointing, fit_model
from fathomgp.inference import AbstractInference, SampledPosterior
from fathomgp.likelihoods import Gaussian
from fathomgp.metrics import mean_log_density
from fathomgp.model import build_model
from fathomgp.plots import PALETTE
from fathomgp.precision import double_precision
from fathomgp.predictive import Predictive

COLUMNS = ("dataset", "split", "run", "phase", "step", "seconds", "loglik", "version")
KEY = ("dataset", "split", "run", "step")
#: Test rows that are scored, and draws that predict, at the most: scoring must not outweigh learning.
_TEST_ROWS, _DRAWS = 2000, 50


def open_watched_results(path: str | os.PathLike[str]) -> ResultFile:
    """The file of results, with what earlier runs put there."""
    return ResultFile(path, COLUMNS, KEY)


@double_precision
def watch_fit(
    name: str,
    inference: AbstractInference,
    results: ResultFile,
    *,
    run: str,
    split: int = 0,
    depth: int = 2,
    num_inducing: int = 100,
    max_iter: int | None = None,
    every: float = 10.0,
    dtype: Any = np.float64,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Fit a model to a split and write its test score every so many seconds of learning; scoring is not counted."""
    dataset = load_dataset(name)
    train, test = standard_split(dataset, split)
    assert dataset.Y is not None
    X, Y = dataset.X.astype(np.float64), dataset.Y[:, :1].astype(np.float64)
    x_scaler, y_scaler = Standardizer.fit(X[train]), Standardizer.fit(Y[train])
    x = np.asarray(x_scaler.transform(X[train]))
    source = ArraySource(x, np.asarray(y_scaler.transform(Y[train])), dtype=dtype)
    model = build_model(x[:20_000], Gaussian(0.01), 1, depth=depth, num_inducing=num_inducing)
    test = test[:_TEST_ROWS]
    rows, y = np.asarray(x_scaler.transform(X[test])), Y[test]

    def score(posterior: Any) -> dict[str, Any]:
        mixture = _predict(fewer_draws(posterior), jax.numpy.asarray(rows), jax.random.key(0))
        loglik = mean_log_density(y, Predictive(mixture, posterior.likelihood, y_scaler.shift, y_scaler.scale))
        return {"loglik": float(f"{float(loglik):.6g}"), "version": __version__}

    watcher = Watcher(results, {"dataset": name, "split": split, "run": run}, score, every, tell)
    folder = results.path.with_name(f"{results.path.stem}_{name}_{split}_{run}".replace(" ", "_"))
    key = jax.random.key(split)
    fit_model(
        inference,
        model,
        source,
        key=key,
        max_iter=max_iter,
        callbacks=[watcher],
        checkpointing=Checkpointing(folder),
        verbose=False,
    )


class Watcher:
    """A callback that scores what was learned so far, whenever enough seconds of learning have passed.

    Args:
        results: where the rows go; it has columns for the key, phase, step, seconds and what ``score`` gives.
        key: names the run.
        score: gives a row's figures from a posterior.
        every: seconds of learning between two rows; the end of a phase has one too.
        tell: called with a line a row.
    """

    def __init__(
        self,
        results: ResultFile,
        key: Mapping[str, Any],
        score: Callable[[Any], Mapping[str, Any]],
        every: float,
        tell: Callable[[str], None],
    ):
        self.results, self.key, self.score, self.every, self.tell = results, key, score, every, tell
        earlier = [row for row in results.rows if all(row[name] == str(value) for name, value in key.items())]
        self.step = max((int(row["step"]) for row in earlier), default=0)
        self.before = max((float(row["seconds"]) for row in earlier), default=0.0)
        self.last, self.scoring = -np.inf, 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Score now and then, and at the end of a phase; steps that an earlier run has scored are left out."""
        seconds = self.before + event["seconds"] - self.scoring
        waits = seconds - self.last < self.every and event["step"] < event["steps"]
        if waits or event["total"] <= self.step:
            return
        began = time.monotonic()
        figures = self.score(event["posterior"]())
        row = dict(self.key) | {"phase": event["phase"], "step": event["total"], "seconds": round(seconds, 2)}
        self.results.append(row | dict(figures))
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float))
        self.tell(f"{self.key['run']}: step {event['total']}, {seconds:.0f} s, test {said}")
        self.last, self.step = seconds, event["total"]
        self.scoring += time.monotonic() - began


def save_watched_figure(
    rows: Sequence[Mapping[str, str]], path: str | os.PathLike[str], *, against: str = "seconds"
) -> pathlib.Path:
    """Test log-likelihood against ``"step"`` or ``"seconds"``, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    ax = figure.subplots()
    for run, colour in zip(dict.fromkeys(row["run"] for row in rows), PALETTE, strict=False):
        mine = sorted((float(row[against]), float(row["loglik"])) for row in rows if row["run"] == run)
        ax.plot(*np.array(mine).T, color=colour, label=run)
    ax.set(xlabel="iterations" if against == "step" else "seconds", ylabel="mean test log-likelihood")
    ax.legend(frameon=False)
    return save_figure(figure, path)


def fewer_draws(posterior: Any) -> Any:
    """The posterior with at most 50 of its draws, evenly spaced, if it is made of draws."""
    if not isinstance(posterior, SampledPosterior):
        return posterior
    chains, draws = posterior.energy.shape
    chosen = np.linspace(0, draws - 1, min(draws, max(1, _DRAWS // chains))).astype(int)
    v = tuple(layer[:, chosen] for layer in posterior.v)
    return SampledPosterior(posterior.model, posterior.whiteners, v, posterior.energy[:, chosen])


@program
def _predict(posterior: Any, x: Any, key: Any) -> Any:
    return posterior.predict_f(x, key=key)
