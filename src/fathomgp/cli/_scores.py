"""Scores of an answer with the names that people read, output by output because their units differ."""

from typing import Any

import numpy as np

from fathomgp.data import read_labels, read_targets
from fathomgp.errors import DataError
from fathomgp.metrics import accuracy, auc, brier, mae, rmse, smse
from fathomgp.predictive import Predictive

LEVELS = (0.5, 0.9, 0.95)


def named_scores(answer: Predictive, y: Any) -> list[dict[str, float]]:
    """For each output: the name of a score to its value. Missing targets (NaN) do not count."""
    read = read_targets(y, missing="mask", more=True)
    targets = np.where(read.observed, read.Y, np.nan)
    targets = targets[:, 0] if read.squeeze else targets
    if np.isnan(targets).all(axis=0).any():
        raise DataError("A target has no measured value in the rows to be scored: give rows whose target is known.")
    figures = {"log density": answer.log_density(targets, per_output=True), "CRPS": answer.crps(targets)}
    for level in LEVELS:
        figures[f"coverage {100 * level:g} %"] = _inside(answer.interval(level), targets)
    columns = {name: _columns(figure).T for name, figure in figures.items()}
    pairs = zip(_columns(targets).T, _columns(answer.mean()).T, strict=True)
    return [
        {"RMSE": float(rmse(*pair)), "MAE": float(mae(*pair)), "SMSE": float(smse(*pair))}
        | {name: float(np.nanmean(column[p])) for name, column in columns.items()}
        for p, pair in enumerate(pairs)
    ]


def class_scores(answer: Predictive, y: Any, classes: np.ndarray) -> list[dict[str, float]]:
    """The same for labels, of which there is one output."""
    targets, _ = read_labels(y, missing="mask", classes=classes)
    known = targets.observed[:, 0]
    if not known.any():
        raise DataError("No row to be scored has a label: give rows whose target is known.")
    labels, table = targets.Y[known, 0], answer.probabilities()[known]
    scores = {
        "accuracy": float(accuracy(labels, table)),
        "log density": float(np.mean(answer.log_density(np.where(known, targets.Y[:, 0], np.nan))[known])),
        "Brier": float(brier(labels, table)),
    }
    # Without rows of every class there is no curve to be under.
    return [scores | {"AUC": auc(labels, table)} if len(np.unique(labels)) == len(classes) else scores]


def _columns(values: np.ndarray) -> np.ndarray:
    return values[:, None] if values.ndim == 1 else values


def _inside(ends: tuple[np.ndarray, np.ndarray], y: np.ndarray) -> np.ndarray:
    """1 where y lies between the ends, 0 where not, NaN where y is missing."""
    return np.where(np.isnan(y), np.nan, (ends[0] <= y) & (y <= ends[1]))
