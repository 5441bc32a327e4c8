"""From the words of an estimator's parameters to objects, refusing what makes no sense before any work."""

import dataclasses
import difflib
import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from sklearn.utils import check_random_state

from fathomgp._checks import shown
from fathomgp.data import check_seed
from fathomgp.errors import SettingError
from fathomgp.inference import (
    AEP,
    DSVI,
    SGHMC,
    SGPR,
    STRIDE,
    AbstractInference,
    Decoupled,
    Exact,
    MeanField,
    Sequential,
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of fitting, as the estimators know it.

    Attributes:
        build: makes the algorithm with its default settings.
        kind: the algorithm's class.
        default_depth: the depth when the user names none.
        uses_inducing: whether its layers have inducing inputs.
        uses_batches: whether ``batch_size`` means something to it.
        precisions: those that were measured to be safe.
        classifies: whether it learns from labels, not from real numbers with Gaussian noise alone.
        architectures: how its layers may be joined.
        grows: whether ``num_inducing`` is a budget that rows of a later :meth:`partial_fit` may fill.
        fixes_noise: whether Gaussian noise may have a size that it leaves as it is.
        noise_of_rows: whether that size may be another one in every row.
    """

    build: Callable[[], AbstractInference]
    kind: type
    default_depth: int
    uses_inducing: bool
    uses_batches: bool
    precisions: tuple[str, ...] = ("double", "single")
    classifies: bool = True
    architectures: tuple[str, ...] = ("composition",)
    grows: bool = False
    fixes_noise: bool = True
    noise_of_rows: bool = False


METHODS: dict[str, Method] = {
    "exact": Method(Exact, Exact, 1, uses_inducing=False, uses_batches=False, classifies=False, noise_of_rows=True),
    "sgpr": Method(SGPR, SGPR, 1, uses_inducing=True, uses_batches=False, classifies=False, noise_of_rows=True),
    "dsvi": Method(
        DSVI,
        DSVI,
        2,
        uses_inducing=True,
        uses_batches=True,
        precisions=("double", "mixed", "single"),
        noise_of_rows=True,
    ),
    "decoupled": Method(
        Decoupled, Decoupled, 2, uses_inducing=True, uses_batches=True, precisions=("double",), fixes_noise=False
    ),
    "sghmc": Method(SGHMC, SGHMC, 2, uses_inducing=True, uses_batches=True, precisions=("double", "mixed", "single")),
    "stride": Method(
        STRIDE,
        STRIDE,
        2,
        uses_inducing=True,
        uses_batches=False,
        precisions=("double",),
        architectures=("composition", "convolution", "injective"),
    ),
    "sequential": Method(
        Sequential, Sequential, 2, True, True, precisions=("double", "mixed"), grows=True, fixes_noise=False
    ),
    # Variances are differences of psi statistics: single precision loses them.
    "aep": Method(AEP, AEP, default_depth=2, uses_inducing=True, uses_batches=True, precisions=("double",)),
    "meanfield": Method(
        MeanField, MeanField, 2, True, uses_batches=False, precisions=("double",), classifies=False, fixes_noise=False
    ),
}

#: What a recipe says about the algorithm of that name, beside the model's start: the paper's, to the letter.
RECIPE_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("salimbeni2017", "dsvi"): {
        "steps": 20_000,
        "batch_size": 10_000,
        "learning_rate": 0.01,
        "decay": False,
        "natural": 0.0,
        "num_samples": 1,
        "test_samples": 100,
        "shallow_start": False,
        "inner_root": 1e-5,
        "parameterisation": "whitened",
    },
    ("havasi2018", "sghmc"): {
        "burn_in": 20_000,
        "sampling": 10_000,
        "draws": 200,
        "chains": 1,
        "batch_size": 10_000,
        "step_size": 0.01,
        "friction": 0.05,
        "learning_rate": 0.01,
        "decay": False,
        "hyperparameters": "moving-window",
        "window": 300,
        "energy": "marginal",
        "metric": "scale",
        "control_variate": False,
        "shallow_start": False,
    },
}
#: Steps of that paper for all but its small and medium sets for regression (the largest has 45,730 rows), and for taxi.
_MORE_STEPS, _MOST_STEPS = 100_000, 500_000
_MEDIUM_ROWS, _LARGE_ROWS = 50_000, 100_000_000

#: For labels there is no shallow start that would have to be kept: inner layers that are less sure of themselves save
#: the KL that training would have to win back first (chosen on two splits of sonar). AEP with a power of 1/2 fits
#: labels more closely than it should: 1/10 was chosen on one split each of sonar, breast and pima.
LABEL_SETTINGS: dict[str, dict[str, Any]] = {
    "dsvi": {"inner_root": 0.1},
    "decoupled": {"inner_root": 0.1},
    "aep": {"inner_root": 0.1, "alpha": 0.1},
}
#: Steps for labels when every step sees all rows: natural gradients of the whole data learn fast.
LABEL_STEPS = 500

#: What an estimator's seed decides: numbers that the seed's key is folded with. No two share a number drawn.
FIT, PREDICT, LEARN_ON = 0, 1, 2

#: Counts are in 32 bits.
_MOST = (1 << 31) - 1
#: The floating-point type of the data; parameters are in float64 except in "single".
PRECISIONS: dict[str, Any] = {"double": np.float64, "mixed": np.float32, "single": np.float32}


def tuned_inference(
    method: str | AbstractInference, recipe: Any, *, labels: bool, num_data: int, batch_size: int | None = None
) -> AbstractInference:
    """The algorithm with the settings that recipe and task suggest; an inference object of the user overrules both.

    ``batch_size`` is the user's, or ``None``.
    """
    inference = find_method(method)[1]
    if not isinstance(method, str):
        return inference
    if isinstance(recipe, str) and (recipe, method) in RECIPE_SETTINGS:
        settings = RECIPE_SETTINGS[recipe, method]
        if recipe == "salimbeni2017" and (labels or num_data > _MEDIUM_ROWS):
            settings = settings | {"steps": _MOST_STEPS if num_data > _LARGE_ROWS else _MORE_STEPS}
        return dataclasses.replace(inference, **settings)  # type: ignore[type-var]
    settings = dict(LABEL_SETTINGS.get(method, {})) if labels else {}
    if settings and num_data <= (batch_size or inference.batch_size):  # type: ignore[attr-defined]
        settings["steps"] = LABEL_STEPS
    return dataclasses.replace(inference, **settings) if settings else inference  # type: ignore[type-var]


def tuning_remarks(method: str | AbstractInference, recipe: Any, inference: AbstractInference) -> tuple[str, ...]:
    """Which settings :func:`tuned_inference` has chosen, as a sentence for a fit's messages."""
    if not isinstance(method, str):
        return ()
    usual, names = find_method(method)[1], [field.name for field in dataclasses.fields(inference)]
    chosen = [f"{name}={value!r}" for name in names if (value := getattr(inference, name)) != getattr(usual, name)]
    if not chosen:
        return ()
    by_recipe = isinstance(recipe, str) and (recipe, method) in RECIPE_SETTINGS
    why = f"recipe={recipe!r}" if by_recipe else "labels"
    kind = type(inference).__name__
    return (f"For {why}, method={method!r} means {kind}({', '.join(chosen)}): pass such an object to choose others.",)


def find_method(method: str | AbstractInference) -> tuple[Method, AbstractInference]:
    """The description of a method and the algorithm itself, from a name or an inference object."""
    if isinstance(method, AbstractInference):
        for known in METHODS.values():
            if isinstance(method, known.kind):
                return known, method
        return Method(lambda: method, type(method), 2, True, True), method
    return METHODS[choose("method", method, METHODS)], METHODS[method].build()


def choose(name: str, value: Any, options: Any) -> str:
    """``value`` if it is one of the options, else a sentence that lists them and the nearest."""
    if isinstance(value, str) and value in options:
        return value
    close = difflib.get_close_matches(value.lower(), list(options), n=1) if isinstance(value, str) else ()
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise SettingError(f"{name}={shown(value)} is unknown: choose one of {', '.join(map(repr, options))}.{hint}")


def key_for(seed: int, purpose: int) -> PRNGKeyArray:
    """The key of :data:`FIT`, :data:`PREDICT` or :data:`LEARN_ON`.

    None is the seed's own: a fit splits its key, and ``split(key, n)[i]`` is ``fold_in(key, i)``.
    """
    return jax.random.fold_in(jax.random.key(seed), purpose)


def check_count(name: str, value: Any, *, optional: bool = False) -> int | None:
    """A whole number of at least 1 (or ``None`` where it is optional)."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise SettingError(f"{name} must be a whole number of at least 1, but it is {shown(value)}.")
    if int(value) > _MOST:
        raise SettingError(f"{name} must be at most {_MOST:,}, but it is {shown(value)}.")
    return int(value)


def draw_seed(random_state: Any) -> int:
    """A seed for keys, from what scikit-learn takes as ``random_state``: a number, a ``RandomState``, or ``None``."""
    if (
        random_state is not None
        and random_state is not np.random
        and not isinstance(random_state, np.random.RandomState)
    ):
        random_state = check_seed(random_state, "random_state")
    return int(check_random_state(random_state).randint(2**31 - 1))
