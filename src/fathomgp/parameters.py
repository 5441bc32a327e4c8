"""Parameters: one mechanism for constraints and for freezing.

A model holds every number that may be learned in a :class:`Parameter`. It stores an unconstrained array and shows the
constrained one as ``value``; optimisers see the unconstrained array only. Arrays outside a parameter are constants.

    value = raw                    on the real line
    value = lower + exp(raw)       above ``lower``: steps are relative, so one step size serves every unit

Example:
    >>> from fathomgp.kernels import RBF
    >>> from fathomgp.parameters import freeze
    >>> kernel = freeze(RBF(lengthscale=2.0), lambda k: k.variance)
    >>> kernel.variance.trainable, float(kernel.lengthscale.value)
    (False, 2.0)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped

from fathomgp._checks import shown
from fathomgp.errors import SettingError
from fathomgp.precision import default_float
from fathomgp.tags import tagged

T = TypeVar("T")


@tagged("model/parameter")
class Parameter(eqx.Module):
    """A number or array that may be learned.

    Attributes:
        raw: the unconstrained array.
        lower: ``None`` for the real line; a number for values above it.
        trainable: a frozen parameter (``False``) is a constant to every optimiser.
        prior: the density of the unconstrained array, see :mod:`fathomgp.priors`; ``None`` for none.
    """

    raw: Float[Array, "..."]
    lower: float | None = eqx.field(static=True, default=None)
    trainable: bool = eqx.field(static=True, default=True)
    prior: Any = eqx.field(static=True, default=None)

    @property
    def value(self) -> Float[Array, "..."]:
        """The constrained array."""
        if self.lower is None:
            return self.raw
        return jnp.asarray(self.lower, self.raw.dtype) + jnp.exp(self.raw)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.raw.shape


def real(value: ArrayLike | Parameter, *, trainable: bool = True) -> Parameter:
    """A parameter on the real line."""
    if isinstance(value, Parameter):
        return value
    return Parameter(_as_float(value, "parameter"), None, trainable)


def positive(
    value: ArrayLike | Parameter, *, name: str = "parameter", lower: float = 0.0, trainable: bool = True
) -> Parameter:
    """A parameter above ``lower`` (default 0). ``name`` appears in the message when ``value`` is not."""
    if isinstance(value, Parameter):
        return value
    array = _as_float(value, name)
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if not (np.all(np.isfinite(values)) and np.all(values > lower)):
            raise SettingError(f"{name} must be greater than {lower:g} and finite, but it is {values.tolist()}.")
    return Parameter(jnp.log(array - jnp.asarray(lower, array.dtype)), float(lower), trainable)


def freeze(model: T, where: Callable[[T], Any] = lambda model: model) -> T:
    """A copy of ``model`` in which the parameters below ``where(model)`` are constants."""
    return _set_trainable(model, where, False)


def unfreeze(model: T, where: Callable[[T], Any] = lambda model: model) -> T:
    """A copy of ``model`` in which the parameters below ``where(model)`` are learned."""
    return _set_trainable(model, where, True)


def trainable_mask(model: Any) -> Any:
    """A prefix tree of ``model``, true at the leaves that an optimiser may change: for ``eqx.partition``."""
    return jax.tree.map(lambda leaf: is_parameter(leaf) and leaf.trainable, model, is_leaf=is_parameter)


def partition(model: T) -> tuple[T, T]:
    """Split ``model`` into what is learned and what is constant; ``eqx.combine`` joins the two again."""
    return eqx.partition(model, trainable_mask(model))


def cast(model: T, dtype: Any) -> T:
    """A copy of ``model`` with every floating-point array in ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, model)


def is_parameter(node: Any) -> bool:
    """Whether ``node`` is a :class:`Parameter`."""
    return isinstance(node, Parameter)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every floating-point number of ``tree`` is finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.asarray(True)


def _set_trainable(model: T, where: Callable[[T], Any], trainable: bool) -> T:
    def switch(node: Any) -> Any:
        return dataclasses.replace(node, trainable=trainable) if is_parameter(node) else node

    chosen = where(model)
    if chosen is model:
        return jax.tree.map(switch, model, is_leaf=is_parameter)
    return eqx.tree_at(where, model, replace_fn=lambda node: jax.tree.map(switch, node, is_leaf=is_parameter))


def _as_float(value: ArrayLike, name: str) -> Shaped[Array, "..."]:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value, default_float())
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{name} must be a number, or numbers, but it is {shown(value)}.") from None
