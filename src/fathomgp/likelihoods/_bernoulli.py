"""Two classes."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.likelihoods._classes import AbstractClassLikelihood
from fathomgp.likelihoods._quadrature import expectation, log_expectation
from fathomgp.likelihoods._special import log_ndtr
from fathomgp.tags import tagged


@tagged("likelihood/bernoulli")
class Bernoulli(AbstractClassLikelihood):
    r"""Two classes with a probit link, :math:`p(y = 1 \mid f) = \Phi(f)`.

    Example:
        >>> import jax.numpy as jnp
        >>> Bernoulli().probabilities(jnp.zeros((1, 1)), jnp.ones((1, 1))).tolist()
        [[0.5, 0.5]]
    """

    num_classes: int = eqx.field(static=True, init=False, default=2)

    def num_latents(self, num_outputs: int) -> int:
        """One latent function an output."""
        return num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``log Phi(f)`` for label 1, ``log Phi(-f)`` for label 0."""
        return log_ndtr(_sign(y) * f)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """By Gauss-Hermite."""
        return expectation(lambda f: self.log_prob(f, y), mean, variance)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """``log Phi(+-mean / sqrt(1 + variance))`` at ``alpha=1``, adaptive Gauss-Hermite otherwise."""
        if alpha == 1.0:
            return log_ndtr(_sign(y) * mean / jnp.sqrt(1.0 + variance))
        return log_expectation(lambda f: alpha * self.log_prob(f, y), mean, variance)

    def probabilities(self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, "N K"]:
        """``Phi(-z)`` and ``Phi(z)`` at ``z = mean / sqrt(1 + variance)``."""
        z = mean / jnp.sqrt(1.0 + variance)
        return jnp.concatenate([ndtr(-z), ndtr(z)], axis=1)

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """Whether ``f`` exceeds a standard normal."""
        return (jax.random.normal(key, f.shape, f.dtype) < f).astype(f.dtype)


def _sign(y: Float[Array, "N P"]) -> Float[Array, "N P"]:
    return jnp.where(y > 0.5, 1.0, -1.0).astype(y.dtype)
