"""Several classes with the softmax link."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp._checks import whole_number
from fathomgp._rules import normal_points
from fathomgp.errors import SettingError
from fathomgp.likelihoods._classes import AbstractClassLikelihood, check_num_classes, one_hot
from fathomgp.likelihoods._special import safe_sqrt
from fathomgp.tags import tagged

#: More points than this cost seconds to place and gain nothing that could be seen.
_MOST_POINTS = 1 << 20


@tagged("likelihood/softmax")
class Softmax(AbstractClassLikelihood):
    r"""Softmax of K latents, :math:`p(y = c \mid f) = e^{f_c} / \sum_k e^{f_k}`.

    No expectation under it has a closed form: all of them average over the same fixed quasi Monte Carlo points (shifted
    Sobol, mirrored, then whitened, so that polynomials of degree three are exact). The answers are deterministic; with
    the default number of points, probabilities are within about 0.005 of the truth at unit latent variances.

    Args:
        num_classes: K, at least 2.
        num_points: a power of two, at least 4 K; more points, more accuracy.
    """

    num_classes: int = eqx.field(static=True)
    num_points: int = eqx.field(static=True)

    def __init__(self, num_classes: int, num_points: int | None = None):
        self.num_classes = check_num_classes(num_classes)
        smallest = 1 << (4 * self.num_classes - 1).bit_length()
        wanted = 128 if num_points is None else whole_number(num_points, "num_points", 1, 1 << 24)
        self.num_points = max(wanted, smallest)

    def __check_init__(self):
        if not 1 <= self.num_points <= _MOST_POINTS:
            raise SettingError(f"num_points must be at most {_MOST_POINTS:,}, but it is {self.num_points:,}.")

    def num_latents(self, num_outputs: int) -> int:
        """K latent functions an output."""
        return self.num_classes * num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``f_y - log sum_k exp(f_k)``."""
        log_table = jax.nn.log_softmax(f.reshape(-1, self.num_classes), axis=1)
        return jnp.sum(jnp.where(one_hot(y, self.num_classes), log_table, 0.0), axis=1).reshape(y.shape)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """The average of ``log_prob`` over the points."""
        return jnp.mean(self._at_points(lambda f: self.log_prob(f, y), mean, variance), axis=0)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """The log of the average of ``exp(alpha log_prob)`` over the points."""
        log_terms = self._at_points(lambda f: alpha * self.log_prob(f, y), mean, variance)
        return jax.nn.logsumexp(log_terms, axis=0) - float(np.log(self.num_points))

    def probabilities(self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, "N K"]:
        """The average of the softmax over the points."""
        return jnp.mean(self._at_points(lambda f: jax.nn.softmax(f, axis=1), mean, variance), axis=0)

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """A draw from the K probabilities."""
        return jax.random.categorical(key, f.reshape(f.shape[0], -1, self.num_classes)).astype(f.dtype)

    def _at_points(
        self,
        function: Callable[[Float[Array, "N Q"]], Float[Array, "N C"]],
        mean: Float[Array, "N Q"],
        variance: Float[Array, "N Q"],
    ) -> Float[Array, "points N C"]:
        points = normal_points(self.num_classes, self.num_points, mean.dtype)
        sd = safe_sqrt(variance)

        def at(z: Float[Array, " K"]) -> Float[Array, "N C"]:
            repeated = jnp.tile(z, mean.shape[1] // self.num_classes)
            return function(mean + sd * repeated[None, :])

        return jax.vmap(at)(points)
