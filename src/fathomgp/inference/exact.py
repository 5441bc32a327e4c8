"""The exact Gaussian process: one layer, Gaussian noise, no approximation (Rasmussen and Williams 2006, chapter 2).

Hyperparameters maximise the log marginal likelihood plus the log density of their priors. With K = k(X, X) + s2 I and
one term per output,

    log p(Y | X) = sum_p  -1/2 y_p^T K^-1 y_p - 1/2 log|K| - N/2 log(2 pi).

L-BFGS searches from the recipe's start and from random restarts around it. The cost is O(N^3) a step and O(N^2) memory.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, AbstractPosterior, Phase
from fathomgp.inference._lbfgs import (
    LBFGSInfo,
    LBFGSState,
    fitted_model,
    lbfgs_begin,
    lbfgs_init,
    lbfgs_shuffle,
    lbfgs_step,
)
from fathomgp.kernels import prior_function
from fathomgp.likelihoods import Gaussian
from fathomgp.linalg import JitterReport, check_factor, gaussian_log_marginal, inverse_lower, safe_cholesky
from fathomgp.model import DeepGP
from fathomgp.precision import clamp_variance
from fathomgp.predictive import Mixture
from fathomgp.priors import log_prior
from fathomgp.tags import tagged

#: Beyond this, one N x N matrix in double precision fills more than 3 GB.
_MAX_ROWS = 20_000


class ExactState(eqx.Module):
    """The search for hyperparameters, and whether one covariance matrix serves all outputs.

    Attributes:
        search: the optimiser's state.
        shared: true when all outputs were measured in the same rows and share their noise variance.
    """

    search: LBFGSState
    shared: bool = eqx.field(static=True)


ExactInfo = LBFGSInfo


@tagged("method/exact")
class Exact(AbstractInference):
    """Exact inference with hyperparameters of highest marginal likelihood.

    Attributes:
        restarts: random starts besides the recipe's own; the best end wins. By default more for fewer rows, which
            are cheap and whose evidence has more local maxima: 10 up to 400 rows, 3 up to 1,000, 1 beyond.
        spread: half-width of the restarts' shift, in log units for positive parameters.
        tolerance: a start ends when a step gains less than this share of the objective.
    """

    restarts: int | None = eqx.field(static=True, default=None)
    spread: float = eqx.field(static=True, default=2.0)
    tolerance: float = eqx.field(static=True, default=1e-7)

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> ExactState:
        """The recipe's parameters."""
        check_one_gaussian_layer(model, "exact")
        if data.num_data > _MAX_ROWS:
            raise SettingError(
                f"method='exact' keeps N x N matrices, and {data.num_data} rows are more than {_MAX_ROWS}: "
                "use method='sgpr'."
            )
        return ExactState(lbfgs_init(model), outputs_are_alike(model, data.everything()))

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase a start, each with at most ``max_iter`` steps (200 by default)."""
        restarts = self.restarts
        if restarts is None:
            restarts = 10 if num_data <= 400 else 3 if num_data <= 1000 else 1
        return (Phase("optimise", 200 if max_iter is None else max_iter),) * (1 + restarts)

    def enter(self, phase: Phase, state: ExactState, data: AbstractSource, *, key: PRNGKeyArray) -> ExactState:
        """Begin the next start."""
        start = lbfgs_shuffle(state.search, spread=self.spread, key=key)
        return ExactState(lbfgs_begin(state.search, start), state.shared)

    def step(self, phase: Phase, state: ExactState, batch: Batch, *, key: PRNGKeyArray) -> tuple[ExactState, ExactInfo]:
        """One L-BFGS step on minus the log marginal likelihood per datum, and the priors' share."""

        def objective(model: DeepGP) -> tuple[Float[Array, ""], Float[Array, ""]]:
            value, jitter = _evidence(model, batch, state.shared)
            return -(value + log_prior(model)) / batch.num_data, jitter

        search, info = lbfgs_step(objective, state.search, tolerance=self.tolerance)
        return ExactState(search, state.shared), info

    def back_off(self, state: ExactState) -> ExactState:
        """The line search already shortens its steps."""
        return state

    def posterior(self, state: ExactState, data: AbstractSource | None) -> "ExactPosterior":
        """Condition the best model on the data."""
        if data is None:
            raise SettingError("The exact posterior needs the training data: pass the source that was fitted.")
        return condition(fitted_model(state.search), data.everything(), shared=state.shared)


@tagged("posterior/exact")
class ExactPosterior(AbstractPosterior):
    """A Gaussian process conditioned on data.

        mean(x) = k(x, X) K^-1 (Y - m(X)) + m(x),    cov(x, x') = k(x, x') - k(x, X) K^-1 k(X, x')

    Attributes:
        model: the fitted model.
        x: the training inputs.
        alpha: K^-1 (Y - m(X)).
        inverse_factor: L^-1 with L L^T = K; one a output where outputs are missing, else one for all.
    """

    model: DeepGP
    x: Float[Array, "N D"]
    alpha: Float[Array, "N P"]
    inverse_factor: Float[Array, "F N N"]

    @program
    def predict_f(self, x: Float[Array, "n D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """One Gaussian; ``key`` is not used."""
        layer = self.model.layers[0]
        cross = layer.kernel(self.x, x)
        mean = cross.T @ self.alpha + layer.mean(x)
        explained = self.inverse_factor @ cross
        log_weights = jnp.zeros(1, x.dtype)
        if full_cov:
            covariance = layer.kernel(x)[None] - jnp.swapaxes(explained, 1, 2) @ explained
            covariance = jnp.broadcast_to(jnp.moveaxis(covariance, 0, -1), (len(x), len(x), layer.width))
            variance = clamp_variance(jnp.diagonal(covariance).T)
            return Mixture(log_weights, mean[None], variance[None], covariance[None])
        variance = clamp_variance(layer.kernel.diagonal(x)[None] - jnp.sum(explained**2, axis=1))
        return Mixture(log_weights, mean[None], jnp.broadcast_to(variance.T, mean.shape)[None], None)

    @program
    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Draws from the joint posterior of the rows of each call."""
        predict_key, draw_key = jax.random.split(key)
        return sample_joint(self.predict_f(x, key=predict_key, full_cov=True), key=draw_key, n=n)

    @program
    def draw_paths(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Whole functions by Matheron's rule, for kernels with random features.

        With e the noise of imagined data, f(x) = mean(x) + prior(x) - k(x, X) K^-1 (prior(X) + e)
        """
        if not self.draws_whole:
            return self.draw_functions(x, key=key, n=n)
        layer = self.model.layers[0]
        cross = layer.kernel(self.x, x)
        mean = cross.T @ self.alpha + layer.mean(x)
        deviation = jnp.sqrt(gaussian_noise(self.model, layer.width))[None]

        def change(key: PRNGKeyArray) -> Float[Array, "N Q"]:
            prior_key, noise_key = jax.random.split(key)
            noise = deviation * jax.random.normal(noise_key, self.alpha.shape, x.dtype)
            prior = prior_function(layer.kernel, x.shape[1], key=prior_key, width=layer.width, like=noise)
            white = jnp.einsum("fij,jp->fip", self.inverse_factor, prior(self.x) + noise)
            if len(white) == 1:
                return prior(x) - cross.T @ (self.inverse_factor[0].T @ white[0])
            return prior(x) - cross.T @ jnp.einsum("pij,pip->jp", self.inverse_factor, white)

        return mean[None] + jax.lax.map(change, jax.random.split(key, n))

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """One joint draw of the only layer."""
        return [self.draw_functions(x, key=key, n=1)]


def log_evidence(model: DeepGP, batch: Batch, *, shared: bool = False) -> Float[Array, ""]:
    """``log p(Y | X)``: summed over outputs; what was not observed (padding, missing outputs) does not count.

    ``shared`` promises that all outputs were measured in the same rows, so that one factorisation serves them.
    """
    return _evidence(model, batch, shared)[0]


def _evidence(model: DeepGP, batch: Batch, shared: bool) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The log evidence, NaN where a covariance cannot be factorised, and the largest jitter."""
    covariances, residuals, observed = _problems(model, batch, shared)
    if shared:  # not under vmap, where the search for a jitter would cost even when none is needed
        values, factor = gaussian_log_marginal(covariances[0], residuals[0])
    else:
        values, factor = jax.vmap(gaussian_log_marginal)(covariances, residuals)
    # A masked row is an independent unit Gaussian at 0: take its log density out again.
    count = residuals.shape[2] * jnp.sum(jnp.where(observed, jnp.zeros((), values.dtype), 1.0))
    masked = 0.5 * math.log(2 * math.pi) * count
    return jnp.where(jnp.all(factor.ok), jnp.sum(values) + masked, jnp.nan), jnp.max(factor.jitter)


def condition(model: DeepGP, batch: Batch, *, shared: bool = False) -> ExactPosterior:
    """The posterior of the latent functions given the data, hyperparameters fixed."""
    posterior, report = _condition(model, batch, shared)
    check_factor(report, "The covariance of the training data")
    return posterior


@program
def _condition(model: DeepGP, batch: Batch, shared: bool) -> tuple[ExactPosterior, JitterReport]:
    covariances, residuals, observed = _problems(model, batch, shared)
    factor = safe_cholesky(covariances)
    inverse_factor = jnp.where(observed[:, None, :], inverse_lower(factor.lower), 0.0)
    alpha = jnp.swapaxes(inverse_factor, 1, 2) @ (inverse_factor @ residuals)
    posterior = ExactPosterior(model, batch.x, jnp.concatenate(list(alpha), axis=1), inverse_factor)
    return posterior, factor.report


def sample_joint(mixture: Mixture, *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
    """Draws of all rows together from a mixture with full covariances."""
    component_key, noise_key = jax.random.split(key)
    which = jax.random.categorical(component_key, mixture.log_weights, shape=(n,))
    assert mixture.covariances is not None
    lower = safe_cholesky(jnp.moveaxis(mixture.covariances, -1, 1)).lower
    rows, latents = mixture.means.shape[1:]
    noise = jnp.swapaxes(jax.random.normal(noise_key, (rows, n, latents), mixture.means.dtype), 0, 1)
    # One draw at a time where there are several components: gathering their factors would take n of them.
    if len(mixture.means) == 1:
        return jnp.asarray(mixture.means) + jnp.einsum("qij,sjq->siq", lower[0], noise)
    draw = lambda pair: mixture.means[pair[0]] + jnp.einsum("qij,jq->iq", lower[pair[0]], pair[1])  # noqa: E731
    return jax.lax.map(draw, (which, noise))


def check_one_gaussian_layer(model: DeepGP, method: str) -> None:
    """Refuse models that a collapsed objective cannot treat."""
    if model.depth != 1:
        raise SettingError(
            f"method={method!r} fits one layer, but depth is {model.depth}: "
            "use depth=1, or a deep method such as 'dsvi'."
        )
    if not isinstance(model.likelihood, Gaussian):
        name = type(model.likelihood).__name__
        raise SettingError(f"method={method!r} needs Gaussian noise, but the likelihood is {name}: use method='dsvi'.")


def _problems(
    model: DeepGP, batch: Batch, shared: bool
) -> tuple[Float[Array, "F N N"], Float[Array, "F N R"], Bool[Array, "F N"]]:
    """The F Gaussian problems that the outputs pose: covariance, residuals and measured rows of each.

    One problem with all outputs as its columns when ``shared``, else one an output.
    """
    layer = model.layers[0]
    residuals = jnp.where(batch.observed, batch.y - layer.mean(batch.x), 0.0)
    noise = noise_of_rows(model, batch)
    covariance = layer.kernel(batch.x)
    if shared:
        observed = batch.observed[:, 0]
        return _masked_covariance(covariance, observed, noise[:, 0])[None], residuals[None], observed[None]
    covariances = jax.vmap(_masked_covariance, in_axes=(None, 1, 1))(covariance, batch.observed, noise)
    return covariances, residuals.T[:, :, None], batch.observed.T


def _masked_covariance(
    covariance: Float[Array, "N N"], observed: Bool[Array, " N"], noise: Float[Array, " N"]
) -> Float[Array, "N N"]:
    """K + diag(s2) on observed rows, the identity on the others."""
    both = observed[:, None] & observed[None, :]
    return jnp.where(both, covariance, 0.0) + jnp.diag(jnp.where(observed, noise, 1.0))


def gaussian_noise(model: DeepGP, num_outputs: int) -> Float[Array, " P"]:
    """The noise variance of every output."""
    assert isinstance(model.likelihood, Gaussian)
    return jnp.broadcast_to(model.likelihood.variance.value, (num_outputs,))


def noise_of_rows(model: DeepGP, batch: Batch) -> Float[Array, "N P"]:
    """The noise variance of every row and output: the batch's where it is known, else the model's."""
    if batch.noise is not None:
        return batch.noise
    return jnp.broadcast_to(gaussian_noise(model, batch.y.shape[1])[None], batch.y.shape)


def output_groups(
    residuals: Float[Array, "N P"], observed: Bool[Array, "N P"], noise: Float[Array, " P"], *, shared: bool
) -> tuple[Float[Array, "G N R"], Float[Array, "G N"]]:
    """Outputs that one factorisation serves, a group at a time, and the noise variance of every row of a group.

    It is infinite where the group was not measured. All outputs are one group when ``shared``, else each is its own.
    """
    columns, rows = (residuals[None], observed.T[:1]) if shared else (residuals.T[:, :, None], observed.T)
    return columns, jnp.where(rows, noise[: len(rows), None], jnp.inf)


def outputs_are_alike(model: DeepGP, batch: Batch) -> bool:
    """Whether one factorisation serves all outputs: measured in the same rows, with the same noise."""
    alike = noise_is_shared(model) and bool(jnp.all(batch.observed == batch.observed[:, :1]))
    return alike and (batch.noise is None or bool(jnp.all(batch.noise == batch.noise[:, :1])))


def noise_is_shared(model: DeepGP) -> bool:
    """Whether one noise variance serves all outputs."""
    assert isinstance(model.likelihood, Gaussian)
    return model.likelihood.variance.raw.size == 1
