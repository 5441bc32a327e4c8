"""Reading saved estimators."""

import functools
import os
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from fathomgp.errors import ModelFileError
from fathomgp.estimators._base import FITTED, SOMETIMES
from fathomgp.estimators._classifier import DeepGPClassifier
from fathomgp.estimators._regressor import DeepGPRegressor
from fathomgp.inference import AbstractInference, AbstractPosterior
from fathomgp.kernels import AbstractKernel
from fathomgp.likelihoods import AbstractLikelihood
from fathomgp.model import Recipe
from fathomgp.persistence import check_type, load_bundle
from fathomgp.precision import double_precision

_ESTIMATORS = {cls.__name__: cls for cls in (DeepGPRegressor, DeepGPClassifier)}
_COUNTS = int | None | list[int | None] | tuple[int | None, ...]
_KERNELS = str | AbstractKernel
#: Rows of the prediction that is traced: a number of which nothing in a model is likely to have as many.
_TRACED_ROWS = 17
#: Numbers that an array of that prediction may hold, beside so many times those of the file: ten times what models with
#: hundreds of samples, inducing points and outputs take.
_ALWAYS_ALLOWED, _TIMES_HELD = 2**24, 100
#: What a file's parameters may be. Functions and places to write to are not taken from files.
_PARAMETERS: dict[str, Any] = {
    "method": str | AbstractInference,
    "depth": int | None,
    "num_inducing": int,
    "hidden_dim": _COUNTS,
    "kernel": _KERNELS | list[_KERNELS] | tuple[_KERNELS, ...],
    "architecture": str,
    "likelihood": str | AbstractLikelihood,
    "noise": str | float | int,
    "max_iter": int | None,
    "batch_size": int | None,
    "precision": str,
    "missing": str,
    "recipe": str | Recipe,
    "early_stopping": bool,
    "checkpoint": None,
    "callbacks": None,
    "random_state": int | None,
    "verbose": bool | int | None,
}


@double_precision
def load(path: str | os.PathLike) -> Any:
    """The estimator that ``save`` wrote to the directory ``path``, ready to predict.

    Damaged, truncated, foreign and newer files are refused with a :class:`~fathomgp.errors.ModelFileError`; nothing in
    a file is executed.
    """
    content = load_bundle(path, "model")
    named = content.get("estimator") if isinstance(content, dict) else None
    cls = _ESTIMATORS.get(named) if isinstance(named, str) else None
    if cls is None:
        raise ModelFileError(f"{path} holds no estimator that this version of fathomgp knows.")
    params, fitted = content.get("params"), content.get("fitted")
    known = {name: _PARAMETERS.get(name, Any) for name in cls._get_param_names()}
    _check_names(params, known, set(known), f"{path}: params")
    _check_names(fitted, FITTED, SOMETIMES, f"{path}: fitted")
    estimator: Any = cls(**params)
    for name, value in fitted.items():
        setattr(estimator, name, value)
    _check_fit(estimator, path)
    return estimator


def _check_names(values: Any, types: dict[str, Any], optional: set[str], path: str) -> None:
    """Only declared names, each of its type; those that are not optional must be there."""
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} is missing or no table of names: restore the file from a copy.")
    unknown, missing = sorted(set(values) - set(types)), sorted(set(types) - set(values) - optional)
    if unknown:
        raise ModelFileError(f"{path} has the unknown name {unknown[0][:80]!r}: upgrade fathomgp.")
    if missing:
        raise ModelFileError(f"{path} lacks {missing[0]!r}: restore the file from a copy.")
    for name, value in values.items():
        check_type(value, types[name], f"{path}.{name}")


def _check_fit(estimator: Any, path: str | os.PathLike) -> None:
    """Refuse pieces that do not fit together, by a prediction that is traced and not computed."""
    width, scalers = estimator.n_features_in_, (estimator.x_scaler_, estimator.y_scaler_)
    widths = [len(np.ravel(part)) for scaler in scalers for part in (scaler.shift, scaler.scale)]
    if widths[:2] != [width, width] or widths[2] != widths[3]:
        raise ModelFileError(f"{path} has {width} inputs, but scales for {widths[0]}: restore it from a copy.")
    x, scale = jax.ShapeDtypeStruct((_TRACED_ROWS, width), estimator._dtype), estimator.y_scaler_.scale
    try:
        program = jax.make_jaxpr(functools.partial(_mean, estimator.posterior_, jnp.asarray(scale)))(x)
        held = sum(leaf.size for leaf in jax.tree.leaves(estimator.posterior_) if isinstance(leaf, jax.Array))
        largest = _largest_array(program.jaxpr)
        if largest > _ALWAYS_ALLOWED + _TIMES_HELD * held:
            raise ModelFileError(f"{_TRACED_ROWS} rows would take arrays of {largest:,} numbers")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelFileError(f"{path} holds parts that do not fit together ({reason}): restore it.") from error


def _largest_array(program: Any) -> int:
    """How many numbers the largest array holds that a traced program makes."""
    sizes = [getattr(variable.aval, "size", 1) for step in program.eqns for variable in step.outvars]
    inner = [part for step in program.eqns for part in jax.tree.leaves(list(step.params.values()), is_leaf=_is_program)]
    sizes += [_largest_array(getattr(part, "jaxpr", part)) for part in inner if _is_program(part)]
    return max(sizes, default=0)


def _is_program(part: Any) -> bool:
    return isinstance(part, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def _mean(posterior: AbstractPosterior, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Means of the observations in units of their scale, by way of all that a prediction needs."""
    mixture = posterior.predict_f(x, key=jax.random.key(0))
    moments = jax.vmap(posterior.likelihood.predict_moments)
    means, _ = moments(jnp.asarray(mixture.means), jnp.asarray(mixture.variances))
    if posterior.likelihood.target_kind != "class" and means.shape[2] != len(scale):
        raise ModelFileError(f"the model has {means.shape[2]} outputs, and there are scales for {len(scale)}")
    return means
