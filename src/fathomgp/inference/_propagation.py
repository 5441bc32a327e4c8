r"""Gaussians pushed through the layers by moment matching: no sampling, one deterministic pass.

With a layer's q(v) = N(m, S) and an input :math:`h \sim N(\mu, C)` the first two moments of the output are exact,

.. math:: m_p = \psi_1 A_p, \qquad v_p = \psi_0 - |a|^2 + a^T S_p a + \mathrm{tr}(B_p \Sigma), \qquad
          \mathrm{Cov}_{pr} = A_p^T \Sigma A_r,

with :math:`A = L_z^{-T} m`, :math:`a = L_z^{-1} \psi_1^T`, :math:`B_p = L_z^{-T} (S_p + m_p m_p^T - I) L_z^{-1}` and
:math:`\Sigma = \psi_2 - \psi_1^T \psi_1`, the covariance of k(Z, h): an input that is certain leaves what it leaves
without psi statistics. (The textbook's :math:`\psi_0 + \mathrm{tr}(B_p \psi_2) - m_p^2` subtracts
numbers that are as large as the kernel's variance over the smallest eigenvalue of k(Z, Z).) That the output is Gaussian
is the approximation. A linear mean function adds its own moments, and by Stein's lemma its covariance with the rest.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp import means
from fathomgp.compilation import program
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractPosterior
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.kernels.expectations import Contraction, contraction, covariance_trace, psi0, psi1
from fathomgp.linalg import product, transposed_product
from fathomgp.model import Conditional, DeepGP, Layer, moments
from fathomgp.precision import clamp_variance, variance_floor
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged

#: Variances, one an output, or the whole covariance between outputs.
Spread = Float[Array, "B _"] | Float[Array, "B _ _"]


@tagged("posterior/matched")
class Matched(eqx.Module):
    """A layer's q(f), ready for uncertain inputs.

    Attributes:
        whitening: Lz^-1.
        mean: m.
        covariance: S of every output, or the one that all share.
        quadratic: what contracts the covariance of k(Z, h) with B of every output, then with the symmetric A_p A_r^T of
            every pair p < r if outputs are correlated.
    """

    whitening: Float[Array, "M M"]
    mean: Float[Array, "M P"]
    covariance: Float[Array, "S M M"]
    quadratic: Contraction


@tagged("posterior/propagated")
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

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """Mean and variance of the last layer; with ``full_cov``, or if asked, sample paths."""
        if full_cov or self.num_samples > 1:
            return self._paths().predict_f(x, key=key, full_cov=full_cov)
        matched = match_all(self.model, self.conditionals, self.correlated)
        mean, variance, _ = propagate(self.model, matched, x, self.correlated)
        return Mixture(jnp.zeros(1, x.dtype), mean[None], diagonal(variance)[None], None)

    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Draws from the joint posterior of the rows of each call."""
        return self._paths().draw_functions(x, key=key, n=n)

    @program
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
    """What of a layer does not depend on the data."""
    covariance = transposed_product(conditional.roots, conditional.roots)
    return match_moments(layer, conditional.z, conditional.whitening, conditional.mean, covariance, correlated)


def match_moments(
    layer: Layer,
    z: Float[Array, "M D"],
    whitening: Float[Array, "M M"],
    mean: Float[Array, "M P"],
    covariance: Float[Array, "S M M"],
    correlated: bool = False,
) -> Matched:
    """:func:`match` for a q(v) that is given by its moments."""
    width, size = mean.shape[1], len(mean)
    middle = jnp.broadcast_to(covariance - jnp.eye(size, dtype=mean.dtype)[None], (width, size, size))
    middle = middle + _symmetric_products(mean.T, mean.T)
    if correlated and width > 1:
        p, r = np.triu_indices(width, 1)
        middle = jnp.concatenate([middle, _symmetric_products(mean.T[p], mean.T[r])])
    quadratic = whitening.T[None] @ middle @ whitening[None]
    return Matched(whitening, mean, covariance, contraction(layer.kernel, z, quadratic))


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

    def projected(mean: Array) -> Array:
        return product(matched.whitening, psi1(layer.kernel, matched.quadratic.z, mean, spread).T)

    def without_mean_function(mean: Array) -> Array:
        return projected(mean).T @ matched.mean

    width, a = layer.width, projected(mean)
    second = covariance_trace(matched.quadratic, mean, spread)
    at_psi1 = psi0(layer.kernel, mean, spread) - jnp.sum(a**2, axis=0)
    variance = at_psi1[:, None] + jnp.sum(a[None] * (matched.covariance @ a), axis=1).T + second[:, :width]
    outputs = a.T @ matched.mean + layer.mean(mean)
    W = slope(layer, mean.shape[1])
    if not (correlated and width > 1):
        if W is not None:
            cross = _input_covariance(without_mean_function, mean, spread)
            variance = variance + _quadratic(spread, W) + 2.0 * jnp.einsum("bdp,dp->bp", cross, W)
        return outputs, clamp_variance(variance)
    p, r = np.triu_indices(width, 1)
    covariance = jnp.zeros((len(mean), width, width), mean.dtype)
    covariance = covariance.at[:, p, r].set(second[:, width:])
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
