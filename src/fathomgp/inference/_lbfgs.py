"""L-BFGS on the trainable parameters of a model, one evaluation a step: shared by the collapsed objectives.

Optimisers of this kind usually hide a loop of evaluations in each iteration. Here the line search is part of the state,
so a step evaluates the objective once: it is compiled once (optax's line search holds several copies of it and takes
four times as long to compile), a checkpoint may fall anywhere, and ``max_iter`` counts what costs time. Directions come
from the two-loop recursion (Nocedal 1980), steps from the weak Wolfe conditions by bisection (Lewis and Overton 2013),
with interpolation where it is safe.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.errors import NonFiniteError
from fathomgp.inference._base import AbstractInfo
from fathomgp.parameters import partition

#: Whatever holds parameters: a deep GP, usually.
Model = Any

#: What is minimised (NaN or infinity where a covariance cannot be factorised), and the jitter it needed.
Objective = Callable[[Model], tuple[Float[Array, ""], Float[Array, ""]]]

#: Pairs of steps and gradient changes that describe the curvature.
_MEMORY = 10
#: The weak Wolfe conditions: a share of the slope that a step must gain, and one that it must leave behind.
_ARMIJO, _CURVATURE = 1e-4, 0.9
#: Trials along one direction before it is given up.
_MAX_TRIALS = 20
#: A start ends after so many iterations in a row with hardly any gain.
_PATIENCE = 3


class Search(eqx.Module):
    """The line search: trial steps along a direction, between a step known too short and one known too long."""

    direction: Float[Array, " n"]
    step: Float[Array, ""]
    too_short: Float[Array, ""]
    too_long: Float[Array, ""]
    trials: Int[Array, ""]


class Curvature(eqx.Module):
    """The last accepted steps s and the changes of the gradient y along them, newest last; zero rows are empty."""

    steps: Float[Array, "m n"]
    changes: Float[Array, "m n"]


class LBFGSState(eqx.Module):
    """The point, what the optimiser knows around it, and the best end of earlier starts.

    Attributes:
        model: the start; its trainable leaves move, the others are constants.
        origin: the point of the very first start, around which others are drawn.
        point: the trainable leaves as one vector.
        value: the objective there; infinite before the first evaluation.
        gradient: its gradient there.
        curvature: memory of accepted steps.
        search: the line search under way.
        stalls: iterations in a row with hardly any gain.
        best: the best end of the earlier starts.
        best_value: its objective.
        starts: how many starts have begun.
    """

    model: Model
    origin: Float[Array, " n"]
    point: Float[Array, " n"]
    value: Float[Array, ""]
    gradient: Float[Array, " n"]
    curvature: Curvature
    search: Search
    stalls: Int[Array, ""]
    best: Model
    best_value: Float[Array, ""]
    starts: Int[Array, ""]


class LBFGSInfo(AbstractInfo):
    """The figures of a step; ``gradient`` is the largest entry of the gradient."""

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    gradient: Float[Array, ""]


def lbfgs_init(model: Model) -> LBFGSState:
    """The state before the first start."""
    origin = model_to_point(model)
    return _begin(model, origin, model, jnp.asarray(jnp.inf, origin.dtype), jnp.asarray(0, jnp.int32))


@program
def lbfgs_begin(state: LBFGSState, model: Model) -> LBFGSState:
    """Remember the best end so far and begin again at ``model``."""
    best_value = jnp.minimum(state.value, state.best_value)
    return _begin(model, state.origin, best_model(state), best_value, state.starts + 1)


@program
def lbfgs_shuffle(state: LBFGSState, *, spread: float, key: PRNGKeyArray) -> Model:
    """The first start itself the first time, a random point around it afterwards."""
    shift = spread * jax.random.uniform(key, state.origin.shape, state.origin.dtype, -1.0, 1.0)
    return point_to_model(state, jnp.where(state.starts == 0, state.origin, state.origin + shift))


def lbfgs_step(objective: Objective, state: LBFGSState, *, tolerance: float) -> tuple[LBFGSState, LBFGSInfo]:
    """Evaluate the trial point, then accept it and turn to a new direction, or try another length.

    A non-finite trial counts as too long. The start is done when ``_PATIENCE`` iterations in a row gain less than
    ``tolerance``, when the gradient vanishes, when no direction leads down, or when it began at a non-finite value.
    """
    trial = state.point + state.search.step * state.search.direction
    value, jitter, gradient = _evaluate(objective, state, trial)
    moved = _accept(state, trial, value, gradient, tolerance)
    retry = _adjust(state, value, gradient)
    accepted = _is_good(state, value, gradient)
    new = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), moved, retry)
    slope = jnp.max(jnp.abs(new.gradient), initial=0.0)
    settled = accepted & ((new.stalls >= _PATIENCE) | (slope <= 1e-6))
    done = settled | (new.search.trials > 2 * _MAX_TRIALS) | jnp.isinf(new.value)
    return new, LBFGSInfo(new.value, jnp.asarray(True), done, jitter, slope)


def lbfgs_minimise(objective: Objective, model: Model, *, max_steps: int, tolerance: float) -> Model:
    """The model after at most ``max_steps`` steps from ``model``, all within one compiled loop."""
    start, constants = eqx.partition(lbfgs_init(model), eqx.is_array)

    def goes_on(carry):
        count, _, done = carry
        return (count < max_steps) & ~done

    def body(carry):
        count, arrays, _ = carry
        state, info = lbfgs_step(objective, eqx.combine(arrays, constants), tolerance=tolerance)
        return count + 1, eqx.partition(state, eqx.is_array)[0], info.done

    _, arrays, _ = jax.lax.while_loop(goes_on, body, (jnp.asarray(0, jnp.int32), start, jnp.asarray(False)))
    return best_model(eqx.combine(arrays, constants))


def fitted_model(state: LBFGSState) -> Model:
    """:func:`best_model`, or an error when no start found a finite value. On the host."""
    if not bool(jnp.isfinite(jnp.minimum(state.value, state.best_value))):
        raise NonFiniteError(
            "The objective was not finite at any start: look for extreme values in the data, or try another kernel."
        )
    return best_model(state)


@program
def best_model(state: LBFGSState) -> Model:
    """The model at the better of the current point and the best earlier end."""
    better = state.value < state.best_value
    current = point_to_model(state, state.point)
    return jax.tree.map(lambda new, old: jnp.where(better, new, old), current, state.best)


def model_to_point(model: Model) -> Float[Array, " n"]:
    """The trainable leaves as one vector, in the model's precision even when there are none."""
    dtype = jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)))
    return ravel_pytree(partition(model)[0])[0].astype(dtype)


def point_to_model(state: LBFGSState, point: Float[Array, " n"]) -> Model:
    """The model whose trainable leaves stand in ``point``."""
    learned, constant = partition(state.model)
    return eqx.combine(ravel_pytree(learned)[1](point), constant)


# --- the pieces of a step ---------------------------------------------------------------------------------------------


def _begin(
    model: Model, origin: Float[Array, " n"], best: Model, best_value: Float[Array, ""], starts: Int[Array, ""]
) -> LBFGSState:
    """A state whose first step evaluates the start itself: the direction is zero."""
    point = model_to_point(model)
    zeros = jnp.zeros((_MEMORY, len(point)), point.dtype)
    infinity, none = jnp.asarray(jnp.inf, point.dtype), jnp.asarray(0, jnp.int32)
    search = _new_search(jnp.zeros_like(point), jnp.ones((), point.dtype))
    curvature = Curvature(zeros, zeros)
    return LBFGSState(
        model, origin, point, infinity, jnp.zeros_like(point), curvature, search, none, best, best_value, starts
    )


def _new_search(direction: Float[Array, " n"], step: Float[Array, ""]) -> Search:
    return Search(direction, step, jnp.zeros_like(step), jnp.full_like(step, jnp.inf), jnp.asarray(0, jnp.int32))


def _evaluate(
    objective: Objective, state: LBFGSState, point: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, " n"]]:
    """Value, jitter and gradient; infinity and zeros where value or gradient is not finite."""

    def at(point: Float[Array, " n"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return objective(point_to_model(state, point))

    (value, jitter), gradient = jax.value_and_grad(at, has_aux=True)(point)
    fine = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    return jnp.where(fine, value, jnp.inf), jitter, jnp.where(fine, gradient, 0.0)


def _is_good(state: LBFGSState, value: Float[Array, ""], gradient: Float[Array, " n"]) -> Bool[Array, ""]:
    """Whether the trial satisfies the weak Wolfe conditions, or gains something after many trials."""
    slope = jnp.dot(state.gradient, state.search.direction)
    gains = value <= state.value + _ARMIJO * state.search.step * slope
    flattens = jnp.dot(gradient, state.search.direction) >= _CURVATURE * slope
    weary = (state.search.trials >= _MAX_TRIALS) & (value < state.value)
    first = jnp.isinf(state.value)
    return jnp.isfinite(value) & (first | (gains & flattens) | weary)


def _accept(
    state: LBFGSState,
    point: Float[Array, " n"],
    value: Float[Array, ""],
    gradient: Float[Array, " n"],
    tolerance: float,
) -> LBFGSState:
    """Move to the trial point, learn from the step, and aim anew."""
    curvature = _remember(state.curvature, point - state.point, gradient - state.gradient)
    direction = -_solve(curvature, gradient)
    # Rounding can spoil the memory: without descent, forget it and follow the gradient.
    descends = jnp.dot(direction, gradient) < 0.0
    curvature = jax.tree.map(lambda rows: jnp.where(descends, rows, 0.0), curvature)
    direction = jnp.where(descends, direction, -gradient)
    known = jnp.any(curvature.steps != 0.0)
    step = jnp.where(known, 1.0, 1.0 / jnp.maximum(jnp.linalg.norm(gradient), 1.0))
    small = state.value - value <= tolerance * jnp.maximum(jnp.abs(value), 1.0)
    return LBFGSState(
        state.model,
        state.origin,
        point,
        value,
        gradient,
        curvature,
        _new_search(direction, step),
        jnp.where(small, state.stalls + 1, 0),
        state.best,
        state.best_value,
        state.starts,
    )


def _adjust(state: LBFGSState, value: Float[Array, ""], gradient: Float[Array, " n"]) -> LBFGSState:
    """Stay, and bracket a good length: shorter after a rise, longer where the slope is still steep."""
    search = state.search
    slope = jnp.dot(state.gradient, search.direction)
    rises = ~(value <= state.value + _ARMIJO * search.step * slope)
    too_short = jnp.where(rises, search.too_short, search.step)
    too_long = jnp.where(rises, search.step, search.too_long)
    middle = jnp.where(jnp.isinf(too_long), 2.0 * too_short, 0.5 * (too_short + too_long))
    # Where a first trial rose, the parabola through value, slope and value knows better than the middle.
    bend = value - state.value - search.step * slope
    parabola = jnp.clip(-0.5 * slope * search.step**2 / jnp.maximum(bend, 1e-300), 0.1 * search.step, 0.5 * search.step)
    informed = rises & (search.too_short == 0.0) & jnp.isfinite(value)
    step = jnp.where(informed, parabola, middle)
    # A direction that leads nowhere: forget the curvature and follow the gradient.
    lost = search.trials == _MAX_TRIALS
    direction = jnp.where(lost, -state.gradient, search.direction)
    step = jnp.where(lost, 1e-3 / jnp.maximum(jnp.linalg.norm(state.gradient), 1e-12), step)
    search = Search(
        direction,
        step,
        jnp.where(lost, 0.0, too_short),
        jnp.where(lost, jnp.inf, too_long),
        search.trials + 1,
    )
    curvature = jax.tree.map(lambda rows: jnp.where(lost, 0.0, rows), state.curvature)
    return eqx.tree_at(lambda s: (s.search, s.curvature), state, (search, curvature))


def _remember(memory: Curvature, step: Float[Array, " n"], change: Float[Array, " n"]) -> Curvature:
    """Add a pair unless it says that the objective bends the wrong way."""
    size = jnp.linalg.norm(step) * jnp.linalg.norm(change)
    useful = jnp.dot(step, change) > jnp.finfo(step.dtype).eps * size

    def push(rows: Float[Array, "m n"], row: Float[Array, " n"]) -> Float[Array, "m n"]:
        return jnp.where(useful, jnp.concatenate([rows[1:], row[None]]), rows)

    return Curvature(push(memory.steps, step), push(memory.changes, change))


def _solve(memory: Curvature, gradient: Float[Array, " n"]) -> Float[Array, " n"]:
    """The two-loop recursion: the inverse Hessian that the pairs describe, times the gradient."""
    products = jnp.sum(memory.steps * memory.changes, axis=1)
    empty = products == 0.0
    weights = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, products))

    def first(vector, row):
        step, change, weight = row
        share = weight * jnp.dot(step, vector)
        return vector - share * change, share

    def second(vector, row):
        step, change, weight, share = row
        return vector + step * (share - weight * jnp.dot(change, vector)), None

    rows = (memory.steps, memory.changes, weights)
    vector, shares = jax.lax.scan(first, gradient, rows, reverse=True)
    newest = jnp.dot(memory.changes[-1], memory.changes[-1])
    scale = jnp.where(newest > 0.0, products[-1] / jnp.where(newest > 0.0, newest, 1.0), 1.0)
    return jax.lax.scan(second, scale * vector, (*rows, shares))[0]
