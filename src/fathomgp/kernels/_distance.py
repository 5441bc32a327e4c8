"""Squared Euclidean distances: the hot path of every stationary kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Up to this width, summing squared differences is faster than a matrix product (forward and backward) and exact.
_FEW_COLUMNS = 3


def squared_distance(
    x1: Float[Array, "N D"],
    x2: Float[Array, "M D"] | None = None,
    lengthscale: Float[Array, "1 _"] | None = None,
) -> Float[Array, "N M"]:
    """``sum_d (x1_id - x2_jd)^2 / lengthscale_d^2`` for all pairs; ``x2=None`` means ``x1``.

    A few columns: the sum of squared differences. Many: one matrix product. With w = 1 / lengthscale^2 and both sets
    centred on the mean of ``x2``,

        ``[-2 w a, |a|_w^2, w] . [b, 1, b^2]``,     a = x1 - c, b = x2 - c.

    The second factor does not know the lengthscale, so the gradient for all parameters is one more product: half the
    time of scaling both sets first where the inputs need no gradient, nine tenths
    where they do (8 columns). Cancellation leaves an error of a few rounding units of ``|a|_w^2 + |b|_w^2``,
    which is why the points are centred (on ``x2`` alone, so that no row depends on the other rows of ``x1``). What is
    smaller than that error is set to zero: coincident points are at distance zero exactly, which the square root in the
    Matern kernels needs. Derivatives of every order ignore this repair of rounding.
    """
    scale = jnp.ones((1, 1), x1.dtype) if lengthscale is None else lengthscale
    if x1.shape[1] <= _FEW_COLUMNS:
        return _by_differences(x1 / scale, (x1 if x2 is None else x2) / scale)
    return _by_product(x1, x1 if x2 is None else x2, jnp.broadcast_to(scale**-2, (1, x1.shape[1])))


def _by_differences(x1: Float[Array, "N D"], x2: Float[Array, "M D"]) -> Float[Array, "N M"]:
    total = jnp.zeros((x1.shape[0], x2.shape[0]), x1.dtype)
    for column1, column2 in zip(x1.T, x2.T, strict=True):  # unrolled: no array of shape (N, M, D)
        total = total + (column1[:, None] - column2[None, :]) ** 2
    return total


def _by_product(x1: Float[Array, "N D"], x2: Float[Array, "M D"], w: Float[Array, "1 D"]) -> Float[Array, "N M"]:
    centre = jax.lax.stop_gradient(jnp.mean(x2, axis=0, keepdims=True))
    a, b = x1 - centre, x2 - centre
    squares1, squares2 = jnp.sum(w * a * a, axis=1), jnp.sum(w * b * b, axis=1)
    left = jnp.concatenate([-2 * w * a, squares1[:, None], jnp.broadcast_to(w, a.shape)], axis=1)
    right = jnp.concatenate([b, jnp.ones((len(b), 1), b.dtype), b * b], axis=1)
    distance = jnp.matmul(left, right.T, precision=jax.lax.Precision.HIGHEST)
    unit = 2.0 * x1.shape[1] ** 0.5 * float(jnp.finfo(x1.dtype).eps)
    rounding = jax.lax.stop_gradient(unit * (squares1[:, None] + squares2[None, :]))
    return distance - jax.lax.stop_gradient(jnp.where(distance <= rounding, distance, 0))


def safe_sqrt(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The square root, with derivative 0 instead of infinity at 0."""
    inside = x > jnp.finfo(x.dtype).tiny
    return jnp.where(inside, jnp.sqrt(jnp.where(inside, x, 1)), 0)
