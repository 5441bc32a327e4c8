"""The methods that are compared: a name for the command line and settings for the estimator. A new one adds a line."""

from collections.abc import Mapping
from typing import Any

from fathomgp.data._tables import near_miss
from fathomgp.errors import SettingError

METHODS: dict[str, Mapping[str, Any]] = {
    "linear": {"method": "exact", "kernel": "linear"},
    "exact": {"method": "exact"},
    "sgpr": {"method": "sgpr", "num_inducing": 100},
    "dsvi": {"method": "dsvi", "depth": 2, "num_inducing": 100, "precision": "mixed"},
    "decoupled": {"method": "decoupled", "depth": 2, "num_inducing": 100},
    "sghmc": {"method": "sghmc", "depth": 2, "num_inducing": 100, "precision": "mixed"},
    "stride": {"method": "stride", "depth": 2, "num_inducing": 100},
    "sequential": {"method": "sequential", "depth": 2, "num_inducing": 100},
    "aep": {"method": "aep", "depth": 2, "num_inducing": 100},
    "meanfield": {"method": "meanfield", "depth": 2, "num_inducing": 100},
}
"""Arguments of :class:`~fathomgp.DeepGPRegressor`. A method that names a depth or a number of inducing points takes
these two from the command line, the others ignore them."""


def configure(
    name: str,
    *,
    depth: int | None = None,
    num_inducing: int | None = None,
    hidden_dim: int | None = None,
    max_iter: int | None = None,
) -> dict[str, Any]:
    """The estimator's settings for a method of :data:`METHODS`, with what the user asked for in its place.

    Example:
        >>> configure("sgpr", depth=3, num_inducing=500)
        {'method': 'sgpr', 'num_inducing': 500}
    """
    if name not in METHODS:
        hint = near_miss(name, METHODS) or f" choose from {', '.join(METHODS)}."
        raise SettingError(f"There is no benchmark method {name!r}:{hint}")
    settings = dict(METHODS[name])
    asked = {"depth": depth, "num_inducing": num_inducing}
    settings |= {key: value for key, value in asked.items() if value is not None and key in settings}
    if hidden_dim is not None and "depth" in settings:
        settings["hidden_dim"] = hidden_dim
    return settings if max_iter is None else settings | {"max_iter": max_iter}


def label(name: str, settings: Mapping[str, Any]) -> str:
    """What tables call a method: its name, its depth if it is deep, and the settings that are not the usual ones.

    Example:
        >>> label("sgpr", {"method": "sgpr", "num_inducing": 500})
        'sgpr num_inducing=500'
    """
    usual = METHODS.get(name, {})
    depth = [str(settings["depth"])] if "depth" in settings else []
    others = [f"{key}={value}" for key, value in settings.items() if key != "depth" and usual.get(key) != value]
    return " ".join([name, *depth, *others])
