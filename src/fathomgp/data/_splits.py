"""Which rows train and which rows test."""

from typing import Any

import numpy as np

from fathomgp.data._named import Dataset
from fathomgp.errors import DataError, SettingError


def standard_split(dataset: Dataset, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training and the test set of a published split; every row that does not test trains."""
    if dataset.test_idx is None:
        raise DataError(f"{dataset.name} has no published splits: use random_split or k_fold instead.")
    splits = len(dataset.test_idx)
    if not 0 <= index < splits:
        raise SettingError(f"{dataset.name} has the splits 0 to {splits - 1}, but split {index} was asked for.")
    test = dataset.test_idx[index].astype(np.int64)
    return _others(len(dataset.X), test), test


def check_seed(seed: Any, name: str = "seed") -> int:
    """A seed of random numbers: a whole number that is not negative, and below 2 ** 32."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 32:
        raise SettingError(f"{name} must be a whole number from 0 to {(1 << 32) - 1}, but it is {str(seed)[:40]}.")
    return int(seed)


def random_split(n: int, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows drawn at random; both sets are sorted and hold at least one row.

    Example:
        >>> train, test = random_split(10, 0.3, seed=0)
        >>> len(train), len(test)
        (7, 3)
    """
    if n < 2:
        raise DataError(f"{n} rows cannot be split into a training and a test set: at least 2 are needed.")
    if not 0.0 < test_fraction < 1.0:
        raise SettingError(f"test_fraction must lie between 0 and 1, but it is {test_fraction:g}.")
    size = min(max(round(n * test_fraction), 1), n - 1)
    test = np.sort(np.random.default_rng(check_seed(seed)).permutation(n)[:size])
    return _others(n, test), test


def k_fold(n: int, folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``folds`` pairs of training and test rows; every row tests once, and test sets differ by at most one row."""
    if not 2 <= folds <= n:
        raise SettingError(f"folds must lie between 2 and the number of rows ({n}), but it is {folds}.")
    parts = np.array_split(np.random.default_rng(check_seed(seed)).permutation(n), folds)
    return [(_others(n, part), np.sort(part)) for part in parts]


def _others(n: int, rows: np.ndarray) -> np.ndarray:
    chosen = np.zeros(n, bool)
    chosen[rows] = True
    return np.flatnonzero(~chosen)
