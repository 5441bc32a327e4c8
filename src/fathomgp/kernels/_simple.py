"""Kernels that do not look at the values of their inputs."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fathomgp.kernels._arguments import ActiveDims, checked_dims, like, positive_number
from fathomgp.kernels._base import AbstractKernel
from fathomgp.parameters import Parameter
from fathomgp.tags import tagged


@tagged("kernel/white")
class White(AbstractKernel):
    """White noise: every point is correlated with itself only.

    ``gram(x)`` is ``variance * I``; ``gram(x, x2)`` is zero, even where points coincide: another look at the same place
    meets other noise.

    Args:
        variance: of the noise.
        active_dims: has no influence; every kernel takes it.
    """

    variance: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(self, variance: ArrayLike | Parameter = 1.0, *, active_dims: ActiveDims = None):
        self.variance = positive_number(variance, "variance")
        self.active_dims = checked_dims(active_dims)

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """``variance * I``, or zeros between two sets of points."""
        if x2 is not None:
            return jnp.zeros((x1.shape[0], x2.shape[0]), x1.dtype)
        return like(self.variance, x1) * jnp.eye(x1.shape[0], dtype=x1.dtype)

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variance, N times."""
        return jnp.broadcast_to(like(self.variance, x), (x.shape[0],))


@tagged("kernel/constant")
class Constant(AbstractKernel):
    """One Gaussian number, the same everywhere: ``k(x, x') = variance``.

    Args:
        variance: of the constant.
        active_dims: has no influence; every kernel takes it.
    """

    variance: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(self, variance: ArrayLike | Parameter = 1.0, *, active_dims: ActiveDims = None):
        self.variance = positive_number(variance, "variance")
        self.active_dims = checked_dims(active_dims)

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The variance, everywhere."""
        num_columns = x1.shape[0] if x2 is None else x2.shape[0]
        return jnp.broadcast_to(like(self.variance, x1), (x1.shape[0], num_columns))

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variance, N times."""
        return jnp.broadcast_to(like(self.variance, x), (x.shape[0],))
