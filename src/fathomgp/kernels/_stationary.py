"""Kernels that depend on the difference of their inputs alone."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fathomgp.kernels._arguments import (
    ActiveDims,
    active_columns,
    checked_dims,
    like,
    log_like,
    positive_number,
    positive_per_column,
    row_like,
)
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._distance import safe_sqrt, squared_distance
from fathomgp.kernels._exponential import exponential
from fathomgp.parameters import Parameter
from fathomgp.tags import tagged


class AbstractStationary(AbstractKernel):
    """``k(x, x') = variance * correlation(r^2)``, with ``r^2 = sum_d (x_d - x'_d)^2 / lengthscale_d^2``.

    A final kernel implements :meth:`covariance`, a function of ``r^2``.
    """

    lengthscale: eqx.AbstractVar[Parameter]
    variance: eqx.AbstractVar[Parameter]
    active_dims: eqx.AbstractVar[ActiveDims]

    @abc.abstractmethod
    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``exp(log_variance) * correlation(r2)``.

        Written with the variance inside the exponential that ends most correlations, it costs one pass less over the
        matrix in the gradient: 1.5 times faster in all.
        """

    def correlation(self, r2: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The correlation at squared scaled distance ``r2``: 1 at 0."""
        return self.covariance(r2, jnp.zeros((), r2.dtype))

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        x1, x2 = active_columns(x1, self.active_dims), None if x2 is None else active_columns(x2, self.active_dims)
        r2 = squared_distance(x1, x2, row_like(self.lengthscale, x1, "lengthscale"))
        return self.covariance(r2, log_like(self.variance, x1))

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variance, N times."""
        return jnp.broadcast_to(like(self.variance, x), (x.shape[0],))

    def scaled(self, x: Float[Array, "N D"]) -> Float[Array, "N A"]:
        """The columns that the kernel looks at, in units of their lengthscales."""
        x = active_columns(x, self.active_dims)
        return x / row_like(self.lengthscale, x, "lengthscale")


class _AbstractTwoParameter(AbstractStationary):
    """The stationary kernels with a lengthscale, a variance and nothing else."""

    lengthscale: Parameter
    variance: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        lengthscale: ArrayLike | Parameter = 1.0,
        variance: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        self.active_dims = checked_dims(active_dims)
        self.lengthscale = positive_per_column(lengthscale, "lengthscale", self.active_dims)
        self.variance = positive_number(variance, "variance")


@tagged("kernel/rbf")
class RBF(_AbstractTwoParameter):
    """Radial basis functions (squared exponential): infinitely smooth functions.

        ``correlation = exp(-r^2 / 2)``

    Args:
        lengthscale: a number, or one for every (active) input column.
        variance: ``k(x, x)``.
        active_dims: the input columns that the kernel looks at; ``None`` = all.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = RBF(lengthscale=jnp.array([1.0, 2.0]), variance=3.0)
        >>> [round(float(k), 4) for k in kernel(jnp.zeros((1, 2)), jnp.array([[0.0, 0.0], [1.0, 2.0]]))[0]]
        [3.0, 1.1036]
    """

    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``exp(log_variance - r2 / 2)``."""
        return exponential(log_variance - 0.5 * r2)


@tagged("kernel/matern12")
class Matern12(_AbstractTwoParameter):
    """Matern kernel of order 1/2 (Ornstein-Uhlenbeck): continuous, nowhere differentiable functions.

        ``correlation = exp(-r)``

    Args: as :class:`RBF`.
    """

    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``exp(log_variance - r)``."""
        return exponential(log_variance - safe_sqrt(r2))


@tagged("kernel/matern32")
class Matern32(_AbstractTwoParameter):
    """Matern kernel of order 3/2: functions that can be differentiated once.

        ``correlation = (1 + s) exp(-s)``,     s = sqrt(3) r

    Args: as :class:`RBF`.
    """

    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``(1 + s) exp(log_variance - s)``."""
        return _matern32(r2, log_variance)


@tagged("kernel/matern52")
class Matern52(_AbstractTwoParameter):
    """Matern kernel of order 5/2: functions that can be differentiated twice.

        ``correlation = (1 + s + s^2 / 3) exp(-s)``,     s = sqrt(5) r

    Args: as :class:`RBF`.
    """

    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``(1 + s + s^2 / 3) exp(log_variance - s)``."""
        return _matern52(r2, log_variance)


@tagged("kernel/rational-quadratic")
class RationalQuadratic(AbstractStationary):
    """A scale mixture of :class:`RBF` kernels, with lengthscales spread the more the smaller ``alpha`` is.

        ``correlation = (1 + r^2 / (2 alpha))^(-alpha)``

    Args:
        lengthscale: a number, or one for every (active) input column.
        variance: ``k(x, x)``.
        alpha: the shape; infinity gives :class:`RBF`.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    lengthscale: Parameter
    variance: Parameter
    alpha: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        lengthscale: ArrayLike | Parameter = 1.0,
        variance: ArrayLike | Parameter = 1.0,
        alpha: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        self.active_dims = checked_dims(active_dims)
        self.lengthscale = positive_per_column(lengthscale, "lengthscale", self.active_dims)
        self.variance = positive_number(variance, "variance")
        self.alpha = positive_number(alpha, "alpha")

    def covariance(self, r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
        """``exp(log_variance - alpha log(1 + r2 / (2 alpha)))``."""
        alpha = self.alpha.value.astype(r2.dtype)
        return exponential(log_variance - alpha * jnp.log1p(r2 / (2 * alpha)))


@tagged("kernel/periodic")
class Periodic(AbstractKernel):
    """Functions that repeat themselves along every input.

        ``k(x, x') = variance * exp(-2 sum_d sin^2(pi (x_d - x'_d) / period_d) / lengthscale_d^2)``

    The sine is half a chord of the circle that the input wraps around, so this is the :class:`RBF` kernel on circles:
    positive semi-definite in any dimension. After MacKay, Introduction to Gaussian processes (1998).

    Args:
        lengthscale: a number, or one for every (active) input column; in units of the circle's radius, not of x.
        variance: ``k(x, x)``.
        period: a number, or one for every (active) input column.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    lengthscale: Parameter
    variance: Parameter
    period: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        lengthscale: ArrayLike | Parameter = 1.0,
        variance: ArrayLike | Parameter = 1.0,
        period: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        self.active_dims = checked_dims(active_dims)
        self.lengthscale = positive_per_column(lengthscale, "lengthscale", self.active_dims)
        self.variance = positive_number(variance, "variance")
        self.period = positive_per_column(period, "period", self.active_dims)

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        chord2 = squared_distance(self._on_circles(x1), None if x2 is None else self._on_circles(x2))
        return exponential(log_like(self.variance, x1) - 0.5 * chord2)

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variance, N times."""
        return jnp.broadcast_to(like(self.variance, x), (x.shape[0],))

    def _on_circles(self, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        x = active_columns(x, self.active_dims)
        angle = 2 * jnp.pi * x / row_like(self.period, x, "period")
        radius = 1 / row_like(self.lengthscale, x, "lengthscale")
        return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=1)


# Derivatives with respect to r^2 are finite at 0 although s has none there. Given by hand, derivatives of the kernel
# are right at coincident points, the second ones too.


@jax.custom_jvp
def _matern32(r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
    s = safe_sqrt(3 * r2)
    return (1 + s) * exponential(log_variance - s)


@_matern32.defjvp
def _matern32_jvp(primals, tangents):
    (r2, log_variance), (r2_dot, log_variance_dot) = primals, tangents
    s = safe_sqrt(3 * r2)
    decay = exponential(log_variance - s)
    k = (1 + s) * decay
    return k, k * log_variance_dot - 1.5 * decay * r2_dot


@jax.custom_jvp
def _matern52(r2: Float[Array, "*shape"], log_variance: Float[Array, ""]) -> Float[Array, "*shape"]:
    s = safe_sqrt(5 * r2)
    return (1 + s + s * s / 3) * exponential(log_variance - s)


@_matern52.defjvp
def _matern52_jvp(primals, tangents):
    (r2, log_variance), (r2_dot, log_variance_dot) = primals, tangents
    s = safe_sqrt(5 * r2)
    decay = exponential(log_variance - s)
    k = (1 + s + s * s / 3) * decay
    return k, k * log_variance_dot - 5 / 6 * (1 + s) * decay * r2_dot
