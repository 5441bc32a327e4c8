"""From rows of results to what a paper prints: means with standard errors, average ranks, the rank diagram."""

import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fathomgp.bench._figures import save_figure
from fathomgp.bench._methods import label
from fathomgp.bench._published import Score
from fathomgp.plots import critical_difference

Row = Mapping[str, str]


def row_label(row: Row) -> str:
    """What tables call the method of a row."""
    return label(row["method"], json.loads(row["settings"]))


def select_rows(rows: Iterable[Row], datasets: Sequence[str], splits: Sequence[int]) -> list[Row]:
    """The rows of some datasets and splits, whatever their method."""
    return [row for row in rows if row["dataset"] in datasets and int(row["split"]) in splits]


def mean_scores(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], Score]:
    """(dataset, label) to the mean over splits and its standard error (NaN for a single split)."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row_label(row)].append(float(row[metric]))
    return {group: _mean_and_error(np.array(values)) for group, values in groups.items()}


def average_ranks(rows: Sequence[Row], metric: str = "loglik", *, highest: bool = True) -> tuple[dict[str, float], int]:
    """The average rank of every method over datasets and splits (1 is best), and over how many of these pairs.

    Only pairs on which every method has run count; ties share their ranks.
    """
    from scipy.stats import rankdata

    labels = list(dict.fromkeys(row_label(row) for row in rows))
    scores: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        scores[row["dataset"], row["split"]][row_label(row)] = float(row[metric])
    complete = [[pair[name] for name in labels] for pair in scores.values() if len(pair) == len(labels)]
    if not complete:
        return {}, 0
    ranks = rankdata(np.array(complete) * (-1.0 if highest else 1.0), axis=1).mean(axis=0)
    return dict(zip(labels, ranks.tolist(), strict=True)), len(complete)


def save_rank_diagram(ranks: Mapping[str, float], pairs: int, path: str | os.PathLike[str]) -> pathlib.Path:
    """Draw the critical-difference diagram into a PNG file and return its path."""
    return save_figure(critical_difference(ranks, pairs).figure, path, dpi=200)


def _mean_and_error(values: np.ndarray) -> Score:
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return Score(float(values.mean()), float(error), len(values))
