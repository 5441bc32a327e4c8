"""What the stochastic methods on whitened Gaussians share: one phase of Adam on the model and q, at a falling pace."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, Phase
from fathomgp.model import DeepGP
from fathomgp.parameters import partition

#: Where step sizes end, as a share of what they were: Adam's last steps move the function by about that share of the
#: learning rate, which passes for noise where data have less.
_END = 0.01


class DescentState(eqx.Module):
    """The model, q of every layer, and Adam's memory.

    Attributes:
        model: hyperparameters and inducing inputs.
        q: what the algorithm knows of every layer's inducing values.
        adam: the optimiser's state.
        steps: steps done.
        horizon: steps planned, for the learning-rate schedule.
        caution: multiplies the step sizes; halved when steps fail.
    """

    model: DeepGP
    q: tuple[Any, ...]
    adam: Any
    steps: Int[Array, ""]
    horizon: Int[Array, ""]
    caution: Float[Array, ""]


class AbstractDescent(AbstractInference):
    """An algorithm whose steps are Adam's, but for natural ones on the last layer's q, in one phase.

    Attributes:
        steps: how many; ``None``: as many as data of their size usually need.
        batch_size: rows a step; data with fewer rows are used whole.
        learning_rate: Adam's; it rises to that over the first steps, and falls to a hundredth along a cosine over the
            last half of them.
        natural: step size of natural gradients on the last layer's q, see :func:`natural_size`.
        objective: what the steps descend, for progress and history.
    """

    objective: ClassVar[str] = "bound"
    steps: eqx.AbstractVar[int | None]
    batch_size: eqx.AbstractVar[int]
    learning_rate: eqx.AbstractVar[float]
    natural: eqx.AbstractVar[float]

    @abc.abstractmethod
    def usual_steps(self, batches: int) -> int:
        """How many steps data that fill so many batches need."""

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase of ``max_iter`` steps."""
        steps = self.steps if max_iter is None else max_iter
        usual = steps is None
        steps = self.usual_steps(-(-num_data // self.batch_size)) if steps is None else steps
        return (Phase(self.objective, steps, batch_size=self.batch_size, usual=usual),)

    def enter(self, phase: Phase, state: DescentState, data: AbstractSource, *, key: PRNGKeyArray) -> DescentState:
        """Tell the schedule how many steps there will be."""
        return eqx.tree_at(lambda s: s.horizon, state, jnp.asarray(phase.steps, jnp.int32))

    def back_off(self, state: DescentState) -> DescentState:
        """Halve the step sizes."""
        return eqx.tree_at(lambda s: s.caution, state, 0.5 * state.caution)

    def _start(self, model: DeepGP, q: tuple[Any, ...]) -> DescentState:
        """The state before the first step."""
        zero, one = jnp.asarray(0, jnp.int32), jnp.ones((), jax.tree.leaves(q)[0].dtype)
        return DescentState(model, q, self._adam().init((partition(model)[0], q)), zero, zero, one)

    def _descend(
        self,
        state: DescentState,
        model_gradient: DeepGP,
        q_gradient: Any,
        *,
        decay: bool,
        pace: Float[Array, ""] | float = 1.0,
    ) -> DescentState:
        """One step on the learned parts of the model and on q, ``pace`` times as long as usual."""
        pace = pace * state.caution
        if decay:
            clock = (state.steps, state.horizon, pace.dtype)
            pace = pace * warm_up(*clock) * schedule(*clock, _END)
        gradient = (partition(model_gradient)[0], q_gradient)
        model, q, adam = descend(self._adam(), state.adam, state.model, state.q, gradient, pace)
        return DescentState(model, q, adam, state.steps + 1, state.horizon, state.caution)

    def _adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def _check(self, *counts: str) -> None:
        """Refuse counts below 1 (the named fields', and the common ones) and step sizes out of their range."""
        for name in ("steps", "batch_size", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, but it is {value}.")
        if self.learning_rate <= 0.0:
            raise SettingError(f"learning_rate must be positive, but it is {self.learning_rate}.")
        if not 0.0 <= self.natural <= 1.0:
            raise SettingError(f"natural is a step size between 0 and 1, but it is {self.natural}.")


def longer(steps: int, batches: int) -> int:
    """More steps where data fill more than ten batches, in proportion, up to four times as many.

    On protein, 41 batches, DSVI's test log density was -2.89 after 1,500 steps and -2.80 after 6,000.
    """
    return round(steps * min(max(batches / 10, 1.0), 4.0))


def descend(
    optimiser: optax.GradientTransformation,
    memory: Any,
    model: DeepGP,
    q: Any,
    gradient: Any,
    pace: Float[Array, ""],
) -> tuple[DeepGP, Any, Any]:
    """One step on the learned parts of the model and on q, scaled by ``pace``; also the optimiser's new memory."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, memory = optimiser.update(gradient, memory)
    learned, constant = partition(model)
    learned, q = jax.tree.map(lambda value, update: value + pace * update, (learned, q), updates)
    return eqx.combine(learned, constant), q, memory


def schedule(steps: Int[Array, ""], horizon: Int[Array, ""], dtype: Any, end: float = 0.1) -> Float[Array, ""]:
    """1 over the first half of the steps, then a cosine down to ``end``."""
    share = jnp.clip(2.0 * steps.astype(dtype) / jnp.maximum(horizon, 1).astype(dtype) - 1.0, 0.0, 1.0)
    return end + 0.5 * (1.0 - end) * (1.0 + jnp.cos(jnp.pi * share))


def warm_up(steps: Int[Array, ""], horizon: Int[Array, ""], dtype: Any) -> Float[Array, ""]:
    """From next to nothing up to 1 over the first hundred steps, or the first tenth of fewer.

    Adam's first step is as long as its others, in a direction that one batch has chosen: on data with next to no noise
    it undoes the start.
    """
    length = jnp.clip(0.1 * horizon.astype(dtype), 1.0, 100.0)
    return jnp.minimum((steps.astype(dtype) + 1.0) / length, 1.0)


def natural_size(gamma: float, state: DescentState, batch: Batch, *, decay: bool = True) -> Float[Array, ""]:
    """Gamma of a natural step, with the state's caution; over the last half of the steps it falls to B / N.

    Such steps leave q an average over the last 1 / gamma batches: at the end over all data once, and before it may
    follow the kernels more quickly. A run that ends before it has seen so much averages over the last tenth of its
    steps. Falling on, to gamma B / N, gained nothing on MNIST or naval.
    """
    size = gamma * state.caution
    if not decay:
        return size
    tenth = 10.0 / jnp.maximum(state.horizon, 1).astype(size.dtype)
    epoch = (jnp.sum(batch.weight) / batch.num_data).astype(size.dtype)
    end = jnp.minimum(jnp.maximum(epoch, tenth) / gamma, 1.0)
    return size * end ** ((1.0 - schedule(state.steps, state.horizon, size.dtype)) / 0.9)


def lower_roots(q: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of lower-triangular roots."""
    return tuple(eqx.tree_at(lambda layer: layer.root, layer, jnp.tril(layer.root)) for layer in q)
