"""Formulas that stand for computer codes in the literature on emulation: smooth, of six to ten inputs, without noise.

Example:
    >>> X, y, X_test, y_test = computer_runs("piston", 100)
    >>> X.shape, y.shape, X_test.shape
    ((100, 7), (100,), (1000, 7))

References:
    Friedman (1991), Multivariate adaptive regression splines. Annals of Statistics.
    Worley (1987), Deterministic uncertainty analysis. Oak Ridge National Laboratory (the borehole).
    Dette and Pepelyshev (2010), Generalized Latin hypercube design for computer experiments. Technometrics.
    Forrester, Sobester and Keane (2008), Engineering design via surrogate modelling. Wiley (the wing).
    Ben-Ari and Steinberg (2007), Modeling data from computer experiments. Quality Engineering (circuit and piston).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from fathomgp.data._tables import near_miss
from fathomgp.errors import SettingError

#: Training inputs and outputs, test inputs and outputs.
Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def friedman(x: np.ndarray) -> np.ndarray:
    """``10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4``; five more inputs do nothing."""
    return 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]


def borehole(x: np.ndarray) -> np.ndarray:
    """Flow of water through a borehole between two aquifers."""
    radius, influence, upper, upper_head, lower, lower_head, length, conductivity = x.T
    log = np.log(influence / radius)
    leak = 2 * length * upper / (log * radius**2 * conductivity)
    return 2 * np.pi * upper * (upper_head - lower_head) / (log * (1 + leak + upper / lower))


def dette_pepelyshev(x: np.ndarray) -> np.ndarray:
    """The function of eight inputs: strongly curved along some of them, nearly flat along the others."""
    curved = 4 * (x[:, 0] - 2 + 8 * x[:, 1] - 8 * x[:, 1] ** 2) ** 2 + (3 - 4 * x[:, 1]) ** 2
    steep = 16 * np.sqrt(x[:, 2] + 1) * (2 * x[:, 2] - 1) ** 2
    return curved + steep + np.log1p(np.cumsum(x[:, 2:], axis=1)[:, 1:]) @ np.arange(4.0, 9.0)


def wing_weight(x: np.ndarray) -> np.ndarray:
    """Weight of a light aircraft's wing."""
    area, fuel, aspect, sweep, pressure, taper, thickness, load, gross, paint = x.T
    cosine = np.cos(np.radians(sweep))
    shape = (aspect / cosine**2) ** 0.6 * taper**0.04 * (100 * thickness / cosine) ** -0.3
    return 0.036 * area**0.758 * fuel**0.0035 * shape * pressure**0.006 * (load * gross) ** 0.49 + area * paint


def otl_circuit(x: np.ndarray) -> np.ndarray:
    """Mid-point voltage of a push-pull circuit without transformer."""
    b1, b2, f, c1, c2, gain = x.T
    load = gain * (c2 + 9)
    return ((12 * b2 / (b1 + b2) + 0.74) * load + 11.35 * f + 0.74 * f * load / c1) / (load + f)


def piston(x: np.ndarray) -> np.ndarray:
    """Time of a cycle of a piston in its cylinder."""
    mass, surface, start, spring, pressure, ambient, filling = x.T
    gas = pressure * start * ambient / filling
    push = pressure * surface + 19.62 * mass - spring * start / surface
    volume = surface / (2 * spring) * (np.sqrt(push**2 + 4 * spring * gas) - push)
    return 2 * np.pi * np.sqrt(mass / (spring + surface**2 * gas / volume**2))


@dataclasses.dataclass(frozen=True)
class ComputerCode:
    """A function of a box, row by row.

    Attributes:
        function: outputs of inputs.
        lowest: the lowest value of every input.
        highest: the highest one.
    """

    function: Callable[[np.ndarray], np.ndarray]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]


COMPUTER_CODES: dict[str, ComputerCode] = {
    "friedman": ComputerCode(friedman, (0.0,) * 10, (1.0,) * 10),
    "borehole": ComputerCode(
        borehole,
        (0.05, 100.0, 63070.0, 990.0, 63.1, 700.0, 1120.0, 9855.0),
        (0.15, 50000.0, 115600.0, 1110.0, 116.0, 820.0, 1680.0, 12045.0),
    ),
    "dette-pepelyshev": ComputerCode(dette_pepelyshev, (0.0,) * 8, (1.0,) * 8),
    "wing-weight": ComputerCode(
        wing_weight,
        (150.0, 220.0, 6.0, -10.0, 16.0, 0.5, 0.08, 2.5, 1700.0, 0.025),
        (200.0, 300.0, 10.0, 10.0, 45.0, 1.0, 0.18, 6.0, 2500.0, 0.08),
    ),
    "otl-circuit": ComputerCode(otl_circuit, (50.0, 25.0, 0.5, 1.2, 0.25, 50.0), (150.0, 70.0, 3.0, 2.5, 1.2, 300.0)),
    "piston": ComputerCode(
        piston,
        (30.0, 0.005, 0.002, 1000.0, 90000.0, 290.0, 340.0),
        (60.0, 0.020, 0.010, 5000.0, 110000.0, 296.0, 360.0),
    ),
}


def computer_runs(name: str, n: int, *, seed: int = 0, num_test: int = 1000) -> Table:
    """``n`` runs of a computer code at a Latin hypercube, and ``num_test`` at uniform inputs to be predicted."""
    from scipy.stats import qmc

    if name not in COMPUTER_CODES:
        hint = near_miss(name, COMPUTER_CODES) or f" choose one of {', '.join(map(repr, COMPUTER_CODES))}."
        raise SettingError(f"There is no computer code {name!r}:{hint}")
    code, rng = COMPUTER_CODES[name], np.random.default_rng(seed)
    low, high = np.array(code.lowest), np.array(code.highest)
    x = low + (high - low) * qmc.LatinHypercube(len(low), rng=rng).random(n)
    x_test = rng.uniform(low, high, size=(num_test, len(low)))
    return x, code.function(x), x_test, code.function(x_test)


def nearly_noiseless(n: int = 92, *, noise: float = 0.0, seed: int = 0, num_test: int = 1000) -> Table:
    """``y = sin(3 x0) + x1 x2 + x3 + noise e`` of seven uniform inputs, three of which do nothing; tests have noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, size=(n + num_test, 7))
    y = np.sin(3.0 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3] + noise * rng.normal(size=len(x))
    return x[:n], y[:n], x[n:], y[n:]
