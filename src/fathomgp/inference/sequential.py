"""Sequential inference for deep GPs (Wang et al. 2016): every layer is a sparse online GP, and each datum is met once.

At datum n, S particles run through the layers, each drawn from what its layer knows so far,

    h_l = m_l(h_{l-1}) + sqrt(v_l(h_{l-1})) e_l,    l < L,    e_l ~ N(0, I),

and are weighted by what the last layer makes of them, w ~ p(y | h_{L-1}), its own value integrated out. Then every layer
learns: layer l at the weighted estimate of its input, with the weighted moments of its noise e_l. The main text of the
paper is not available; this is a reconstruction, with three choices that its supplement leaves open.

* A layer learns from the change of its noise's moments. Before the datum they are 0 and 1, so a mean of e_l of c and a
  variance of s mean a slope c / sqrt(v) and a curvature (s - 1) / v of the log predictive density: a datum that says
  nothing changes nothing. Learning the estimate of h_l as if it had been observed would count the prior again each time.
* Where the effective number of particles falls below a share of S, they are resampled and moved by one step of a chain
  that leaves p(e | y) as it is (preconditioned Crank-Nicolson), so an outlier finds particles too.
* The last layer's slope and curvature are derivatives of the likelihood's log Z: exact for Gaussian noise, moment
  matching for all other likelihoods (Csato and Opper 2002).

An episode is a pass over the data. Hyperparameters start from a shallow sparse GP on a subset. In all episodes but the
last they follow the gradient of the particle estimate of the predictive density of each block of rows, taken before the
block is learned; the function values at the active inputs count as given. Every episode begins at the prior. Depth 1 is
the sparse online GP.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractInfo, Phase
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.inference._online import OnlineGP, Projection, absorb, conditionals, empty, forget, prior_at, project, refresh
from fathomgp.inference._particles import balanced_normal, effective_sample_size, systematic_resample
from fathomgp.inference.dsvi import shallow_start
from fathomgp.likelihoods import AbstractLikelihood, Gaussian
from fathomgp.linalg import check_factor
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import all_finite, cast, partition

#: Rows between two computations of Q from its definition.
_REFRESH = 128
#: How far a moved particle goes: 0 stays, 1 forgets where it was.
_MOVE = 0.5
#: The two kinds of episode.
_LEARN, _PASS = "learn", "pass"


class SequentialState(eqx.Module):
    """The model and what its layers have learned.

    Attributes:
        model: hyperparameters; its inducing inputs only say where active sets begin.
        gps: one online GP a layer.
        seen: rows met in this episode, or by this stream.
        grows: whether inputs may join the active sets.
        adam: the optimiser's state in episodes that learn hyperparameters, else ``None``.
    """

    model: DeepGP
    gps: tuple[OnlineGP, ...]
    seen: Int[Array, ""]
    grows: Bool[Array, ""]
    adam: Any


class SequentialInfo(AbstractInfo):
    """The figures of a block: ``objective`` is minus its mean log density before it was learned, ``particles`` the mean
    effective number of particles, ``refused`` the number of rows that were not finite."""

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    particles: Float[Array, ""]
    refused: Float[Array, ""]


class Sequential(AbstractInference):
    """Sequential Monte Carlo for deep GPs; with one layer, the sparse online GP.

    Attributes:
        num_particles: S.
        episodes: passes over the data; hyperparameters are learned in all but the last.
        delta: the least gamma^2, as a share of k(x, x), with which an input joins an active set.
        active: ``"inducing"`` starts active sets at the model's inducing inputs; ``"empty"`` with nothing.
        batch_size: rows a block: the compiled unit of a pass, and of hyperparameter learning.
        learning_rate: Adam's, of the hyperparameters.
        learning_particles: particles a row in the gradient of the hyperparameters.
        threshold: particles are resampled when fewer than this share of them is effective.
        forgetting: below 1, each row first moves the layers back to the prior by this factor: for streams that drift.
        shuffle: whether a pass takes the rows in random order.
        shallow_start: whether hyperparameters start from a sparse GP fitted to a subset (Gaussian noise only).
        test_samples: sample paths a prediction: components of the answer.
    """

    num_particles: int = eqx.field(static=True, default=100)
    episodes: int = eqx.field(static=True, default=2)
    delta: float = eqx.field(static=True, default=1e-6)
    active: str = eqx.field(static=True, default="inducing")
    batch_size: int = eqx.field(static=True, default=64)
    learning_rate: float = eqx.field(static=True, default=0.03)
    learning_particles: int = eqx.field(static=True, default=10)
    threshold: float = eqx.field(static=True, default=0.5)
    forgetting: float = eqx.field(static=True, default=1.0)
    shuffle: bool = eqx.field(static=True, default=True)
    shallow_start: bool = eqx.field(static=True, default=True)
    test_samples: int = eqx.field(static=True, default=100)

    def __check_init__(self):
        for name in ("num_particles", "episodes", "batch_size", "learning_particles", "test_samples"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        if self.active not in ("inducing", "empty", "kept", "on"):
            raise SettingError(f"active must be 'inducing' or 'empty', but it is {self.active!r}.")
        if not 0.0 < self.forgetting <= 1.0:
            raise SettingError(f"forgetting is a factor above 0 and at most 1, but it is {self.forgetting}.")
        if self.delta < 0.0 or self.learning_rate <= 0.0 or not 0.0 <= self.threshold <= 1.0:
            raise SettingError(
                "delta must not be negative, learning_rate must be positive and threshold between 0 and 1, but they "
                f"are {self.delta}, {self.learning_rate} and {self.threshold}."
            )

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> SequentialState:
        """Hyperparameters from the shallow start, layers that have seen nothing."""
        if self.shallow_start and isinstance(model.likelihood, Gaussian) and model.layers[-1].z is not None:
            model, _ = shallow_start(model, data, key=key)
        model = cast(model, jnp.float64)
        observed = data.subset(_SHARING_ROWS, seed=0)[2]
        alike = bool((observed == observed[:, :1]).all())
        gps = start_layers(model, shared=alike and noise_is_one_number(model.likelihood))
        return SequentialState(model, gps, jnp.asarray(0, jnp.int32), jnp.asarray(True), None)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase an episode, one step a block; at most ``max_iter`` steps each."""
        blocks = -(-num_data // min(self.batch_size, num_data))
        steps = blocks if max_iter is None else min(max_iter, blocks)
        names = (_LEARN,) * (self.episodes - 1) + (_PASS,)
        return tuple(Phase(name, steps, batch_size=self.batch_size, ordered=not self.shuffle) for name in names)

    def enter(
        self, phase: Phase, state: SequentialState, data: AbstractSource, *, key: PRNGKeyArray
    ) -> SequentialState:
        """Back to the prior, at the active sets of the episode before."""
        gps = state.gps
        if self.active == "inducing":
            gps = tuple(map(_at_inducing, gps, state.model.layers))
        if self.active == "kept":
            gps = tuple(prior_at(g, l, g.x, g.active) for g, l in zip(gps, state.model.layers))
        if self.active == "empty":
            gps = tuple(jax.tree.map(jnp.zeros_like, g) for g in gps)
        adam = self._adam().init(partition(state.model)[0]) if phase.name == _LEARN else None
        return SequentialState(state.model, gps, jnp.asarray(0, jnp.int32), state.grows, adam)

    def step(
        self, phase: Phase, state: SequentialState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[SequentialState, SequentialInfo]:
        """Learn the rows of a block one after the other; in learning episodes, hyperparameters first."""
        batch = cast(batch, jnp.float64)
        # The last block of an episode runs into the next one's rows.
        counts = (state.seen + jnp.arange(len(batch.x))).astype(batch.num_data.dtype) < batch.num_data
        wanted = counts & (batch.weight > 0.0)
        if phase.name == _LEARN:
            state = self._learn_hyperparameters(state, batch, wanted, jax.random.fold_in(key, 1))
        state, rows = self.learn(state, (batch.x, batch.y, batch.observed), wanted, key=key)
        count = jnp.maximum(jnp.sum(rows.learned), 1.0)
        objective = -jnp.sum(rows.log_density * rows.learned) / count
        particles = jnp.sum(rows.particles * rows.learned) / count
        refused = jnp.sum(jnp.where(wanted, 1.0, 0.0) - rows.learned)
        ok = jnp.isfinite(objective) & all_finite(state.gps)
        done = jnp.asarray(False)
        return state, SequentialInfo(objective, ok, done, jnp.zeros_like(objective), particles, refused)

    def back_off(self, state: SequentialState) -> SequentialState:
        """Rows that break a layer are left out already."""
        return state

    def posterior(self, state: SequentialState, data: AbstractSource | None) -> LayeredPosterior:
        """The layers as they stand, as a mixture over sample paths."""
        posterior, reports = _posterior(state.model, state.gps, self.test_samples)
        for level, report in enumerate(reports):
            check_factor(report, f"The covariance of layer {level + 1}'s active inputs")
        return posterior

    def learn(
        self,
        state: SequentialState,
        rows: tuple[Float[Array, "B D"], Float[Array, "B P"], Bool[Array, "B P"]],
        wanted: Bool[Array, " B"],
        *,
        key: PRNGKeyArray,
    ) -> tuple[SequentialState, "RowInfo"]:
        """Predict and then learn rows (x, y, observed) in their order: one compiled scan.

        A row with nothing observed, or with numbers that are not finite, is predicted but not learned. What row n does
        depends on ``fold_in(key, n)`` with n counted from the start of the stream, not on where blocks begin.
        """

        def one(carry: Any, row: Any) -> tuple[Any, RowInfo]:
            gps, seen = carry
            x, y, observed, wanted = row
            gps = jax.lax.cond(seen % _REFRESH == 0, lambda g: refresh(g, state.model.layers), lambda g: g, gps)
            datum = (x[None], jnp.where(observed, y, 0.0)[None], observed[None])
            finite = jnp.all(jnp.isfinite(x)) & jnp.all(jnp.isfinite(datum[1]))
            fine = wanted & finite & jnp.any(observed)
            row_key = jax.random.fold_in(key, seen)
            gps, info = learn_datum(self, state.model, gps, datum, fine, state.grows, key=row_key)
            return (gps, seen + jnp.where(wanted, 1, 0).astype(seen.dtype)), info

        (gps, seen), infos = jax.lax.scan(one, (state.gps, state.seen), (*rows, wanted))
        return SequentialState(state.model, gps, seen, state.grows, state.adam), infos

    def _adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def _learn_hyperparameters(
        self, state: SequentialState, batch: Batch, wanted: Bool[Array, " B"], key: PRNGKeyArray
    ) -> SequentialState:
        """One Adam step up the predictive density of a block that the layers have not seen yet."""
        learned, constant = partition(state.model)

        def loss(learned: DeepGP) -> Float[Array, ""]:
            model = eqx.combine(learned, constant)
            rows = (batch.x, batch.y, batch.observed & wanted[:, None])
            values = predictive_density(model, state.gps, rows, key=key, num_samples=self.learning_particles)
            return -jnp.sum(jnp.where(wanted, values, 0.0)) / jnp.maximum(jnp.sum(jnp.where(wanted, 1.0, 0.0)), 1.0)

        gradient = jax.grad(loss)(learned)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, adam = self._adam().update(gradient, state.adam)
        new = jax.tree.map(jnp.add, learned, updates)
        good = all_finite((new, adam))
        new, adam = jax.tree.map(lambda a, b: jnp.where(good, a, b), (new, adam), (learned, state.adam))
        model = eqx.combine(new, constant)
        return SequentialState(model, refresh(state.gps, model.layers), state.seen, state.grows, adam)


# --- one datum --------------------------------------------------------------------------------------------------------

#: Rows that are looked at to see whether outputs are missing.
_SHARING_ROWS = 1 << 30


class RowInfo(eqx.Module):
    """What a row was before it was learned.

    Attributes:
        mean: of y.
        variance: of y.
        log_density: of the y that was observed.
        particles: the effective number of them.
        learned: 1, or 0 for rows that were left out.
    """

    mean: Float[Array, "*rows P"]
    variance: Float[Array, "*rows P"]
    log_density: Float[Array, "*rows"]
    particles: Float[Array, "*rows"]
    learned: Float[Array, "*rows"]


class Paths(eqx.Module):
    """Particles on their way through the layers.

    Attributes:
        noise: e of every inner layer.
        hidden: h of every inner layer.
        mean: of the last layer's function.
        variance: of the last layer's function.
        log_likelihood: log p(y | h_{L-1}).
    """

    noise: list[Float[Array, "S _"]]
    hidden: list[Float[Array, "S _"]]
    mean: Float[Array, "S Q"]
    variance: Float[Array, "S Q"]
    log_likelihood: Float[Array, " S"]


def learn_datum(
    inference: Sequential,
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: tuple[Float[Array, "1 D"], Float[Array, "1 P"], Bool[Array, "1 P"]],
    fine: Bool[Array, ""],
    grows: Bool[Array, ""],
    *,
    key: PRNGKeyArray,
) -> tuple[tuple[OnlineGP, ...], RowInfo]:
    """Draw, weight, and update every layer; where not ``fine``, only predict."""
    draw_key, move_key = jax.random.split(key)
    noise = _draw(model, inference.num_particles, draw_key)
    paths = follow(model, gps, datum, noise)
    before = paths
    particles = effective_sample_size(paths.log_likelihood)
    paths, log_weights = resample(inference, model, gps, datum, paths, particles, move_key)
    delta = jnp.where(grows, inference.delta, jnp.inf)
    new = update_layers(model, gps, datum, paths, log_weights, delta)
    if inference.forgetting < 1.0:
        new = tuple(forget(gp, layer, inference.forgetting) for gp, layer in zip(new, model.layers, strict=True))
    fine = fine & jnp.isfinite(jnp.sum(log_weights)) & all_finite([gp.weights for gp in new])
    gps = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, gps)
    mean, variance = _moments_of_y(model.likelihood, before)
    density = jax.nn.logsumexp(before.log_likelihood) - jnp.log(float(len(before.log_likelihood)))
    return gps, RowInfo(mean, variance, density, particles, jnp.where(fine, 1.0, 0.0))


def follow(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: tuple[Float[Array, "1 D"], Float[Array, "1 P"], Bool[Array, "1 P"]],
    noise: list[Float[Array, "S _"]],
) -> Paths:
    """Particles with the given noise through all layers."""
    x, y, observed = datum
    size = len(noise[0]) if noise else 1
    h, hidden = x, []
    for level, e in enumerate(noise):
        at = _project(model, gps, level, x, h)
        h = at.mean + jnp.sqrt(at.variance + _noise_between(model.layers[level])) * e
        hidden.append(h)
    at = _project(model, gps, model.depth - 1, x, h)
    variance = jnp.broadcast_to(at.variance, at.mean.shape)
    figures = model.likelihood.log_z(at.mean, variance, jnp.broadcast_to(y, (size, y.shape[1])))
    return Paths(noise, hidden, at.mean, variance, jnp.sum(jnp.where(observed, figures, 0.0), axis=1))


def resample(
    inference: Sequential,
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: tuple[Float[Array, "1 D"], Float[Array, "1 P"], Bool[Array, "1 P"]],
    paths: Paths,
    particles: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Paths, Float[Array, " S"]]:
    """Particles and their log weights; resampled and moved when too few of them are effective."""
    if model.depth == 1:
        return paths, paths.log_likelihood
    size = inference.num_particles

    def renew(paths: Paths) -> tuple[Paths, Float[Array, " S"]]:
        pick_key, step_key, accept_key = jax.random.split(key, 3)
        chosen = systematic_resample(pick_key, paths.log_likelihood)
        old = jax.tree.map(lambda leaf: leaf[chosen], paths)
        steps = _draw(model, size, step_key)
        trial = [(1.0 - _MOVE**2) ** 0.5 * e + _MOVE * step for e, step in zip(old.noise, steps, strict=True)]
        moved = follow(model, gps, datum, trial)
        uniform = jax.random.uniform(accept_key, (size,), paths.log_likelihood.dtype)
        accepted = jnp.log(uniform) < moved.log_likelihood - old.log_likelihood

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(accepted.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, moved, old), jnp.zeros_like(paths.log_likelihood)

    return jax.lax.cond(
        particles < inference.threshold * size, renew, lambda paths: (paths, paths.log_likelihood), paths
    )


def update_layers(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: tuple[Float[Array, "1 D"], Float[Array, "1 P"], Bool[Array, "1 P"]],
    paths: Paths,
    log_weights: Float[Array, " S"],
    delta: Float[Array, ""],
) -> tuple[OnlineGP, ...]:
    """Every layer learns at the weighted estimate of its input."""
    x, y, observed = datum
    weights = jax.nn.softmax(log_weights)[None, :]
    h, new = x, []
    for level, (noise, hidden) in enumerate(zip(paths.noise, paths.hidden, strict=True)):
        at = _project(model, gps, level, x, h)
        total = at.variance[0] + _noise_between(model.layers[level])
        slope, curvature = _change_of_noise(weights, noise, total)
        new.append(absorb(gps[level], at, model.layer_input(level, x, h), slope, curvature, delta))
        h = weights @ hidden
    at = _project(model, gps, model.depth - 1, x, h)
    slope, curvature = site(model.likelihood, at, y, observed)
    return (*new, absorb(gps[-1], at, model.layer_input(model.depth - 1, x, h), slope, curvature, delta))


def site(
    likelihood: AbstractLikelihood, at: Projection, y: Float[Array, "1 P"], observed: Bool[Array, "1 P"]
) -> tuple[Float[Array, " Q"], Float[Array, " R"]]:
    """Slope and curvature of ``log Z``, the datum's log predictive density, in the mean of each latent function.

    The second derivative follows from the first ones: ``d2/dm2 log Z = 2 d/dv log Z - (d/dm log Z)^2``.
    """

    def log_z(mean: Float[Array, "1 Q"], variance: Float[Array, "1 Q"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(observed, likelihood.log_z(mean, variance, y), 0.0))

    variance = jnp.broadcast_to(at.variance, at.mean.shape)
    slope, by_variance = jax.grad(log_z, (0, 1))(at.mean, variance)
    curvature = jnp.minimum(2.0 * by_variance - slope**2, 0.0)[0]
    shared = at.variance.shape[1] == 1
    return slope[0], jnp.mean(curvature, keepdims=True) if shared else curvature


def _change_of_noise(
    weights: Float[Array, "1 S"], noise: Float[Array, "S W"], variance: Float[Array, " 1"]
) -> tuple[Float[Array, " W"], Float[Array, " 1"]]:
    """Slope and curvature that give the noise its weighted moments; all outputs share one curvature, their mean."""
    mean = weights @ noise
    spread = jnp.mean(weights @ (noise - mean) ** 2)
    # A weighted variance of few particles is too small on average; equal weights are to give exactly 1.
    size = len(noise)
    lost = jnp.minimum(jnp.sum(weights**2), 0.5)
    spread = spread * (1.0 - 1.0 / max(size, 2)) / (1.0 - lost)
    curvature = jnp.minimum(spread - 1.0, 0.0) / variance
    return mean[0] / jnp.sqrt(variance), curvature


# --- hyperparameters --------------------------------------------------------------------------------------------------


def predictive_density(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    rows: tuple[Float[Array, "B D"], Float[Array, "B P"], Bool[Array, "B P"]],
    *,
    key: PRNGKeyArray,
    num_samples: int,
) -> Float[Array, " B"]:
    """The particle estimate of ``log p(y | x, what the layers know)`` of every row, differentiable in the model."""
    gps = refresh(gps, model.layers)
    count = len(rows[0])
    samples = 1 if model.depth == 1 else num_samples
    x, y, observed = (jnp.tile(part, (samples, 1)) for part in rows)
    h = x
    for level, layer in enumerate(model.layers[:-1]):
        at = _project(model, gps, level, x, h)
        e = jax.random.normal(jax.random.fold_in(key, level), at.mean.shape, at.mean.dtype)
        h = at.mean + jnp.sqrt(at.variance + _noise_between(layer)) * e
    at = _project(model, gps, model.depth - 1, x, h)
    figures = model.likelihood.log_z(at.mean, jnp.broadcast_to(at.variance, at.mean.shape), y)
    values = jnp.sum(jnp.where(observed, figures, 0.0), axis=1).reshape(samples, count)
    return jax.nn.logsumexp(values, axis=0) - jnp.log(float(samples))


# --- starts -----------------------------------------------------------------------------------------------------------


def start_layers(model: DeepGP, *, shared: bool) -> tuple[OnlineGP, ...]:
    """Online GPs that have seen nothing, with the layers' numbers of inducing inputs as their budgets."""
    gps = []
    for level, layer in enumerate(model.layers):
        if layer.z is None:
            raise SettingError("method='sequential' keeps a budget of active inputs a layer: set num_inducing.")
        inner = level < model.depth - 1
        gps.append(empty(layer, layer.z.shape[1], layer.num_inducing, shared=inner or shared))
    return tuple(gps)


def noise_is_one_number(likelihood: AbstractLikelihood) -> bool:
    """Whether every output of a row tells its function equally much."""
    return isinstance(likelihood, Gaussian) and likelihood.variance.raw.size == 1


@eqx.filter_jit
def _at_inducing(gp: OnlineGP, layer: Layer) -> OnlineGP:
    assert layer.z is not None
    x = jnp.concatenate([layer.z.value, jnp.zeros_like(layer.z.value[:1])])
    return prior_at(gp, layer, x, jnp.arange(len(x)) < layer.num_inducing)


@eqx.filter_jit
def _posterior(model: DeepGP, gps: tuple[OnlineGP, ...], num_samples: int) -> tuple[LayeredPosterior, list[Any]]:
    answers, reports = conditionals(gps, model.layers)
    return LayeredPosterior(model, answers, num_samples), reports


# --- pieces -----------------------------------------------------------------------------------------------------------


def _project(model: DeepGP, gps: tuple[OnlineGP, ...], level: int, x: Array, h: Array) -> Projection:
    if len(x) < len(h):
        x = jnp.broadcast_to(x, (len(h), x.shape[1]))
    return project(gps[level], model.layers[level], model.layer_input(level, x, h))


def _draw(model: DeepGP, size: int, key: PRNGKeyArray) -> list[Float[Array, "S _"]]:
    keys = [jax.random.fold_in(key, level) for level in range(model.depth - 1)]
    return [
        balanced_normal(one, (size, layer.width), jnp.float64)
        for one, layer in zip(keys, model.layers[:-1], strict=True)
    ]


def _noise_between(layer: Layer) -> Float[Array, ""]:
    return jnp.zeros((), jnp.float64) if layer.noise is None else layer.noise.value


def _moments_of_y(likelihood: AbstractLikelihood, paths: Paths) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Mean and total variance of y over the particles, before they were weighted."""
    means, variances = likelihood.predict_moments(paths.mean, paths.variance)
    mean = jnp.mean(means, axis=0)
    return mean, jnp.mean(variances, axis=0) + jnp.mean((means - mean[None]) ** 2, axis=0)
