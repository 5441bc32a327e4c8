"""The answer: a mixture of Gaussians on the latent functions, pushed through the likelihood.

Every algorithm answers with the same type. A DSVI path, a draw of a sampler, a STRIDE particle is one component; an
exact Gaussian process has one. Variances follow the law of total variance and densities are logarithms of sums:
averaging the components' variances or log densities instead is the classic mistake.

Example:
    >>> import numpy as np
    >>> from fathomgp.likelihoods import Gaussian
    >>> means = np.array([[[-1.0]], [[1.0]]])
    >>> mixture = Mixture(np.log([0.5, 0.5]), means, np.full((2, 1, 1), 0.5))
    >>> answer = Predictive(mixture, Gaussian(0.5), shift=np.array([10.0]), scale=np.array([2.0]), squeeze=True)
    >>> answer.mean().round(6).tolist(), answer.variance().round(6).tolist()
    ([10.0], [8.0])
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from fathomgp import _answers
from fathomgp._checks import as_numbers, real_number, shown
from fathomgp.compilation import power_of_two, program, question_rows
from fathomgp.errors import DataError, NotPositiveDefiniteError, SettingError
from fathomgp.likelihoods import AbstractClassLikelihood, AbstractLikelihood, likelihood_of_rows
from fathomgp.parameters import cast
from fathomgp.precision import double_precision

#: Rows of one compiled evaluation. Fewer rows go in smaller blocks, of two sizes, so few shapes are ever compiled.
BLOCK_ROWS = 4096
_FEW_ROWS = (16, 256)
_SAMPLES_PER_BLOCK = 1 << 21

AnyArray = Array | np.ndarray
RandomState = int | np.integer | np.random.Generator | None


class Mixture(eqx.Module):
    """The latent functions at N inputs: S Gaussians with weights.

    Attributes:
        log_weights: logarithms of the components' weights; they need not be normalised.
        means: of every latent function.
        variances: of every latent function.
        covariances: between the rows, with ``variances`` on the diagonal; ``None`` when nobody asked for them.
    """

    log_weights: Float[AnyArray, " S"]
    means: Float[AnyArray, "S N Q"]
    variances: Float[AnyArray, "S N Q"]
    covariances: Float[AnyArray, "S N N Q"] | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.means.shape[1]

    def mean(self) -> Float[Array, "N Q"]:
        """The mean of f."""
        return self._moments()[0]

    def variance(self) -> Float[Array, "N Q"]:
        """The total variance of f: the mean of the variances plus the variance of the means."""
        return self._moments()[1]

    def _moments(self) -> tuple[Float[Array, "N Q"], Float[Array, "N Q"]]:
        return _latent_moments(self.log_weights, self.means, self.variances)

    def joint_moments(self) -> tuple[Float[Array, "N Q"], Float[Array, "N N Q"]]:
        """Mean of f, and its total covariance between rows, for use within a program. Needs covariances."""
        assert self.covariances is not None
        log_weights = jax.nn.log_softmax(jnp.asarray(self.log_weights))
        means, covariances = jnp.asarray(self.means), jnp.asarray(self.covariances)
        return jnp.tensordot(jnp.exp(log_weights), means, 1), _answers.latent_covariance(
            log_weights, means, covariances
        )

    def rows(self, rows: slice) -> "Mixture":
        """The same mixture at some of its rows."""
        covariances = None if self.covariances is None else self.covariances[:, rows, rows]
        return Mixture(self.log_weights, self.means[:, rows], self.variances[:, rows], covariances)


def concatenate_rows(mixtures: Sequence[Mixture]) -> Mixture:
    """Mixtures of the same components at several sets of rows, as one on the host, without covariances."""
    parts = [
        np.concatenate([np.asarray(getattr(m, name)) for m in mixtures], axis=1) for name in ("means", "variances")
    ]
    return Mixture(np.asarray(mixtures[0].log_weights), *parts)


class Predictive(eqx.Module):
    """The distribution of y at N inputs, in the units of y.

    All answers are NumPy arrays in double precision, whatever the global flags say: (N, P), or (N,) when y was
    one-dimensional. Work is done in blocks of rows, so memory does not grow with N.

    Attributes:
        mixture: the latent functions.
        likelihood: what makes y of them.
        shift: the units of y: ``y = shift + scale * standardised y``.
        scale: see ``shift``.
        squeeze: whether y was one-dimensional.
    """

    mixture: Mixture
    likelihood: AbstractLikelihood
    shift: Float[AnyArray, " P"]
    scale: Float[AnyArray, " P"]
    squeeze: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        needed, given = self.likelihood.num_latents(self.shift.shape[0]), self.mixture.means.shape[2]
        if needed != given:
            name = type(self.likelihood).__name__
            raise SettingError(
                f"{name} needs {needed} latents for {self.shift.shape[0]} outputs, but the mixture has {given}."
            )

    @double_precision
    def mean(self) -> np.ndarray:
        """``E[y]``. For labels: of the label read as a number."""
        return self._shape(self._units(self._ask(_answers.moments)[0]))

    @double_precision
    def variance(self) -> np.ndarray:
        """``Var[y]``, by the law of total variance: spread within the components, noise, and between the components."""
        return self._shape(self._ask(_answers.moments)[1] * self._numpy_scale**2)

    @double_precision
    def std(self) -> np.ndarray:
        """The square root of :meth:`variance`."""
        return np.sqrt(self.variance())

    @double_precision
    def cdf(self, y: ArrayLike) -> np.ndarray:
        """``P(Y <= y)`` of every output; ``y`` has the shape of :meth:`mean` or is one number. NaN stays NaN."""
        targets = self._read(y)
        answer = self._ask(_answers.cdf, np.nan_to_num(self._standardise(targets)))
        return self._shape(np.where(np.isnan(targets), np.nan, answer))

    @double_precision
    def log_density(self, y: ArrayLike, *, per_output: bool = False) -> np.ndarray:
        """``log p(y)`` of every row, (N,): jointly over outputs, which only the components make independent.

        Args:
            y: has the shape of :meth:`mean`. NaN means missing: left out; a row without any output scores 0.
            per_output: the marginal log densities instead, in the shape of :meth:`mean`, NaN where y is.
        """
        targets = self._check(self._read(y))
        missing, values = np.isnan(targets), np.nan_to_num(self._standardise(targets))
        if per_output:
            answer = self._ask(_answers.log_marginal, values) - np.log(self._numpy_scale)
            return self._shape(np.where(missing, np.nan, answer))
        joint = self._ask(_answers.log_joint, values, ~missing)[:, 0]
        return joint - np.where(missing, 0.0, np.log(self._numpy_scale)).sum(axis=1)

    @double_precision
    def quantile(self, q: ArrayLike | Sequence[float]) -> np.ndarray:
        """The smallest y with ``P(Y <= y) >= q``: a root of :meth:`cdf`, to about 1e-12 of the standard deviation.

        One number gives the shape of :meth:`mean`; a list gives one such answer a quantile, stacked.
        """
        levels = as_numbers(q, "q")
        if levels.ndim > 1 or levels.size == 0 or not np.all((levels > 0.0) & (levels < 1.0)):
            raise SettingError(
                f"q must be one number or a list of numbers between 0 and 1, without the ends; it is {shown(q)}."
            )
        answers = [
            self._shape(self._units(self._ask(_answers.quantile, extra=(jnp.asarray(level),))))
            for level in levels.ravel()
        ]
        return answers[0] if levels.ndim == 0 else np.stack(answers)

    @double_precision
    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """The central interval that holds y with probability ``level``: its lower and upper ends."""
        if not 0.0 < real_number(level, "level") < 1.0:
            raise SettingError(f"level must lie between 0 and 1, such as 0.95, but it is {shown(level)}.")
        lower, upper = self.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        return lower, upper

    @double_precision
    def crps(self, y: ArrayLike) -> np.ndarray:
        r"""The continuous ranked probability score :math:`E|Y - y| - \tfrac12 E|Y - Y'|`, in the units of y.

        A closed form under Gaussian noise. Otherwise :math:`\int (F(x) - 1[x \ge y])^2 dx` by Gauss-Legendre between
        rough quantiles (1e-5 of the score when the components overlap); for counts and labels the sum, in cells where
        it is long (1e-3).
        """
        targets = self._check(self._read(y))
        answer = self._ask(_answers.crps, np.nan_to_num(self._standardise(targets))) * self._numpy_scale
        return self._shape(np.where(np.isnan(targets), np.nan, answer))

    @double_precision
    def sample(self, n: int = 1, random_state: RandomState = None) -> np.ndarray:
        """``n`` draws, (n, N) or (n, N, P). A draw takes all rows from one component.

        Within a component the rows are drawn jointly if the mixture has covariances, independently otherwise.

        Args:
            n: the number of draws.
            random_state: a seed, a NumPy generator, or ``None`` for fresh entropy.
        """
        if not isinstance(n, int | np.integer) or not 1 <= n < 1 << 31:
            raise SettingError(f"n, the number of draws, must be a whole number of at least 1, but it is {shown(n)}.")
        n = int(n)
        key_components, key = jax.random.split(_key(random_state))
        log_weights = np.asarray(self.mixture.log_weights, np.float64)
        components = _choose_components(key_components, log_weights, n)
        draws = self._independent(components, key) if self.mixture.covariances is None else self._joint(components, key)
        draws = self._units(draws)
        return draws[..., 0] if self.squeeze else draws

    @double_precision
    def probabilities(self) -> np.ndarray:
        """``P(Y = k)`` of every class, (N, K)."""
        if not isinstance(self.likelihood, AbstractClassLikelihood):
            name = type(self.likelihood).__name__
            raise SettingError(
                f"probabilities() needs a classification likelihood, but this is {name}: use cdf or quantile."
            )
        if self.shift.shape[0] != 1:
            raise SettingError(f"probabilities() answers for one output, but there are {self.shift.shape[0]}.")
        return self._ask(_answers.probabilities)

    @double_precision
    def latent_mean(self) -> np.ndarray:
        """The mean of f: for real y in its units and shape, else of all latent functions, (N, Q)."""
        answer = self._ask(_answers.latent_moments)[0]
        return self._shape(self._units(answer[:, : len(self.shift)])) if self._is_real else answer

    @double_precision
    def latent_std(self) -> np.ndarray:
        """The standard deviation of f: as :meth:`latent_mean`."""
        answer = np.sqrt(self._ask(_answers.latent_moments)[1])
        return self._shape(answer[:, : len(self.shift)] * self._numpy_scale) if self._is_real else answer

    @double_precision
    def covariance(self) -> np.ndarray:
        """The covariance of y between rows, noise included: (N, N), or (N, N, P). Needs a mixture with covariances."""
        if self.mixture.covariances is None:
            raise SettingError("This mixture has no covariances between rows: predict again with full_cov=True.")
        self._check_real()
        latent = np.asarray(self.mixture.covariances)[..., : len(self.shift)]
        rows = slice(0, self.mixture.num_rows)
        answer = np.asarray(self._ask_padded(_answers.covariance, _pad(_pad(latent, 1, 0), 2, 0)))[rows, rows]
        answer = answer * self._numpy_scale**2
        return answer[..., 0] if self.squeeze else answer

    def standard_moments(self) -> tuple[Float[Array, "N P"], Float[Array, "N N P"]]:
        """Mean and covariance between rows in standard units, for use within a program."""
        self._check_real()
        mixture = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), self.mixture)
        log_weights = jax.nn.log_softmax(mixture.log_weights)
        block = _answers.Block(log_weights, mixture.means, mixture.variances, cast(self.likelihood, jnp.float64))
        latent = mixture.covariances[..., : len(self.shift)]
        return _answers.moments(block)[0], _answers.covariance(block, latent)

    def _check_real(self) -> None:
        if not self._is_real:
            name = type(self.likelihood).__name__
            raise SettingError(f"A covariance is for real-valued y, but the likelihood is {name}: use sample.")

    @property
    def _is_real(self) -> bool:
        return self.likelihood.target_kind == "real"

    @property
    def _numpy_scale(self) -> np.ndarray:
        return np.asarray(self.scale, np.float64)

    def _units(self, standardised: np.ndarray) -> np.ndarray:
        return np.asarray(self.shift, np.float64) + self._numpy_scale * standardised

    def _standardise(self, y: np.ndarray) -> np.ndarray:
        return (y - np.asarray(self.shift, np.float64)) / self._numpy_scale

    def _shape(self, answer: np.ndarray) -> np.ndarray:
        return answer[:, 0] if self.squeeze else answer

    def _read(self, y: Any) -> np.ndarray:
        """Targets as (N, P), NaN for missing."""
        (rows, outputs), values = (self.mixture.num_rows, self.shift.shape[0]), _target_values(y)
        if values.ndim == 0:
            return np.full((rows, outputs), values)
        if values.ndim == 1 and outputs == 1:
            values = values[:, None]
        if values.shape != (rows, outputs):
            wanted = (rows,) if outputs == 1 else (rows, outputs)
            raise DataError(f"y has the shape {np.shape(y)}, but the prediction has {wanted}.")
        return values

    def _check(self, targets: np.ndarray) -> np.ndarray:
        self.likelihood.check_targets(targets)
        return targets

    def _ask(self, question: Callable, *rows: np.ndarray, extra: tuple = (), block_rows: int | None = None) -> Any:
        """Put a question block by block; ``rows`` are arrays with the rows first, ``extra`` goes with every block."""
        num_rows = self.mixture.num_rows
        block_rows = block_rows or question_rows(num_rows, sizes=_FEW_ROWS, largest=BLOCK_ROWS)
        answers = []
        for start in range(0, max(num_rows, 1), block_rows):
            part = slice(start, start + block_rows)
            parts = [_pad(x[part], 0, 0, block_rows) for x in rows]
            answer = self._ask_padded(question, *parts, *extra, part=part, rows=block_rows)
            count = min(block_rows, num_rows - start)
            answers.append(jax.tree.map(lambda x, count=count: np.asarray(x)[:count], answer))
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *answers)

    def _ask_padded(self, question: Callable, *args: Any, part: slice = slice(None), rows: int | None = None) -> Any:
        """Put a question about some rows at once, padded to ``rows``; the answer is padded too."""
        log_weights, means, variances = (
            np.asarray(x, np.float64) for x in (self.mixture.log_weights, self.mixture.means, self.mixture.variances)
        )
        means, variances = _pad(means[:, part], 1, 0, rows), _pad(variances[:, part], 1, 1, rows)
        likelihood = likelihood_of_rows(cast(self.likelihood, jnp.float64), part, means.shape[1])
        return _ask_block(question, log_weights, means, variances, likelihood, *args)

    def _independent(self, components: Array, key: PRNGKeyArray) -> np.ndarray:
        numbers = np.arange(self.mixture.num_rows)
        block_rows = min(
            BLOCK_ROWS, power_of_two(_SAMPLES_PER_BLOCK // (len(components) * self.mixture.means.shape[2]))
        )
        return np.moveaxis(self._ask(_answers.observe, numbers, extra=(components, key), block_rows=block_rows), 1, 0)

    def _joint(self, components: Array, key: PRNGKeyArray) -> np.ndarray:
        rows = self.mixture.num_rows
        covariances = _pad(_pad(np.asarray(self.mixture.covariances, np.float64), 1, 0), 2, 0)
        draws, ok = self._ask_padded(_answers.observe_jointly, covariances, np.asarray(rows), components, key)
        if not bool(ok):
            raise NotPositiveDefiniteError(
                "A component's covariance between rows has no Cholesky factor: draw fewer rows."
            )
        return np.asarray(draws)[:, :rows]


@program
def _ask_block(
    question: Callable, log_weights: Any, means: Any, variances: Any, likelihood: AbstractLikelihood, *args: Any
) -> Any:
    return question(_answers.Block(jax.nn.log_softmax(log_weights), means, variances, likelihood), *args)


@program
def _latent_moments(log_weights: Any, means: Any, variances: Any) -> tuple[Array, Array]:
    parts = (jnp.asarray(part) for part in (means, variances))
    return _answers.total_moments(jax.nn.log_softmax(jnp.asarray(log_weights)), *parts)


@program
def _choose_components(key: PRNGKeyArray, log_weights: Any, n: int) -> Array:
    return jax.random.categorical(key, log_weights, shape=(n,))


def _pad(x: np.ndarray, axis: int, value: float, rows: int | None = None) -> np.ndarray:
    """Rows up to ``rows`` or the next power of two, filled with a harmless value."""
    size = rows or power_of_two(x.shape[axis], smallest=_FEW_ROWS[0])
    widths = [(0, size - x.shape[axis]) if i == axis else (0, 0) for i in range(x.ndim)]
    return np.pad(x, widths, constant_values=value)


def _key(random_state: RandomState) -> PRNGKeyArray:
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        if -(1 << 63) <= random_state < 1 << 63:
            return jax.random.key(int(random_state))
    elif random_state is None or isinstance(random_state, np.random.Generator):
        return jax.random.key(int(np.random.default_rng(random_state).integers(2**63 - 1)))
    raise SettingError(
        f"random_state must be a whole number of 64 bits, a NumPy generator or None, but it is {shown(random_state)}."
    )


def _target_values(y: Any) -> np.ndarray:
    try:
        return np.asarray(y, np.float64)
    except Exception:
        raise DataError(f"y must hold numbers, but it is {shown(y)}.") from None
