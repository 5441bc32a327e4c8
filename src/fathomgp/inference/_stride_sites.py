"""Gaussian stand-ins for other likelihoods: with them, whatever is scored for Gaussian noise is scored for any.

Under q(f) = N(m, v) the expected log likelihood E of a datum has the slope g = dE/dm and the curvature W = -2 dE/dv.
The Gaussian observation y~ of precision W with the same two,

    W y~ = W m + g,

is its site. Given sites, q of the inducing values is that of sparse GP regression; where sites and q agree, q is the
best Gaussian (Khan and Lin 2017). For Gaussian noise sites are the data themselves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fathomgp.data import Batch
from fathomgp.likelihoods import AbstractLikelihood
from fathomgp.linalg import inverse_lower, logdet_lower, product, safe_cholesky
from fathomgp.model import Layer
from fathomgp.precision import clamp_variance

#: The least precision of a site: a likelihood that is not log-concave may bend the other way.
_LEAST_PRECISION = 1e-4
#: How far sites go towards new ones at a time: all the way, those of steep likelihoods swing.
_STEP = 0.5


class Sites(NamedTuple):
    """Sites of N data and Q latent functions.

    Attributes:
        precision: W; 0 where nothing was observed.
        weighted: W y~.
    """

    precision: Float[Array, "N Q"]
    weighted: Float[Array, "N Q"]

    def as_groups(self, trend: Float[Array, "N Q"]) -> tuple[Float[Array, "Q N 1"], Float[Array, "Q N"]]:
        """Observations less the mean function, and their noise variances, every latent function a group."""
        seen = self.precision > 0.0
        noise = 1.0 / jnp.where(seen, self.precision, 1.0)
        residual = jnp.where(seen, self.weighted * noise - trend, 0.0)
        return residual.T[:, :, None], jnp.where(seen, noise, jnp.inf).T


def sites_about(
    likelihood: AbstractLikelihood, batch: Batch, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
) -> Sites:
    """The sites under q(f) = N(mean, variance)."""

    def expected(mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(batch.observed, likelihood.expected_log_prob(mean, variance, batch.y), 0.0))

    slope, bend = jax.grad(expected, (0, 1))(mean, variance)
    seen = jnp.any(batch.observed, axis=1)[:, None]
    precision = jnp.where(seen, jnp.maximum(-2.0 * bend, _LEAST_PRECISION), 0.0)
    return Sites(precision, jnp.where(seen, precision * mean + slope, 0.0))


class Shallow(NamedTuple):
    """One layer given sites: moments at the data, whitened inducing means, and their KL divergence from the prior."""

    mean: Float[Array, "N Q"]
    variance: Float[Array, "N Q"]
    white: Float[Array, "M Q"]
    kl: Float[Array, ""]


def shallow_given(layer: Layer, batch: Batch, z: Float[Array, "M D"], sites: Sites) -> Shallow:
    """Sparse GP regression: ``q(v) = N(B^-1 V W y~, B^-1)`` with ``B = I + V W V^T`` and ``V = Lz^-1 k(Z, X)``."""
    trend = layer.mean(batch.x)
    V = product(inverse_lower(safe_cholesky(layer.kernel(z)).lower), layer.kernel(z, batch.x))
    unexplained = layer.kernel.diagonal(batch.x) - jnp.sum(V**2, axis=0)

    def of_latent(own: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        precision, weighted, trend = own
        scaled = V * jnp.sqrt(precision)[None, :]
        lower = safe_cholesky(jnp.eye(len(V), dtype=V.dtype) + product(scaled, scaled.T), jitter=0.0).lower
        root = inverse_lower(lower)
        white = root.T @ (root @ (V @ (weighted - precision * trend)))
        variance = clamp_variance(unexplained + jnp.sum(product(root, V) ** 2, axis=0))
        kl = 0.5 * (jnp.sum(root**2) + jnp.sum(white**2) + logdet_lower(lower) - len(V))
        return V.T @ white + trend, variance, white, kl

    mean, variance, white, kl = jax.lax.map(of_latent, (sites.precision.T, sites.weighted.T, trend.T))
    return Shallow(mean.T, variance.T, white.T, jnp.sum(kl))


def shallow_bound(
    layer: Layer, likelihood: AbstractLikelihood, batch: Batch, z: Float[Array, "M D"], sites: Sites
) -> Float[Array, ""]:
    """The variational bound at the q that the sites imply: a function of the hyperparameters."""
    q = shallow_given(layer, batch, z, sites)
    figures = likelihood.expected_log_prob(q.mean, q.variance, batch.y)
    return jnp.sum(jnp.where(batch.observed, figures, 0.0)) - q.kl


def settle_sites(
    layer: Layer, likelihood: AbstractLikelihood, batch: Batch, z: Float[Array, "M D"], sites: Sites, *, times: int
) -> Sites:
    """Sites after so many turns towards those of the q that they imply."""

    def turn(_: Int[Array, ""], sites: Sites) -> Sites:
        q = shallow_given(layer, batch, z, sites)
        new = sites_about(likelihood, batch, q.mean, q.variance)
        return Sites(*((1.0 - _STEP) * old + _STEP * own for old, own in zip(sites, new, strict=True)))

    return jax.lax.fori_loop(0, times, turn, sites)
