"""Sampling the posterior of a deep GP: SGHMC with Moving Window MCEM (Havasi et al. 2018).

The whitened inducing values v of all layers are drawn from their posterior, whose energy is

    U(v) = -sum_i log p(y_i | v) + 1/2 sum_l |v_l|^2,

by stochastic gradient Hamiltonian Monte Carlo (:mod:`~fathomgp.inference._hamiltonian`). A minibatch stands for the
data, and one sample path a row for the integral over the inner layers. For the last layer's f there are two ways:

    "bound"      E[log p(y_i | f_i)] over f_i given v, Jensen's bound of the paper's section 4.1. The chain then draws
                 from the best q(v) there is for a variational bound, Gaussian or not (Hensman et al. 2015): in one
                 layer it is Titsias' optimal q. Hyperparameters climb that bound. It is the default by the test scores
                 of seven settings on split 0 of energy, boston and concrete (one seed): a choice yet to be confirmed.
    "marginal"   log p(y_i | v) with f_i integrated out, as in the authors' code. In one layer that is the model of
                 Snelson and Ghahramani (2006). There the noise variance fell to 3e-4 on boston and concrete.

Burn-in tunes the sampler and the hyperparameters. The latter climb E[log p(y, v)] over draws v: those of a moving
window of the chain's past (each step takes one at random), those of the last E-step (plain MCEM), or only the last one
(naive: the hyperparameters then chase the chain). Afterwards everything is frozen but v, so k(Z, Z) is factorised once,
and every so many steps a draw is kept: a component of the answer.

Several chains run side by side on batches of their own; they share the hyperparameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractInfo, Buffer, Phase, empty_buffer
from fathomgp.inference._descent import longer, schedule
from fathomgp.inference._hamiltonian import SamplerState, hamiltonian_sampler, kinetic_temperature
from fathomgp.inference._sampled import SampledPosterior, Values
from fathomgp.inference._streaming import Noise, Rows, last_moments, path_noise, stream_sum
from fathomgp.inference.dsvi import initial_q, shallow_start
from fathomgp.likelihoods import Gaussian
from fathomgp.linalg import check_factor
from fathomgp.model import DeepGP, Whitener, condition_on, known, prepare_all
from fathomgp.parameters import all_finite, cast, freeze, partition

HYPERPARAMETERS = ("moving-window", "mcem", "naive", "fixed")
ENERGIES = ("bound", "marginal")
#: The phases. Both parameters and v move in the first, v in the second and the last, parameters in the third.
BURN_IN, EXPECTATION, MAXIMISATION, SAMPLING = "burn-in", "expectation", "maximisation", "sampling"

Whiteners = tuple[Whitener, ...]


class SGHMCState(eqx.Module):
    """Where the chains are, and what the phase needs.

    Attributes:
        model: hyperparameters and inducing inputs.
        v: whitened inducing values, one array (chains, M, P) a layer.
        sampler: momenta, and what the step sizes depend on.
        adam: the memory of the hyperparameters' optimiser.
        draws: v of past steps and their energies: the window in burn-in, what is kept in the sampling phase.
        whiteners: factors of k(Z, Z), where the hyperparameters stand still.
        filled: how many of the draws are there.
        steps: steps done in this phase.
        horizon: steps of this phase.
        caution: multiplies the step sizes; halved when steps fail.
    """

    model: DeepGP
    v: Values
    sampler: SamplerState
    adam: Any
    draws: Buffer
    whiteners: Whiteners | None
    filled: Int[Array, ""]
    steps: Int[Array, ""]
    horizon: Int[Array, ""]
    caution: Float[Array, ""]


class SGHMCInfo(AbstractInfo):
    """The figures of a step.

    ``objective`` is the energy U a datum; ``temperature`` that of the momenta: it is 1 where minibatches do no harm.
    """

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    temperature: Float[Array, ""]


class SGHMC(AbstractInference):
    """Stochastic gradient Hamiltonian Monte Carlo over the inducing values, with Monte Carlo EM for all else.

    Attributes:
        burn_in: steps that tune sampler and hyperparameters; ``None``: 3,000, and up to 12,000 where data fill more
            than ten batches. The paper has 20,000.
        sampling: steps that sample; the paper has 10,000.
        draws: kept of each chain, evenly spaced over the sampling phase; the paper has 200.
        chains: independent chains; with several, the verdict after a fit can tell whether they agree.
        batch_size: rows a batch; data with fewer rows are used whole. The paper has 10,000.
        step_size: the sampler's eps; ``None``: 0.01, and 0.03 where data fill several batches. Larger steps mix inner
            layers before they have learned (energy loses 0.4 nats at 0.03), but on kin8nm a larger step gained 0.03.
        friction: the sampler's a.
        learning_rate: Adam's, of the hyperparameters; it falls to a tenth along a cosine over the last half of burn-in.
        hyperparameters: ``"moving-window"``, ``"mcem"``, ``"naive"`` or ``"fixed"``.
        window: past draws among which a step of the hyperparameters chooses.
        mcem_draws: draws of an E-step of plain MCEM.
        mcem_steps: steps of an E-step, and of an M-step, of plain MCEM.
        energy: ``"bound"`` or ``"marginal"``: how the last layer's f enters, see above.
        shallow_start: whether the last layer starts from a fitted one-layer sparse GP (Gaussian noise only).
    """

    separates: ClassVar[bool] = True
    #: With fewer, outputs share kernels and inducing inputs, which are then kept: boston gained 0.9 nats a datum.
    separate_rows: ClassVar[int] = 50
    burn_in: int | None = eqx.field(static=True, default=None)
    sampling: int = eqx.field(static=True, default=2000)
    draws: int = eqx.field(static=True, default=100)
    chains: int = eqx.field(static=True, default=1)
    batch_size: int = eqx.field(static=True, default=1024)
    step_size: float | None = eqx.field(static=True, default=None)
    friction: float = eqx.field(static=True, default=0.05)
    learning_rate: float = eqx.field(static=True, default=0.01)
    hyperparameters: str = eqx.field(static=True, default="moving-window")
    window: int = eqx.field(static=True, default=300)
    mcem_draws: int = eqx.field(static=True, default=10)
    mcem_steps: int = eqx.field(static=True, default=500)
    energy: str = eqx.field(static=True, default="bound")
    shallow_start: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        for name in ("burn_in", "sampling", "draws", "chains", "batch_size", "window", "mcem_draws", "mcem_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        for name in ("step_size", "learning_rate"):
            if getattr(self, name) is not None and getattr(self, name) <= 0.0:
                raise SettingError(f"{name} must be positive, but it is {getattr(self, name)}.")
        if not 0.0 < self.friction <= 1.0:
            raise SettingError(f"friction must lie above 0 and not above 1, but it is {self.friction}.")
        for name, choices in (("hyperparameters", HYPERPARAMETERS), ("energy", ENERGIES)):
            if getattr(self, name) not in choices:
                options = ", ".join(map(repr, choices))
                raise SettingError(f"{name}={getattr(self, name)!r} is unknown: choose one of {options}.")

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> SGHMCState:
        """Start at v = 0; in the last layer at draws of the fitted shallow model's posterior, if asked."""
        start_key, draw_key = jax.random.split(key)
        v = tuple(jnp.tile(q.mean[None], (self.chains, 1, 1)) for q in initial_q(model))
        model = self._hold_inducing(model, data.num_data)
        if self.shallow_start and self.hyperparameters != "fixed" and isinstance(model.likelihood, Gaussian):
            model, last = shallow_start(model, data, key=start_key)
            noise = jax.random.normal(draw_key, (self.chains, *last.mean.shape), last.mean.dtype)
            v = (*v[:-1], last.mean[None] + jnp.einsum("pmn,cnp->cmp", last.root, noise))
        sampler, adam = hamiltonian_sampler().init(v), self._adam().init(partition(model)[0])
        zero, one = jnp.asarray(0, jnp.int32), jnp.ones((), v[0].dtype)
        return SGHMCState(model, v, sampler, adam, _room(v, self._window_slots), None, zero, zero, zero, one)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """Burn-in, then sampling; ``max_iter`` is the sum of the two and keeps their proportions."""
        burn_in = longer(3000, -(-num_data // self.batch_size)) if self.burn_in is None else self.burn_in
        total = burn_in + self.sampling if max_iter is None else max_iter
        burn_in = -(-burn_in * total // (burn_in + self.sampling))
        phases = (*self._burn_in_phases(burn_in), self._phase(SAMPLING, total - burn_in, self.chains))
        return tuple(phase for phase in phases if phase.steps > 0)

    def enter(self, phase: Phase, state: SGHMCState, data: AbstractSource, *, key: PRNGKeyArray) -> SGHMCState:
        """Count from zero; factorise where the hyperparameters stand still; make room for the draws to be kept."""
        zero, sampling, climbing = jnp.asarray(0, jnp.int32), phase.name == SAMPLING, phase.name == MAXIMISATION
        return dataclasses.replace(
            state,
            adam=None if sampling else state.adam,
            draws=_room(state.v, min(self.draws, phase.steps)) if sampling else state.draws,
            whiteners=None if climbing or phase.name == BURN_IN else _factorise(state.model),
            filled=state.filled if climbing else zero,
            steps=zero,
            horizon=jnp.asarray(phase.steps, jnp.int32),
        )

    def step(self, phase: Phase, state: SGHMCState, batch: Batch, *, key: PRNGKeyArray) -> tuple[SGHMCState, SGHMCInfo]:
        """A step of the chains, of the hyperparameters, or of both, as the phase asks."""
        batches = batch if batch.x.ndim == 3 else _stack(batch)
        chains_key, model_key = jax.random.split(key)
        if phase.name == MAXIMISATION:
            state, info = self._climb(state, differentiable_factors(state.model), _pick(batches, 0), model_key)
            return dataclasses.replace(state, steps=state.steps + 1), info
        if phase.name == BURN_IN:
            factors = differentiable_factors(state.model)
            state, info = self._move(phase, state, factors.whiteners, batches, chains_key)
            state, other = self._climb(state, factors, _pick(batches, self.chains), model_key)
            return state, dataclasses.replace(info, ok=info.ok & other.ok)
        assert state.whiteners is not None
        return self._move(phase, state, state.whiteners, batches, chains_key)

    def back_off(self, state: SGHMCState) -> SGHMCState:
        """Halve the step sizes."""
        return dataclasses.replace(state, caution=0.5 * state.caution)

    def posterior(self, state: SGHMCState, data: AbstractSource | None) -> SampledPosterior:
        """The kept draws; where burn-in was not over, the window; before any draw, where the chains stand."""
        whiteners = _factorise(state.model)
        for level, whitener in enumerate(whiteners):
            check_factor(whitener.report, f"The covariance of layer {level + 1}'s inducing points")
        energies = np.asarray(state.draws.values[1])[: int(state.filled)]
        fine = np.flatnonzero(np.all(np.isfinite(energies), axis=1))
        draws = jax.tree.map(lambda leaf: leaf[fine], state.draws.values)
        if len(fine) == 0:
            draws = jax.tree.map(lambda leaf: leaf[None], (state.v, jnp.zeros_like(state.v[0][:, 0, 0])))
        return SampledPosterior(state.model, whiteners, *jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), draws))

    def _burn_in_phases(self, steps: int) -> tuple[Phase, ...]:
        if self.hyperparameters == "fixed":
            return (self._phase(EXPECTATION, steps, self.chains),)
        if self.hyperparameters != "mcem":
            return (self._phase(BURN_IN, steps, self.chains + 1),)
        half = min(self.mcem_steps, max(1, steps // 2))
        cycle = (self._phase(EXPECTATION, half, self.chains), self._phase(MAXIMISATION, half, 1))
        return cycle * max(1, steps // (2 * half))

    def _phase(self, name: str, steps: int, batches: int) -> Phase:
        return Phase(name, steps, batch_size=self.batch_size, batches_per_step=batches)

    @property
    def _window_slots(self) -> int:
        return {"naive": 1, "fixed": 1, "mcem": self.mcem_draws}.get(self.hyperparameters, self.window)

    def _adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def _move(
        self, phase: Phase, state: SGHMCState, whiteners: Whiteners, batches: Batch, key: PRNGKeyArray
    ) -> tuple[SGHMCState, SGHMCInfo]:
        """One step of every chain."""
        path_key, noise_key = jax.random.split(key)

        def one_chain(chain: Int[Array, ""], v: Values) -> tuple[Float[Array, ""], Values]:
            chain_key = jax.random.fold_in(path_key, chain)
            return energy_and_gradient(
                state.model, whiteners, v, _pick(batches, chain), key=chain_key, bound=self.energy == "bound"
            )

        energy, gradient = jax.vmap(one_chain)(jnp.arange(self.chains), state.v)
        num_data = batches.num_data.astype(energy.dtype)
        eps = self._eps(num_data, batches.weight.shape[-1]) * state.caution
        transform = hamiltonian_sampler(
            num_data, step_size=eps, friction=self.friction, adapting=phase.name != SAMPLING
        )
        move, sampler = transform.update(gradient, state.sampler, key=noise_key)
        v = jax.tree.map(jnp.add, state.v, move)
        ok = jnp.all(jnp.isfinite(energy)) & all_finite(v)
        temperature = kinetic_temperature(sampler, num_data, eps, self.friction)
        draws, filled = _keep(phase, state, v, energy)
        new = dataclasses.replace(state, v=v, sampler=sampler, draws=draws, filled=filled, steps=state.steps + 1)
        return new, SGHMCInfo(jnp.mean(energy), ok, jnp.asarray(False), _jitter(whiteners), temperature)

    def _hold_inducing(self, model: DeepGP, num_data: int) -> DeepGP:
        """Inner inducing inputs stay where they are while rows are few: given v they are parameters, and fit noise."""
        few = [level for level, layer in enumerate(model.layers[:-1]) if num_data < self.separate_rows * layer.width]
        return freeze(model, lambda m: [m.layers[level].z for level in few]) if few else model

    def _eps(self, num_data: Float[Array, ""], rows: int) -> Float[Array, ""]:
        usual = jnp.where(num_data > rows, 0.03, 0.01)
        return (usual if self.step_size is None else jnp.asarray(self.step_size)).astype(num_data.dtype)

    def _climb(
        self, state: SGHMCState, factors: "Factors", batch: Batch, key: PRNGKeyArray
    ) -> tuple[SGHMCState, SGHMCInfo]:
        """One step of the hyperparameters, on a random draw of the window."""
        member_key, path_key = jax.random.split(key)
        ends = jnp.stack([state.filled, jnp.asarray(self.chains, jnp.int32)])
        choice = jax.random.randint(member_key, (2,), 0, ends, jnp.int32)
        v, _ = state.draws.read(choice[0])
        v = jax.tree.map(lambda leaf: leaf[choice[1]], v)
        value, gradient = model_gradient(state.model, factors, v, batch, key=path_key, bound=self.energy == "bound")
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, adam = self._adam().update(gradient, state.adam)
        pace = state.caution * schedule(state.steps, state.horizon, state.caution.dtype)
        learned, constant = partition(state.model)
        model = eqx.combine(jax.tree.map(lambda a, b: a + pace * b, learned, updates), constant)
        ok = jnp.isfinite(value) & all_finite(model)
        new = dataclasses.replace(state, model=model, adam=adam)
        return new, SGHMCInfo(value, ok, jnp.asarray(False), _jitter(factors.whiteners), jnp.ones((), value.dtype))


# --- the energy -------------------------------------------------------------------------------------------------------


def log_likelihood(
    model: DeepGP, whiteners: Whiteners, v: Values, rows: Rows, noise: Noise, *, bound: bool = False
) -> Float[Array, ""]:
    """``sum_i log p(y_i | v, path_i)`` over rows, with one sample path a row through the inner layers.

    With ``bound``, Jensen's bound instead: ``sum_i E[log p(y_i | f_i)]`` over the last layer's f given v.
    """
    x, y, observed, weight = rows
    parts = zip(model.layers, whiteners, v, strict=True)
    conditionals = [condition_on(layer, whitener, known(values)) for layer, whitener, values in parts]
    mean, variance = last_moments(model, conditionals, x, noise)
    score = model.likelihood.expected_log_prob if bound else model.likelihood.log_z
    figures = score(mean, variance, y)
    return jnp.sum(jnp.where(observed, figures, 0.0) * weight[:, None])


def energy_and_gradient(
    model: DeepGP, whiteners: Whiteners, v: Values, batch: Batch, *, key: PRNGKeyArray, bound: bool = False
) -> tuple[Float[Array, ""], Values]:
    """``U / N`` and its gradient with respect to v, estimated from a batch."""
    dtype = batch.x.dtype
    low_model, low_whiteners = cast((model, whiteners), dtype)

    def of_block(rows: Rows, noise: Noise) -> tuple[Float[Array, ""], Values]:
        def value(v: Values) -> Float[Array, ""]:
            return log_likelihood(low_model, low_whiteners, cast(v, dtype), rows, noise, bound=bound)

        return jax.value_and_grad(value)(v)

    value, gradient = stream_sum(of_block, batch, path_noise(model, len(batch.x), key=key))
    share = (1.0 / jnp.sum(batch.weight)).astype(v[0].dtype)
    num_data = batch.num_data.astype(share.dtype)
    prior = sum((0.5 * jnp.sum(values**2) for values in v), start=jnp.zeros((), share.dtype))
    energy = prior / num_data - share * value.astype(share.dtype)
    return energy, jax.tree.map(lambda values, slope: values / num_data - share * slope, v, gradient)


class Factors(NamedTuple):
    """The factors of k(Z, Z) of every layer, and the pull-back of their cotangents to the hyperparameters."""

    whiteners: Whiteners
    pull_back: Callable[[list[Array]], tuple[DeepGP]]


def differentiable_factors(model: DeepGP) -> Factors:
    """Factorise every layer's k(Z, Z) so that gradients can go back through it."""
    learned, constant = partition(model)

    def inverses(learned: DeepGP) -> tuple[list[Array], Whiteners]:
        whiteners = tuple(prepare_all(eqx.combine(learned, constant).layers))
        return [whitener.inverse_factor for whitener in whiteners], whiteners

    _, pull_back, whiteners = jax.vjp(inverses, learned, has_aux=True)
    return Factors(whiteners, pull_back)


def model_gradient(
    model: DeepGP, factors: Factors, v: Values, batch: Batch, *, key: PRNGKeyArray, bound: bool = False
) -> tuple[Float[Array, ""], DeepGP]:
    """Minus the log likelihood a datum, and its gradient with respect to the hyperparameters at fixed whitened v.

    Cotangents of the factors are summed over blocks of rows and pulled back once.
    """
    dtype, (learned, constant) = batch.x.dtype, partition(model)
    inverses = [whitener.inverse_factor for whitener in factors.whiteners]

    def of_block(rows: Rows, noise: Noise) -> Any:
        def value(learned: DeepGP, inverses: list[Array]) -> Float[Array, ""]:
            whiteners = tuple(Whitener(*parts) for parts in zip(inverses, reports, strict=True))
            low_model, low_whiteners, low_v = cast((eqx.combine(learned, constant), whiteners, v), dtype)
            return log_likelihood(low_model, low_whiteners, low_v, rows, noise, bound=bound)

        reports = [whitener.report for whitener in factors.whiteners]
        return jax.value_and_grad(value, (0, 1))(learned, inverses)

    value, (direct, cotangents) = stream_sum(of_block, batch, path_noise(model, len(batch.x), key=key))
    (indirect,) = factors.pull_back(cotangents)
    share = (-1.0 / jnp.sum(batch.weight)).astype(v[0].dtype)
    return share * value.astype(share.dtype), jax.tree.map(lambda a, b: share * (a + b), direct, indirect)


# --- pieces -----------------------------------------------------------------------------------------------------------


@eqx.filter_jit
def _factorise(model: DeepGP) -> Whiteners:
    return tuple(prepare_all(model.layers))


def _room(v: Values, slots: int) -> Buffer:
    return empty_buffer((v, v[0][:, 0, 0]), slots)


def _keep(phase: Phase, state: SGHMCState, v: Values, energy: Float[Array, " C"]) -> tuple[Buffer, Int[Array, ""]]:
    """The draws with one more, and how many slots are then full.

    In burn-in they are a ring; in other phases each slot has its share of the steps, and the last draw of it stays.
    """
    slots = len(state.draws.values[1])
    if phase.name == BURN_IN:
        return state.draws.write(state.steps % slots, (v, energy)), jnp.minimum(state.steps + 1, slots)
    horizon = jnp.maximum(state.horizon, 1)
    draws = state.draws.write(state.steps * slots // horizon, (v, energy))
    return draws, (state.steps + 1) * slots // horizon


def _jitter(whiteners: Whiteners) -> Float[Array, ""]:
    return jnp.max(jnp.stack([jnp.max(whitener.report.jitter) for whitener in whiteners]))


def _stack(batch: Batch) -> Batch:
    """A stack of one batch."""
    return jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, batch)


def _pick(batches: Batch, i: int | Int[Array, ""]) -> Batch:
    """One batch of a stack."""
    return jax.tree.map(lambda leaf: leaf[i] if leaf.ndim else leaf, batches)
