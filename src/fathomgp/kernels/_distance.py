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

        ``[-2 w a, |a|_w^2, 1] . [b, 1, |b|_w^2]``,     a = x1 - c, b = x2 - c.

    Derivatives are those of ``[-2 w a, |a|_w^2, w] . [b, 1, b^2]``, whose second factor does not know the lengthscale,
    so the gradient for all parameters is one more product: half the time of scaling both sets first where the inputs
    need no gradient, nine tenths where they do (8 columns).

    Cancellation leaves an error of a few rounding units of ``|a|_w^2 + |b|_w^2``, which is why the points are centred
    (on ``x2`` alone, so that no row depends on the other rows of ``x1``). What is smaller than that error is set to
    zero: coincident points are at distance zero exactly, which the square root in the Matern kernels needs. Derivatives
    of every order ignore this repair of rounding.
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


@jax.custom_jvp
def _by_product(x1: Float[Array, "N D"], x2: Float[Array, "M D"], w: Float[Array, "1 D"]) -> Float[Array, "N M"]:
    """``[-2 w a, |a|_w^2, 1] . [b, 1, |b|_w^2]``: half the work of :func:`_by_wide_product`, for values alone."""
    a, b = _centred(x1, x2)
    squares1, squares2 = jnp.sum(w * a * a, axis=1), jnp.sum(w * b * b, axis=1)
    left = jnp.concatenate([-2 * w * a, squares1[:, None], jnp.ones((len(a), 1), a.dtype)], axis=1)
    right = jnp.concatenate([b, jnp.ones((len(b), 1), b.dtype), squares2[:, None]], axis=1)
    distance = _accurate_product(left, right)
    unit = 2.0 * x1.shape[1] ** 0.5 * float(jnp.finfo(x1.dtype).eps)
    return jnp.where(distance <= unit * (squares1[:, None] + squares2[None, :]), 0, distance)


@_by_product.defjvp
def _by_product_jvp(primals, tangents):
    return _by_product(*primals), jax.jvp(_by_wide_product, primals, tangents)[1]


def _by_wide_product(x1: Float[Array, "N D"], x2: Float[Array, "M D"], w: Float[Array, "1 D"]) -> Float[Array, "N M"]:
    """``[-2 w a, |a|_w^2, w] . [b, 1, b^2]``: the form for derivatives."""
    a, b = _centred(x1, x2)
    left = jnp.concatenate([-2 * w * a, jnp.sum(w * a * a, axis=1)[:, None], jnp.broadcast_to(w, a.shape)], axis=1)
    right = jnp.concatenate([b, jnp.ones((len(b), 1), b.dtype), b * b], axis=1)
    return _accurate_product(left, right)


def _centred(x1: Float[Array, "N D"], x2: Float[Array, "M D"]) -> tuple[Float[Array, "N D"], Float[Array, "M D"]]:
    """Both sets around the mean of ``x2``."""
    centre = jax.lax.stop_gradient(jnp.mean(x2, axis=0, keepdims=True))
    return x1 - centre, x2 - centre


def _accurate_product(left: Float[Array, "N C"], right: Float[Array, "M C"]) -> Float[Array, "N M"]:
    return jnp.matmul(left, right.T, precision=jax.lax.Precision.HIGHEST)


def safe_sqrt(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The square root, with derivative 0 instead of infinity at 0.

    The compiler may evaluate ``x`` once for each of its uses, with roundings that differ: a zero to one may be 1e-34 to
    another. So the number whose root is not wanted is near 0 too: with 1 in its place coincident points were found at
    a distance of 1.
    """
    tiny = float(jnp.finfo(x.dtype).tiny)
    return jnp.where(x > tiny, jnp.sqrt(jnp.maximum(x, tiny)), 0)
