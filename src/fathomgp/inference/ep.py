r"""Expectation propagation proper, with a factor a datum (EP) or one average factor (stochastic EP).

Sections 3 and 4 of Bui et al. (2016), whitened, with power alpha. The posterior of a layer's inducing values is
:math:`q(v) \propto N(v; 0, I) \prod_n t_n(v)`, with Gaussian factors of precision T_n and precision-mean s_n. For every
row of a batch, side by side:

1. deletion: the cavity :math:`q^{\setminus n} \propto q / t_n^\alpha`;
2. moment matching: with :math:`\log Z_n` from one deterministic pass and H = g g^T - 2 G,

   .. math:: m = m^\setminus + V^\setminus g, \quad V = V^\setminus - V^\setminus H V^\setminus, \quad
             g = \frac{d \log Z}{d m^\setminus}, \quad G = \frac{d \log Z}{d V^\setminus};

3. the new factor, what the matched Gaussian has beyond the cavity;
4. a damped update of the natural parameters: of the row's own factor (EP), or of the one factor that stands for all, by
   the average of the batch's new ones (SEP).

A row whose cavity or new posterior is no Gaussian keeps its factor. Hyperparameters stay as they are, or alternate: a
few Adam steps on the energy with the factors held, at whose fixed point the energy does not change with them.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractInfo, Phase
from fathomgp.inference._descent import descend
from fathomgp.inference._propagation import PropagatedPosterior, layer_input, match_moments, push
from fathomgp.inference.aep import log_z
from fathomgp.inference.dsvi import compiled_conditions
from fathomgp.linalg import Factor, check_factor, inverse_lower, logdet_lower, safe_cholesky
from fathomgp.model import DeepGP, Layer, Whitened, Whitener, prepare_all, project
from fathomgp.parameters import all_finite, partition
from fathomgp.precision import clamp_variance
from fathomgp.tags import tagged

#: Numbers that the factors of all data may hold.
_MAX_NUMBERS = 1 << 27


class Natural(eqx.Module):
    """Gaussians of a layer's whitened inducing values by natural parameters, one an output.

    Attributes:
        precision: the inverse covariance.
        shift: precision times mean.
    """

    precision: Float[Array, "*batch P M M"]
    shift: Float[Array, "*batch P M"]


class EPState(eqx.Module):
    """The model, the factors of every layer (one a datum, or one for all), and Adam's memory."""

    model: DeepGP
    factors: tuple[Natural, ...]
    adam: Any
    caution: Float[Array, ""]


class EPInfo(AbstractInfo):
    """The figures of a step: ``objective`` is minus the log evidence a datum, ``change`` the factors' largest change.

    ``kept`` counts the rows that had to keep their factors.
    """

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    change: Float[Array, ""]
    kept: Float[Array, ""]


@tagged("method/ep")
class EP(AbstractInference):
    """Expectation propagation (``tied=False``) and stochastic expectation propagation (``tied=True``).

    Attributes:
        tied: one average factor for all data instead of one a datum.
        alpha: the power, in (0, 1].
        damping: how far factors move towards their new values: 1 all the way.
        sweeps: passes over the data, at most, before the hyperparameters are touched.
        batch_size: rows that are updated side by side.
        tolerance: a pass over all rows at once ends the phase when no factor moved by more than this share.
        rounds: how often hyperparameters are learned and factors found again; 0 leaves the hyperparameters alone.
        hyper_steps: Adam steps a round.
        learning_rate: Adam's.
    """

    tied: bool = eqx.field(static=True, default=False)
    alpha: float = eqx.field(static=True, default=1.0)
    damping: float = eqx.field(static=True, default=0.5)
    sweeps: int = eqx.field(static=True, default=50)
    batch_size: int = eqx.field(static=True, default=256)
    tolerance: float = eqx.field(static=True, default=1e-8)
    rounds: int = eqx.field(static=True, default=0)
    hyper_steps: int = eqx.field(static=True, default=20)
    learning_rate: float = eqx.field(static=True, default=0.02)

    def __check_init__(self):
        if not 0.0 < self.alpha <= 1.0:
            raise SettingError(f"alpha is a power above 0 and up to 1, but it is {self.alpha}.")
        if not 0.0 < self.damping <= 1.0:
            raise SettingError(f"damping is a step above 0 and up to 1, but it is {self.damping}.")
        for name in ("sweeps", "batch_size", "hyper_steps"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> EPState:
        """Factors that say nothing."""
        count = 1 if self.tied else data.num_data
        numbers = sum(count * layer.width * layer.num_inducing**2 for layer in model.layers)
        if numbers > _MAX_NUMBERS:
            raise SettingError(
                f"A factor for each of {count} rows would hold {numbers:.2g} numbers: use tied=True, or fewer inducing "
                "points."
            )
        factors = tuple(_no_information(layer, count) for layer in model.layers)
        one = jnp.ones((), factors[0].shift.dtype)
        return EPState(model, factors, self._adam().init((partition(model)[0], ())), one)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """Sweeps, and rounds of hyperparameters and sweeps; ``max_iter`` bounds the steps of each phase."""
        batches = -(-num_data // min(self.batch_size, num_data))
        sweep = Phase("factors", self.sweeps * batches if max_iter is None else max_iter, self.batch_size)
        learn = Phase("hyperparameters", self.hyper_steps if max_iter is None else max_iter, self.batch_size)
        return (sweep, *((learn, sweep) * self.rounds))

    def enter(self, phase: Phase, state: EPState, data: AbstractSource, *, key: PRNGKeyArray) -> EPState:
        """Nothing changes shape."""
        return state

    def step(self, phase: Phase, state: EPState, batch: Batch, *, key: PRNGKeyArray) -> tuple[EPState, EPInfo]:
        """New factors for the rows of a batch, or one Adam step on the hyperparameters."""
        if phase.name == "hyperparameters":
            return self._learn(state, batch)
        damping = self.damping * state.caution
        factors, evidence, jitter, kept = update_factors(
            state.model, state.factors, batch, alpha=self.alpha, tied=self.tied, damping=damping
        )
        change = _largest_change(state.factors, factors)
        done = (change < self.tolerance) & (jnp.sum(batch.weight) >= batch.num_data)
        ok = jnp.isfinite(evidence) & all_finite(factors)
        new = EPState(state.model, factors, state.adam, state.caution)
        return new, EPInfo(-evidence / batch.num_data, ok, done, jitter, change, kept)

    def back_off(self, state: EPState) -> EPState:
        """Halve the damping."""
        return eqx.tree_at(lambda s: s.caution, state, 0.5 * state.caution)

    def posterior(self, state: EPState, data: AbstractSource | None) -> PropagatedPosterior:
        """q(f), answered by one deterministic pass."""
        num_data = 1.0 if not self.tied else _count_of(data)
        q = whitened(state.factors, num_data)
        conditionals, reports = compiled_conditions(state.model, q)
        for level, report in enumerate(reports):
            check_factor(report, f"The covariance of layer {level + 1}'s inducing points")
        return PropagatedPosterior(state.model, tuple(conditionals))

    def _learn(self, state: EPState, batch: Batch) -> tuple[EPState, EPInfo]:
        learned, constant = partition(state.model)

        def objective(learned: DeepGP) -> Float[Array, ""]:
            model = eqx.combine(learned, constant)
            return -log_evidence(model, state.factors, batch, alpha=self.alpha, tied=self.tied) / batch.num_data

        value, gradient = jax.value_and_grad(objective)(learned)
        model, _, adam = descend(self._adam(), state.adam, state.model, (), (gradient, ()), state.caution)
        ok = jnp.isfinite(value) & all_finite(model)
        zero = jnp.zeros_like(value)
        return EPState(model, state.factors, adam, state.caution), EPInfo(
            value, ok, jnp.asarray(False), zero, zero, zero
        )

    def _adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)


# --- deletion, moment matching, update --------------------------------------------------------------------------------


class Cavities(eqx.Module):
    """Cavities of a batch's rows in one layer: moments, natural parameters, log normalisers, and whether they exist."""

    mean: Float[Array, "B P M"]
    covariance: Float[Array, "B P M M"]
    natural: Natural
    log_normaliser: Float[Array, " B"]
    ok: Bool[Array, " B"]


def update_factors(
    model: DeepGP,
    factors: tuple[Natural, ...],
    batch: Batch,
    *,
    alpha: float,
    tied: bool,
    damping: Float[Array, ""] | float,
) -> tuple[tuple[Natural, ...], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Steps 1 to 4 for a batch: the factors, the log evidence before, the jitter, and how many rows kept theirs."""
    whiteners = prepare_all(model.layers)
    posterior, cavities = delete(factors, batch, alpha=alpha, tied=tied)
    values, slopes = _log_z_and_slopes(model, whiteners, cavities, batch, alpha)
    evidence = _evidence(posterior, cavities, values, batch, alpha)
    matched = [_match(cavity, slope[0], slope[1], alpha) for cavity, slope in zip(cavities, slopes, strict=True)]
    fine = jnp.isfinite(values)
    for cavity, (_, ok) in zip(cavities, matched, strict=True):
        fine = fine & cavity.ok & ok
    use = fine & (batch.weight > 0.0)
    updated = tuple(_damp(old, new, batch, use, tied, damping) for old, (new, _) in zip(factors, matched, strict=True))
    jitter = jnp.max(jnp.stack([jnp.max(whitener.report.jitter) for whitener in whiteners]))
    return updated, evidence, jitter, jnp.sum(~fine & (batch.weight > 0.0), dtype=values.dtype)


def log_evidence(
    model: DeepGP, factors: tuple[Natural, ...], batch: Batch, *, alpha: float = 1.0, tied: bool = False
) -> Float[Array, ""]:
    r"""EP's log evidence, estimated from a batch.

    .. math:: \log p(y) \approx \sum_l (\phi_q - \phi_p)
              + \tfrac1\alpha \sum_n \big\{ \log Z_n + \sum_l (\phi_{\setminus n} - \phi_q) \big\}
    """
    whiteners = prepare_all(model.layers)
    posterior, cavities = delete(factors, batch, alpha=alpha, tied=tied)
    gaussians = tuple((cavity.mean, cavity.covariance) for cavity in cavities)
    rows = (batch.x, batch.y, batch.observed)
    values = jax.vmap(lambda gaussians, row: log_z_of_row(model, whiteners, gaussians, row, alpha))(gaussians, rows)
    return _evidence(posterior, cavities, values, batch, alpha)


def delete(
    factors: tuple[Natural, ...], batch: Batch, *, alpha: float, tied: bool
) -> tuple[list[Float[Array, ""]], list[Cavities]]:
    """Step 1: the log normaliser of q, and the cavity of every row, in every layer."""
    normalisers, cavities = [], []
    for factor in factors:
        total = _posterior(factor, batch.num_data if tied else jnp.ones_like(batch.num_data))
        own = jax.tree.map(lambda leaf: leaf if tied else leaf[batch.index], factor)
        shape = (len(batch.x), *total.shift.shape)
        natural = Natural(
            jnp.broadcast_to(total.precision[None] - alpha * own.precision, (*shape, shape[-1])),
            jnp.broadcast_to(total.shift[None] - alpha * own.shift, shape),
        )
        mean, covariance, normaliser, ok = _moments(natural)
        cavities.append(Cavities(mean, covariance, natural, jnp.sum(normaliser, axis=1), jnp.all(ok, axis=1)))
        normalisers.append(jnp.sum(_moments(total)[2]))
    return normalisers, cavities


def log_z_of_row(
    model: DeepGP, whiteners: list[Whitener], gaussians: Any, row: tuple[Array, Array, Array], alpha: float
) -> Float[Array, ""]:
    """``log Z`` of one row (x, y, observed), when layers hold Gaussians of given means and covariances."""
    x, y, observed = (part[None] for part in row)
    mean, variance = x, jnp.zeros_like(x)
    for level, (layer, whitener, (m, V)) in enumerate(zip(model.layers, whiteners, gaussians, strict=True)):
        if level == 0:
            a = project(layer, whitener, x)[:, 0]
            mean = (m @ a)[None] + layer.mean(x)
            variance = layer.kernel.diagonal(x)[:, None] - jnp.sum(a**2) + jnp.einsum("m,pmn,n->p", a, V, a)[None]
            variance = clamp_variance(variance)
        else:
            assert layer.z is not None
            inputs, spread = layer_input(model, x, mean, variance)
            mean, variance = push(
                layer, match_moments(layer, layer.z.value, whitener.inverse_factor, m.T, V), inputs, spread
            )
        if level < model.depth - 1 and layer.noise is not None:
            variance = variance + layer.noise.value
    return log_z(model.likelihood, mean, variance, y, observed, alpha)[0]


def whitened(factors: tuple[Natural, ...], num_data: float) -> tuple[Whitened, ...]:
    """q(v) of every layer by mean and root."""

    def one(factor: Natural) -> Whitened:
        total = _posterior(factor, jnp.asarray(num_data, factor.shift.dtype))
        factored = safe_cholesky(total.precision, jitter=0.0)
        root = jnp.swapaxes(inverse_lower(factored.lower), 1, 2)
        mean = jnp.einsum("pij,pkj,pk->ip", root, root, total.shift)
        return Whitened(mean, root)

    return tuple(one(factor) for factor in factors)


def _log_z_and_slopes(
    model: DeepGP, whiteners: list[Whitener], cavities: list[Cavities], batch: Batch, alpha: float
) -> tuple[Float[Array, " B"], Any]:
    def one(gaussians: Any, row: Any) -> tuple[Float[Array, ""], Any]:
        return jax.value_and_grad(lambda g: log_z_of_row(model, whiteners, g, row, alpha))(gaussians)

    gaussians = tuple((cavity.mean, cavity.covariance) for cavity in cavities)
    return jax.vmap(one)(gaussians, (batch.x, batch.y, batch.observed))


def _match(
    cavity: Cavities, g: Float[Array, "B P M"], G: Float[Array, "B P M M"], alpha: float
) -> tuple[Natural, Bool[Array, " B"]]:
    """Steps 2 and 3: the factors that turn cavities into the matched Gaussians, and whether these exist."""
    V = cavity.covariance
    H = g[..., :, None] * g[..., None, :] - G - jnp.swapaxes(G, -1, -2)
    covariance = V - V @ H @ V
    mean = cavity.mean + jnp.einsum("bpmn,bpn->bpm", V, g)
    factor = safe_cholesky(0.5 * (covariance + jnp.swapaxes(covariance, -1, -2)), jitter=0.0)
    inverse = inverse_lower(factor.lower)
    precision = jnp.swapaxes(inverse, -1, -2) @ inverse
    shift = jnp.einsum("bpmn,bpn->bpm", precision, mean)
    new = Natural(
        (precision - cavity.natural.precision) / alpha,
        (shift - cavity.natural.shift) / alpha,
    )
    return new, jnp.all(_definite(factor), axis=1)


def _damp(
    old: Natural,
    new: Natural,
    batch: Batch,
    use: Bool[Array, " B"],
    tied: bool,
    damping: Float[Array, ""] | float,
) -> Natural:
    """Step 4: ``t <- t^(1-d) t_new^d``, for the row's own factor or for the average one."""

    def move(before: Array, after: Array) -> Array:
        mask = use.reshape(-1, *(1,) * (after.ndim - 1))
        if tied:
            kept = jnp.where(mask, after, before)
            weight = batch.weight.reshape(mask.shape)
            average = jnp.sum(weight * kept, axis=0, keepdims=True) / jnp.sum(batch.weight)
            return before + damping * (average - before)
        own = before[batch.index]
        return before.at[batch.index].set(jnp.where(mask, own + damping * (after - own), own))

    return jax.tree.map(move, old, new)


def _evidence(
    posterior: list[Float[Array, ""]], cavities: list[Cavities], values: Float[Array, " B"], batch: Batch, alpha: float
) -> Float[Array, ""]:
    whole = sum(posterior, start=jnp.zeros((), values.dtype))
    for cavity in cavities:
        values = values + cavity.log_normaliser
    return whole + batch.scale / alpha * jnp.sum(batch.weight * (values - whole))


def _posterior(factor: Natural, copies: Float[Array, ""]) -> Natural:
    """The prior times all factors."""
    eye = jnp.eye(factor.shift.shape[-1], dtype=factor.shift.dtype)[None]
    return Natural(eye + copies * jnp.sum(factor.precision, axis=0), copies * jnp.sum(factor.shift, axis=0))


def _moments(natural: Natural) -> tuple[Array, Array, Array, Array]:
    """Mean, covariance, log normaliser ``-1/2 log|precision| + 1/2 mean . shift``, and whether it is a Gaussian."""
    factor = safe_cholesky(natural.precision, jitter=0.0)
    inverse = inverse_lower(factor.lower)
    half = jnp.einsum("...mn,...n->...m", inverse, natural.shift)
    mean = jnp.einsum("...nm,...n->...m", inverse, half)
    covariance = jnp.swapaxes(inverse, -1, -2) @ inverse
    return mean, covariance, 0.5 * (jnp.sum(half**2, axis=-1) - logdet_lower(factor.lower)), _definite(factor)


def _definite(factor: Factor) -> Bool[Array, "..."]:
    return factor.report.ok & ~factor.report.raised


def _no_information(layer: Layer, count: int) -> Natural:
    if layer.z is None:
        raise SettingError("This algorithm needs inducing inputs, but a layer has none: set num_inducing.")
    M, dtype = layer.num_inducing, layer.z.raw.dtype
    return Natural(jnp.zeros((count, layer.width, M, M), dtype), jnp.zeros((count, layer.width, M), dtype))


def _largest_change(old: tuple[Natural, ...], new: tuple[Natural, ...]) -> Float[Array, ""]:
    """The largest change of a factor, as a share of the largest factor."""
    ratios = [
        jnp.max(jnp.abs(b - a)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-12)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    ]
    return jnp.max(jnp.stack(ratios))


def _count_of(data: AbstractSource | None) -> float:
    if data is None:
        raise SettingError("The average factor stands for all rows: pass the source that was fitted.")
    return float(data.num_data)
