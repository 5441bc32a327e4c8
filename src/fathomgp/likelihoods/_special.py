"""Elementary functions that stay finite, with finite gradients, where the textbook forms overflow."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

LOG_TWO_PI = 1.8378770664093453


def exponent_cap(dtype: jnp.dtype) -> float:
    """The exponent up to which :func:`safe_exp` is ``exp``: half of the dtype's range (355, or 44 in float32)."""
    return 0.5 * float(np.log(jnp.finfo(dtype).max))


def safe_exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``exp(x)``, continued by its tangent beyond :func:`exponent_cap`: finite, increasing, with a useful gradient."""
    cap = exponent_cap(x.dtype)
    return jnp.exp(jnp.minimum(x, cap)) * (1.0 + jnp.maximum(x - cap, 0.0))


def safe_sqrt(variance: Float[Array, "..."]) -> Float[Array, "..."]:
    """A standard deviation whose gradient stays finite at zero."""
    return jnp.sqrt(jnp.maximum(variance, float(jnp.finfo(variance.dtype).tiny)))


@jax.custom_jvp
def log_ndtr(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log Phi(x)``, with a gradient that is right far in the lower tail too.

    There ``phi(x) / Phi(x)`` as a difference of logarithms is all rounding, so the gradient takes Laplace's continued
    fraction ``t + 1/(t + 2/(t + 3/(t + ...)))`` at ``t = -x``.
    """
    return jax.scipy.special.log_ndtr(x)


@log_ndtr.defjvp
def _log_ndtr_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return log_ndtr(x), _inverse_mills(x) * tangent


def _inverse_mills(x: Float[Array, "..."]) -> Float[Array, "..."]:
    body = jnp.maximum(x, -5.0)
    ratio = jnp.exp(-0.5 * body * body - 0.5 * LOG_TWO_PI - log_ndtr(body))
    t = jnp.maximum(-x, 5.0)
    tail = t
    for level in range(15, 0, -1):
        tail = t + level / tail
    return jnp.where(x < -5.0, tail, ratio)
