"""Kernels built on a dot product of their inputs: linear and polynomial functions, and infinitely wide networks."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fathomgp._checks import whole_number
from fathomgp.kernels._arguments import (
    ActiveDims,
    active_columns,
    checked_dims,
    like,
    positive_number,
    positive_per_column,
    row_like,
)
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._distance import safe_sqrt
from fathomgp.parameters import Parameter
from fathomgp.tags import tagged


@tagged("kernel/linear")
class Linear(AbstractKernel):
    """Linear functions with Gaussian weights: ``k(x, x') = sum_d variance_d x_d x'_d + bias_variance``.

    Args:
        variance: of the weights: a number, or one for every (active) input column.
        bias_variance: of a constant that is added to the function; ``None`` = none.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    variance: Parameter
    bias_variance: Parameter | None
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        variance: ArrayLike | Parameter = 1.0,
        bias_variance: ArrayLike | Parameter | None = None,
        *,
        active_dims: ActiveDims = None,
    ):
        self.active_dims = checked_dims(active_dims)
        self.variance = positive_per_column(variance, "variance", self.active_dims)
        self.bias_variance = None if bias_variance is None else positive_number(bias_variance, "bias_variance")

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        a = self._weighted(x1)
        return _products(a, a if x2 is None else self._weighted(x2)) + self._bias(x1)

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``."""
        return _squares(self._weighted(x)) + self._bias(x)

    def _weighted(self, x: Float[Array, "N D"]) -> Float[Array, "N A"]:
        return _weighted(x, self.variance, "variance", self.active_dims)

    def _bias(self, x: Float[Array, "N D"]) -> Float[Array, ""]:
        return jnp.zeros((), x.dtype) if self.bias_variance is None else like(self.bias_variance, x)


@tagged("kernel/polynomial")
class Polynomial(AbstractKernel):
    """Polynomials of a given degree: ``k(x, x') = (sum_d variance_d x_d x'_d + offset)^degree``.

    Args:
        degree: a whole number, 1 or more.
        variance: a number, or one for every (active) input column.
        offset: weighs the terms of lower degree.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    variance: Parameter
    offset: Parameter
    degree: int = eqx.field(static=True)
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        degree: int = 2,
        variance: ArrayLike | Parameter = 1.0,
        offset: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        self.degree = whole_number(degree, "degree", 1, 100)
        self.active_dims = checked_dims(active_dims)
        self.variance = positive_per_column(variance, "variance", self.active_dims)
        self.offset = positive_number(offset, "offset")

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        a = self._weighted(x1)
        b = a if x2 is None else self._weighted(x2)
        return (_products(a, b) + like(self.offset, x1)) ** self.degree

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``."""
        return (_squares(self._weighted(x)) + like(self.offset, x)) ** self.degree

    def _weighted(self, x: Float[Array, "N D"]) -> Float[Array, "N A"]:
        return _weighted(x, self.variance, "variance", self.active_dims)


@tagged("kernel/arc-cosine")
class ArcCosine(AbstractKernel):
    """A hidden layer of infinitely many units with activation ``max(0, a)^order`` and Gaussian weights.

        ``k(x, x') = (variance / pi) J_n(t) (|a| |a'|)^n``,     n = order, t the angle between a and a',

    where ``a = (sqrt(w) x, sqrt(b))`` with the weight variances w and the bias variance b, and
    ``J_0 = pi - t``, ``J_1 = sin t + (pi - t) cos t``, ``J_2 = 3 sin t cos t + (pi - t)(1 + 2 cos^2 t)``.
    It equals ``2 variance E[max(0, u)^n max(0, u')^n]`` with ``(u, u')`` Gaussian of covariance ``a.a'``.
    Cho and Saul, Kernel methods for deep learning (2009).

    Args:
        order: 0 (steps), 1 (rectified linear units) or 2 (rectified squares).
        weight_variance: of the weights: a number, or one for every (active) input column.
        bias_variance: of the units' biases.
        variance: of the sum of the units.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    weight_variance: Parameter
    bias_variance: Parameter
    variance: Parameter
    order: int = eqx.field(static=True)
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        order: int = 1,
        weight_variance: ArrayLike | Parameter = 1.0,
        bias_variance: ArrayLike | Parameter = 1.0,
        variance: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        order = whole_number(order, "order", 0, 2)
        self.order = order
        self.active_dims = checked_dims(active_dims)
        self.weight_variance = positive_per_column(weight_variance, "weight_variance", self.active_dims)
        self.bias_variance = positive_number(bias_variance, "bias_variance")
        self.variance = positive_number(variance, "variance")

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        a = self._weighted(x1)
        b = a if x2 is None else self._weighted(x2)
        bias = like(self.bias_variance, x1)
        norms = jnp.sqrt((_squares(a) + bias)[:, None] * (_squares(b) + bias)[None, :])
        cosine = (_products(a, b) + bias) / norms
        if x2 is None:
            cosine = jnp.where(jnp.eye(x1.shape[0], dtype=bool), 1, cosine)
        return like(self.variance, x1) / math.pi * _angular(self.order, cosine) * norms**self.order

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``: ``J_n(0) = pi, pi, 3 pi``."""
        squares = _squares(self._weighted(x)) + like(self.bias_variance, x)
        return like(self.variance, x) * (3 if self.order == 2 else 1) * squares**self.order

    def _weighted(self, x: Float[Array, "N D"]) -> Float[Array, "N A"]:
        return _weighted(x, self.weight_variance, "weight_variance", self.active_dims)


@tagged("kernel/neural-network")
class NeuralNetwork(AbstractKernel):
    """A hidden layer of infinitely many units with a sigmoid (error function) activation and Gaussian weights.

        ``k(x, x') = variance (2 / pi) arcsin( 2 a.a' / sqrt((1 + 2 a.a)(1 + 2 a'.a')) )``

    where ``a = (sqrt(w) x, sqrt(b))`` with the weight variances w and the bias variance b.
    Williams, Computation with infinite neural networks (1998).

    Args:
        weight_variance: of the weights: a number, or one for every (active) input column.
        bias_variance: of the units' biases.
        variance: of the sum of the units.
        active_dims: the input columns that the kernel looks at; ``None`` = all.
    """

    weight_variance: Parameter
    bias_variance: Parameter
    variance: Parameter
    active_dims: ActiveDims = eqx.field(static=True)

    def __init__(
        self,
        weight_variance: ArrayLike | Parameter = 1.0,
        bias_variance: ArrayLike | Parameter = 1.0,
        variance: ArrayLike | Parameter = 1.0,
        *,
        active_dims: ActiveDims = None,
    ):
        self.active_dims = checked_dims(active_dims)
        self.weight_variance = positive_per_column(weight_variance, "weight_variance", self.active_dims)
        self.bias_variance = positive_number(bias_variance, "bias_variance")
        self.variance = positive_number(variance, "variance")

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``."""
        a = self._weighted(x1)
        b = a if x2 is None else self._weighted(x2)
        bias = like(self.bias_variance, x1)
        squares1, squares2 = _squares(a) + bias, _squares(b) + bias
        norms = jnp.sqrt((1 + 2 * squares1)[:, None] * (1 + 2 * squares2)[None, :])
        return self._arcsine(2 * (_products(a, b) + bias) / norms)

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``."""
        squares = _squares(self._weighted(x)) + like(self.bias_variance, x)
        return self._arcsine(2 * squares / (1 + 2 * squares))

    def _arcsine(self, sine: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        largest = 1 - float(jnp.finfo(sine.dtype).eps)  # rounding may reach 1, where the derivative is infinite
        return self.variance.value.astype(sine.dtype) * (2 / math.pi) * jnp.arcsin(jnp.clip(sine, -largest, largest))

    def _weighted(self, x: Float[Array, "N D"]) -> Float[Array, "N A"]:
        return _weighted(x, self.weight_variance, "weight_variance", self.active_dims)


def _weighted(x: Float[Array, "N D"], variance: Parameter, name: str, active_dims: ActiveDims) -> Float[Array, "N A"]:
    """``sqrt(variance) x``: both factors of the product get the same weights, so that it is symmetric."""
    x = active_columns(x, active_dims)
    return x * jnp.sqrt(row_like(variance, x, name))


def _products(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _squares(a: Float[Array, "N D"]) -> Float[Array, " N"]:
    return jnp.sum(a * a, axis=1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _angular(order: int, cosine: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``J_n`` as a function of ``c = cos t``."""
    # Within rounding of +-1 the angle is rounding too: parallel vectors are at angle zero exactly.
    sine = safe_sqrt(1 - cosine * cosine)
    sine = jnp.where(_is_parallel(cosine), 0, sine)
    back_angle = math.pi - jnp.arctan2(sine, cosine)
    if order == 0:
        return back_angle
    if order == 1:
        return sine + back_angle * cosine
    return 3 * sine * cosine + back_angle * (1 + 2 * cosine * cosine)


@_angular.defjvp
def _angular_jvp(order, primals, tangents):
    """``dJ_n/dc = n^2 J_{n-1}`` and ``dJ_0/dc = 1 / sin t``: only order 0 has no derivative at c = +-1 (0 is used)."""
    (cosine,), (cosine_dot,) = primals, tangents
    if order > 0:
        slope = order**2 * _angular(order - 1, cosine)
    else:
        parallel = _is_parallel(cosine)
        slope = jnp.where(parallel, 0, 1 / jnp.sqrt(jnp.where(parallel, 1, 1 - cosine * cosine)))
    return _angular(order, cosine), slope * cosine_dot


def _is_parallel(cosine: Float[Array, "*shape"]) -> Array:
    return jnp.abs(cosine) >= 1 - 4 * float(jnp.finfo(cosine.dtype).eps)
