"""Counts."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc, gammaln, ndtr
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._checks import refuse, refuse_infinite
from fathomgp.likelihoods._quadrature import expectation, log_expectation, log_gamma_average_rule
from fathomgp.likelihoods._special import safe_exp, safe_sqrt
from fathomgp.tags import tagged

_NUM_NODES = 64
# Above this rate the Poisson is normal to four digits, and the exact sampler's integers come near their limit.
_LARGEST_EXACT_RATE = 1e8


@tagged("likelihood/poisson")
class Poisson(AbstractLikelihood):
    r"""Counts with a log link, :math:`p(y \mid f) = e^{y f - e^f} / y!`."""

    scales_targets: ClassVar[bool] = False
    target_kind: ClassVar[str] = "count"

    def num_latents(self, num_outputs: int) -> int:
        """One latent function an output: the log rate."""
        return num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``y f - exp(f) - log y!``."""
        return y * f - safe_exp(f) - gammaln(y + 1.0)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``y mean - exp(mean + variance/2) - log y!``."""
        return y * mean - safe_exp(mean + 0.5 * variance) - gammaln(y + 1.0)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """By adaptive Gauss-Hermite: the integrand is log-concave."""
        return log_expectation(lambda f: alpha * self.log_prob(f, y), mean, variance, _NUM_NODES)

    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """``r = exp(mean + variance/2)`` and ``r + r^2 (exp(variance) - 1)``; infinite where they overflow."""
        log_rate = mean + 0.5 * variance
        positive = jnp.maximum(variance, float(jnp.finfo(variance.dtype).tiny))
        log_excess = positive + jnp.log(-jnp.expm1(-positive))
        return jnp.exp(log_rate), jnp.exp(log_rate) + jnp.exp(2.0 * log_rate + log_excess)

    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``P(Y <= y)``, which is ``P(f < log G)`` for ``G ~ Gamma(y + 1)``.

        Integrated over the narrower of the two, ``f`` or ``log G``, with the other's distribution function inside: so
        the integrand is smooth at the scale of the nodes whatever the count and the latent variance.
        """
        count = jnp.floor(jnp.maximum(y, 0.0)) + 1.0
        narrow = variance * count < 0.25
        # The incomplete gamma function iterates long for large counts: spare it those that do not need it.
        some_count, some_mean = jnp.where(narrow, count, 1.0), jnp.where(narrow, mean, 0.0)
        some_variance = jnp.where(narrow, variance, 0.0)
        over_f = expectation(lambda f: gammaincc(some_count, safe_exp(f)), some_mean, some_variance)
        u, weights = log_gamma_average_rule(count)
        over_gamma = jnp.sum(weights * ndtr((u - mean[None]) / safe_sqrt(variance)[None]), axis=0)
        return jnp.where(y < 0.0, 0.0, jnp.where(narrow, over_f, over_gamma))

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """A Poisson draw; rounded normal where the rate is above 1e8."""
        rate = safe_exp(f)
        key_small, key_large = jax.random.split(key)
        small = jax.random.poisson(key_small, jnp.minimum(rate, _LARGEST_EXACT_RATE), f.shape).astype(f.dtype)
        large = jnp.round(rate + jnp.sqrt(rate) * jax.random.normal(key_large, f.shape, f.dtype))
        return jnp.where(rate > _LARGEST_EXACT_RATE, large, small)

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse everything but 0, 1, 2, ..."""
        refuse_infinite(y)
        refuse(y < 0, y, "is negative", "The Poisson likelihood takes counts: 0, 1, 2, ...")
        fractional = np.isfinite(y) & (y != np.round(y))
        refuse(fractional, y, "is not a whole number", "The Poisson likelihood takes counts: 0, 1, 2, ...")
