"""The page that ``fathomgp fit`` writes: what was fitted, how it went, how good it is, how to use it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fathomgp.errors import DataError
from fathomgp.plots import Answer, as_column
from fathomgp.report._figures import (
    MAX_BARS,
    MAX_POINTS,
    calibration_curve,
    objective_history,
    predicted_vs_observed,
    relevance_bars,
    sorted_intervals,
)
from fathomgp.report._page import Report

SCORES_CAPTION = "RMSE and CRPS are in the units of the output, lower is better; log density: higher is better."

LABEL_SCORES_CAPTION = (
    "Accuracy: the share of right labels. Log density: the mean log probability of the true label, higher is better; "
    "Brier: the squared error of the probabilities, lower is better."
)

CALIBRATION_CAPTION = (
    "Calibration: the share of held-out rows inside the central interval (up) for each nominal probability (across). "
    "An honest model follows the dashed line: above it the intervals are too wide, below it too narrow. The grey band "
    "is what chance alone explains with this many rows."
)

PREDICTED_CAPTION = (
    "Predicted mean with its 95 % interval (up) against the observed value (across); the dashed line is perfection."
)


def fit_report(
    *,
    title: str,
    summary: Mapping[str, Any],
    path: str | os.PathLike[str],
    history: Mapping[str, Any] | None = None,
    scores: Sequence[Mapping[str, Any]] = (),
    y_test: Any = None,
    predictive: Answer | None = None,
    feature_names: Sequence[str] = (),
    lengthscales: Any = None,
    messages: Sequence[str] = (),
    model_path: str | os.PathLike[str] = "model/",
    labels: bool = False,
) -> Path:
    """Write the page of one fit and return its path. What is not given is left out of the page.

    Args:
        title: the heading of the page.
        summary: what was fitted: name to value.
        path: the HTML file.
        history: arrays ``step`` and ``objective``.
        scores: a row of scores for each set of rows, as column to value.
        y_test: outputs of the held-out rows, in their own units; goes with ``predictive``.
        predictive: the answer at the held-out rows.
        feature_names: the input columns, in order.
        lengthscales: one for each input, of the first layer, in units of the scaled inputs.
        messages: warnings and remarks of the fit, one sentence each.
        model_path: where the model was saved, for the lines that load it.
        labels: whether the model predicts labels instead of numbers.
    """
    page = Report(title, "A Gaussian process fitted by fathomgp.").with_heading("What was fitted")
    page = page.with_pairs(summary)
    for message in messages:
        page = page.with_warning(message)
    page = _how_it_went(page, history)
    page = _how_good(page, scores, y_test, predictive, LABEL_SCORES_CAPTION if labels else SCORES_CAPTION)
    page = _what_matters(page, lengthscales, feature_names)
    return _what_next(page, model_path, feature_names, labels).write(path)


def _how_it_went(page: Report, history: Mapping[str, Any] | None) -> Report:
    if history is None or np.size(history.get("objective", ())) == 0:
        return page
    caption = "The objective, step by step. A curve that is still moving at its end would gain from more steps."
    return page.with_heading("How the fit went").with_figure(objective_history(history), caption=caption)


def _how_good(page: Report, scores: Sequence[Mapping[str, Any]], y: Any, answer: Answer | None, caption: str) -> Report:
    if (y is None) != (answer is None):
        raise DataError("y_test and predictive belong together: give both, or neither.")
    if not scores and answer is None:
        return page
    page = page.with_heading("How good it is")
    if scores:
        page = page.with_table(scores, caption)
    return page if answer is None else _held_out_pictures(page, y, answer)


def _held_out_pictures(page: Report, y: Any, answer: Answer) -> Report:
    count = int(np.isfinite(as_column(y, "y_test")).sum())
    shown = f" Shown: {MAX_POINTS:,} of {count:,} rows." if count > MAX_POINTS else ""
    pictures = predicted_vs_observed(y, answer, title="predicted and observed"), calibration_curve({"model": answer}, y)
    page = page.with_figure(*pictures, caption=f"{PREDICTED_CAPTION}{shown} {CALIBRATION_CAPTION}")
    caption = "Rows sorted by predicted mean. About one observation in twenty should lie outside its 95 % interval."
    return page.with_figure(sorted_intervals(y, answer), caption=caption)


def _what_matters(page: Report, lengthscales: Any, names: Sequence[str]) -> Report:
    if lengthscales is None:
        return page
    count = as_column(lengthscales, "lengthscales").size
    names = list(names) or [f"x{i + 1}" for i in range(count)]
    if len(names) != count:
        raise DataError(f"There are {count} lengthscales but {len(names)} feature names; they must agree one to one.")
    caption = (
        "One over the learned lengthscale of each scaled input, in the first layer. The longer the bar, the faster the "
        "function changes along that input; a bar near zero means that the input hardly matters."
    )
    shown = f" Shown: the {MAX_BARS} longest of {count}." if count > MAX_BARS else ""
    page = page.with_heading("Which inputs matter")
    return page.with_figure(relevance_bars(lengthscales, names), caption=caption + shown)


def _what_next(page: Report, model_path: str | os.PathLike[str], names: Sequence[str], labels: bool) -> Report:
    columns = f"[{list(names)!r}]" if 0 < len(names) <= 12 else ""
    numbers = (
        "mean, std = model.predict(new, return_std=True)\nlower, upper = model.predict_distribution(new).interval(0.95)"
    )
    snippet = (
        "import pandas as pd\n"
        "from fathomgp import load\n\n"
        f"model = load({os.fspath(model_path)!r})\n"
        f'new = pd.read_csv("new.csv"){columns}\n'
        f"{'labels, probabilities = model.predict(new), model.predict_proba(new)' if labels else numbers}"
    )
    page = page.with_heading("Use the model again").with_text("In Python:").with_code(snippet)
    return page.with_text("On the command line:").with_code(
        f"fathomgp predict {os.fspath(model_path)} new.csv -o predictions.csv"
    )
