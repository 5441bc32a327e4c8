r"""Draws of a Gaussian process as whole functions, by random Fourier features.

A stationary kernel is the characteristic function of its spectral density, so with frequencies :math:`\omega_i` drawn
from it, phases :math:`b_i` uniform on a circle and Gaussian weights :math:`w_i`,

.. math:: f(x) = \sqrt{2 \sigma^2 / F} \sum_{i=1}^F w_i \cos(\omega_i^T x + b_i)

has the covariance k(x, x') in expectation over all three. Rahimi and Recht (2007), Random features for large-scale
kernel machines.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.kernels._algebra import Product, Sum
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._dot_product import Linear
from fathomgp.kernels._simple import Constant
from fathomgp.kernels._stationary import RBF, AbstractStationary, Matern12, Matern32, Matern52, RationalQuadratic

Function = Callable[[Float[Array, "N D"]], Float[Array, "N P"]]

#: The spectral density of a Matern kernel of order nu is a Student t with 2 nu degrees of freedom.
_FREEDOM: dict[type[AbstractKernel], int] = {Matern12: 1, Matern32: 3, Matern52: 5}


def has_features(kernel: AbstractKernel) -> bool:
    """Whether :func:`prior_function` can draw from this kernel: stationary, linear or constant, their sums, ..."""
    if isinstance(kernel, Sum):
        return all(has_features(part) for part in kernel.parts)
    return isinstance(kernel, Linear) or _has_spectrum(kernel)


def prior_function(
    kernel: AbstractKernel, input_dim: int, *, key: PRNGKeyArray, width: int, like: Array, num_features: int = 1024
) -> Function:
    """A draw of ``width`` independent functions with mean zero and this kernel.

    Args:
        kernel: one for which :func:`has_features` holds.
        input_dim: D.
        key: decides the functions; the same key gives the same functions.
        width: P.
        like: an array of the dtype to work in.
        num_features: F. Few suffice when every draw has a key of its own; more make a single draw more Gaussian.
    """
    if isinstance(kernel, Sum):
        keys = jax.random.split(key, len(kernel.parts))
        parts = [
            prior_function(part, input_dim, key=one, width=width, like=like, num_features=num_features)
            for part, one in zip(kernel.parts, keys, strict=True)
        ]
        return lambda x: jnp.sum(jnp.stack([part(x) for part in parts]), axis=0)
    if isinstance(kernel, Linear):
        return _linear_function(kernel, input_dim, key, width, like)
    return _wave_function(kernel, input_dim, key, width, like, num_features)


def _wave_function(
    kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray, width: int, like: Array, num_features: int
) -> Function:
    spectrum_key, phase_key, weight_key = jax.random.split(key, 3)
    frequencies, variance = _spectrum(kernel, input_dim, spectrum_key, like, num_features)
    phases = jax.random.uniform(phase_key, (1, num_features), like.dtype, maxval=2 * jnp.pi)
    weights = jnp.sqrt(2.0 * variance / num_features) * jax.random.normal(weight_key, (num_features, width), like.dtype)
    return lambda x: jnp.cos(x.astype(like.dtype) @ frequencies + phases) @ weights


def _linear_function(kernel: Linear, input_dim: int, key: PRNGKeyArray, width: int, like: Array) -> Function:
    noise = jax.random.normal(key, (input_dim + 1, width), like.dtype)
    deviations = _per_column(jnp.sqrt(kernel.variance.value), kernel.active_dims, input_dim, like)
    bias = jnp.zeros((), like.dtype) if kernel.bias_variance is None else jnp.sqrt(kernel.bias_variance.value)
    slopes, offset = deviations[:, None] * noise[:-1], bias.astype(like.dtype) * noise[-1:]
    return lambda x: x.astype(like.dtype) @ slopes + offset


def _has_spectrum(kernel: AbstractKernel) -> bool:
    if isinstance(kernel, Product):
        return all(_has_spectrum(part) for part in kernel.parts)
    return type(kernel) in (RBF, RationalQuadratic, Constant, *_FREEDOM)


def _spectrum(
    kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray, like: Array, num_features: int
) -> tuple[Float[Array, "D F"], Float[Array, ""]]:
    """Frequencies and the variance. Those of a product add up: characteristic functions multiply."""
    if isinstance(kernel, Product):
        keys = jax.random.split(key, len(kernel.parts))
        parts = [
            _spectrum(part, input_dim, one, like, num_features) for part, one in zip(kernel.parts, keys, strict=True)
        ]
        frequencies, variances = zip(*parts, strict=True)
        return jnp.sum(jnp.stack(frequencies), axis=0), jnp.prod(jnp.stack(variances))
    if isinstance(kernel, Constant):
        return jnp.zeros((input_dim, num_features), like.dtype), kernel.variance.value.astype(like.dtype)
    assert isinstance(kernel, AbstractStationary)
    normal_key, scale_key = jax.random.split(key)
    scale = _spread(kernel, scale_key, like, num_features) * jax.random.normal(
        normal_key, (input_dim, num_features), like.dtype
    )
    inverse = _per_column(1.0 / kernel.lengthscale.value, kernel.active_dims, input_dim, like)
    return inverse[:, None] * scale, kernel.variance.value.astype(like.dtype)


def _spread(kernel: AbstractStationary, key: PRNGKeyArray, like: Array, num_features: int) -> Float[Array, "1 F"]:
    """What makes Gaussian frequencies those of the kernel: all of these kernels are scale mixtures of RBF kernels."""
    if isinstance(kernel, RationalQuadratic):
        alpha = kernel.alpha.value.astype(like.dtype)
        return jnp.sqrt(jax.random.gamma(key, alpha, (1, num_features), like.dtype) / alpha)
    if isinstance(kernel, RBF):
        return jnp.ones((1, num_features), like.dtype)
    freedom = _FREEDOM[type(kernel)]
    squares = jnp.sum(jax.random.normal(key, (freedom, 1, num_features), like.dtype) ** 2, axis=0)
    return jnp.sqrt(freedom / squares)


def _per_column(value: Array, active_dims: tuple[int, ...] | None, input_dim: int, like: Array) -> Float[Array, " D"]:
    """One value a column, 0 where the kernel does not look."""
    columns = jnp.arange(input_dim) if active_dims is None else jnp.asarray(active_dims)
    values = jnp.broadcast_to(value.astype(like.dtype), columns.shape)
    return jnp.zeros(input_dim, like.dtype).at[columns].set(values)
