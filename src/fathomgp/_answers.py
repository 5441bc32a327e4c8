"""What a predictive answers, for one block of rows, in standardised units: pure functions, compiled by the caller.

Components are visited one after the other: memory is that of one component's answer plus one number a component.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf, ndtri
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.likelihoods import AbstractClassLikelihood, AbstractLikelihood, Gaussian, has_noise_of_rows
from fathomgp.linalg import safe_cholesky

Row = Float[Array, "B P"]
# Where the mixture's distribution function is split for the numerical CRPS: beyond them its square is below 1e-14.
_LEVELS = (1e-7, 1e-5, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 0.999, 1.0 - 1e-5, 1.0 - 1e-7)
_CELLS = 24
_LARGEST_COUNT = 2.0**52


class Block(NamedTuple):
    """Rows of a mixture with their likelihood; ``log_weights`` are normalised."""

    log_weights: Float[Array, " S"]
    means: Float[Array, "S B Q"]
    variances: Float[Array, "S B Q"]
    likelihood: AbstractLikelihood


def total_moments(
    log_weights: Float[Array, " S"], means: Float[Array, "S B P"], variances: Float[Array, "S B P"]
) -> tuple[Row, Row]:
    """Mean and variance of a mixture: the variance is the mean of the variances plus the variance of the means."""
    weights = jnp.exp(log_weights)
    average = jnp.tensordot(weights, means, 1)
    return average, jnp.tensordot(weights, variances + (means - average[None]) ** 2, 1)


def moments(block: Block) -> tuple[Row, Row]:
    """Mean and variance of y, by the laws of total expectation and variance."""
    return total_moments(block.log_weights, *_component_moments(block))


def latent_moments(block: Block) -> tuple[Float[Array, "B Q"], Float[Array, "B Q"]]:
    """Mean and variance of f."""
    return total_moments(block.log_weights, block.means, block.variances)


def log_marginal(block: Block, y: Row) -> Row:
    """The log density of every output by itself."""
    scores = _each(block, lambda m, v: block.likelihood.log_z(m, v, y))
    return jax.nn.logsumexp(scores + block.log_weights[:, None, None], axis=0)


def log_joint(block: Block, y: Row, observed: Bool[Array, "B P"]) -> Float[Array, "B 1"]:
    """The log density of the observed outputs together: outputs are independent within a component only."""

    def score(m: Float[Array, "B Q"], v: Float[Array, "B Q"]) -> Float[Array, " B"]:
        return jnp.sum(jnp.where(observed, block.likelihood.log_z(m, v, y), 0.0), axis=1)

    return jax.nn.logsumexp(_each(block, score) + block.log_weights[:, None], axis=0)[:, None]


def cdf(block: Block, y: Row) -> Row:
    """``P(Y <= y)``."""
    return _average(block, lambda m, v: block.likelihood.cdf(m, v, y))


def probabilities(block: Block) -> Float[Array, "B K"]:
    """Class probabilities."""
    assert isinstance(block.likelihood, AbstractClassLikelihood)
    return _average(block, block.likelihood.probabilities)


def quantile(block: Block, q: Float[Array, ""]) -> Row:
    """The smallest y with ``P(Y <= y) >= q``."""
    return _real_quantile(block, q) if block.likelihood.target_kind == "real" else _integer_quantile(block, q)


def crps(block: Block, y: Row) -> Row:
    r"""The continuous ranked probability score :math:`\int (F(x) - 1[x \ge y])^2 dx`."""
    if isinstance(block.likelihood, Gaussian):
        return _gaussian_crps(block, y)
    return _integrated_crps(block, y) if block.likelihood.target_kind == "real" else _summed_crps(block, y)


def observe(
    block: Block, row: Int[Array, " B"], components: Int[Array, " n"], key: PRNGKeyArray
) -> Float[Array, "B n P"]:
    """Draws of y with independent rows. The noise of a row depends on its number alone, not on its block."""

    def of_row(
        row: Int[Array, ""],
        means: Float[Array, "S Q"],
        variances: Float[Array, "S Q"],
        likelihood: AbstractLikelihood,
    ) -> Float[Array, "n P"]:
        key_f, key_y = jax.random.split(jax.random.fold_in(key, row))
        shape = (components.shape[0], means.shape[1])
        f = means[components] + jnp.sqrt(variances[components]) * jax.random.normal(key_f, shape, means.dtype)
        return likelihood.sample(f, key=key_y)

    own = 0 if has_noise_of_rows(block.likelihood) else None
    return jax.vmap(of_row, in_axes=(0, 1, 1, own))(row, block.means, block.variances, block.likelihood)


def observe_jointly(
    block: Block,
    covariances: Float[Array, "S B B Q"],
    rows: Int[Array, ""],
    components: Int[Array, " n"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, "n B P"], Bool[Array, ""]]:
    """Draws of y whose rows share the latent covariance of their component; and whether it had a factor.

    Rows from ``rows`` on are padding, independent of the others; their variance is the others' mean, so that the scale
    of a jitter is that of the rows.
    """
    size = covariances.shape[1]
    padding = jnp.arange(size) >= rows
    total = jnp.sum(jnp.diagonal(covariances, axis1=1, axis2=2), axis=-1) / rows.astype(covariances.dtype)
    filler = jnp.diag(padding.astype(covariances.dtype))[None, :, :, None] * total[:, None, None, :]
    factor = safe_cholesky(jnp.moveaxis(covariances + filler, -1, 1))

    def draw(part: tuple[Int[Array, ""], PRNGKeyArray]) -> Float[Array, "B P"]:
        component, key = part
        key_f, key_y = jax.random.split(key)
        noise = jax.random.normal(key_f, block.means.shape[1:], block.means.dtype)
        f = block.means[component] + jnp.einsum("qij,jq->iq", factor.lower[component], noise)
        return block.likelihood.sample(f, key=key_y)

    return jax.lax.map(draw, (components, jax.random.split(key, components.shape[0]))), jnp.all(factor.ok)


def covariance(block: Block, covariances: Float[Array, "S B B P"]) -> Float[Array, "B B P"]:
    """Total covariance of y between rows, for likelihoods of the form y = f + noise."""
    outputs, weights = covariances.shape[-1], jnp.exp(block.log_weights)
    latent = latent_covariance(block.log_weights, block.means[:, :, :outputs], covariances)
    noise = _component_moments(block)[1] - block.variances[:, :, :outputs]
    identity = jnp.eye(covariances.shape[1], dtype=latent.dtype)
    return latent + identity[:, :, None] * jnp.tensordot(weights, noise, 1)[:, None]


def latent_covariance(
    log_weights: Float[Array, " S"], means: Float[Array, "S B P"], covariances: Float[Array, "S B B P"]
) -> Float[Array, "B B P"]:
    """Total covariance of f between rows: the mean of the covariances plus the covariance of the means."""
    weights = jnp.exp(log_weights)
    apart = means - jnp.tensordot(weights, means, 1)[None]
    return jnp.tensordot(weights, covariances, 1) + jnp.einsum("s,sip,sjp->ijp", weights, apart, apart)


def _each(block: Block, function: Callable[[Array, Array], Array]) -> Array:
    return jax.lax.map(lambda part: function(*part), (block.means, block.variances))


def _average(block: Block, function: Callable[[Array, Array], Array]) -> Array:
    return jnp.tensordot(jnp.exp(block.log_weights), _each(block, function), 1)


def _component_moments(block: Block) -> tuple[Float[Array, "S B P"], Float[Array, "S B P"]]:
    return jax.lax.map(lambda part: block.likelihood.predict_moments(*part), (block.means, block.variances))


def _real_quantile(block: Block, q: Float[Array, ""]) -> Row:
    """A root of the distribution function, to 1e-13 of the narrowest component's standard deviation."""
    if isinstance(block.likelihood, Gaussian) and len(block.means) == 1:
        mean, variance = block.likelihood.predict_moments(block.means[0], block.variances[0])
        return mean + ndtri(q) * jnp.sqrt(variance)
    return _cdf_root(block, q)


@eqx.filter_custom_jvp
def _cdf_root(block: Block, q: Float[Array, ""]) -> Row:
    means, variances = _component_moments(block)
    sd = jnp.sqrt(variances)
    ends, unit = means + ndtri(q) * sd, jnp.max(sd, axis=0)
    low, high = jnp.min(ends, axis=0) - 1e-3 * unit, jnp.max(ends, axis=0) + 1e-3 * unit
    bracket = _widen(lambda x: cdf(block, x) - q, low, high)
    return _root(lambda x: cdf(block, x) - q, *bracket, 1e-13 * jnp.min(sd, axis=0))


@_cdf_root.def_jvp
def _cdf_root_jvp(primals, tangents):
    """The root moves so that its level stays: ``dx = (dq - dF) / F'(x)``; the search itself is not differentiated."""
    (block, q), (moving, dq) = primals, tangents
    root = _cdf_root(block, q)
    _, density = jax.jvp(lambda y: cdf(block, y), (root,), (jnp.ones_like(root),))
    _, change = eqx.filter_jvp(lambda block: cdf(block, root), (block,), (moving,))
    level = jnp.zeros_like(root) if dq is None else jnp.broadcast_to(dq, root.shape)
    # Between components far apart the density may underflow: the quantile jumps there and has no derivative.
    return root, (level - (0.0 if change is None else change)) / jnp.maximum(density, jnp.finfo(root.dtype).tiny)


def _widen(function: Callable[[Row], Row], low: Row, high: Row) -> tuple[Row, Row]:
    """Move the ends of a bracket outwards, by doubling steps, until an increasing function changes sign in it."""

    def unfinished(state):
        low_ok, high_ok = state[2:]
        return ~jnp.all(low_ok & high_ok)

    def step(state):
        low, high, low_ok, high_ok = state
        width = high - low
        low, high = jnp.where(low_ok, low, low - width), jnp.where(high_ok, high, high + width)
        return low, high, ~(function(low) > 0.0), ~(function(high) < 0.0)

    start = low, high, ~(function(low) > 0.0), ~(function(high) < 0.0)
    return jax.lax.while_loop(unfinished, step, start)[:2]


def _root(function: Callable[[Row], Row], low: Row, high: Row, tolerance: Row) -> Row:
    """A root in a bracket: inverse quadratic interpolation where safe, bisection elsewhere (Chandrupatla 1997)."""
    eps = float(jnp.finfo(low.dtype).eps)

    def goal(x1: Row, x2: Row, f1: Row, f2: Row) -> tuple[Row, Row, Bool[Array, "B P"]]:
        best = jnp.where(jnp.abs(f1) < jnp.abs(f2), x1, x2)
        limit = (2.0 * eps * jnp.abs(best) + tolerance) / jnp.abs(x2 - x1)
        return best, limit, ~((limit <= 0.5) & (f1 != 0.0) & (f2 != 0.0))

    def unfinished(state):
        return (state[0] < 200) & ~jnp.all(goal(*state[2:])[2])

    def step(state):
        count, t, x1, x2, f1, f2 = state
        done = goal(x1, x2, f1, f2)[2]
        x = x1 + t * (x2 - x1)
        f = function(x)
        same = jnp.sign(f) == jnp.sign(f1)
        x3, f3 = jnp.where(same, x1, x2), jnp.where(same, f1, f2)
        new = x, jnp.where(same, x2, x1), f, jnp.where(same, f2, f1)
        x1, x2, f1, f2 = (jnp.where(done, old, now) for old, now in zip((x1, x2, f1, f2), new, strict=True))
        xi, phi = (x1 - x2) / (x3 - x2), (f1 - f2) / (f3 - f2)
        safe = (phi**2 < xi) & ((1.0 - phi) ** 2 < 1.0 - xi)
        quadratic = f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2)
        limit = jnp.minimum(goal(x1, x2, f1, f2)[1], 0.5)
        t = jnp.clip(jnp.where(safe, quadratic, 0.5), limit, 1.0 - limit)
        return count + 1, t, x1, x2, f1, f2

    start = 0, jnp.full_like(low, 0.5), low, high, function(low), function(high)
    return goal(*jax.lax.while_loop(unfinished, step, start)[2:])[0]


def _integer_quantile(block: Block, q: Float[Array, ""]) -> Row:
    """Double an upper bound, then halve the bracket (low, high], between whole numbers."""
    origin = jnp.zeros_like(_component_moments(block)[0][0])

    def short(bracket):
        return (cdf(block, bracket[1]) < q) & (bracket[1] < _LARGEST_COUNT)

    def double(bracket):
        low, high = bracket
        more = short(bracket)
        return jnp.where(more, high, low), jnp.where(more, 2.0 * high + 1.0, high)

    def halve(bracket):
        low, high = bracket
        middle = jnp.floor(0.5 * (low + high))
        enough = cdf(block, middle) >= q
        return jnp.where(enough & (middle > low), low, middle), jnp.where(enough & (middle > low), middle, high)

    bracket = jax.lax.while_loop(lambda b: jnp.any(short(b)), double, (origin - 1.0, origin))
    return jax.lax.while_loop(lambda b: jnp.any(b[1] - b[0] > 1.0), halve, bracket)[1]


def _gaussian_crps(block: Block, y: Row) -> Row:
    r""":math:`E|Y - y| - \tfrac12 E|Y - Y'|`, both closed forms for Gaussian mixtures; pairs by component."""
    weights = jnp.exp(block.log_weights)
    means, variances = _component_moments(block)
    to_target = jnp.tensordot(weights, _mean_absolute(means - y[None], variances), 1)

    def to_others(part: tuple[Row, Row]) -> Row:
        mean, variance = part
        return jnp.tensordot(weights, _mean_absolute(means - mean[None], variances + variance[None]), 1)

    return to_target - 0.5 * jnp.tensordot(weights, jax.lax.map(to_others, (means, variances)), 1)


def _mean_absolute(mean: Float[Array, "S B P"], variance: Float[Array, "S B P"]) -> Float[Array, "S B P"]:
    """``E|X|`` for Gaussian X."""
    density = jnp.exp(-0.5 * mean**2 / variance)
    return float(np.sqrt(2.0 / np.pi)) * jnp.sqrt(variance) * density + mean * erf(mean / jnp.sqrt(2.0 * variance))


def _integrated_crps(block: Block, y: Row) -> Row:
    """Gauss-Legendre with ten nodes between y and rough quantiles of the mixture."""
    edges = jnp.sort(jnp.concatenate([_rough_quantiles(block), y[None]]), axis=0)
    nodes, weights = (jnp.asarray(0.5 * part, y.dtype) for part in np.polynomial.legendre.leggauss(10))

    def piece(ends: tuple[Row, Row]) -> Row:
        low, high = ends
        target = (low >= y).astype(y.dtype)
        values = jax.lax.map(lambda t: (cdf(block, low + (high - low) * t) - target) ** 2, nodes + 0.5)
        return (high - low) * jnp.tensordot(weights, values, 1)

    return jnp.sum(jax.lax.map(piece, (edges[:-1], edges[1:])), axis=0)


def _rough_quantiles(block: Block) -> Float[Array, "levels B P"]:
    """Quantiles interpolated from 41 values of the distribution function, out to 2000 standard deviations."""
    average, variance = moments(block)
    spread = jnp.asarray(0.2 * np.sinh(np.linspace(-10.0, 10.0, 41)), average.dtype)
    grid = average[None] + jnp.sqrt(variance)[None] * spread[:, None, None]
    levels = jnp.asarray(_LEVELS, average.dtype)
    of_output = jax.vmap(lambda F, x: jnp.interp(levels, F, x), in_axes=1, out_axes=1)
    return jax.vmap(of_output, in_axes=2, out_axes=2)(jax.lax.map(lambda x: cdf(block, x), grid), grid)


def _summed_crps(block: Block, y: Row) -> Row:
    """The sum over whole numbers, between y and rough quantiles; over 24 terms a piece, cells of several numbers."""
    edges = jnp.maximum(jnp.round(_rough_quantiles(block)), 0.0)
    edges = jnp.sort(jnp.concatenate([edges, y[None]]), axis=0)

    def piece(ends: tuple[Row, Row]) -> Row:
        start, stop = ends
        length, target = stop - start, (start >= y).astype(y.dtype)
        # Odd, so that the middle of a cell is a whole number too.
        width = 2.0 * jnp.ceil(0.5 * jnp.maximum(length / _CELLS - 1.0, 0.0)) + 1.0

        def add_cell(index: Int[Array, ""], total: Row) -> Row:
            offset = index.astype(y.dtype) * width
            terms = jnp.clip(length - offset, 0.0, width)
            return total + terms * (cdf(block, jnp.round(start + offset + 0.5 * (terms - 1.0))) - target) ** 2

        cells = jnp.max(jnp.ceil(length / width), initial=0.0).astype(jnp.int32)
        return jax.lax.fori_loop(0, cells, add_cell, jnp.zeros_like(y))

    return jnp.sum(jax.lax.map(piece, (edges[:-1], edges[1:])), axis=0)
