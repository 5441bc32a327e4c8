"""The log marginal likelihood of an exact GP: the hot path when N is large."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fathomgp.linalg._cholesky import Factor, JitterPolicy, differentiable_lower, safe_cholesky
from fathomgp.linalg._inverse import gram_of_lower, inverse_lower, logdet_lower
from fathomgp.linalg._products import transpose, transposed_product


def gaussian_log_marginal(
    K: Float[Array, "N N"],
    Y: Float[Array, "N P"],
    *,
    jitter: float | None = None,
    policy: JitterPolicy | None = None,
) -> tuple[Float[Array, ""], Factor]:
    """``sum_p log N(Y_p; 0, K)`` and the factor of ``K``, which carries no derivative here.

        value = -1/2 tr(Y^T K^-1 Y) - P/2 log |K| - N P/2 log 2 pi
        dK = 1/2 (A A^T - P K^-1),    dY = -A,    with A = K^-1 Y

    The derivative needs one explicit inverse, where differentiating a Cholesky factor needs several solves.

    Example:
        >>> import jax.numpy as jnp
        >>> value, factor = gaussian_log_marginal(jnp.eye(2), jnp.zeros((2, 1)), jitter=0.0)
        >>> round(float(value), 4), bool(factor.ok)
        (-1.8379, True)
    """
    factor = safe_cholesky(lax.stop_gradient(K), jitter=jitter, policy=policy)
    return _log_density(K, Y, factor.lower), factor


@jax.custom_jvp
def _log_density(K: Float[Array, "N N"], Y: Float[Array, "N P"], lower: Float[Array, "N N"]) -> Float[Array, ""]:
    """The value from ``lower``; ``K`` is here for its derivative alone."""
    whitened = lax.linalg.triangular_solve(lower, Y, left_side=True, lower=True)
    constant = Y.size * math.log(2.0 * math.pi)
    return -0.5 * (jnp.sum(whitened**2) + Y.shape[1] * logdet_lower(lower) + constant)


@_log_density.defjvp
def _log_density_jvp(primals, tangents):
    K, Y, lower = primals
    dK, dY, _ = tangents
    inverse = inverse_lower(differentiable_lower(K, lower))
    A = transposed_product(inverse, inverse @ Y)
    gradient = 0.5 * (A @ transpose(A) - Y.shape[1] * gram_of_lower(inverse))
    return _log_density(K, Y, lower), jnp.sum(gradient * dK) - jnp.sum(A * dY)
