"""fathomgp: deep Gaussian processes with honest error bars.

    from fathomgp import DeepGPClassifier, DeepGPRegressor, load

One model, every published way of fitting it, one kind of answer. The estimators run in double precision by themselves;
importing the package changes no global setting.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fathomgp._version import __version__ as __version__
from fathomgp.kept import keep_compiled as keep_compiled

if TYPE_CHECKING:
    from fathomgp.estimators import DeepGPClassifier as DeepGPClassifier
    from fathomgp.estimators import DeepGPRegressor as DeepGPRegressor
    from fathomgp.estimators import load as load

__all__ = ["DeepGPClassifier", "DeepGPRegressor", "__version__", "keep_compiled", "load"]


def __getattr__(name: str) -> Any:
    """Import the estimators when they are first asked for, so that ``fathomgp --help`` need not wait for JAX."""
    if name in __all__:
        return getattr(importlib.import_module("fathomgp.estimators"), name)
    raise AttributeError(f"module 'fathomgp' has no attribute {name!r}")
