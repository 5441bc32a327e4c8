"""The demonstration: every method on a function that is smooth here and steep there, and on real data."""

import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathomgp.data import random_split, step_function, step_truth
from fathomgp.estimators import DeepGPRegressor
from fathomgp.metrics import evaluate
from fathomgp.report import CurveSection, ScoreSection, demo_report

METHODS: dict[str, Mapping[str, Any]] = {
    "exact GP": {"method": "exact"},
    "sparse GP": {"method": "sgpr", "num_inducing": 50},
    "deep GP": {"method": "dsvi", "num_inducing": 50},
}
"""The methods on show, as settings of the estimator. A new one adds a line."""

STEP_TEXT = """\
The first example of the STRIDE paper (Latz et al. 2025): 200 noisy observations of a function that is smooth on the \
left and a staircase on the right. Look at the jumps: a Gaussian process that must be equally smooth everywhere rings \
beside them, and its bands are too wide where the function is flat."""

DIABETES_TEXT = """\
442 patients, ten measurements each (age, sex, body mass, blood pressure, six of the blood serum), and how far the \
illness had progressed a year later: the diabetes data that come with scikit-learn. 354 patients train the \
methods, 88 judge them."""


@dataclass(frozen=True)
class Demonstration:
    """What the demonstration leaves behind: the page, and the scores on it as (data set, row) pairs."""

    path: pathlib.Path
    scores: tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class _Problem:
    """Rows to fit, and rows to be judged on."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def run_demo(
    out: str | os.PathLike[str],
    *,
    methods: Mapping[str, Mapping[str, Any]] = METHODS,
    max_iter: int | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> Demonstration:
    """Fit every method to both data sets and write ``out/report.html``.

    Args:
        out: the directory of the page.
        methods: name to settings of :class:`~fathomgp.DeepGPRegressor`.
        max_iter: fewer steps, for a hasty look.
        tell: called with a few words before every fit.
    """
    hurry = {} if max_iter is None else {"max_iter": max_iter}
    settings = {name: {**chosen, **hurry} for name, chosen in methods.items()}
    sections: dict[str, CurveSection | ScoreSection] = {
        "step function": _step_section(settings, tell),
        "diabetes": _diabetes_section(settings, tell),
    }
    path = demo_report(list(sections.values()), pathlib.Path(out) / "report.html")
    return Demonstration(path, tuple((name, row) for name, section in sections.items() for row in section.scores))


def _step_section(methods: Mapping[str, Mapping[str, Any]], tell: Callable[[str], None]) -> CurveSection:
    X, y = step_function()
    problem = _Problem(X, y, *step_function(n=501, seed=1))
    matern = {name: {"kernel": "matern32", **settings} for name, settings in methods.items()}
    answers, scores = _fit_all("step function", problem, matern, tell)
    return CurveSection(
        "A function with jumps",
        STEP_TEXT,
        x=problem.X_test[:, 0],
        answers=answers,
        data=(X[:, 0], y),
        truth=step_truth(problem.X_test[:, 0]),
        scores=scores,
    )


def _diabetes_section(methods: Mapping[str, Mapping[str, Any]], tell: Callable[[str], None]) -> ScoreSection:
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    train, test = random_split(len(X), 0.2, seed=0)
    answers, scores = _fit_all("diabetes", _Problem(X[train], y[train], X[test], y[test]), methods, tell)
    return ScoreSection("Diabetes, a year later", DIABETES_TEXT, scores, answers, y[test])


def _fit_all(
    name: str, problem: _Problem, methods: Mapping[str, Mapping[str, Any]], tell: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """Every method's answer at the test rows, and its row of scores."""
    answers, scores = {}, []
    for method, settings in methods.items():
        tell(f"{name}: {method}")
        began = time.perf_counter()
        estimator = DeepGPRegressor(**settings, random_state=0, verbose=False).fit(problem.X, problem.y)
        seconds = time.perf_counter() - began
        answers[method] = estimator.predict_distribution(problem.X_test)
        scores.append({"method": method} | _scores(answers[method], problem.y_test) | {"seconds": seconds})
    return answers, scores


def _scores(answer: Any, y: np.ndarray) -> dict[str, float]:
    scores = evaluate(answer, y)
    names = {"RMSE": "rmse", "log density": "log_density", "coverage": "coverage_95", "CRPS": "crps"}
    return {shown: scores[name] for shown, name in names.items()}
