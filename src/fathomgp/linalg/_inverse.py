"""Explicit inverses of triangular factors, built from matrix products.

XLA's triangular solves on a CPU are several times slower than matrix products of the same size, forward and backward.
So a factor is inverted once, and every solve after that is a product.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp.linalg._products import multiply_from_left, transpose, transposed_product

# Measured on two cores, float32 and float64, M = 50 ... 2000: blocks under 32 gain nothing, and more than 8 blocks
# only add compilation time.
_SMALLEST_BLOCK = 32
_MOST_HALVINGS = 3
_SMALLEST_GRAM = 256


def logdet_lower(L: Float[Array, "*batch M M"]) -> Float[Array, "*batch"]:
    """``log |L L^T| = 2 sum_i log L_ii`` of a Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)


@jax.custom_jvp
def inverse_lower(L: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """The inverse of a lower-triangular matrix; only the lower triangle of ``L`` is read.

        inv [[A, 0], [B, C]] = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]

    The smallest diagonal blocks are solved all at once, then joined pair by pair: all the rest is matrix products.
    The derivative is ``d(L^-1) = -L^-1 dL L^-1``, so the pull-back of ``G`` is ``-tril(L^-T G L^-T)``.

    Example:
        >>> import jax.numpy as jnp
        >>> inverse_lower(jnp.array([[2.0, 0.0], [1.0, 1.0]])).tolist()
        [[0.5, 0.0], [-0.5, 1.0]]
    """
    return _inverse_by_blocks(L)


@inverse_lower.defjvp
def _inverse_lower_jvp(primals, tangents):
    (L,), (dL,) = primals, tangents
    inverse = inverse_lower(L)
    return inverse, -multiply_from_left(inverse, jnp.tril(dL) @ inverse)


def gram_of_lower(L: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """``L^T L`` of a lower-triangular matrix, without multiplying its zeros: with ``L^-1`` it is ``(L L^T)^-1``."""
    size = L.shape[-1]
    if size <= _SMALLEST_GRAM:
        return transposed_product(L, L)
    half = size // 2
    A, B, C = L[..., :half, :half], L[..., half:, :half], L[..., half:, half:]
    corner = transposed_product(C, B)
    top = jnp.concatenate([gram_of_lower(A) + transposed_product(B, B), transpose(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, gram_of_lower(C)], axis=-1)], axis=-2)


@jax.jit
def _inverse_by_blocks(L: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    size = L.shape[-1]
    blocks = _num_blocks(size)
    if blocks == 1:
        return _solve_identity(L)
    width = -(-size // blocks)
    padded = _pad_with_identity(L, blocks * width)
    inverse = _solve_identity(_blocks(padded, width, offset=0))
    while inverse.shape[-3] > 1:
        inverse = _join_pairs(inverse, _blocks(padded, inverse.shape[-1], offset=1))
    return inverse[..., 0, :size, :size]


def _num_blocks(size: int) -> int:
    halvings = math.ceil(math.log2(max(size / _SMALLEST_BLOCK, 1.0)))
    return 2 ** min(halvings, _MOST_HALVINGS)


def _pad_with_identity(L: Float[Array, "*batch M M"], size: int) -> Float[Array, "*batch padded padded"]:
    extra = size - L.shape[-1]
    if extra == 0:
        return L
    padded = jnp.pad(L, [(0, 0)] * (L.ndim - 2) + [(0, extra), (0, extra)])
    new = jnp.arange(L.shape[-1], size)
    return padded.at[..., new, new].set(1.0)


def _blocks(L: Float[Array, "*batch M M"], width: int, offset: int) -> Float[Array, "*batch b w w"]:
    """The diagonal blocks (offset 0), or the block below the diagonal of each pair of them (offset 1)."""
    starts = range(0, L.shape[-1], width * (1 + offset))
    down = width * offset
    return jnp.stack([L[..., i + down : i + down + width, i : i + width] for i in starts], axis=-3)


def _solve_identity(L: Float[Array, "*batch w w"]) -> Float[Array, "*batch w w"]:
    identity = jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape)
    return jax.lax.linalg.triangular_solve(L, identity, left_side=True, lower=True)


def _join_pairs(
    inverse: Float[Array, "*batch b w w"], below: Float[Array, "*batch b2 w w"]
) -> Float[Array, "*batch b2 w2 w2"]:
    A, C = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    top = jnp.concatenate([A, jnp.zeros_like(A)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([-C @ (below @ A), C], axis=-1)], axis=-2)
