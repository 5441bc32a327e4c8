"""A kernel that sees its inputs through the logistic function."""

import jax
from jaxtyping import Array, Float

from fathomgp.kernels._base import AbstractKernel
from fathomgp.tags import tagged


@tagged("kernel/squashed")
class Squashed(AbstractKernel):
    """``k(x, x') = inner(s(x), s(x'))`` with the logistic function ``s(x) = 1 / (1 + exp(-x))`` on every column.

    In a layer of a deep GP it squashes what the layer before hands over, as a neural network would (Wang et al. 2016).

    Args:
        inner: the kernel on the squashed inputs.
    """

    inner: AbstractKernel

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        return self.inner.gram(jax.nn.sigmoid(x1), None if x2 is None else jax.nn.sigmoid(x2))

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``."""
        return self.inner.diagonal(jax.nn.sigmoid(x))
