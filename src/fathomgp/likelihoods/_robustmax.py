"""Several classes: the largest latent function wins, up to mistakes of a fixed rate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fathomgp._rules import normal_rule
from fathomgp.errors import SettingError
from fathomgp.likelihoods._classes import AbstractClassLikelihood, check_num_classes, one_hot
from fathomgp.likelihoods._quadrature import NUM_NODES
from fathomgp.likelihoods._special import log_ndtr, safe_sqrt
from fathomgp.tags import tagged


@tagged("likelihood/robust-max")
class RobustMax(AbstractClassLikelihood):
    r"""The largest of K latents names the class, except for labelling mistakes at rate :math:`\epsilon`.

    .. math:: p(y = c \mid f) = 1 - \epsilon \text{ if } c = \arg\max_k f_k, \text{ else } \epsilon / (K - 1)

    Everything follows from the probability that :math:`f_c` is the largest,
    :math:`P_c = E_{f_c}[\prod_{j \ne c} \Phi((f_c - \mu_j)/\sigma_j)]`, by one Gauss-Hermite rule with the product
    taken in log space. Predicted probabilities are scaled to sum to one. The quadrature's error is below 1e-4 while the
    latent variances of a row are within a factor of ten of one another.

    Args:
        num_classes: K, at least 2.
        epsilon: the rate of labelling mistakes.

    References:
        Hernandez-Lobato, Hernandez-Lobato and Dupont (2011), Robust multi-class Gaussian process classification.
    """

    num_classes: int = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, num_classes: int, epsilon: float = 1e-3):
        self.num_classes = check_num_classes(num_classes)
        self.epsilon = float(epsilon)
        chance = 1.0 - 1.0 / num_classes
        if not 0.0 < epsilon < chance:
            raise SettingError(
                f"epsilon must lie between 0 and {chance:g}, the rate of guessing, but it is {epsilon:g}."
            )

    def num_latents(self, num_outputs: int) -> int:
        """K latent functions an output."""
        return self.num_classes * num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``log(1 - epsilon)`` or ``log(epsilon / (K - 1))``."""
        winner = jnp.argmax(f.reshape(*y.shape, self.num_classes), axis=-1)
        hit, miss = self._log_rates
        return jnp.where(winner.astype(y.dtype) == y, hit, miss).astype(f.dtype)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``P log(1 - epsilon) + (1 - P) log(epsilon / (K - 1))``."""
        hit, miss = self._log_rates
        return miss + self._win(mean, variance, y) * (hit - miss)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """``log(P (1 - epsilon)^alpha + (1 - P) (epsilon / (K - 1))^alpha)``."""
        hit, miss = self._log_rates
        gain = float(np.expm1(alpha * (hit - miss)))
        return alpha * miss + jnp.log1p(self._win(mean, variance, y) * gain)

    def probabilities(self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, "N K"]:
        """``P_c (1 - epsilon) + (1 - P_c) epsilon / (K - 1)``, with the ``P_c`` scaled to sum to one."""
        classes = jnp.eye(self.num_classes, dtype=bool)

        def of_class(row: Bool[Array, " K"]) -> Float[Array, " N"]:
            return _log_win(mean, variance, jnp.broadcast_to(row[None, :], mean.shape))

        win = jax.nn.softmax(jax.lax.map(of_class, classes), axis=0).T
        hit, miss = (float(np.exp(rate)) for rate in self._log_rates)
        return miss + win * (hit - miss)

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """The winner; at rate ``epsilon``, one of the others."""
        winner = jnp.argmax(f.reshape(f.shape[0], -1, self.num_classes), axis=-1)
        key_slip, key_other = jax.random.split(key)
        slip = jax.random.uniform(key_slip, winner.shape, f.dtype) < self.epsilon
        step = jax.random.randint(key_other, winner.shape, 1, self.num_classes, winner.dtype)
        return jnp.where(slip, (winner + step) % self.num_classes, winner).astype(f.dtype)

    @property
    def _log_rates(self) -> tuple[float, float]:
        return float(np.log1p(-self.epsilon)), float(np.log(self.epsilon / (self.num_classes - 1)))

    def _win(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """The probability that the latent of the label ``y`` is the largest."""
        rows = (-1, self.num_classes)
        log_win = _log_win(mean.reshape(rows), variance.reshape(rows), one_hot(y, self.num_classes))
        return jnp.exp(jnp.minimum(log_win, 0.0)).reshape(y.shape)


def _log_win(
    mean: Float[Array, "R K"], variance: Float[Array, "R K"], chosen: Bool[Array, "R K"]
) -> Float[Array, " R"]:
    """``log P(f_c > f_j for all j != c)`` for the chosen class ``c`` of every row."""
    nodes, log_weights = normal_rule(NUM_NODES, mean.dtype)
    sd = safe_sqrt(variance)
    mean_c = jnp.sum(jnp.where(chosen, mean, 0.0), axis=1, keepdims=True)
    sd_c = jnp.sum(jnp.where(chosen, sd, 0.0), axis=1, keepdims=True)

    def term(z: Float[Array, ""], log_weight: Float[Array, ""]) -> Float[Array, " R"]:
        log_beaten = log_ndtr((mean_c + sd_c * z - mean) / sd)
        return log_weight + jnp.sum(jnp.where(chosen, 0.0, log_beaten), axis=1)

    return jax.nn.logsumexp(jax.vmap(term)(nodes, log_weights), axis=0)
