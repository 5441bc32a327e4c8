"""Matrix products in the layout that XLA multiplies fast on a CPU.

In float64 ``A^T B`` takes two to three times as long as ``A B`` (M = 100 ... 930, two cores), because the transpose is
folded into the product. Writing the transpose to memory first costs next to nothing. The pull-back of every ordinary
product holds such an ``A^T B``.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_jvp
def product(A: Float[Array, "*batch N M"], B: Float[Array, "*batch M P"]) -> Float[Array, "*batch N P"]:
    """``A B``, with a pull-back that is as fast as the product itself; worth its name when A or B is large.

    The pull-back of G to B, ``A^T G``, transposes the smaller of its two factors.
    """
    return A @ B


@product.defjvp
def _product_jvp(primals, tangents):
    (A, B), (dA, dB) = primals, tangents
    if B.shape[-1] < A.shape[-1]:
        by_B = transpose(jnp.einsum("...pm,...nm->...pn", transpose(dB), A))  # pulled back as (G^T A)^T
    else:
        by_B = jnp.einsum("...mn,...mp->...np", _stored_transpose(A), dB)  # as A^T G, with A^T stored
    return product(A, B), dA @ B + by_B


def transposed_product(A: Float[Array, "*batch M N"], B: Float[Array, "*batch M P"]) -> Float[Array, "*batch N P"]:
    """``A^T B``, fast forward and backward."""
    return product(_stored_transpose(A), B)


def multiply_from_left(A: Float[Array, "*batch N M"], dB: Float[Array, "*batch M P"]) -> Float[Array, "*batch N P"]:
    """``A dB`` for a tangent ``dB`` inside a derivative rule, written so that its pull-back reads a stored ``A^T``."""
    return transpose(transpose(dB) @ _stored_transpose(A))


def transpose(matrix: Float[Array, "*batch N M"]) -> Float[Array, "*batch M N"]:
    """The matrix transpose, over the last two axes."""
    return jnp.swapaxes(matrix, -1, -2)


def _stored_transpose(matrix: Float[Array, "*batch N M"]) -> Float[Array, "*batch M N"]:
    double = jnp.finfo(matrix.dtype).bits == 64
    return lax.optimization_barrier(transpose(matrix)) if double else transpose(matrix)
