"""Student-t noise: regression that outliers do not bend."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, ndtr
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._checks import refuse_infinite
from fathomgp.likelihoods._quadrature import expectation, log_gamma_average_rule, log_gamma_rule
from fathomgp.parameters import Parameter, positive
from fathomgp.tags import tagged

#: Targets are standardised, so this bounds the scale to a thousandth of their standard deviation.
SMALLEST_SCALE = 1e-3


@tagged("likelihood/student-t")
class StudentT(AbstractLikelihood):
    r"""Student-t noise, :math:`p(y \mid f) \propto (1 + (y - f)^2 / (\nu s^2))^{-(\nu+1)/2}`.

    A Student-t is a gamma mixture of Gaussians, so :math:`\log Z` and the distribution function integrate :math:`f` out
    exactly and the gamma variable by an exponentially convergent rule (about 1e-9), however narrow the noise is beside
    the latent variance. The expected log probability takes Gauss-Hermite.

    Args:
        df: degrees of freedom :math:`\nu`, above 2 so that the variance exists; fixed unless given as a parameter.
        scale: :math:`s` in standardised units, one number or one an output.
    """

    scales_targets: ClassVar[bool] = True
    target_kind: ClassVar[str] = "real"
    df: Parameter
    scale: Parameter

    def __init__(self, df: ArrayLike | Parameter = 4.0, scale: ArrayLike | Parameter = 0.1):
        self.df = positive(df, name="df", lower=2.0, trainable=False)
        self.scale = positive(scale, name="scale", lower=SMALLEST_SCALE)

    def num_latents(self, num_outputs: int) -> int:
        """One latent function an output."""
        return num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """The log density of ``(y - f) / scale``, less ``log scale``."""
        df, spread = self._df_and_spread(y.shape)
        return self._log_constant(df, spread) - 0.5 * (df + 1.0) * jnp.log1p((y - f) ** 2 / spread)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """By Gauss-Hermite."""
        return expectation(lambda f: self.log_prob(f, y), mean, variance)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        r"""From :math:`(1+R)^{-a} = \int t^{a-1} e^{-t(1+R)} dt / \Gamma(a)`, with ``a = alpha (df+1)/2``.

        Under the integral, :math:`E[e^{-t R}] = (1 + 2 t \tau)^{-1/2} \exp(-t R_m / (1 + 2 t \tau))`, where
        :math:`R_m = (y-m)^2/(\nu s^2)` and :math:`\tau = v/(\nu s^2)`.
        """
        df, spread = self._df_and_spread(y.shape)
        a, misfit, tau = 0.5 * alpha * (df + 1.0), (y - mean) ** 2 / spread, variance / spread
        # Where t times everything is below rounding, the integrand is t^a: the rule sums that part by itself.
        lowest = float(np.log(jnp.finfo(y.dtype).eps)) - jnp.log1p(misfit + 2.0 * tau)
        u, log_weights = log_gamma_rule(*jax.lax.stop_gradient((a, 1.0 + misfit, lowest)))
        # The rule's weights, as a function of a: its nodes are constants to the gradient.
        log_weights = log_weights + _shape_gradient(a, u)
        t = jnp.exp(u)
        shrink = 1.0 + 2.0 * t * tau[None]
        log_terms = log_weights - 0.5 * jnp.log(shrink) - t * misfit[None] / shrink
        return alpha * self._log_constant(df, spread) + jax.nn.logsumexp(log_terms, axis=0)

    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """``mean`` and ``variance + scale^2 df / (df - 2)``."""
        df, spread = self._df_and_spread(mean.shape)
        return mean, variance + spread / (df - 2.0)

    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``E_t[Phi((y - mean) / sqrt(variance + df scale^2 / (2 t)))]`` under ``t ~ Gamma(df/2)``."""
        df, spread = self._df_and_spread((1, y.shape[1]))
        u, weights = log_gamma_average_rule(0.5 * df)
        noise = 0.5 * spread[None] * jnp.exp(-u)
        terms = weights * ndtr((y - mean)[None] / jnp.sqrt(variance[None] + noise))
        return jnp.sum(terms, axis=0)

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """``f + scale e`` with a Student-t ``e``."""
        df = jnp.broadcast_to(self.df.value, f.shape)
        scale = jnp.broadcast_to(self.scale.value, f.shape)
        return f + scale * jax.random.t(key, df, f.shape, f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse infinite targets."""
        refuse_infinite(y)

    def _df_and_spread(self, shape: tuple[int, ...]) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """``df`` and ``df scale^2``."""
        df = jnp.broadcast_to(self.df.value, shape)
        return df, df * jnp.broadcast_to(self.scale.value, shape) ** 2

    def _log_constant(self, df: Float[Array, "N P"], spread: Float[Array, "N P"]) -> Float[Array, "N P"]:
        return gammaln(0.5 * (df + 1.0)) - gammaln(0.5 * df) - 0.5 * (jnp.log(spread) + float(np.log(np.pi)))


def _shape_gradient(a: Float[Array, "N P"], u: Float[Array, "nodes N P"]) -> Float[Array, "nodes N P"]:
    """Zero, with the gradient of ``a u - log Gamma(a)`` with respect to ``a``."""
    change = a - jax.lax.stop_gradient(a)
    log_gamma = gammaln(a) - jax.lax.stop_gradient(gammaln(a))
    return change[None] * u - log_gamma[None]
