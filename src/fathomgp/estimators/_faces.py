"""What a fitted estimator answers in JAX: distributions and draws of f that can be differentiated, in user's units."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from fathomgp.compilation import double_program
from fathomgp.data import Standardizer
from fathomgp.distribution import Distribution
from fathomgp.errors import DataError
from fathomgp.inference import AbstractPosterior
from fathomgp.predictive import Mixture


class Units(eqx.Module):
    """Between the user's units and those of the posterior.

    Attributes:
        inputs: how x was standardised.
        outputs: how y was.
        squeeze: whether y was one-dimensional.
        dtype: of the posterior's inputs.
    """

    inputs: Standardizer
    outputs: Standardizer
    squeeze: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def read(self, x: Array) -> Array:
        """Rows in standard units; one row becomes a matrix."""
        rows = jnp.atleast_2d(x).astype(jnp.float64)
        return ((rows - self.inputs.shift[None]) / self.inputs.scale[None]).astype(self.dtype)

    def check(self, x: ArrayLike) -> Array:
        """``x`` as numbers of a floating-point type: one row (D,), or (N, D)."""
        width = len(self.inputs.shift)
        rows = jnp.asarray(x)
        if rows.ndim not in (1, 2) or rows.shape[-1] != width:
            raise DataError(f"x must be one row of shape ({width},) or rows (N, {width}), but it is {rows.shape}.")
        return rows if jnp.issubdtype(rows.dtype, jnp.floating) else rows.astype(float)


class _Callable(eqx.Module):
    # ``jax.jit`` keeps what it compiled under the function's hash, and arrays have none.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class JaxModel(_Callable):
    """A fitted model as a pure function in the user's own units: from inputs to the distribution of y.

    ``x`` is rows (N, D), or one row (D,): for ``jax.grad`` and ``jax.vmap``. Answers are those of
    ``predict_distribution``.

    Attributes:
        posterior: what was learned, in standard units.
        units: the user's.
        key: of the sample paths of an answer.
    """

    posterior: AbstractPosterior
    units: Units
    key: PRNGKeyArray

    def __call__(self, x: ArrayLike) -> Distribution:
        """The distribution of y at ``x``."""
        rows = self.units.check(x)
        mixture = _mixture(self, rows)
        shift, scale = self.units.outputs.shift, self.units.outputs.scale
        parts = (self.posterior.likelihood, jnp.asarray(shift), jnp.asarray(scale))
        return Distribution(mixture, *parts, self.units.squeeze, rows.ndim == 1, np.dtype(rows.dtype))


@double_program
def _mixture(model: JaxModel, x: Array) -> Mixture:
    mixture = model.posterior.predict_f(model.units.read(x), key=model.key)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), mixture)
