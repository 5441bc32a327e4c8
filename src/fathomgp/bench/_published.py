"""Numbers that papers printed, as they printed them."""

import csv
import importlib.resources
from typing import NamedTuple

DSVI_TABLES = {"loglik": "dsvi_salimbeni_2017_table7.csv", "rmse": "dsvi_salimbeni_2017_table8.csv"}
"""Salimbeni and Deisenroth (2017), Doubly stochastic variational inference for deep Gaussian processes: Table 7 (mean
test log-likelihood) and Table 8 (RMSE), over 20 splits."""


class Score(NamedTuple):
    """A mean over splits with its standard error, and the number of splits behind it."""

    mean: float
    error: float
    splits: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f}"


def published_scores(metric: str) -> dict[tuple[str, str], Score]:
    """(dataset, method) to the printed score; cells that are illegible in the source are left out.

    Example:
        >>> str(published_scores("loglik")["boston", "DGP 2"])
        '-2.47 ± 0.05'
    """
    folder = importlib.resources.files("fathomgp.bench") / "published"
    with (folder / DSVI_TABLES[metric]).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["value"]]
    return {(row["dataset"], row["method"]): Score(float(row["value"]), float(row["stderr"]), 20) for row in rows}
