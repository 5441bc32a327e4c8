"""A stationary kernel whose length scale varies over the inputs."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp.errors import SettingError
from fathomgp.kernels._arguments import log_like
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._distance import squared_distance
from fathomgp.kernels._stationary import AbstractStationary
from fathomgp.tags import tagged


@tagged("kernel/convolution")
class Convolution(AbstractKernel):
    """Paciorek's kernel: a stationary one whose length at x is ``u(x)`` times its own.

    The inputs are the D columns of x and, last, the value u(x). With ``h = clip(u, shortest, longest)^2`` and the
    base's scaled distance r and correlation rho,

        k = variance * phi * rho(r sqrt(2 / (h + h'))),    phi = (2 sqrt(h h') / (h + h'))^(D / 2)

    It is positive semi-definite for every u because rho is a mixture of Gaussians of r in any dimension. (Latz et al.
    2025 print rho(2 r / (h + h')), which is not.) Where u is 1 everywhere, it is the base kernel.

    Args:
        base: a stationary kernel of the D columns.
        shortest: the smallest factor of the length scale.
        longest: the largest.

    Example:
        >>> import jax.numpy as jnp
        >>> from fathomgp.kernels import RBF
        >>> x = jnp.array([[0.0, 1.0], [1.0, 1.0]])
        >>> bool(jnp.allclose(Convolution(RBF())(x), RBF()(x[:, :1])))
        True

    References:
        Paciorek and Schervish, Nonstationary covariance functions for Gaussian process regression (2004).
    """

    base: AbstractStationary
    shortest: float = eqx.field(static=True, default=0.1)
    longest: float = eqx.field(static=True, default=10.0)

    def __check_init__(self):
        if not 0.0 < self.shortest < self.longest:
            raise SettingError(
                f"shortest must be positive and below longest, but they are {self.shortest} and {self.longest}."
            )

    def gram(self, x1: Float[Array, "N E"], x2: Float[Array, "M E"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``; the last column of the inputs is u."""
        a, u1 = self._split(x1)
        b, u2 = (None, u1) if x2 is None else self._split(x2)
        precision = 2.0 / (u1[:, None] ** 2 + u2[None, :] ** 2)
        phi = _half_power(u1[:, None] * u2[None, :] * precision, a.shape[1])
        r2 = squared_distance(a, b) * precision
        return phi * self.base.covariance(r2, log_like(self.base.variance, x1))

    def diagonal(self, x: Float[Array, "N E"]) -> Float[Array, " N"]:
        """The variance, N times."""
        return self.base.diagonal(x[:, :-1])

    def _split(self, x: Float[Array, "N E"]) -> tuple[Float[Array, "N A"], Float[Array, " N"]]:
        """The scaled columns and the clipped u."""
        if x.shape[1] < 2:
            raise SettingError(f"The convolution kernel takes x and u, two columns at least, but there are {x.shape}.")
        return self.base.scaled(x[:, :-1]), jnp.clip(x[:, -1], self.shortest, self.longest)


def _half_power(x: Float[Array, "*shape"], count: int) -> Float[Array, "*shape"]:
    """``x^(count / 2)`` by products and a root: a real power takes as long as all the rest of the kernel."""
    whole, half = divmod(count, 2)
    return x**whole * jnp.sqrt(x) if half else x**whole
