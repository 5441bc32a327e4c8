"""The answer in JAX: the distribution of y, in the units of y, for ``jit``, ``grad`` and ``vmap``.

:class:`~fathomgp.predictive.Predictive` is the same answer for NumPy; the mathematics of both is in ``_answers``.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from fathomgp import _answers
from fathomgp._checks import shown
from fathomgp.compilation import double_program
from fathomgp.errors import DataError, SettingError
from fathomgp.likelihoods import AbstractClassLikelihood, AbstractLikelihood
from fathomgp.parameters import cast
from fathomgp.predictive import Mixture


class Distribution(eqx.Module):
    """The distribution of y at the inputs that were asked for: a pytree whose methods are pure functions.

    Everything is computed in float64, with JAX's flag off too; answers have the dtype of the inputs. Their shape is
    that of y at the inputs: (N,), or (N, P) where y has several outputs, without N where the input was one row.

    Attributes:
        mixture: the latent functions, in standard units.
        likelihood: what makes y of them.
        shift: the units of y: ``y = shift + scale * standardised y``.
        scale: see ``shift``.
        squeeze: whether y was one-dimensional.
        one_row: whether the input was one row.
        dtype: of the answers.
    """

    mixture: Mixture
    likelihood: AbstractLikelihood
    shift: Array
    scale: Array
    squeeze: bool = eqx.field(static=True)
    one_row: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def mean(self) -> Array:
        """``E[y]``."""
        return _ask(_mean, self)

    def variance(self) -> Array:
        """``Var[y]``, noise included."""
        return _ask(_variance, self)

    def std(self) -> Array:
        """The square root of :meth:`variance`."""
        return _ask(_std, self)

    def quantile(self, q: ArrayLike) -> Array:
        """The smallest y with ``P(Y <= y) >= q``; derivatives by the implicit function theorem, for q too.

        Counts and labels are whole numbers: their quantiles have derivative zero.
        """
        if not isinstance(q, jax.core.Tracer) and not (np.ndim(q) == 0 and 0.0 < float(np.asarray(q)) < 1.0):
            raise SettingError(f"q must be one number between 0 and 1, without the ends; it is {shown(q)}.")
        return _ask(_quantile, self, jnp.asarray(q))

    def cdf(self, y: ArrayLike) -> Array:
        """``P(Y <= y)`` of every output; ``y`` has the shape of :meth:`mean`, or is one number."""
        return _ask(_cdf, self, jnp.asarray(y))

    def log_prob(self, y: ArrayLike) -> Array:
        """``log p(y)`` of every row, jointly over its outputs; NaN is missing and left out."""
        return _ask(_log_prob, self, jnp.asarray(y))

    def sample(self, key: PRNGKeyArray, n: int = 1) -> Array:
        """``n`` draws of y, first axis n; rows are independent within a component of the mixture."""
        if not isinstance(n, int) or n < 1:
            raise SettingError(f"n, the number of draws, must be a whole number of at least 1, but it is {shown(n)}.")
        return _ask(_sample, self, key, n)

    def probabilities(self) -> Array:
        """``P(Y = k)`` of every class: (N, K)."""
        if not isinstance(self.likelihood, AbstractClassLikelihood):
            name = type(self.likelihood).__name__
            raise SettingError(f"probabilities() is for labels, but the likelihood is {name}: use cdf or quantile.")
        return _ask(_probabilities, self)


Question = Callable[..., Array]


@double_program
def _ask(question: Question, answer: Distribution, *args: Any) -> Array:
    """Put one question, in float64; the value has the dtype of the inputs."""
    value = question(answer, _block(answer), *args)
    return value.astype(answer.dtype)


def _block(answer: Distribution) -> _answers.Block:
    mixture: Mixture = cast(answer.mixture, jnp.float64)
    log_weights = jax.nn.log_softmax(jnp.asarray(mixture.log_weights))
    means, variances = jnp.asarray(mixture.means), jnp.asarray(mixture.variances)
    return _answers.Block(log_weights, means, variances, cast(answer.likelihood, jnp.float64))


def _mean(answer: Distribution, block: _answers.Block) -> Array:
    return _shape(answer, _units(answer, _answers.moments(block)[0]))


def _variance(answer: Distribution, block: _answers.Block) -> Array:
    return _shape(answer, _answers.moments(block)[1] * answer.scale[None] ** 2)


def _std(answer: Distribution, block: _answers.Block) -> Array:
    return jnp.sqrt(_variance(answer, block))


def _quantile(answer: Distribution, block: _answers.Block, q: Array) -> Array:
    if block.likelihood.target_kind != "real":
        block, q = jax.lax.stop_gradient((block, q))
    return _shape(answer, _units(answer, _answers.quantile(block, q.astype(jnp.float64))))


def _cdf(answer: Distribution, block: _answers.Block, y: Array) -> Array:
    return _shape(answer, _answers.cdf(block, _read(answer, block, y)))


def _log_prob(answer: Distribution, block: _answers.Block, y: Array) -> Array:
    targets = _read(answer, block, y)
    observed = ~jnp.isnan(targets)
    joint = _answers.log_joint(block, jnp.where(observed, targets, 0.0), observed)[:, 0]
    value = joint - jnp.sum(jnp.where(observed, jnp.log(answer.scale)[None], 0.0), axis=1)
    return value[0] if answer.one_row else value


def _sample(answer: Distribution, block: _answers.Block, key: PRNGKeyArray, n: int) -> Array:
    component_key, draw_key = jax.random.split(key)
    components = jax.random.categorical(component_key, block.log_weights, shape=(n,))
    draws = jnp.moveaxis(_answers.observe(block, jnp.arange(block.means.shape[1]), components, draw_key), 1, 0)
    return jax.vmap(lambda one: _shape(answer, _units(answer, one)))(draws)


def _probabilities(answer: Distribution, block: _answers.Block) -> Array:
    probabilities = _answers.probabilities(block)
    return probabilities[0] if answer.one_row else probabilities


def _units(answer: Distribution, standardised: Array) -> Array:
    return answer.shift[None] + answer.scale[None] * standardised


def _shape(answer: Distribution, value: Array) -> Array:
    value = value[:, 0] if answer.squeeze else value
    return value[0] if answer.one_row else value


def _read(answer: Distribution, block: _answers.Block, y: Array) -> Array:
    """Targets as (N, P), in standard units."""
    rows, outputs = block.means.shape[1], answer.shift.shape[0]
    shape = (() if answer.one_row else (rows,)) + (() if answer.squeeze else (outputs,))
    if y.shape not in ((), shape):
        raise DataError(f"y has the shape {y.shape}, but the prediction has {shape}.")
    values = jnp.broadcast_to(y.astype(jnp.float64), shape).reshape(rows, outputs)
    return (values - answer.shift[None]) / answer.scale[None]
