"""Several classes: the largest latent function wins, up to mistakes of a fixed rate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp._checks import real_number
from fathomgp._rules import legendre
from fathomgp.errors import SettingError
from fathomgp.likelihoods._classes import AbstractClassLikelihood, check_num_classes, one_hot
from fathomgp.likelihoods._special import safe_sqrt
from fathomgp.tags import tagged

#: How many deviations each latent reaches, and how many nodes lie between.
_REACH, _NUM_NODES = 4.0, 48


@tagged("likelihood/robust-max")
class RobustMax(AbstractClassLikelihood):
    r"""The largest of K latents names the class, except for labelling mistakes at rate :math:`\epsilon`.

    .. math:: p(y = c \mid f) = 1 - \epsilon \text{ if } c = \arg\max_k f_k, \text{ else } \epsilon / (K - 1)

    Everything follows from the probability that :math:`f_c` is the largest,

    .. math:: P_c = \int N(x; \mu_c, \sigma_c^2) \prod_{j \ne c} \Phi((x - \mu_j)/\sigma_j) \, dx ,

    by one rule for all classes, Gauss-Legendre in :math:`u = \log(1 + (x - l)/s)`. The largest latent lies above
    :math:`l = \max_j (\mu_j - 4 \sigma_j)`, and a latent that matters at x has a width of about (x - l)/8 at the least,
    so nodes that spread out from l, where the narrowest has width s, miss none and need not be more when classes are
    many. With the P_c scaled to sum to one the error is below 1e-4 while deviations are within a factor of 3,000 of one
    another, in training as in prediction.

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
        self.epsilon = epsilon = real_number(epsilon, "epsilon")
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
        hit, miss = (float(np.exp(rate)) for rate in self._log_rates)
        return miss + win_probabilities(mean, variance) * (hit - miss)

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
        table = win_probabilities(mean.reshape(rows), variance.reshape(rows))
        return jnp.sum(jnp.where(one_hot(y, self.num_classes), table, 0.0), axis=1).reshape(y.shape)


def win_probabilities(mean: Float[Array, "R K"], variance: Float[Array, "R K"]) -> Float[Array, "R K"]:
    """``P(f_c > f_j for all j != c)`` for every class; rows sum to one."""
    mean = mean - jax.lax.stop_gradient(jnp.max(mean, axis=1, keepdims=True))
    sd = jnp.maximum(safe_sqrt(variance), _narrowest(mean))
    x, weights = _nodes(mean, sd)
    z = (x[:, :, None] - mean[:, None, :]) / sd[:, None, :]
    log_beaten = jnp.log(jnp.maximum(jax.scipy.special.ndtr(z), float(jnp.finfo(z.dtype).tiny)))
    log_others = jnp.sum(log_beaten, axis=2, keepdims=True) - log_beaten
    win = jnp.sum(weights[:, :, None] * jnp.exp(log_others - 0.5 * z * z), axis=1) / sd
    return win / jnp.sum(win, axis=1, keepdims=True)


def _nodes(mean: Float[Array, "R K"], sd: Float[Array, "R K"]) -> tuple[Float[Array, "R X"], Float[Array, "R X"]]:
    """Nodes and weights where the largest latent may be."""
    low, high = (jnp.max(mean + side * _REACH * sd, axis=1, keepdims=True) for side in (-1.0, 1.0))
    finest = jnp.min(jnp.where(mean + _REACH * sd > low, sd, jnp.inf), axis=1, keepdims=True)
    rate = jnp.log1p((high - low) / finest)
    u, w = (jnp.asarray(part, mean.dtype)[None] for part in legendre(_NUM_NODES))
    return low + finest * jnp.expm1(rate * u), w * rate * finest * jnp.exp(rate * u)


def _narrowest(mean: Float[Array, "R K"]) -> Float[Array, "R 1"]:
    """The smallest deviation that the nodes' own rounding resolves."""
    spacing = 100.0 * float(jnp.finfo(mean.dtype).eps)
    return spacing * jax.lax.stop_gradient(jnp.max(jnp.abs(mean), axis=1, keepdims=True))
