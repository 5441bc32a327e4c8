r"""Gaussians pushed through the layers by moment matching: no sampling, one deterministic pass.

With a layer's q(v) = N(m, S) and an input :math:`h \sim N(\mu, C)` the first two moments of the output are exact,

.. math:: m_p = \psi_1 A_p, \qquad v_p = \psi_0 + \mathrm{tr}(B_p \psi_2) - m_p^2, \qquad
          \mathrm{Cov}_{pr} = A_p^T \psi_2 A_r - m_p m_r,

with :math:`A = L_z^{-T} m` and :math:`B_p = L_z^{-T} (S_p + m_p m_p^T - I) L_z^{-1}`; that the output is Gaussian is
the approximation. A linear mean function adds its own moments, and by Stein's lemma its covariance with the rest.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp import means
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractPosterior
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.kernels.expectations import Contraction, contraction, psi0, psi1, psi2_trace
from fathomgp.linalg import transposed_product
from fathomgp.model import Conditional, DeepGP, Layer, moments
from fathomgp.precision import clamp_variance, variance_floor
from fathomgp.predictive import Mixture

#: Variances, one an output, or the whole covariance between outputs.
Spread = Float[Array, "B _"] | Float[Array, "B _ _"]


class Matched(eqx.Module):
    """A layer's q(f), ready for uncertain inputs.

    Attributes:
        linear: A.
        quadratic: what contracts psi2 with B of every output, then with the symmetric A_p A_r^T of
            every pair p < r if outputs are correlated.
    """

    linear: Float[Array, "M P"]
    quadratic: Contraction


class PropagatedPosterior(AbstractPosterior):
    """q(f) of a deep GP, answered by one deterministic pass: a mixture of one component.

    Covariances between rows, draws of functions and of layers come from sample paths, as does everything when
    ``num_samples`` is above 1.

    Attributes:
        model: the fitted model.
        conditionals: q(f) of every layer.
        correlated: whether outputs of a layer stay correlated on their way to the next.
        num_samples: components of a prediction: 1 for the deterministic pass.
    """

    model: DeepGP
    conditionals: tuple[Conditional, ...]
    correlated: bool = eqx.field(static=True, default=False)
    num_samples: int = eqx.field(static=True, default=1)

    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """Mean and variance of the last layer; with ``full_cov``, or if asked, sample paths."""
        if full_cov or self.num_samples > 1:
            return self._paths().predict_f(x, key=key, full_cov=full_cov)
        matched = match_all(self.model, self.conditionals, self.correlated)
        mean, variance, _ = propagate(self.model, matched, x, self.correlated)
        return Mixture(jnp.zeros(1, x.dtype), mean[None], diagonal(variance)[None], None)

    def sample_functions(self, key: PRNGKeyArray, n: int) -> Callable[[Float[Array, "N D"]], Float[Array, "n N Q"]]:
        """Draws from the joint posterior of the rows of each call."""
        return self._paths().sample_functions(key, n)

    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Joint draws of every layer."""
        return self._paths().propagate(x, key=key)

    def _paths(self) -> LayeredPosterior:
        samples = self.num_samples if self.num_samples > 1 else 100
        return LayeredPosterior(self.model, self.conditionals, samples)


def match_all(
    model: DeepGP, conditionals: tuple[Conditional, ...] | list[Conditional], correlated: bool
) -> tuple[Conditional | Matched, ...]:
    """The first layer sees points and stays as it is; the others see Gaussians."""
    later = zip(model.layers[1:], conditionals[1:], strict=True)
    return (conditionals[0], *(match(layer, conditional, correlated) for layer, conditional in later))


def match(layer: Layer, conditional: Conditional, correlated: bool = False) -> Matched:
    """A and B of a layer: everything that does not depend on the data."""
    width = conditional.mean.shape[1]
    squares = transposed_product(conditional.maps, conditional.maps)
    linear = conditional.maps[0].T @ conditional.mean
    columns = linear.T
    variances = jnp.broadcast_to(squares[1:] - squares[:1], (width, *squares.shape[1:]))
    quadratic = variances + _symmetric_products(columns, columns)
    if correlated and width > 1:
        p, r = np.triu_indices(width, 1)
        quadratic = jnp.concatenate([quadratic, _symmetric_products(columns[p], columns[r])])
    return Matched(linear, contraction(layer.kernel, conditional.z, quadratic))


def propagate(
    model: DeepGP, layers: tuple[Conditional | Matched, ...], x: Float[Array, "B D"], correlated: bool
) -> tuple[Float[Array, "B Q"], Spread, Float[Array, ""]]:
    """Moments of the last layer's outputs at the points ``x``, and how many variances had to be clamped on the way."""
    mean, variance = x, jnp.zeros_like(x)
    clamped = jnp.zeros((), x.dtype)
    for level, (layer, matched) in enumerate(zip(model.layers, layers, strict=True)):
        if isinstance(matched, Conditional):
            mean, variance = moments(layer, matched, x)
        else:
            inputs, spread = layer_input(model, x, mean, variance)
            mean, variance = push(layer, matched, inputs, spread, correlated)
            clamped = clamped + jnp.sum(diagonal(variance) <= variance_floor(x.dtype), dtype=x.dtype)
        if level < model.depth - 1 and layer.noise is not None:
            variance = _add_to_diagonal(variance, jnp.broadcast_to(layer.noise.value, mean.shape))
    return mean, variance, clamped


def push(
    layer: Layer, matched: Matched, mean: Float[Array, "B D"], spread: Spread, correlated: bool = False
) -> tuple[Float[Array, "B P"], Spread]:
    """Moments of a layer's outputs when its inputs are Gaussian."""

    def without_mean_function(mean: Array) -> Array:
        return psi1(layer.kernel, matched.quadratic.z, mean, spread) @ matched.linear

    width = layer.width
    middle = without_mean_function(mean)
    second = psi2_trace(matched.quadratic, mean, spread)
    variance = psi0(layer.kernel, mean, spread)[:, None] + second[:, :width] - middle**2
    outputs = middle + layer.mean(mean)
    W = slope(layer, mean.shape[1])
    if not (correlated and width > 1):
        if W is not None:
            cross = _input_covariance(without_mean_function, mean, spread)
            variance = variance + _quadratic(spread, W) + 2.0 * jnp.einsum("bdp,dp->bp", cross, W)
        return outputs, clamp_variance(variance)
    p, r = np.triu_indices(width, 1)
    covariance = jnp.zeros((len(mean), width, width), mean.dtype)
    covariance = covariance.at[:, p, r].set(second[:, width:] - middle[:, p] * middle[:, r])
    covariance = _add_to_diagonal(covariance + jnp.swapaxes(covariance, 1, 2), variance)
    if W is not None:
        cross = jnp.einsum("bdp,dr->bpr", _input_covariance(without_mean_function, mean, spread), W)
        full = spread if spread.ndim == 3 else spread[:, :, None] * jnp.eye(spread.shape[1], dtype=spread.dtype)[None]
        covariance = covariance + cross + jnp.swapaxes(cross, 1, 2) + jnp.einsum("dp,bde,er->bpr", W, full, W)
    missing = clamp_variance(diagonal(covariance)) - diagonal(covariance)
    return outputs, _add_to_diagonal(covariance, missing)


def diagonal(variance: Spread) -> Float[Array, "B P"]:
    """The variances."""
    return variance if variance.ndim == 2 else jnp.diagonal(variance, axis1=1, axis2=2)


def slope(layer: Layer, num_inputs: int) -> Float[Array, "D P"] | None:
    """The matrix of a layer's linear mean function; ``None`` when it is constant."""
    if isinstance(layer.mean, (means.Zero, means.Constant)):
        return None
    if isinstance(layer.mean, means.Linear):
        return layer.mean.weights.value
    name = type(layer.mean).__name__
    raise SettingError(f"Moment matching needs linear mean functions, but a layer has a {name}: use means.Linear.")


def layer_input(model: DeepGP, x: Array, mean: Array, variance: Spread) -> tuple[Array, Spread]:
    """h, and x with certainty when layers also see the inputs."""
    inputs = model.layer_input(1, x, mean)
    extra = inputs.shape[1] - mean.shape[1]
    padding = ((0, 0),) + ((0, extra),) * (variance.ndim - 1)
    return inputs, jnp.pad(variance, padding)


def _input_covariance(function: Callable[[Array], Array], mean: Array, spread: Spread) -> Float[Array, "B D P"]:
    """``Cov[h_d, g_p(h)] = C dE[g_p]/dmu`` (Stein's lemma), for the expectation ``function`` of g."""
    basis = jnp.eye(mean.shape[1], dtype=mean.dtype)
    slopes = jax.vmap(lambda e: jax.jvp(function, (mean,), (jnp.broadcast_to(e[None], mean.shape),))[1])(basis)
    if spread.ndim == 2:
        return spread[:, :, None] * jnp.moveaxis(slopes, 0, 1)
    return jnp.einsum("bde,ebp->bdp", spread, slopes)


def _quadratic(spread: Spread, W: Float[Array, "D P"]) -> Float[Array, "B P"]:
    """The variance of ``h W``."""
    if spread.ndim == 2:
        return spread @ W**2
    return jnp.einsum("dp,bde,ep->bp", W, spread, W)


def _add_to_diagonal(variance: Spread, addition: Float[Array, "B P"]) -> Spread:
    if variance.ndim == 2:
        return variance + addition
    return variance + addition[:, :, None] * jnp.eye(variance.shape[1], dtype=variance.dtype)[None]


def _symmetric_products(a: Float[Array, "K M"], b: Float[Array, "K M"]) -> Float[Array, "K M M"]:
    outer = a[:, :, None] * b[:, None, :]
    return 0.5 * (outer + jnp.swapaxes(outer, 1, 2))
