"""Sparse Gaussian process regression: the collapsed bound of Titsias (2009).

M inducing inputs Z summarise N data in O(N M^2). With V = Lz^-1 k(Z, X), B = I + V V^T / s2 and c = V y / s2, the bound
on the log marginal likelihood, one term an output, is

    F = -N/2 log(2 pi s2) - 1/2 log|B| - 1/(2 s2) y^T y + 1/2 c^T B^-1 c - 1/(2 s2) (tr k(X, X) - tr V V^T),

reached at q(v) = N(B^-1 c, B^-1). Where the noise of every row is known, rows are divided by its root,
which leaves noise of one size, s2 = 1. Hyperparameters maximise it by L-BFGS. Z moves along with them by gradient, or
is chosen among the data greedily: one birth after the other, each the candidate that raises F most.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, Phase
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.inference._lbfgs import (
    LBFGSInfo,
    LBFGSState,
    best_model,
    fitted_model,
    lbfgs_begin,
    lbfgs_init,
    lbfgs_step,
)
from fathomgp.inference.exact import (
    check_one_gaussian_layer,
    gaussian_noise,
    noise_is_shared,
    output_groups,
    outputs_are_alike,
)
from fathomgp.kernels import AbstractKernel
from fathomgp.linalg import (
    Factor,
    JitterReport,
    birth_scores,
    check_factor,
    inverse_lower,
    logdet_lower,
    safe_cholesky,
    sparse_bound,
    sum_blocks,
)
from fathomgp.model import DeepGP, Layer, Whitened, Whitener, condition_on, prepare, project
from fathomgp.parameters import real
from fathomgp.priors import log_prior
from fathomgp.tags import tagged

#: Rows that pass through the bound at a time: memory is this many times M.
_BLOCK = 4096


class SGPRState(eqx.Module):
    """The search for hyperparameters (and Z), and whether one factorisation serves all outputs.

    Attributes:
        search: the optimiser's state.
        shared: true when all outputs were measured in the same rows and share one noise variance.
    """

    search: LBFGSState
    shared: bool = eqx.field(static=True)


SGPRInfo = LBFGSInfo


@tagged("method/sgpr")
class SGPR(AbstractInference):
    """The collapsed sparse bound.

    Attributes:
        inducing: ``"gradient"`` moves Z with the hyperparameters; ``"greedy"`` chooses Z among the data, fits the
            hyperparameters, and chooses again; ``"fixed"`` leaves Z where the recipe put it.
        rounds: how often greedy selection alternates with the hyperparameters.
        selection_rows: rows that greedy selection looks at, at the most; no fewer than there are to be inducing points.
        candidates: of them, those that may become inducing points; likewise.
        tolerance: a phase ends when a step gains less than this share of the bound.
    """

    inducing: str = eqx.field(static=True, default="gradient")
    rounds: int = eqx.field(static=True, default=3)
    selection_rows: int = eqx.field(static=True, default=10_000)
    candidates: int = eqx.field(static=True, default=2000)
    tolerance: float = eqx.field(static=True, default=1e-7)

    def __check_init__(self):
        if self.inducing not in ("gradient", "greedy", "fixed"):
            raise SettingError(f"inducing must be 'gradient', 'greedy' or 'fixed', but it is {self.inducing!r}.")
        for name in ("rounds", "selection_rows", "candidates"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> SGPRState:
        """The recipe's parameters; Z is a constant unless it moves by gradient."""
        check_one_gaussian_layer(model, "sgpr")
        shared = outputs_are_alike(model, data.everything())
        z = model.layers[0].z
        if z is None:
            raise SettingError("method='sgpr' needs inducing inputs: set num_inducing.")
        return SGPRState(lbfgs_init(_with_inducing(model, z.value, trainable=self.inducing == "gradient")), shared)

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase, or one a round of greedy selection; each with at most ``max_iter`` steps (500 by default)."""
        rounds = self.rounds if self.inducing == "greedy" else 1
        return (Phase("optimise", 500 if max_iter is None else max_iter),) * rounds

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """What greedy selection does not look at."""
        if self.inducing != "greedy" or data.num_data <= self.candidates:
            return ()
        rows = min(self.selection_rows, data.num_data)
        return (
            f"Inducing points are chosen among {self.candidates} random rows, judged on {rows} of the {data.num_data}: "
            "candidates and selection_rows set how many.",
        )

    def enter(self, phase: Phase, state: SGPRState, data: AbstractSource, *, key: PRNGKeyArray) -> SGPRState:
        """Choose Z anew, if it is chosen greedily."""
        model = best_model(state.search)
        if self.inducing == "greedy":
            sizes = {"num_rows": self.selection_rows, "num_candidates": self.candidates}
            z = greedy_inducing(model, data, model.layers[0].num_inducing, key=key, **sizes)
            model = _with_inducing(model, z, trainable=False)
        return SGPRState(lbfgs_begin(state.search, model), state.shared)

    def step(self, phase: Phase, state: SGPRState, batch: Batch, *, key: PRNGKeyArray) -> tuple[SGPRState, SGPRInfo]:
        """One L-BFGS step on minus the bound per datum, and the priors' share."""

        def objective(model: DeepGP) -> tuple[Float[Array, ""], Float[Array, ""]]:
            value, jitter = collapsed_elbo_and_jitter(model, batch, state.shared)
            return -(value + log_prior(model)) / batch.num_data, jitter

        search, info = lbfgs_step(objective, state.search, tolerance=self.tolerance)
        return SGPRState(search, state.shared), info

    def back_off(self, state: SGPRState) -> SGPRState:
        """The line search already shortens its steps."""
        return state

    def posterior(self, state: SGPRState, data: AbstractSource | None) -> LayeredPosterior:
        """The optimal q(v) of the best model."""
        if data is None:
            raise SettingError("The sparse posterior needs the training data: pass the source that was fitted.")
        return optimal_posterior(fitted_model(state.search), data.everything(), shared=state.shared)


def collapsed_elbo(model: DeepGP, batch: Batch, *, shared: bool = False) -> Float[Array, ""]:
    """The bound F on ``log p(Y | X)``, summed over outputs; NaN where a matrix cannot be factorised.

    ``shared`` promises that all outputs were measured in the same rows, so that one factorisation serves them.
    """
    return collapsed_elbo_and_jitter(model, batch, shared)[0]


def collapsed_elbo_and_jitter(model: DeepGP, batch: Batch, shared: bool) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """:func:`collapsed_elbo`, and the jitter that k(Z, Z) needed."""
    layer = model.layers[0]
    whitener = prepare(layer)
    sums = summarise(layer, whitener, batch, shared=shared)
    noise = _noise_of_groups(model, batch, len(sums.gram))
    factor, inverse, c = _solve_for_q(sums, noise)
    outputs = sums.cross.shape[2]
    fit = jnp.sum((inverse @ c) ** 2, axis=(1, 2)) - sums.square / noise
    slack = outputs * (logdet_lower(factor.lower) + sums.unexplained / noise)
    constant = outputs * (sums.count * jnp.log(2 * jnp.pi * noise) + sums.log_noise)
    ok = whitener.report.ok & jnp.all(factor.ok)
    return jnp.where(ok, 0.5 * jnp.sum(fit - slack - constant), jnp.nan), whitener.report.jitter


def optimal_posterior(model: DeepGP, batch: Batch, *, shared: bool = False) -> LayeredPosterior:
    """The posterior at q(v) = N(B^-1 c, B^-1), which makes the bound tight in q."""
    posterior, prior_report, report = _optimal_posterior(model, batch, shared)
    check_factor(prior_report, "The prior covariance of the inducing points")
    check_factor(report, "The posterior precision of the inducing values")
    return posterior


@program
def _optimal_posterior(
    model: DeepGP, batch: Batch, shared: bool
) -> tuple[LayeredPosterior, JitterReport, JitterReport]:
    layer = model.layers[0]
    whitener = prepare(layer)
    q, report = _optimal_q(model, whitener, batch, shared)
    return LayeredPosterior(model, (condition_on(layer, whitener, q),), num_samples=1), whitener.report, report


def optimal_q(model: DeepGP, batch: Batch) -> Whitened:
    """q(v) = N(B^-1 c, B^-1), with a lower-triangular root for every output."""
    q, _ = _optimal_q(model, prepare(model.layers[0]), batch, shared=False)
    covariance = q.root @ jnp.swapaxes(q.root, 1, 2)
    return Whitened(q.mean, safe_cholesky(covariance).lower)


class Summary(eqx.Module):
    """What the bound needs to know of the data: sums over rows, one entry a group of outputs.

    Each row counts with the inverse of its noise variance where that is known, else with 1.

    Attributes:
        gram: V V^T over the group's rows.
        cross: V y.
        square: y^T y, summed over the group's outputs.
        unexplained: tr k(X, X) - tr V V^T.
        count: the number of measured rows.
        log_noise: the logarithms of known noise variances.
    """

    gram: Float[Array, "F M M"]
    cross: Float[Array, "F M R"]
    square: Float[Array, " F"]
    unexplained: Float[Array, " F"]
    count: Float[Array, " F"]
    log_noise: Float[Array, " F"]


def summarise(layer: Layer, whitener: Whitener, batch: Batch, *, shared: bool) -> Summary:
    """Sum over the data, block by block, so that memory does not grow with N; blocks are recomputed for gradients."""

    def of_block(rows: tuple[Array, Array, Array, Array | None]) -> Summary:
        return _summarise_block(layer, whitener, *rows, shared)

    blocks = -(-len(batch.x) // _BLOCK)
    return sum_blocks(of_block, (batch.x, batch.y, batch.observed, batch.noise), blocks, recompute=True)


def greedy_inducing(
    model: DeepGP,
    data: AbstractSource,
    num_inducing: int,
    *,
    key: PRNGKeyArray,
    num_rows: int = 10_000,
    num_candidates: int = 2000,
) -> Float[Array, "M D"]:
    """Inducing inputs chosen among the data, one birth after the other, hyperparameters fixed.

    Scores use ``num_rows`` random rows and ``num_candidates`` of them as candidates, at the most, or as many as there
    are to be inducing points.
    """
    rows_key, candidates_key = jax.random.split(key)
    subset = data.subset(max(num_rows, num_inducing), seed=int(jax.random.bits(rows_key, dtype=jnp.uint32)))
    x, y, observed = (jnp.asarray(part) for part in subset)
    candidates = jax.random.permutation(candidates_key, len(x))[: max(num_candidates, num_inducing)]
    residual = jnp.where(observed, y - model.layers[0].mean(x), 0.0)
    shared = noise_is_shared(model) and bool(jnp.all(observed == observed[:, :1]))
    outputs = output_groups(residual, observed, gaussian_noise(model, y.shape[1]), shared=shared)
    chosen = _greedy_births(model.layers[0].kernel, x, *outputs, candidates, min(num_inducing, len(x)))
    return x[chosen]


@program
def _greedy_births(
    kernel: AbstractKernel,
    x: Float[Array, "N D"],
    residual: Float[Array, "G N R"],
    noise: Float[Array, "G N"],
    candidates: Int[Array, " J"],
    num_inducing: int,
) -> Int[Array, " M"]:
    """Row numbers of the inducing points; slots fill one by one, so one program serves every step."""
    variances = kernel.diagonal(x)
    slots = jnp.arange(num_inducing)

    def birth(i: Int[Array, ""], chosen: Int[Array, " M"]) -> Int[Array, " M"]:
        z = x[chosen]
        bound = sparse_bound(kernel(z), kernel(z, x), variances, residual, noise, active=slots < i)
        gains = birth_scores(bound, candidates, lambda rows, columns: kernel(x[rows], x[columns]))
        taken = jnp.any((candidates[:, None] == chosen[None, :]) & (slots < i)[None, :], axis=1)
        gains = jnp.where(taken, -jnp.inf, gains)
        return chosen.at[i].set(candidates[jnp.argmax(gains)])

    return jax.lax.fori_loop(0, num_inducing, birth, jnp.zeros(num_inducing, candidates.dtype))


def _summarise_block(
    layer: Layer,
    whitener: Whitener,
    x: Float[Array, "B D"],
    y: Float[Array, "B P"],
    observed: Bool[Array, "B P"],
    noise: Float[Array, "B P"] | None,
    shared: bool,
) -> Summary:
    v = project(layer, whitener, x)
    residual = jnp.where(observed, y - layer.mean(x), 0.0)
    groups = (observed[:, :1] if shared else observed).T
    columns = residual[None] if shared else residual.T[:, :, None]
    members = jnp.where(groups, jnp.ones((), x.dtype), 0.0)
    count, log_noise = jnp.sum(members, axis=1), jnp.zeros(len(groups), x.dtype)
    if noise is not None:
        known = jnp.where(groups, noise.T[: len(groups)], 1.0)
        members, log_noise = members / known, jnp.sum(jnp.log(known), axis=1)
    masked = v[None] * members[:, None, :]
    gram = masked @ v.T
    prior = members @ layer.kernel.diagonal(x)
    return Summary(
        gram=gram,
        cross=v[None] @ columns if shared and noise is None else masked @ columns,
        square=jnp.sum(columns**2 * members[:, :, None], axis=(1, 2)),
        unexplained=prior - jnp.trace(gram, axis1=1, axis2=2),
        count=count,
        log_noise=log_noise,
    )


def _optimal_q(model: DeepGP, whitener: Whitener, batch: Batch, shared: bool) -> tuple[Whitened, JitterReport]:
    sums = summarise(model.layers[0], whitener, batch, shared=shared)
    factor, inverse, c = _solve_for_q(sums, _noise_of_groups(model, batch, len(sums.gram)))
    root = jnp.swapaxes(inverse, 1, 2)
    mean = root @ (inverse @ c)
    return Whitened(jnp.concatenate(list(mean), axis=1), root), factor.report


def _noise_of_groups(model: DeepGP, batch: Batch, groups: int) -> Float[Array, " F"]:
    """What is left of the noise when rows have been divided by what is known of it."""
    if batch.noise is not None:
        return jnp.ones(groups, batch.noise.dtype)
    return gaussian_noise(model, batch.y.shape[1])[:groups]


def _solve_for_q(
    sums: Summary, noise: Float[Array, " F"]
) -> tuple[Factor, Float[Array, "F M M"], Float[Array, "F M R"]]:
    """The factor of B, its inverse, and c."""
    scale = noise[:, None, None]
    factor = safe_cholesky(jnp.eye(sums.gram.shape[1], dtype=noise.dtype)[None] + sums.gram / scale, jitter=0.0)
    return factor, inverse_lower(factor.lower), sums.cross / scale


def _with_inducing(model: DeepGP, z: Float[Array, "M D"], *, trainable: bool) -> DeepGP:
    return eqx.tree_at(lambda m: m.layers[0].z, model, real(z, trainable=trainable))
