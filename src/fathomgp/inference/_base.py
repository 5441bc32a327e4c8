"""The contract that every algorithm keeps, and the contract of what it learns."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from fathomgp._checks import check_types_first
from fathomgp.compilation import RUN_SELDOM, program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.kernels import has_features
from fathomgp.likelihoods import AbstractLikelihood
from fathomgp.model import DeepGP
from fathomgp.predictive import Mixture, Predictive

#: With more rows than this, running a program a few times takes longer than compiling it well.
_FEW_ROWS = 2_000


def run_seldom(function: Callable[..., Any]) -> Callable[..., Any]:
    """A :func:`~fathomgp.compilation.program` of a :class:`Batch`, and of no keywords, that runs a few times in a fit.

    With few rows it is compiled in half the time, into a program that is hardly slower (STRIDE on energy: 2.2 s instead
    of 4.1 to enter an E step that then takes 0.07 s).
    """
    quick, best = program(function, options=RUN_SELDOM), program(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        rows = max(len(part.x) for part in arguments if isinstance(part, Batch))
        return (quick if rows <= _FEW_ROWS else best)(*arguments)

    return call


def rows_or_auto(name: str, value: int | str, auto: int) -> int:
    """A number of rows that may be left to the algorithm: ``"auto"`` is ``auto``."""
    if value == "auto":
        return auto
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name} must be 'auto' or a whole number of at least 1, but it is {value!r}.")
    return value


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of equal steps; phases of one name share one compilation.

    Attributes:
        name: what the phase does, for progress and history.
        steps: how many steps at most.
        batch_size: rows a batch; ``None`` for all.
        batches_per_step: above 1, a step sees that many batches stacked along a first axis.
        ordered: rows in their own order instead of shuffled.
        usual: whether nobody asked for this number of steps, so that the algorithm may end the phase earlier.
        joined: whether pieces of a state (see :meth:`AbstractInference.split`) are joined after every step.
        begins: steps that earlier phases have done of the stretch which this one continues.
        stretch: the steps of that stretch, all its phases together; ``None`` where the phase stands alone.
    """

    name: str
    steps: int
    batch_size: int | None = None
    batches_per_step: int = 1
    ordered: bool = False
    usual: bool = False
    joined: bool = False
    begins: int = 0
    stretch: int | None = None


class Buffer(eqx.Module):
    """A part of a state that steps fill slot by slot, in place: draws that are kept, for instance.

    The loop does not undo what a failed step wrote here, since that would copy the whole buffer at every step. So the
    slot must follow from the rest of the state: the step that is tried again then writes the same slot.

    Attributes:
        values: arrays with one slot an entry of their first axis.
    """

    values: PyTree[Shaped[Array, "slots ..."]]

    def write(self, slot: Int[Array, ""], values: PyTree) -> "Buffer":
        """The buffer with ``values`` in a slot."""
        return Buffer(jax.tree.map(lambda old, new: old.at[slot].set(new), self.values, values))

    def read(self, slot: Int[Array, ""]) -> PyTree:
        """What a slot holds."""
        return jax.tree.map(lambda leaf: leaf[slot], self.values)


def empty_buffer(values: PyTree, slots: int) -> Buffer:
    """A buffer for so many entries like ``values``."""
    return Buffer(jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), values))


def slot_of(step: Int[Array, ""], steps: Int[Array, ""] | int, slots: int) -> Int[Array, ""]:
    """The slot of a step where every slot has its share of the steps: also how many are full when it begins.

    The first slots have a step more where they cannot be equal. No number is larger than ``steps``: ``step * slots``
    leaves 32 bits with 20,000 steps and 110,000 slots.
    """
    share, rest = jnp.asarray(steps, step.dtype) // slots, jnp.asarray(steps, step.dtype) % slots
    longer = rest * (share + 1)
    return jnp.where(step < longer, step // (share + 1), rest + (step - longer) // jnp.maximum(share, 1))


class AbstractInfo(eqx.Module):
    """What a step tells the loop: scalars only; algorithms add their own figures as further fields.

    Attributes:
        objective: what the algorithm minimises or tracks.
        ok: false asks the loop to undo the step and to count it.
        done: ends the phase.
        jitter: the largest amount added to the diagonal of a covariance matrix.
    """

    objective: eqx.AbstractVar[Float[Array, ""]]
    ok: eqx.AbstractVar[Bool[Array, ""]]
    done: eqx.AbstractVar[Bool[Array, ""]]
    jitter: eqx.AbstractVar[Float[Array, ""]]


class AbstractPosterior(eqx.Module):
    """What was learned. Every algorithm's posterior answers the same questions.

    Noise of a prediction is shared across rows: one draw a component and layer. A row's answer then never depends on
    which other rows are asked, so batched, unbatched and one-at-a-time predictions agree.
    """

    model: eqx.AbstractVar[DeepGP]

    @abc.abstractmethod
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """The latent functions at ``x``: a mixture of Gaussians. ``full_cov`` adds covariances between rows."""

    @abc.abstractmethod
    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """``n`` draws of the latent functions at ``x``, jointly over the rows.

        What is drawn at the first rows does not depend on how many rows follow, but for the size of a jitter.
        """

    @abc.abstractmethod
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Samples of every layer at ``x``, to look inside."""

    def sample_functions(self, key: PRNGKeyArray, n: int) -> "FunctionDraws":
        """``n`` draws of the latent functions, as one callable: rows of one call are drawn jointly."""
        return FunctionDraws(self, key, n)

    @program
    def sample_y(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N P"]:
        """``n`` joint draws of observations: of the latent functions, and then of each observation's own noise."""
        function_key, noise_key = jax.random.split(key)
        f = self.draw_functions(x, key=function_key, n=n)
        return jax.vmap(lambda f, key: self.likelihood.sample(f, key=key))(f, jax.random.split(noise_key, n))

    def draw_paths(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """:meth:`draw_functions`, as functions of each row by itself where :attr:`draws_whole` holds."""
        return self.draw_functions(x, key=key, n=n)

    @property
    def draws_whole(self) -> bool:
        """Whether :meth:`draw_paths` draws whole functions: a key is one function, whichever rows are asked for."""
        layers = self.model.layers
        return all(has_features(layer.kernel) for layer in layers) and all(layer.noise is None for layer in layers[:-1])

    def doubts(self) -> tuple[str, ...]:
        """Sentences about what may be wrong with this answer: a fit's messages end with them."""
        return ()

    @property
    def likelihood(self) -> AbstractLikelihood:
        """The model's likelihood."""
        return self.model.likelihood

    def predict_y(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Predictive:
        """Observations at ``x``: :meth:`predict_f` pushed through the likelihood, in the model's own units."""
        mixture = self.predict_f(x, key=key, full_cov=full_cov)
        outputs = jax.eval_shape(self.likelihood.predict_moments, mixture.means[0], mixture.variances[0])[0].shape[1]
        one = jnp.ones(outputs, x.dtype)
        return Predictive(mixture, self.likelihood, 0.0 * one, one, squeeze=False)


class FunctionDraws(eqx.Module):
    """Draws of the latent functions: from inputs to values, for ``jit``, ``grad`` and ``vmap`` too.

    Attributes:
        posterior: what was learned.
        key: decides which functions these are.
        num_draws: how many.
    """

    posterior: AbstractPosterior
    key: PRNGKeyArray
    num_draws: int = eqx.field(static=True)

    # ``jax.jit`` keeps what it compiled under the function's hash, and arrays have none.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @program
    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "n N Q"]:
        """The values at ``x``."""
        return self.posterior.draw_functions(x, key=self.key, n=self.num_draws)


class AbstractInference(eqx.Module):
    """An algorithm: how a model is learned from data. Its settings are its fields.

    Attributes:
        separates: whether it can learn layers whose outputs have kernels and inducing inputs of their own.
    """

    separates: ClassVar[bool] = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        check_types_first(cls)

    @abc.abstractmethod
    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> Any:
        """The state before the first step."""

    def sketch(self, model: DeepGP, data: AbstractSource) -> Any | None:
        """A state of the structure and shapes that :meth:`init` will return; ``None`` where that is no quicker.

        Its numbers mean nothing. With it, steps are compiled while ``init`` is still at work.
        """
        return None

    @abc.abstractmethod
    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """The phases of a fit; ``max_iter`` bounds the number of steps, ``None`` leaves it to the algorithm."""

    @abc.abstractmethod
    def enter(self, phase: Phase, state: Any, data: AbstractSource, *, key: PRNGKeyArray) -> Any:
        """The state with which a phase starts: the only place where its structure or shapes may change."""

    @abc.abstractmethod
    def step(self, phase: Phase, state: Any, batch: Batch, *, key: PRNGKeyArray) -> tuple[Any, AbstractInfo]:
        """One step: a pure function, compiled once per phase name and shape."""

    @abc.abstractmethod
    def back_off(self, state: Any) -> Any:
        """A more careful state, asked for after several failed steps in a row: a smaller step size, for instance."""

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """Sentences about what settings left to the algorithm came to: a fit's messages begin with them."""
        return ()

    def split(self, phase: Phase, state: Any, at_most: int) -> tuple[Any, ...]:
        """States of equal shapes, at most so many, that can be stepped without one another until they are joined.

        The loop steps them side by side, one a core, and joins them after some steps, after every one where the phase
        is ``joined``. The result must not depend on how many they are, but for rounding.
        """
        return (state,)

    def join(self, states: Sequence[Any], infos: Sequence[Any]) -> tuple[Any, AbstractInfo]:
        """What :meth:`split` took apart, some steps later; ``infos`` have a first axis of steps."""
        (state,), (info,) = states, infos
        return state, info

    @abc.abstractmethod
    def posterior(self, state: Any, data: AbstractSource | None) -> AbstractPosterior:
        """What the state has learned."""
