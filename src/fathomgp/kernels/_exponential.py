"""An exponential that fills vector registers: most kernels end in one, and psi statistics are made of little else."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
#: Added to a whole number n of double precision, it leaves n in the last bits.
_SHIFTER = 1.5 * 2.0**52
_TAYLOR = [1.0 / math.factorial(n) for n in range(13)]
_LARGEST = 708.0


@jax.custom_jvp
def exponential(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``exp(x)`` to a few units in the last place; four times as fast as XLA's in float64 on a CPU.

    ``exp(x) = 2^n exp(r)``, with ``|r| <= log(2) / 2`` by a Taylor polynomial and ``2^n`` written into the exponent
    bits. Arguments are cut at +-708, where doubles end.
    """
    if jnp.finfo(x.dtype).bits != 64:
        return jnp.exp(x)
    r, power = _reduce(x)
    return _series(r, 0) * power


@exponential.defjvp
def _exponential_jvp(primals, tangents):
    value = exponential(primals[0])
    return value, value * tangents[0]


@jax.custom_jvp
def excess(x: Float[Array, "*shape"], g: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``exp(x) - exp(x - g)``, in which nothing cancels where g is small, and nothing overflows where it is large."""
    return _larger(x, g) * jnp.sign(g) * _one_less_exponential(jnp.abs(g))


@excess.defjvp
def _excess_jvp(primals, tangents):
    value = excess(*primals)
    return value, value * tangents[0] + (_larger(*primals) - jnp.maximum(value, 0.0)) * tangents[1]


def _larger(x: Array, g: Array) -> Array:
    return exponential(x + jnp.maximum(-g, 0.0))


def _one_less_exponential(x: Array) -> Array:
    """``1 - exp(-x)``."""
    if jnp.finfo(x.dtype).bits != 64:
        return -jnp.expm1(-x)
    r, power = _reduce(-x)
    return (1.0 - power) - power * (r * _series(r, 1))


def _reduce(x: Array) -> tuple[Array, Array]:
    """R and ``2^n`` with ``x = n log(2) + r``."""
    x = jnp.clip(x, -_LARGEST, _LARGEST)
    n = jnp.round(x * (1.0 / math.log(2.0)))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    bits = lax.bitcast_convert_type(n + _SHIFTER, jnp.int64)
    return r, lax.bitcast_convert_type((bits << 52) + (1023 << 52), x.dtype)


def _series(r: Array, first: int) -> Array:
    """``sum_n r^(n - first) / n!`` over n from ``first``."""
    total = jnp.full_like(r, _TAYLOR[-1])
    for coefficient in _TAYLOR[-2 : first - len(_TAYLOR) - 1 : -1]:
        total = total * r + coefficient
    return total
