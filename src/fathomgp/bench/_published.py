"""Numbers that papers printed, as they printed them."""

import csv
import importlib.resources
from typing import NamedTuple

DSVI_TABLES = {"loglik": "dsvi_salimbeni_2017_table7.csv", "rmse": "dsvi_salimbeni_2017_table8.csv"}
"""Salimbeni and Deisenroth (2017), Doubly stochastic variational inference for deep Gaussian processes: Table 7 (mean
test log-likelihood) and Table 8 (RMSE), over 20 splits."""


AEP_TABLE = "aep_bui_2016_supplement_table1.csv"
"""Bui et al. (2016, supplement), Table 1: mean test log-likelihood of classifiers of two classes, whose spreads are
taken as standard errors. Table 2, of several classes, is illegible in our source."""


class Score(NamedTuple):
    """A mean over splits with its standard error, and the number of splits behind it (0 where a paper does not say)."""

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
    return _read(DSVI_TABLES[metric], splits=20)


def published_classifiers() -> dict[tuple[str, str], Score]:
    """(dataset, method) to the printed log-likelihood of approximate EP's classifiers.

    Example:
        >>> str(published_classifiers()["pima", "DGP D-2-1"])
        '-0.40 ± 0.02'
    """
    return _read(AEP_TABLE, splits=0)


def _read(table: str, *, splits: int) -> dict[tuple[str, str], Score]:
    folder = importlib.resources.files("fathomgp.bench") / "published"
    with (folder / table).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["value"]]
    return {(row["dataset"], row["method"]): Score(float(row["value"]), float(row["stderr"]), splits) for row in rows}
