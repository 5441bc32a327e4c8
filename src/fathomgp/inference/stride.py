"""STRIDE: Monte Carlo EM over hidden layers and inducing points (Latz, Teckentrup and Urbainczyk 2025).

A deep GP's hidden layers are sampled, its last layer is integrated out given M inducing points among the data:

    E   S particles of the hidden layers move by a Markov chain that leaves prior x exp(F_V) invariant
    M   inducing points are exchanged so as to raise F_V, Titsias' bound, averaged over the particles

The final model is the mixture of the S sparse GPs. Hyperparameters of the last layer come from sparse GP regression on
the model's stationary start and are kept, as in the paper; beyond it, gradient steps on F_V in the M step can learn
them all (in white variables p(y | w, theta) is the complete-data likelihood, so this is EM too), and do so where the
noise is not Gaussian: there the last layer's inducing values are sampled with the hidden layers, and what the start and
the exchanges need of the likelihood are its Gaussian sites.

Choices that the paper leaves open: hidden layers are centred on the values at which the last layer is stationary (the
recipe "latz2025" has the paper's mean 0), so a deep model starts as the shallow one, at white variables of zero; every
particle adapts its step size to its own acceptance in the first half of an E step, so particles can be moved on a core
each; the pivots of ACA are those of the last layer's covariance averaged over the particles.

One choice departs from the paper: its particles follow the first two terms of F_V (``target="evidence"``), which let
them wander to where the inducing points explain little. With all three terms both steps raise one bound, that of the
whole model, E_q[F_V] - KL(q | prior), of which q ~ prior x exp(F_V) is the maximum. On ten fresh seeds of the paper's
one-dimensional example the error is smaller on every one, in cross-validation the two are level.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.compilation import RUN_ONCE, program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractInfo, Phase, rows_or_auto, run_seldom
from fathomgp.inference._mcmc import SAMPLERS, Chains, adapted, chain_keys
from fathomgp.inference._stride_exchange import Exchanged, Share, exchange
from fathomgp.inference._stride_hidden import (
    KINDS,
    Hidden,
    Values,
    at_data,
    each_particle,
    hidden_values,
    mean_path,
    num_white,
    pivots,
    prepare_hidden,
    seen,
    sight,
    top_inputs,
    white_by_layer,
    whitened,
)
from fathomgp.inference._stride_posterior import Given, STRIDEPosterior, Trace
from fathomgp.inference._stride_start import neutral_path, shallow_start, without_inducing
from fathomgp.inference._stride_top import (
    Top,
    bound,
    carried_over,
    condition_top,
    log_likelihood,
    mean_of_possible,
    way_and_log_likelihood,
)
from fathomgp.inference.exact import noise_is_shared
from fathomgp.likelihoods import Gaussian
from fathomgp.linalg import JitterReport, check_factor, inverse_lower, safe_cholesky
from fathomgp.model import DeepGP
from fathomgp.parameters import all_finite, partition
from fathomgp.priors import log_prior
from fathomgp.tags import tagged

#: Rows that the shallow start looks at, at the most, unless a setting says otherwise.
_START_ROWS = 10_000
#: Gradient steps on hyperparameters in an M step where noise is not Gaussian, unless a setting says otherwise.
_HYPER_STEPS = 10
#: Steps of the last E step that are remembered for diagnostics.
_TRACE = 256


class Particles(eqx.Module):
    """What every particle has of its own: the first axis of all arrays.

    Attributes:
        number: the particle's own, from which its random numbers follow.
        chains: white variables and their log likelihoods.
        log_size: logarithms of the step sizes.
        log_trace: log likelihoods at the last steps, a ring.
        distance: mean squares of the white variables at the last steps, a ring.
        accepted: acceptances at the last steps, a ring.
        nonfinite: proposals without a finite likelihood so far.
    """

    number: Int[Array, " S"]
    chains: Chains
    log_size: Float[Array, " S"]
    log_trace: Float[Array, "S T"]
    distance: Float[Array, "S T"]
    accepted: Float[Array, "S T"]
    nonfinite: Int[Array, " S"]


class STRIDEState(eqx.Module):
    """Particles, inducing points, and what both are conditioned on.

    Attributes:
        model: hyperparameters.
        top: how the last layer is treated.
        hidden: anchors of the hidden layers, and the bottom layer's factor.
        particles: where they are, and what they have learned about their steps.
        inducing: row numbers of the inducing points.
        share: the candidates that exchanges look at; all of them, but in a piece of a state.
        raw: whether the quicker likelihood was exact enough where this E step began.
        tick: steps done in this phase.
        horizon: steps of this phase after which step sizes are frozen.
        adam: the memory of the gradient steps on hyperparameters.
    """

    model: DeepGP
    top: Top
    hidden: Hidden
    particles: Particles
    inducing: Int[Array, " M"]
    share: Share
    raw: Bool[Array, ""]
    tick: Int[Array, ""]
    horizon: Int[Array, ""]
    adam: Any


class STRIDEInfo(AbstractInfo):
    """The figures of a step.

    ``objective`` is minus the mean log likelihood (E) or minus F_V (M) a datum, ``gain`` what an exchange adds to F_V.
    """

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    acceptance: Float[Array, ""]
    step_size: Float[Array, ""]
    nonfinite: Int[Array, ""]
    gain: Float[Array, ""]


@tagged("method/stride")
class STRIDE(AbstractInference):
    """Sparse techniques for regression in deep Gaussian processes.

    Attributes:
        particles: S; in the E step cores share them where their number can be divided.
        rounds: EM iterations; the last one ends with its E step.
        moves: Markov chain steps of an E step; the step size is adapted in their first half, and frozen in the other.
        exchanges: inducing points replaced in an M step, R.
        candidates: data points looked at for each birth, |J|.
        hidden: ``"exact"`` hidden layers cost O(N^2) a step (and O(N^3) each beyond the second layer); ``"aca"``
            approximates them with ``rank`` pivots, ``"sparse"`` samples them at the inducing points.
        rank: of ``"aca"``; ``None`` is the number of inducing points.
        refresh: whether the pivots of ``"aca"`` are chosen anew after every M step.
        sampler: ``"pcn"``, ``"slice"`` (elliptical) or ``"mala"`` (preconditioned).
        step_size: of the first step.
        target: the log likelihood of a particle: ``"bound"`` is F_V, ``"evidence"`` the paper's, F_V without its trace
            term.
        standard: no inducing points: the last layer's exact evidence, O(S N^3) a step.
        hyper_steps: gradient steps on all hyperparameters in every M step; 0 keeps those of the shallow start.
            ``"auto"`` is 0 for Gaussian noise, as in the paper, and 10 for other likelihoods.
        learning_rate: of these steps (Adam).
        shallow_rounds: how often the shallow start alternates between inducing points and hyperparameters; 0 keeps
            the model's own hyperparameters.
        start_rows: rows that the shallow start looks at, at the most; ``"auto"`` is 10,000, or as many as there are to
            be inducing points.
    """

    particles: int = eqx.field(static=True, default=24)
    rounds: int = eqx.field(static=True, default=10)
    moves: int = eqx.field(static=True, default=200)
    exchanges: int = eqx.field(static=True, default=5)
    candidates: int = eqx.field(static=True, default=500)
    hidden: str = eqx.field(static=True, default="aca")
    rank: int | None = eqx.field(static=True, default=None)
    refresh: bool = eqx.field(static=True, default=True)
    sampler: str = eqx.field(static=True, default="pcn")
    step_size: float = eqx.field(static=True, default=0.05)
    target: str = eqx.field(static=True, default="bound")
    standard: bool = eqx.field(static=True, default=False)
    hyper_steps: int | str = eqx.field(static=True, default="auto")
    learning_rate: float = eqx.field(static=True, default=0.02)
    shallow_rounds: int = eqx.field(static=True, default=3)
    start_rows: int | str = eqx.field(static=True, default="auto")

    def __check_init__(self):
        for name in ("particles", "rounds", "moves", "candidates"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        for name in ("exchanges", "shallow_rounds"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} must be at least 0, but it is {getattr(self, name)}.")
        if self.hyper_steps != "auto" and (not isinstance(self.hyper_steps, int) or self.hyper_steps < 0):
            raise SettingError(f"hyper_steps must be 'auto' or at least 0, but it is {self.hyper_steps!r}.")
        self._num_start_rows(1)
        _choose("hidden", self.hidden, KINDS)
        _choose("sampler", self.sampler, tuple(SAMPLERS))
        _choose("target", self.target, ("bound", "evidence"))
        if not 0.0 < self.step_size < 1.0:
            raise SettingError(f"step_size must lie between 0 and 1, but it is {self.step_size}.")
        if self.standard and self.hidden == "sparse":
            raise SettingError("standard=True has no inducing points to sample hidden layers at: set hidden='exact'.")

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> STRIDEState:
        """The stationary start: hyperparameters of sparse GP regression, hidden layers where the last is stationary."""
        if model.depth < 2:
            raise SettingError(f"method='stride' samples hidden layers, but depth is {model.depth}: use method='sgpr'.")
        batch, top = data.everything(), self._top(model, data)
        num_inducing = _num_inducing(model, data.num_data)
        model = without_inducing(model)
        path = neutral_path(model, batch.x)
        start = model.layer_input(model.depth - 1, batch.x, path[-1])
        if self.shallow_rounds > 0:
            model, inducing, above = shallow_start(
                model,
                top,
                batch,
                start,
                num_inducing,
                data.num_data,
                num_rows=self._num_start_rows(num_inducing),
                rounds=self.shallow_rounds,
                candidates=self.candidates,
                key=key,
            )
        else:
            inducing = pivots(model, start[None], batch.weight, num_inducing)
            above = _no_white(model, top, num_inducing, start.dtype)
        return _first_state(self, model, top, batch, path, inducing, above)

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """How many rows hyperparameters are learned from, where these are not all."""
        rows = self._num_start_rows(_num_inducing(model, data.num_data))
        if self.shallow_rounds == 0 or data.num_data <= rows:
            return ()
        start = "sparse GP regression" if isinstance(model.likelihood, Gaussian) else "a variational sparse GP"
        return (f"Hyperparameters start from {start} on {rows} of the {data.num_data} rows: start_rows sets how many.",)

    def sketch(self, model: DeepGP, data: AbstractSource) -> STRIDEState | None:
        """The start without sparse GP regression, at the first rows."""
        batch, top = data.everything(), self._top(model, data)
        if self.shallow_rounds == 0:
            return None
        num_inducing = _num_inducing(model, data.num_data)
        inducing = jnp.asarray(np.arange(num_inducing), jnp.int32)
        above = _no_white(model, top, num_inducing, batch.x.dtype)
        model = without_inducing(model)
        return _first_state(self, model, top, batch, neutral_path(model, batch.x), inducing, above)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """E, M, E, M, ..., E; ``max_iter`` is the number of Markov chain steps in all E steps together."""
        rounds = self.rounds if max_iter is None else min(self.rounds, max_iter)
        moves = self.moves if max_iter is None else max_iter // rounds
        hyper_steps = _HYPER_STEPS if self.hyper_steps == "auto" else int(self.hyper_steps)
        sample, choose = Phase("E", moves), Phase("M", max(self.exchanges, hyper_steps), joined=True)
        return (*(sample, choose) * (rounds - 1), sample) if choose.steps else (sample,) * rounds

    def enter(self, phase: Phase, state: STRIDEState, data: AbstractSource, *, key: PRNGKeyArray) -> STRIDEState:
        """Before an E step: new anchors, the same hidden values in their terms, and likelihoods under the new M."""
        zero = jnp.asarray(0, jnp.int32)
        state = eqx.tree_at(lambda s: (s.tick, s.horizon), state, (zero, jnp.asarray(phase.steps // 2, jnp.int32)))
        return state if phase.name == "M" else _enter_e(self, state, data.everything())

    def step(
        self, phase: Phase, state: STRIDEState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[STRIDEState, STRIDEInfo]:
        """One move of every particle (E), or one exchange of inducing points and one step on hyperparameters (M)."""
        return self._move(state, batch, key) if phase.name == "E" else self._improve(state, batch, key)

    def back_off(self, state: STRIDEState) -> STRIDEState:
        """Halve the step sizes."""
        return eqx.tree_at(lambda s: s.particles.log_size, state, state.particles.log_size - jnp.log(2.0))

    def split(self, phase: Phase, state: STRIDEState, at_most: int) -> tuple[STRIDEState, ...]:
        """Cores share the particles in an E step, and the candidates in an M step where births are most of it."""
        if phase.name == "M":
            few = self._num_candidates(state) < 4 * len(state.inducing)  # a core does all deaths itself
            count = 1 if few or self._num_hyper_steps(state.top) > 0 else at_most
            shares = (Share(jnp.asarray(number, jnp.int32), count) for number in range(count))
            return tuple(dataclasses.replace(state, share=share) for share in shares)
        S = self.particles
        count = max(count for count in range(1, at_most + 1) if S % count == 0)
        if count == 1 or 2 * count < at_most:  # rather XLA's threads than most cores idle
            return (state,)
        size = S // count
        # NumPy's slices are views: JAX's would each be a program.
        own = jax.device_get(state.particles)
        parts = (jax.tree.map(lambda leaf, at=start: leaf[at : at + size], own) for start in range(0, S, size))
        return tuple(dataclasses.replace(state, particles=part) for part in parts)

    def join(self, states: Sequence[STRIDEState], infos: Sequence[STRIDEInfo]) -> tuple[STRIDEState, STRIDEInfo]:
        """The best of all exchanges (M); all particles again, and figures over all of them (E)."""
        if states[0].share.count > 1:
            best = int(np.argmax([float(info.gain[0]) for info in infos]))
            return dataclasses.replace(states[best], share=Share(jnp.asarray(0, jnp.int32), 1)), infos[best]
        whole = lambda *parts: jnp.asarray(np.concatenate(parts))  # noqa: E731
        particles = jax.tree.map(whole, *jax.device_get([state.particles for state in states]))
        over: dict[str, Any] = {"ok": np.all, "done": np.all, "jitter": np.max, "nonfinite": np.sum}
        names = [field.name for field in dataclasses.fields(STRIDEInfo)]
        figures = [over.get(name, np.mean)([getattr(info, name) for info in infos], axis=0) for name in names]
        info = eqx.tree_at(lambda info: [getattr(info, name) for name in names], infos[0], figures)
        return dataclasses.replace(states[0], particles=particles), info

    def posterior(self, state: STRIDEState, data: AbstractSource | None) -> STRIDEPosterior:
        """The mixture (5)."""
        if data is None:
            raise SettingError("STRIDE's posterior needs the training data: pass the source that was fitted.")
        posterior, report = _posterior(self, state, data.everything())
        check_factor(report, "The covariance of the inducing points given a particle")
        return posterior

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _move(self, state: STRIDEState, batch: Batch, key: PRNGKeyArray) -> tuple[STRIDEState, STRIDEInfo]:
        sampler, old = SAMPLERS[self.sampler], state.particles
        keys = chain_keys(key, old.number)
        chains, moves = sampler.move(_target(state, batch), old.chains, jnp.exp(old.log_size), keys=keys)
        moved = adapted(old.log_size, moves.acceptance, sampler.goal, state.tick)
        slot = state.tick % _TRACE
        new = Particles(
            number=old.number,
            chains=chains,
            log_size=jnp.where(state.tick < state.horizon, moved, old.log_size),
            log_trace=old.log_trace.at[:, slot].set(chains.value),
            distance=old.distance.at[:, slot].set(jnp.mean(chains.white**2, axis=1)),
            accepted=old.accepted.at[:, slot].set(moves.acceptance),
            nonfinite=old.nonfinite + moves.nonfinite,
        )
        objective = -mean_of_possible(chains.value, chains.value) / batch.num_data
        rejected, gain = jnp.sum(moves.nonfinite), jnp.zeros_like(objective)
        info = _info(objective, jnp.mean(moves.acceptance), old.log_size, rejected, gain)
        return eqx.tree_at(lambda s: (s.particles, s.tick), state, (new, state.tick + 1)), info

    def _improve(self, state: STRIDEState, batch: Batch, key: PRNGKeyArray) -> tuple[STRIDEState, STRIDEInfo]:
        value, learn = self._gradient(state, batch)
        gain, hyper_steps = jnp.zeros((), value.dtype), self._num_hyper_steps(state.top)
        if self._num_candidates(state) > 0:
            new, white = self._maybe_exchange(state, batch, key)
            state = eqx.tree_at(lambda s: (s.inducing, s.particles.chains.white), state, (new.inducing, white))
            gain, value = new.gain, new.before if hyper_steps == 0 else value
        state = learn(state)
        state = eqx.tree_at(lambda s: s.tick, state, state.tick + 1)
        none, size = jnp.asarray(0, jnp.int32), state.particles.log_size
        info = _info(-value / batch.num_data, jnp.zeros_like(value), size, none, gain)
        return state, eqx.tree_at(lambda info: info.done, info, state.tick >= max(self.exchanges, hyper_steps))

    def _num_candidates(self, state: STRIDEState) -> int:
        """|J| of an exchange; 0 where there is nothing to exchange."""
        spare = len(state.hidden.root) - len(state.inducing)
        return min(self.candidates, spare) if self.exchanges > 0 and state.top.kind != "standard" else 0

    def _num_hyper_steps(self, top: Top) -> int:
        """Gradient steps of an M step."""
        auto = _HYPER_STEPS if top.kind == "sampled" else 0
        return auto if self.hyper_steps == "auto" else int(self.hyper_steps)

    def _maybe_exchange(
        self, state: STRIDEState, batch: Batch, key: PRNGKeyArray
    ) -> tuple[Exchanged, Float[Array, "S n"]]:
        """The exchange, and the white variables that keep what is sampled of the last layer as it is."""
        model, count, white = state.model, self._num_candidates(state), state.particles.chains.white
        below, above = _parts(state, white)

        def swap(inducing: Int[Array, " M"]) -> tuple[Exchanged, Float[Array, "S n"]]:
            hidden = state.hidden
            if self._num_hyper_steps(state.top) > 0:  # the factor follows the kernel
                hidden = prepare_hidden(model, batch.x, hidden.anchors, hidden.kind)
            each = functools.partial(each_particle, model, hidden, batch.x, below, above)
            new = exchange(model, state.top, batch, each, inducing, count, key=key, share=state.share)
            if state.top.kind != "sampled":
                return new, white
            moved = carried_over(model, sight(model, hidden, batch.x, below), inducing, new.inducing, above)
            return new, jnp.concatenate([below, moved], axis=1)

        def keep(inducing: Int[Array, " M"]) -> tuple[Exchanged, Float[Array, "S n"]]:
            zero = jnp.zeros((), batch.x.dtype)
            return Exchanged(inducing, zero, zero), white

        return jax.lax.cond(state.tick < self.exchanges, swap, keep, state.inducing)

    def _gradient(
        self, state: STRIDEState, batch: Batch
    ) -> tuple[Float[Array, ""], Callable[[STRIDEState], STRIDEState]]:
        """What hyperparameters maximise, and the Adam step on all of them."""
        steps = self._num_hyper_steps(state.top)
        if steps == 0:
            return jnp.zeros((), batch.x.dtype), lambda state: state
        learned, constant = partition(state.model)

        def loss(learned: DeepGP) -> tuple[Float[Array, ""], Float[Array, ""]]:
            value = _complete_data(eqx.combine(learned, constant), state, batch)
            return -(value + log_prior(learned)) / batch.num_data, value

        gradient, value = jax.grad(loss, has_aux=True)(learned)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, adam = self._adam().update(gradient, state.adam)
        useful = jnp.isfinite(value) & all_finite(updates) & (state.tick < steps)
        moved = jax.tree.map(lambda old, update: jnp.where(useful, old + update, old), learned, updates)
        adam = jax.tree.map(lambda new, old: jnp.where(useful, new, old), adam, state.adam)
        new = (eqx.combine(moved, constant), adam)
        return value, lambda state: eqx.tree_at(lambda s: (s.model, s.adam), state, new)

    def _adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    # --- the start ----------------------------------------------------------------------------------------------------

    def _top(self, model: DeepGP, data: AbstractSource) -> Top:
        if not isinstance(model.likelihood, Gaussian):
            if self.standard:
                name = type(model.likelihood).__name__
                raise SettingError(f"standard=True needs Gaussian noise, but the likelihood is {name}.")
            return Top("sampled", shared=False)
        observed = data.everything().observed
        shared = noise_is_shared(model) and bool(jnp.all(observed == observed[:, :1]))
        if self.standard and not shared:
            raise SettingError("standard=True needs all outputs in the same rows, with one noise variance.")
        return Top("standard" if self.standard else "collapsed", shared, self.target == "bound")

    def _num_start_rows(self, num_inducing: int) -> int:
        return max(rows_or_auto("start_rows", self.start_rows, _START_ROWS), num_inducing)

    def _num_anchors(self, num_data: int, num_inducing: int) -> int | None:
        """R, or ``None`` for all rows."""
        if self.hidden == "exact":
            return None
        return num_inducing if self.rank is None or self.hidden == "sparse" else min(self.rank, num_data)


# --- the target -------------------------------------------------------------------------------------------------------


def _target(state: STRIDEState, batch: Batch):
    """Phi of white variables: hidden layers first, then (if sampled) the last layer's inducing values."""

    def phi(white: Float[Array, "S n"]) -> Float[Array, " S"]:
        return _log_likelihood(state.model, state, batch, white)

    return phi


def _log_likelihood(model: DeepGP, state: STRIDEState, batch: Batch, white: Float[Array, "S n"]) -> Float[Array, " S"]:
    below, above = _parts(state, white)
    view = sight(model, state.hidden, batch.x, below)
    return log_likelihood(model, state.top, batch, view, state.inducing, above, raw=state.raw)


def _complete_data(model: DeepGP, state: STRIDEState, batch: Batch) -> Float[Array, ""]:
    """F_V, or Phi where there is none, averaged over the particles."""
    hidden = prepare_hidden(model, batch.x, state.hidden.anchors, state.hidden.kind)
    below, above = _parts(state, state.particles.chains.white)
    view = sight(model, hidden, batch.x, below)
    if state.top.kind == "collapsed":
        values = bound(model, state.top, batch, view, state.inducing)
    else:
        values = log_likelihood(model, state.top, batch, view, state.inducing, above, raw=state.raw)
    return mean_of_possible(values, values)


def _parts(state: STRIDEState, white: Float[Array, "S n"]) -> tuple[Float[Array, "S a"], Float[Array, "S b"]]:
    """White variables of the hidden layers, and of the last."""
    count = num_white(state.model, len(state.hidden.anchors))
    return white[:, :count], white[:, count:]


# --- starts and changes of anchors ------------------------------------------------------------------------------------


@program(options=RUN_ONCE)
def _first_state(
    method: STRIDE,
    model: DeepGP,
    top: Top,
    batch: Batch,
    path: list[Array],
    inducing: Int[Array, " M"],
    above: Float[Array, " k"],
) -> STRIDEState:
    """All particles at the stationary start, and what is sampled of the last layer at its white variables ``above``."""
    num_anchors = method._num_anchors(len(batch.x), len(inducing))
    inducing = inducing[:0] if method.standard else inducing
    S, dtype, zero = method.particles, batch.x.dtype, jnp.asarray(0, jnp.int32)
    start = model.layer_input(model.depth - 1, batch.x, path[-1])[None]
    anchors = _anchors(method, model, batch, start, inducing, num_anchors)
    hidden = prepare_hidden(model, batch.x, anchors, method.hidden)
    values = [(h[anchors] if method.hidden == "sparse" else h)[None] for h in path]
    white = whitened(model, hidden, batch.x, values)
    white = jnp.concatenate([white, above[None]], axis=1)
    gradient = white if method.sampler == "mala" else white[:, :0]
    chains = Chains(*(jnp.repeat(part, S, axis=0) for part in (white, jnp.full(1, -jnp.inf, dtype), gradient)))
    particles = Particles(
        number=jnp.arange(S, dtype=jnp.int32),
        chains=chains,
        log_size=jnp.full(S, jnp.log(method.step_size), dtype),
        log_trace=jnp.full((S, _TRACE), jnp.nan, dtype),
        distance=jnp.full((S, _TRACE), jnp.nan, dtype),
        accepted=jnp.full((S, _TRACE), jnp.nan, dtype),
        nonfinite=jnp.zeros(S, jnp.int32),
    )
    return STRIDEState(
        model=model,
        top=top,
        hidden=hidden,
        particles=particles,
        inducing=inducing,
        share=Share(zero, 1),
        raw=jnp.asarray(False),
        tick=zero,
        horizon=zero,
        adam=method._adam().init(partition(model)[0]),
    )


def _anchors(
    method: STRIDE,
    model: DeepGP,
    batch: Batch,
    inputs: Float[Array, "S N F"],
    inducing: Int[Array, " M"],
    num_anchors: int | None,
) -> Int[Array, " R"]:
    if num_anchors is None:
        return jnp.arange(len(batch.x), dtype=jnp.int32)
    return inducing if method.hidden == "sparse" else pivots(model, inputs, batch.weight, num_anchors)


def _no_white(model: DeepGP, top: Top, num_inducing: int, dtype: Any) -> Float[Array, " k"]:
    """White variables of a last layer at its prior mean."""
    return jnp.zeros(top.num_white(model, num_inducing), dtype)


@run_seldom
def _enter_e(method: STRIDE, state: STRIDEState, batch: Batch) -> STRIDEState:
    """Where M or the hyperparameters have changed: new anchors, the same hidden values, new likelihoods."""
    model, x, old = state.model, batch.x, state.hidden
    below, above = _parts(state, state.particles.chains.white)
    if method.hidden == "exact" or (method.hidden == "aca" and not method.refresh):
        hidden = prepare_hidden(model, x, old.anchors, method.hidden)
    else:
        if method._num_hyper_steps(state.top) > 0:  # the factor follows the kernel
            old = prepare_hidden(model, x, old.anchors, method.hidden)
        values = hidden_values(model, old, x, below)
        inputs = top_inputs(model, old, x, values)
        anchors = _anchors(method, model, batch, inputs, state.inducing, len(old.anchors))
        hidden = prepare_hidden(model, x, anchors, method.hidden)
        below = whitened(model, hidden, x, _moved(model, old, hidden, x, values))
    raw, value = way_and_log_likelihood(model, state.top, batch, sight(model, hidden, x, below), state.inducing, above)
    donor = _possible_ones(value)
    white, value = jnp.concatenate([below, above], axis=1)[donor], value[donor]
    state = eqx.tree_at(lambda s: (s.hidden, s.raw), state, (hidden, raw))
    # Phi is known at this point; only its gradient has to be asked for.
    target = _target(state, batch) if method.sampler == "mala" else lambda _: value
    chains = SAMPLERS[method.sampler].begin(target, white)
    return eqx.tree_at(lambda s: s.particles.chains, state, chains)


def _possible_ones(value: Float[Array, " S"]) -> Int[Array, " S"]:
    """The number of every particle, but those of possible ones for particles without a finite likelihood."""
    possible, numbers = jnp.isfinite(value), jnp.arange(len(value))
    turn = numbers % jnp.maximum(jnp.sum(possible), 1)
    return jnp.where(possible, numbers, jnp.argsort(~possible, stable=True)[turn])


def _moved(model: DeepGP, old: Hidden, new: Hidden, x: Float[Array, "N D"], values: Values) -> Values:
    """Hidden values at the new sites."""
    if old.lift is None:
        return values
    return [at_data(model, old, x, h, level)[:, new.anchors] for level, h in enumerate(values)]


def _num_inducing(model: DeepGP, num_data: int) -> int:
    if model.layers[-1].z is None:
        raise SettingError("method='stride' needs to know the number of inducing points: set num_inducing.")
    return min(model.layers[-1].num_inducing, num_data)


# --- what was learned -------------------------------------------------------------------------------------------------


@program(options=RUN_ONCE)
def _posterior(method: STRIDE, state: STRIDEState, batch: Batch) -> tuple[STRIDEPosterior, JitterReport]:
    model, x, hidden = state.model, batch.x, state.hidden
    below, above = _parts(state, state.particles.chains.white)
    values = hidden_values(model, hidden, x, below)
    top, report = condition_top(model, state.top, batch, sight(model, hidden, x, below), state.inducing, above)
    knots = None
    if not model.architecture.by_row:
        knots = (x, tuple(at_data(model, hidden, x, h, level) for level, h in enumerate(values)))
    return STRIDEPosterior(
        model=model,
        hidden=_given(model, hidden, x, below, values),
        top=top,
        knots=knots,
        inducing=x[state.inducing],
        trace=_ordered(state),
        interpolated=hidden.kind == "sparse" and model.depth > 2,
        low_rank=hidden.kind != "exact",
        num_samples=method.particles,
    ), report


def _given(
    model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], white: Float[Array, "S n"], values: Values
) -> tuple[Given, ...]:
    """Every hidden layer's GP given the particles' white variables at the anchors."""
    sites, at, result = hidden.sites(x), hidden.at_sites, []
    z = sites[at][None]
    lower = hidden.lower if hidden.kind == "exact" else safe_cholesky(model.layers[0].kernel(z[0])).lower
    inverse = inverse_lower(lower)[None]
    for level, own in enumerate(white_by_layer(model, len(hidden.anchors), white)):
        if hidden.kind == "sparse" and level == model.depth - 2:  # the bottom layer's GP carries it to all data
            offset = jnp.take(values[level] - mean_path(model, sites)[level][None], at, axis=1)
            result.append(Given(z, inverse @ offset, inverse))
        elif level == 0:
            result.append(Given(z, own, inverse))
        else:
            z_own = jnp.take(seen(model, level, sites, values[level - 1]), at, axis=1)
            factor = safe_cholesky(jax.vmap(model.layers[level].kernel.gram)(z_own))
            result.append(Given(z_own, own, inverse_lower(factor.lower)))
    return tuple(result)


def _ordered(state: STRIDEState) -> Trace:
    """The ring of the last E step, oldest first; what was written while step sizes were adapted is blanked."""
    steps = jnp.arange(_TRACE, dtype=jnp.int32)
    frozen = (_TRACE - steps <= state.tick - state.horizon)[None]
    own = state.particles
    log_likelihood, acceptance, distance = (
        jnp.where(frozen, ring[:, (state.tick + steps) % _TRACE], jnp.nan)
        for ring in (own.log_trace, own.accepted, own.distance)
    )
    return Trace(log_likelihood, acceptance, jnp.sum(own.nonfinite).astype(acceptance.dtype), distance)


def _info(
    objective: Float[Array, ""],
    acceptance: Float[Array, ""],
    log_size: Float[Array, " S"],
    nonfinite: Int[Array, ""],
    gain: Float[Array, ""],
) -> STRIDEInfo:
    no = jnp.asarray(False)
    zero, size = jnp.zeros((), objective.dtype), jnp.mean(jnp.exp(log_size))
    return STRIDEInfo(objective, jnp.isfinite(objective), no, zero, acceptance, size, nonfinite, gain)


def _choose(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise SettingError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}.")
