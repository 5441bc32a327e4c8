"""Sequential inference for deep GPs (Wang et al. 2016): every layer is a sparse online GP, and each datum is met once.

At datum n, S particles run through the layers, each drawn from what its layer knows so far,

    h_l = m_l(h_{l-1}) + sqrt(v_l(h_{l-1})) e_l,    l < L,    e_l ~ N(0, I),

and are weighted by what the last layer makes of them, w ~ p(y | h_{L-1}), its own value integrated out. Then every
layer learns: layer l at the weighted estimate of its input, with the weighted moments of its noise e_l. The main text
of the paper is not available; this is a reconstruction, with four choices that its supplement leaves open.

* A layer learns from the change of its noise's moments. Before the datum they are 0 and 1, so a mean of e_l of c and a
  variance of s mean a slope c / sqrt(v) and a curvature (s - 1) / v of the log predictive density: a datum that says
  nothing changes nothing. To learn the estimate of h_l as if it had been observed would count the prior every time.
* Particles are drawn where the datum will send them, from the Gaussian that the linearised layers give, and weighted
  back to their prior: with many outputs, draws from the prior would all miss.
* Where the effective number of particles falls below a share of S, they are resampled and moved by one step of a chain
  that leaves p(e | y) as it is (preconditioned Crank-Nicolson), so an outlier finds particles too.
* The last layer's slope and curvature are derivatives of the likelihood's log Z: exact for Gaussian noise, moment
  matching for all other likelihoods (Csato and Opper 2002). Particles tell every output something else, so outputs
  share a covariance only where there are no inner layers.

An episode is a pass over the data. Hyperparameters start from a shallow sparse GP on a subset. In all episodes but the
last they follow the gradient of the particle estimate of the predictive density of each block of rows, taken before the
block is learned; the function values at the active inputs count as given. Every episode begins at the prior. Depth 1 is
the sparse online GP.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractInfo, AbstractPosterior, Phase, rows_or_auto
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.inference._online import OnlineGP, conditionals, forget, refresh
from fathomgp.inference._particles import (
    Datum,
    Paths,
    draw_guided,
    draw_noise,
    effective_sample_size,
    follow,
    guide,
    noise_between,
    project_layer,
    resample_and_move,
    site,
    systematic_resample,
    unlearned,
    update_layers,
)
from fathomgp.inference._sequential_start import (
    START_ROWS,
    keep_log_noise,
    noise_is_one_number,
    prior_at_inducing,
    scale_inner_layers,
    start_hyperparameters,
    start_layers,
)
from fathomgp.likelihoods import HeteroscedasticGaussian
from fathomgp.linalg import check_factor
from fathomgp.model import DeepGP
from fathomgp.parameters import all_finite, cast, partition
from fathomgp.precision import clamp_variance
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged

#: Rows between two computations of V from its definition.
_REFRESH = 128
#: Particles are guided where the inner layers have at most so many outputs together: a guide costs their cube.
_MAX_GUIDED_WIDTH = 64
#: Rows of one compiled block of a stream.
_STREAM_ROWS = 1024
#: Rows that are looked at to see whether outputs go missing separately.
_MASK_ROWS = 1 << 20
#: The two kinds of episode.
_LEARN, _PASS = "learn", "pass"


@tagged("sequential/state")
class SequentialState(eqx.Module):
    """The model and what its layers have learned.

    Attributes:
        model: hyperparameters; its inducing inputs only say where active sets begin.
        gps: one online GP a layer.
        seen: rows met in this episode, or by this stream.
        adam: the optimiser's state in episodes that learn hyperparameters, else ``None``.
    """

    model: DeepGP
    gps: tuple[OnlineGP, ...]
    seen: Int[Array, ""]
    adam: Any


class SequentialInfo(AbstractInfo):
    """The figures of a block.

    Attributes:
        objective: minus the mean log density of its rows, each before it was learned.
        ok: whether all is finite.
        done: never.
        jitter: none is added.
        particles: the mean effective number of particles.
        refused: rows that were not learned, because they were not finite or nothing was observed.
    """

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    particles: Float[Array, ""]
    refused: Float[Array, ""]


@tagged("method/sequential")
class Sequential(AbstractInference):
    """Sequential Monte Carlo for deep GPs; with one layer, the sparse online GP.

    Attributes:
        num_particles: S.
        episodes: passes over the data; hyperparameters are learned in all but the last. A noise that varies learns an
            equal share of each row in each of them.
        delta: the least gamma^2, as a share of k(x, x), with which an input joins an active set, if that is above
            1e-6, and the white noise of the function values there.
        budget: N_AC, active inputs a layer; ``None`` takes the layers' numbers of inducing inputs.
        active: ``"empty"`` starts episodes without active inputs; ``"inducing"`` at the model's inducing inputs.
        batch_size: rows a block: the compiled unit of a pass, and of hyperparameter learning.
        learning_rate: Adam's, of the hyperparameters.
        learning_particles: particles a row in the gradient of the hyperparameters.
        threshold: particles are resampled when fewer than this share of them is effective.
        forgetting: below 1, each row first moves the layers back to the prior by this factor, and is then predicted and
            learned: for streams that drift.
        averaged_covariance: whether outputs share one covariance although particles tell each something else: it is
            then right on average only, and costs less where a deep model has many outputs.
        shuffle: whether a pass takes the rows in random order.
        shallow_start: whether hyperparameters start from a shallow sparse GP with Gaussian noise.
        start_rows: rows that the shallow start looks at, at the most; ``"auto"`` is 2,000.
        inner_scale: the inner kernels' variances start at this share of the recipe's: layers that scatter their
            particles widely teach the next one little.
        test_samples: sample paths a prediction: components of the answer.
    """

    num_particles: int = eqx.field(static=True, default=100)
    episodes: int = eqx.field(static=True, default=2)
    delta: float = eqx.field(static=True, default=1e-6)
    budget: int | None = eqx.field(static=True, default=None)
    active: str = eqx.field(static=True, default="empty")
    batch_size: int = eqx.field(static=True, default=64)
    learning_rate: float = eqx.field(static=True, default=0.03)
    learning_particles: int = eqx.field(static=True, default=10)
    threshold: float = eqx.field(static=True, default=0.5)
    forgetting: float = eqx.field(static=True, default=1.0)
    averaged_covariance: bool = eqx.field(static=True, default=False)
    shuffle: bool = eqx.field(static=True, default=True)
    shallow_start: bool = eqx.field(static=True, default=True)
    start_rows: int | str = eqx.field(static=True, default="auto")
    inner_scale: float = eqx.field(static=True, default=0.1)
    test_samples: int = eqx.field(static=True, default=100)

    def __check_init__(self):
        for name in ("num_particles", "episodes", "batch_size", "learning_particles", "test_samples"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        self._num_start_rows()
        if self.active not in ("inducing", "empty"):
            raise SettingError(f"active must be 'inducing' or 'empty', but it is {self.active!r}.")
        if not 0.0 < self.forgetting <= 1.0:
            raise SettingError(f"forgetting is a factor above 0 and at most 1, but it is {self.forgetting}.")
        if self.delta < 0.0 or self.learning_rate <= 0.0 or not 0.0 <= self.threshold <= 1.0:
            raise SettingError(
                "delta must not be negative, learning_rate must be positive and threshold between 0 and 1, but they "
                f"are {self.delta}, {self.learning_rate} and {self.threshold}."
            )

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> SequentialState:
        """Hyperparameters from a shallow GP, layers that have seen nothing."""
        model = scale_inner_layers(cast(model, jnp.float64), self.inner_scale)
        if self.shallow_start:
            model = start_hyperparameters(model, data, rows=self._num_start_rows(), key=key)
        observed = data.subset(_MASK_ROWS, seed=0)[2]
        alike = bool((observed == observed[:, :1]).all())
        shared = alike and noise_is_one_number(model.likelihood)
        averaged = self.averaged_covariance
        gps = start_layers(model, self.budget, shared=shared, averaged=averaged, delta=self.delta)
        return SequentialState(model, gps, jnp.asarray(0, jnp.int32), None)

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """How many rows hyperparameters start from, where these are not all, and whether covariances are averaged."""
        rows, told = self._num_start_rows(), []
        if self.shallow_start and data.num_data > rows:
            told.append(
                f"Hyperparameters start from a shallow GP on {rows} of the {data.num_data} rows (start_rows sets how "
                f"many); {self.episodes - 1} of {self.episodes} episodes refine them on all rows."
            )
        if self.averaged_covariance and model.depth > 1:
            told.append("averaged_covariance: the error bars of single outputs are right on average only.")
        return tuple(told)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase an episode, one step a block; at most ``max_iter`` steps each."""
        blocks = -(-num_data // min(self.batch_size, num_data))
        steps = blocks if max_iter is None else min(max_iter, blocks)
        names = (_LEARN,) * (self.episodes - 1) + (_PASS,)
        return tuple(Phase(name, steps, batch_size=self.batch_size, ordered=not self.shuffle) for name in names)

    def enter(
        self, phase: Phase, state: SequentialState, data: AbstractSource, *, key: PRNGKeyArray
    ) -> SequentialState:
        """Back to the prior: rows must not count twice.

        A log noise is kept from one episode to the next, as residuals are only seen once the function is known; of
        each row it learns one share an episode, which add up to the row.
        """
        gps = jax.tree.map(jnp.zeros_like, state.gps)
        if self.active == "inducing":
            gps = tuple(map(prior_at_inducing, gps, state.model.layers))
        if isinstance(state.model.likelihood, HeteroscedasticGaussian):
            gps = (*gps[:-1], keep_log_noise(state.gps[-1], state.model.layers[-1]))
        adam = self._adam().init(partition(state.model)[0]) if phase.name == _LEARN else None
        return SequentialState(state.model, gps, jnp.asarray(0, jnp.int32), adam)

    def step(
        self, phase: Phase, state: SequentialState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[SequentialState, SequentialInfo]:
        """Learn the rows of a block one after the other; in learning episodes, hyperparameters first."""
        batch = cast(batch, jnp.float64)
        # The last block of an episode runs into the next one's rows.
        counts = (state.seen + jnp.arange(len(batch.x), dtype=jnp.int32)).astype(batch.num_data.dtype) < batch.num_data
        wanted = counts & (batch.weight > 0.0)
        hyper_key, learn_key = jax.random.split(key)
        if phase.name == _LEARN:
            state = self._learn_hyperparameters(state, batch, wanted, hyper_key)
        seen, share = (batch.x, batch.y, batch.observed), 1.0 / self.episodes
        state, rows = self.learn(state, seen, wanted, key=learn_key, noise_share=share)
        count = jnp.maximum(jnp.sum(rows.learned), 1.0)
        objective = -jnp.sum(jnp.where(rows.learned > 0.0, rows.log_density, 0.0)) / count
        particles = jnp.sum(jnp.where(rows.learned > 0.0, rows.particles, 0.0)) / count
        refused = jnp.sum(jnp.where(wanted, 1.0, 0.0) - rows.learned)
        ok = jnp.isfinite(objective) & all_finite(state.gps)
        done = jnp.asarray(False)
        return state, SequentialInfo(objective, ok, done, jnp.zeros_like(objective), particles, refused)

    def back_off(self, state: SequentialState) -> SequentialState:
        """Rows that break a layer are left out already."""
        return state

    def posterior(self, state: SequentialState, data: AbstractSource | None) -> "SequentialPosterior":
        """The layers as they stand."""
        layered, reports = _layered(state, self.test_samples)
        for level, report in enumerate(reports):
            check_factor(report, f"The covariance of layer {level + 1}'s active inputs")
        kept = SequentialState(state.model, state.gps, state.seen, None)
        return SequentialPosterior(state.model, layered, kept, self)

    def learn(
        self,
        state: SequentialState,
        rows: tuple[Float[Array, "B D"], Float[Array, "B P"], Bool[Array, "B P"]],
        wanted: Bool[Array, " B"],
        *,
        key: PRNGKeyArray,
        predict: bool = False,
        noise_share: float = 1.0,
    ) -> tuple[SequentialState, "RowInfo"]:
        """Predict and then learn rows (x, y, observed) in their order: one compiled scan.

        A row with nothing observed, or with numbers that are not finite, is predicted but not learned. What row n does
        depends on ``fold_in(key, n)`` with n counted from the start of the stream, not on where blocks begin.
        ``predict`` asks for the moments of y too; a noise that varies learns ``noise_share`` of each row.
        """

        def one(carry: Any, row: Any) -> tuple[Any, RowInfo]:
            gps, seen = carry
            x, y, observed, wanted = row
            due = wanted & (seen % _REFRESH == 0)
            gps = jax.lax.cond(due, lambda gps: refresh(gps, state.model.layers), lambda gps: gps, gps)
            datum = Datum(x[None], jnp.where(observed, y, 0.0)[None], observed[None])
            finite = jnp.all(jnp.isfinite(x)) & jnp.all(jnp.isfinite(datum.y))
            fine = wanted & finite & jnp.any(observed)
            row_key = jax.random.fold_in(key, seen)
            gps, info = learn_datum(
                self, state, gps, datum, fine, key=row_key, predict=predict, noise_share=noise_share
            )
            return (gps, seen + jnp.where(wanted, 1, 0).astype(seen.dtype)), info

        (gps, seen), infos = jax.lax.scan(one, (state.gps, state.seen), (*rows, wanted))
        return SequentialState(state.model, gps, seen, state.adam), infos

    def _num_start_rows(self) -> int:
        return rows_or_auto("start_rows", self.start_rows, START_ROWS)

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
        return SequentialState(model, refresh(state.gps, model.layers), state.seen, adam)


@tagged("posterior/sequential")
class SequentialPosterior(AbstractPosterior):
    """What the layers know, ready to predict and to learn more.

    Attributes:
        model: the fitted model.
        layered: the layers' q(f): the active inputs play the part of inducing inputs.
        state: what the next row needs.
        algorithm: how it is learned.
    """

    model: DeepGP
    layered: LayeredPosterior
    state: SequentialState
    algorithm: Sequential

    @property
    def num_samples(self) -> int:
        """S of a prediction."""
        return self.layered.num_samples

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """A component a sample path."""
        return self.layered.predict_f(x, key=key, full_cov=full_cov)

    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Draws from the joint posterior of the rows of each call."""
        return self.layered.draw_functions(x, key=key, n=n)

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Joint draws of every layer."""
        return self.layered.propagate(x, key=key)

    def fill_in(
        self,
        x: Float[Array, "N D"],
        y: Float[Array, "N P"],
        observed: Bool[Array, "N P"],
        *,
        learned: bool | Bool[Array, " N"],
        key: PRNGKeyArray,
        num_particles: int | None = None,
    ) -> Mixture:
        """The latent functions at rows of which some outputs are known, given these.

        The particles of a row are weighted by its own observed outputs and resampled, so components weigh the same.

        Args:
            x: inputs.
            y: outputs; whatever where they are not observed.
            observed: which outputs are known.
            learned: whether the layers have learned these rows, with these outputs, already: all of them or row by row.
                What they taught is then taken out of the layers first, or it would count twice.
            key: of the particles.
            num_particles: as many as in learning unless given: log densities want more of them where the noise is small
                beside what is uncertain, as a mixture of few narrow components has gaps.
        """
        size = (num_particles or self.algorithm.num_particles) if self.model.depth > 1 else 1
        return _fill_in(self.state, (x, y, observed, jnp.broadcast_to(jnp.asarray(learned), (len(x),))), size, key)

    def learn(
        self,
        x: Float[np.ndarray, "B D"],
        y: Float[np.ndarray, "B P"],
        observed: Bool[np.ndarray, "B P"],
        *,
        key: PRNGKeyArray,
        predict: bool = False,
    ) -> tuple["SequentialPosterior", "RowInfo"]:
        """The posterior after more rows, and what was known of each before it was learned: on the host.

        The cost of a row does not depend on what came before. Blocks of any length share few compiled programs.
        """
        state = self.state if observed.all() else _with_own_covariances(self.state)
        infos = []
        for start in range(0, len(x), _STREAM_ROWS):
            rows = [part[start : start + _STREAM_ROWS] for part in (x, y, observed)]
            count = len(rows[0])
            size = 1 << (count - 1).bit_length()
            padded = tuple(
                jnp.asarray(np.concatenate([part, np.repeat(part[:1], size - count, axis=0)])) for part in rows
            )
            block_key = jax.random.clone(key)  # a row folds it with its number in the stream, not in the block
            state, info = _learn_block(self.algorithm, state, padded, jnp.arange(size) < count, block_key, predict)
            infos.append(jax.tree.map(lambda leaf, count=count: np.asarray(leaf)[:count], info))
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *infos)
        return self.algorithm.posterior(state, None), joined


# --- one datum --------------------------------------------------------------------------------------------------------


class RowInfo(eqx.Module):
    """What a row was before it was learned.

    Attributes:
        mean: of y; NaN where nobody asked for it.
        variance: of y; likewise.
        log_density: of the y that was observed.
        particles: the effective number of them.
        learned: 1, or 0 for rows that were left out.
    """

    mean: Float[Array, "*rows P"]
    variance: Float[Array, "*rows P"]
    log_density: Float[Array, "*rows"]
    particles: Float[Array, "*rows"]
    learned: Float[Array, "*rows"]


def learn_datum(
    algorithm: Sequential,
    state: SequentialState,
    gps: tuple[OnlineGP, ...],
    datum: Datum,
    fine: Bool[Array, ""],
    *,
    key: PRNGKeyArray,
    predict: bool,
    noise_share: float = 1.0,
) -> tuple[tuple[OnlineGP, ...], RowInfo]:
    """Forget, draw, weight, and update every layer; where not ``fine``, only predict."""
    model, size, old = state.model, algorithm.num_particles, gps
    if algorithm.forgetting < 1.0:
        gps = tuple(forget(gp, layer, algorithm.forgetting) for gp, layer in zip(gps, model.layers, strict=True))
    draw_key, move_key, predict_key = jax.random.split(key, 3)
    paths, log_weights = weighted_paths(model, gps, datum, size, key=draw_key)
    particles = effective_sample_size(log_weights)
    density = jax.nn.logsumexp(log_weights) - jnp.log(float(len(log_weights)))

    def renew(paths: Paths) -> tuple[Paths, Float[Array, " S"]]:
        return resample_and_move(model, gps, datum, paths, log_weights, move_key), jnp.zeros_like(log_weights)

    if model.depth > 1:
        few = particles < algorithm.threshold * size
        paths, log_weights = jax.lax.cond(few, renew, lambda paths: (paths, log_weights), paths)
    new = update_layers(model, gps, datum, paths, log_weights, noise_share)
    fine = fine & jnp.isfinite(density) & all_finite([gp.mean for gp in new])
    gps_after = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
    mean, variance = _moments_of_y(model, gps, datum, size, predict_key) if predict else _no_moments(datum)
    return gps_after, RowInfo(mean, variance, density, particles, jnp.where(fine, 1.0, 0.0))


def weighted_paths(
    model: DeepGP, gps: tuple[OnlineGP, ...], datum: Datum, size: int, *, key: PRNGKeyArray
) -> tuple[Paths, Float[Array, " S"]]:
    """Particles and their log weights, whose mean exponential estimates p(y | x): guided where that is affordable."""
    width = sum(layer.width for layer in model.layers[:-1])
    if not 0 < width <= _MAX_GUIDED_WIDTH:
        paths = follow(model, gps, datum, draw_noise(model, size, key) if width else [])
        return paths, paths.log_likelihood
    noise, log_ratio = draw_guided(model, guide(model, gps, datum), size, key)
    paths = follow(model, gps, datum, noise)
    return paths, paths.log_likelihood + log_ratio


def _moments_of_y(
    model: DeepGP, gps: tuple[OnlineGP, ...], datum: Datum, size: int, key: PRNGKeyArray
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Mean and total variance of y, from particles that know nothing of it."""
    paths = follow(model, gps, datum, draw_noise(model, size, key) if model.depth > 1 else [])
    means, variances = model.likelihood.predict_moments(paths.mean, paths.variance)
    mean = jnp.mean(means, axis=0)
    return mean, jnp.mean(variances, axis=0) + jnp.mean((means - mean[None]) ** 2, axis=0)


def _no_moments(datum: Datum) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    nothing = jnp.full(datum.y.shape[1], jnp.nan)
    return nothing, nothing


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
        at = project_layer(model, gps, level, x, h)
        e = jax.random.normal(jax.random.fold_in(key, level), at.mean.shape, at.mean.dtype)
        h = at.mean + jnp.sqrt(at.variance + noise_between(layer)) * e
    at = project_layer(model, gps, model.depth - 1, x, h)
    figures = model.likelihood.log_z(at.mean, jnp.broadcast_to(at.variance, at.mean.shape), y)
    values = jnp.sum(jnp.where(observed, figures, 0.0), axis=1).reshape(samples, count)
    return jax.nn.logsumexp(values, axis=0) - jnp.log(float(samples))


# --- pieces -----------------------------------------------------------------------------------------------------------


@program
def _layered(state: SequentialState, num_samples: int) -> tuple[LayeredPosterior, list[Any]]:
    answers, reports = conditionals(state.gps, state.model.layers)
    return LayeredPosterior(state.model, answers, num_samples), reports


@program
def _fill_in(state: SequentialState, rows: tuple[Array, ...], size: int, key: PRNGKeyArray) -> Mixture:
    draw_key, pick_key = jax.random.split(key)
    model = state.model

    def one(row: tuple[Array, ...]) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
        x, y, observed, learned = row
        datum = Datum(x[None], jnp.where(observed, y, 0.0)[None], observed[None])
        # The same noise for all rows, as in every prediction, and for the same row with and without what it taught.
        weigh = lambda gps: weighted_paths(model, gps, datum, size, key=jax.random.clone(draw_key))  # noqa: E731
        gps = jax.lax.cond(learned, lambda gps: unlearned(model, gps, datum, weigh), lambda gps: gps, state.gps)
        paths, log_weights = weigh(gps)
        slope, curvature = site(model.likelihood, paths.mean, paths.variance, datum)
        mean = paths.mean + slope * paths.variance
        variance = clamp_variance(paths.variance + curvature * paths.variance**2)
        chosen = systematic_resample(jax.random.clone(pick_key), log_weights)
        return mean[chosen], variance[chosen]

    means, variances = jax.lax.map(one, rows)
    return Mixture(jnp.zeros(size), jnp.swapaxes(means, 0, 1), jnp.swapaxes(variances, 0, 1), None)


@program
def _learn_block(
    algorithm: Sequential, state: SequentialState, rows: Any, wanted: Array, key: PRNGKeyArray, predict: bool
) -> tuple[SequentialState, RowInfo]:
    return algorithm.learn(state, cast(rows, jnp.float64), wanted, key=key, predict=predict)


def _with_own_covariances(state: SequentialState) -> SequentialState:
    """A covariance for every output of the last layer, now that they no longer see the same points."""
    last = state.gps[-1]
    own = jnp.broadcast_to(last.covariance, (last.mean.shape[1], *last.covariance.shape[1:]))
    return eqx.tree_at(lambda s: s.gps[-1].covariance, state, own)
