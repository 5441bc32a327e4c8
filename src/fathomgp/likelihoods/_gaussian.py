"""Gaussian noise: of one size, or of a size that varies with the input."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._checks import refuse_infinite
from fathomgp.likelihoods._quadrature import expectation, log_expectation
from fathomgp.likelihoods._special import LOG_TWO_PI, exponent_cap, safe_exp
from fathomgp.parameters import Parameter, positive, real
from fathomgp.tags import tagged

#: Targets are standardised, so this bounds the noise's standard deviation to a thousandth of theirs.
SMALLEST_VARIANCE = 1e-6
# The log noise enters through a smooth but not polynomial function, and costs one dimension only: afford more nodes.
_NOISE_NODES = 64


@tagged("likelihood/gaussian")
class Gaussian(AbstractLikelihood):
    r"""Gaussian noise, :math:`p(y \mid f) = N(y; f, \sigma^2)`.

    Args:
        variance: :math:`\sigma^2` of the standardised targets, one number or one an output; (N, P) for N rows that
            each have their own.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones((1, 1))
        >>> mean, variance = Gaussian(variance=0.5).predict_moments(one, one)
        >>> float(variance[0, 0])
        1.5
    """

    scales_targets: ClassVar[bool] = True
    target_kind: ClassVar[str] = "real"
    variance: Parameter

    def __init__(self, variance: ArrayLike | Parameter = 0.01):
        self.variance = positive(variance, name="variance", lower=SMALLEST_VARIANCE)

    def num_latents(self, num_outputs: int) -> int:
        """One latent function an output."""
        return num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``log N(y; f, variance)``."""
        return gaussian_log_z(f, jnp.zeros_like(f), y, self._noise(y.shape))

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``log N(y; mean, noise) - variance / (2 noise)``."""
        noise = self._noise(y.shape)
        return -0.5 * (LOG_TWO_PI + jnp.log(noise) + ((y - mean) ** 2 + variance) / noise)

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """``log N(y; mean, variance + noise / alpha)`` and its normalising constant: see :func:`gaussian_log_z`."""
        return gaussian_log_z(mean, variance, y, self._noise(y.shape), alpha)

    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """``mean`` and ``variance + noise``."""
        return mean, variance + self._noise(mean.shape)

    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``Phi((y - mean) / sqrt(variance + noise))``."""
        return jax.scipy.special.ndtr((y - mean) / jnp.sqrt(variance + self._noise(y.shape)))

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """``f + sqrt(noise) e``."""
        return f + jnp.sqrt(self._noise(f.shape)) * jax.random.normal(key, f.shape, f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse infinite targets."""
        refuse_infinite(y)

    def _noise(self, shape: tuple[int, ...]) -> Float[Array, "N P"]:
        return jnp.broadcast_to(self.variance.value, shape)


@tagged("likelihood/heteroscedastic-gaussian")
class HeteroscedasticGaussian(AbstractLikelihood):
    r"""Gaussian noise whose logarithm is a latent function, :math:`p(y \mid f, g) = N(y; f, e^{g + o})`.

    P outputs need 2P latents: the first P are :math:`f`, the last P are :math:`g`. The expected log probability is a
    closed form; :math:`\log Z` and the distribution function integrate :math:`f` out exactly, :math:`g` by
    quadrature (1e-9 up to a variance of 2 of the log noise, 1e-5 at 9).

    Args:
        offset: :math:`o`, the log noise variance where :math:`g = 0`; one number or one an output.
    """

    scales_targets: ClassVar[bool] = True
    target_kind: ClassVar[str] = "real"
    offset: Parameter

    def __init__(self, offset: ArrayLike | Parameter = 0.0):
        self.offset = real(offset)

    def num_latents(self, num_outputs: int) -> int:
        """Two latent functions an output: the mean and the log noise."""
        return 2 * num_outputs

    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``log N(y; f, exp(g + offset))``."""
        return self.expected_log_prob(f, jnp.zeros_like(f), y)

    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``-1/2 [log 2 pi + m_g + ((y - m_f)^2 + v_f) exp(v_g/2 - m_g)]``."""
        (m_f, m_g), (v_f, v_g) = self._split(mean), _halves(variance)
        return -0.5 * (LOG_TWO_PI + m_g + ((y - m_f) ** 2 + v_f) * safe_exp(0.5 * v_g - m_g))

    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """The Gaussian log Z, integrated over the log noise."""
        (m_f, m_g), (v_f, v_g) = self._split(mean), _halves(variance)
        return log_expectation(lambda g: gaussian_log_z(m_f, v_f, y, _noise_of(g), alpha), m_g, v_g, _NOISE_NODES)

    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """``m_f`` and ``v_f + exp(m_g + v_g/2)``."""
        (m_f, m_g), (v_f, v_g) = self._split(mean), _halves(variance)
        return m_f, v_f + safe_exp(m_g + 0.5 * v_g)

    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``E_g[Phi((y - m_f) / sqrt(v_f + exp(g)))]``."""
        (m_f, m_g), (v_f, v_g) = self._split(mean), _halves(variance)
        return expectation(
            lambda g: jax.scipy.special.ndtr((y - m_f) / jnp.sqrt(v_f + _noise_of(g))), m_g, v_g, _NOISE_NODES
        )

    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """``f + exp(g/2) e``."""
        location, log_noise = self._split(f)
        return location + safe_exp(0.5 * log_noise) * jax.random.normal(key, location.shape, f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse infinite targets."""
        refuse_infinite(y)

    def _split(self, f: Float[Array, "N Q"]) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        location, log_noise = _halves(f)
        return location, log_noise + jnp.broadcast_to(self.offset.value, log_noise.shape)


def likelihood_of_rows(likelihood: AbstractLikelihood, rows: slice, padded: int | None = None) -> AbstractLikelihood:
    """The likelihood at some of the rows, where each has noise of its own; padded with noise of 1."""
    if not has_noise_of_rows(likelihood):
        return likelihood
    assert isinstance(likelihood, Gaussian)
    raw = np.asarray(likelihood.variance.raw)[rows]
    raw = np.pad(raw, [(0, (padded or len(raw)) - len(raw)), (0, 0)])
    return eqx.tree_at(lambda one: one.variance.raw, likelihood, jnp.asarray(raw))


def with_known_noise(likelihood: AbstractLikelihood, noise: Float[Array, "N P"] | None = None) -> AbstractLikelihood:
    """Gaussian noise of these variances, one a row and output, where they are known, else the likelihood itself.

    Where a variance is 0, in rows that fill up a block, it becomes 1.
    """
    if noise is None:
        return likelihood
    return Gaussian(Parameter(jnp.log(jnp.where(noise > 0.0, noise, 1.0)), 0.0, trainable=False))


def has_noise_of_rows(likelihood: AbstractLikelihood) -> bool:
    """Whether the noise variance is (N, P), one a row and output: only those rows may be asked about."""
    return isinstance(likelihood, Gaussian) and likelihood.variance.raw.ndim == 2


def gaussian_log_z(
    mean: Float[Array, "N P"],
    variance: Float[Array, "N P"],
    y: Float[Array, "N P"],
    noise: Float[Array, "N P"],
    alpha: float = 1.0,
) -> Float[Array, "N P"]:
    r"""``log E[N(y; f, noise)^alpha]``, arranged so that nothing cancels as ``alpha -> 0``.

    .. math:: \log N(y; m, v + s/\alpha) + \tfrac12 \log(2\pi s/\alpha) - \tfrac\alpha2 \log(2\pi s)
              = -\tfrac12 \log(1 + \alpha v/s) - \frac{\alpha (y-m)^2}{2(\alpha v + s)} - \tfrac\alpha2 \log(2\pi s)
    """
    spread = jnp.log1p(alpha * variance / noise)
    misfit = (y - mean) ** 2 / (alpha * variance + noise)
    return -0.5 * (spread + alpha * (misfit + LOG_TWO_PI + jnp.log(noise)))


def _halves(f: Float[Array, "N Q"]) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
    middle = f.shape[1] // 2
    return f[:, :middle], f[:, middle:]


def _noise_of(g: Float[Array, "N P"]) -> Float[Array, "N P"]:
    """``exp(g)``, bounded so that its square and cube do not overflow either: gradients divide by them."""
    cap = 0.5 * exponent_cap(g.dtype)
    return jnp.exp(jnp.clip(g, -cap, cap))
