"""What a fitted estimator answers in JAX: distributions and draws of f that can be differentiated, in user's units."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from fathomgp.compilation import double_program, program
from fathomgp.data import Standardizer
from fathomgp.distribution import Distribution
from fathomgp.errors import DataError, SettingError
from fathomgp.inference import AbstractPosterior
from fathomgp.kernels import Matern12, White
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


class SamplePaths(_Callable):
    """Draws of f as functions in the user's own units: from rows (N, D), or one row (D,), to values, draws first.

    Attributes:
        posterior: what was learned, in standard units.
        units: the user's.
        key: decides which functions these are.
        num_draws: how many.
    """

    posterior: AbstractPosterior
    units: Units
    key: PRNGKeyArray
    num_draws: int = eqx.field(static=True)

    def __call__(self, x: ArrayLike) -> Array:
        """The values at ``x``: (n, N), or (n, N, P) where f has several outputs; without N at one row."""
        return _values(self, self.units.check(x))


@double_program
def _values(paths: SamplePaths, x: Array) -> Array:
    rows, units = paths.units.read(x), paths.units
    values = paths.posterior.draw_paths(rows, key=paths.key, n=paths.num_draws).astype(jnp.float64)
    if paths.posterior.likelihood.target_kind == "real":
        outputs = len(units.outputs.shift)
        shift, scale = jnp.asarray(units.outputs.shift), jnp.asarray(units.outputs.scale)
        values = shift[None, None] + scale[None, None] * values[..., :outputs]
    values = values[..., 0] if units.squeeze and values.shape[2] == 1 else values
    return (values[:, 0] if x.ndim == 1 else values).astype(x.dtype)


@program
def slope_moments(posterior: AbstractPosterior, x: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Mean and standard deviation of df/dx, (N, Q, D), where f is a mixture of Gaussian processes given by its moments.

    The derivative of a Gaussian process is one: its mean is the mean's derivative, its variance the mixed second
    derivative of the covariance at coincident inputs. The moments are those of the mixture.
    """

    def at(row: Array, direction: Array) -> tuple[Array, Array, Array]:
        def moved(a: Array, b: Array) -> tuple[Array, Array, Array]:
            pair = jnp.stack([row + a * direction, row + b * direction])
            mixture = posterior.predict_f(pair, key=key, full_cov=True)
            means, covariances = jnp.asarray(mixture.means), jnp.asarray(mixture.covariances)
            return means[:, 0], covariances[:, 0, 1], jnp.asarray(mixture.log_weights)

        zero, one = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        along = lambda a: jax.jvp(lambda b: moved(a, b)[1], (zero,), (one,))[1]  # noqa: E731
        mean = jax.jvp(lambda a: moved(a, zero)[0], (zero,), (one,))[1]
        return mean, jax.jvp(along, (zero,), (one,))[1], moved(zero, zero)[2]

    directions = jnp.eye(x.shape[1], dtype=x.dtype)
    slopes = lambda row: jax.lax.map(lambda direction: at(row, direction), directions)  # noqa: E731
    means, variances, log_weights = jax.lax.map(slopes, x)
    weights = jax.nn.softmax(log_weights[0, 0])
    mean = jnp.einsum("s,ndsq->nqd", weights, means)
    spread = jnp.einsum("s,ndsq->nqd", weights, jnp.maximum(variances, 0.0) + (means - _per_component(mean)) ** 2)
    return mean, jnp.sqrt(spread)


@program
def path_slope_moments(posterior: AbstractPosterior, x: Array, key: PRNGKeyArray, n: int) -> tuple[Array, Array]:
    """:func:`slope_moments` from ``n`` whole functions: every one is differentiated at all rows together."""

    def along(direction: Array) -> tuple[Array, Array]:
        moving = jnp.broadcast_to(direction, x.shape)
        slopes = jax.jvp(lambda x: posterior.draw_paths(x, key=key, n=n), (x,), (moving,))[1]
        return jnp.mean(slopes, axis=0), jnp.std(slopes, axis=0, ddof=1)

    means, deviations = jax.lax.map(along, jnp.eye(x.shape[1], dtype=x.dtype))
    return jnp.moveaxis(means, 0, -1), jnp.moveaxis(deviations, 0, -1)


def check_slopes(posterior: AbstractPosterior) -> None:
    """Refuse functions without a derivative, and draws that are no functions."""
    rough = (Matern12, White)
    for part in jax.tree.leaves(posterior.model.layers, is_leaf=lambda node: isinstance(node, rough)):
        if isinstance(part, rough):
            raise SettingError(f"Functions of the kernel {type(part).__name__} have no derivative: use 'matern32'.")
    if posterior.model.depth > 1 and not posterior.draws_whole:
        raise SettingError(
            f"predict_gradient needs whole functions, but {type(posterior).__name__} with these kernels draws f at the "
            "rows of each call: use method='dsvi' or 'sghmc' with stationary kernels."
        )


def _per_component(mean: Array) -> Array:
    return jnp.moveaxis(mean, 1, 2)[:, :, None]
