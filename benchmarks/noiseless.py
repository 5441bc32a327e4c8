"""Functions observed with next to no noise: 100 runs of a computer code, or a table that a formula made.

Every function returns ``X_train, y_train, X_test, y_test``; the training rows are a Latin hypercube, or uniform for
:func:`ninety_two`, and the test rows 1,000 uniform ones without noise but for :func:`ninety_two`, whose tests have the
same noise as its training rows.
"""

import numpy as np
from scipy.stats import qmc

Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

_TEST_ROWS = 1000
#: Radius of the borehole and of influence, transmissivity and head of the upper aquifer, those of the lower one, length
#: and conductivity of the borehole: lowest and highest values.
_BOREHOLE = np.array(
    [
        [0.05, 100.0, 63070.0, 990.0, 63.1, 700.0, 1120.0, 9855.0],
        [0.15, 50000.0, 115600.0, 1110.0, 116.0, 820.0, 1680.0, 12045.0],
    ]
)


def ninety_two(noise: float, seed: int) -> Table:
    """``y = sin(3 x0) + x1 x2 + x3 + noise e`` on 92 rows of seven uniform columns, three of which do nothing."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, size=(92 + _TEST_ROWS, 7))
    y = np.sin(3.0 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3] + noise * rng.normal(size=len(x))
    return x[:92], y[:92], x[92:], y[92:]


def friedman(n: int, seed: int) -> Table:
    """``10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4`` (Friedman 1991); five more columns do nothing."""
    return _runs(
        lambda x: 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4],
        10,
        n,
        seed,
    )


def borehole(n: int, seed: int) -> Table:
    """Flow of water through a borehole between two aquifers (Worley 1987); inputs in their own units."""

    def flow(u: np.ndarray) -> np.ndarray:
        rw, r, Tu, Hu, Tl, Hl, length, Kw = _in_units(u).T
        log = np.log(r / rw)
        return 2 * np.pi * Tu * (Hu - Hl) / (log * (1 + 2 * length * Tu / (log * rw**2 * Kw) + Tu / Tl))

    x, y, x_test, y_test = _runs(flow, 8, n, seed)
    return _in_units(x), y, _in_units(x_test), y_test


def dette_pepelyshev(n: int, seed: int) -> Table:
    """The eight-dimensional function of Dette and Pepelyshev (2010)."""

    def curved(x: np.ndarray) -> np.ndarray:
        first = 4 * (x[:, 0] - 2 + 8 * x[:, 1] - 8 * x[:, 1] ** 2) ** 2 + (3 - 4 * x[:, 1]) ** 2
        third = 16 * np.sqrt(x[:, 2] + 1) * (2 * x[:, 2] - 1) ** 2
        return first + third + np.log1p(np.cumsum(x[:, 2:], axis=1)[:, 1:]) @ np.arange(4.0, 9.0)

    return _runs(curved, 8, n, seed)


def _runs(function, columns: int, n: int, seed: int) -> Table:
    """A Latin hypercube of ``n`` runs, and uniform test rows."""
    rng = np.random.default_rng(seed)
    x = qmc.LatinHypercube(columns, rng=rng).random(n)
    x_test = rng.uniform(size=(_TEST_ROWS, columns))
    return x, function(x), x_test, function(x_test)


def _in_units(u: np.ndarray) -> np.ndarray:
    low, high = _BOREHOLE
    return low + (high - low) * u
