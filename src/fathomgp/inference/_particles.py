"""Particles through the layers of a deep GP, at one datum: draws, weights, and what each layer learns from them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fathomgp.inference._online import OnlineGP, Projection, absorb, absorb_mixture, project
from fathomgp.likelihoods import AbstractLikelihood, HeteroscedasticGaussian
from fathomgp.linalg import inverse_lower, safe_cholesky
from fathomgp.model import DeepGP, Layer

#: A datum moves an inner layer's function by at most so many of its standard deviations: one outlier must not bend the
#: layers for good.
_FARTHEST = 3.0
#: How often the sites of a datum that is to be taken out again are estimated.
_ROUNDS_BACK = 4
#: A site that leaves less of the variance than this share counts as one that leaves so much.
_SMALLEST_SHARE = 1e-8
#: How far a moved particle goes: 0 stays, 1 forgets where it was.
_MOVE = 0.5
#: How often a guide is taken again where noise varies, and whether the noise is judged too.
_GUIDE_ROUNDS = (False, True, True)
#: Bounds of a log noise's slope in a guide: half a unit down is all there is.
_NOISE_SLOPE = (-0.5, 5.0)

#: e of every inner layer, one particle a row.
Noise = list[Float[Array, "S _"]]


class Datum(NamedTuple):
    """One row: inputs, outputs, and which of these were observed (the others hold 0)."""

    x: Float[Array, "1 D"]
    y: Float[Array, "1 P"]
    observed: Bool[Array, "1 P"]


class Paths(eqx.Module):
    """Particles on their way through the layers.

    Attributes:
        noise: e of every inner layer.
        hidden: h of every inner layer.
        mean: of the last layer's function.
        variance: of the last layer's function.
        log_likelihood: log p(y | h_{L-1}), the last layer's value integrated out.
    """

    noise: Noise
    hidden: list[Float[Array, "S _"]]
    mean: Float[Array, "S Q"]
    variance: Float[Array, "S Q"]
    log_likelihood: Float[Array, " S"]


class Guide(eqx.Module):
    """A Gaussian N(centre, R^T R) for the noise of all inner layers, side by side.

    Attributes:
        centre: its mean.
        inverse_root: R, the inverse of the precision's lower root.
        log_root: half the log determinant of the precision.
    """

    centre: Float[Array, " W"]
    inverse_root: Float[Array, "W W"]
    log_root: Float[Array, ""]


def draw_noise(model: DeepGP, size: int, key: PRNGKeyArray) -> Noise:
    """Particles from the prior of the noise, see :func:`balanced_normal`."""
    widths = [layer.width for layer in model.layers[:-1]]
    return _split(balanced_normal(key, (size, sum(widths)), jnp.float64), widths)


def follow(model: DeepGP, gps: tuple[OnlineGP, ...], datum: Datum, noise: Noise) -> Paths:
    """Particles with the given noise through all layers."""
    x = datum.x
    size = len(noise[0]) if noise else 1
    h, hidden = x, []
    for level, e in enumerate(noise):
        at = project_layer(model, gps, level, x, h)
        h = at.mean + jnp.sqrt(at.variance + noise_between(model.layers[level])) * e
        hidden.append(h)
    at = project_layer(model, gps, model.depth - 1, x, h)
    variance = jnp.broadcast_to(at.variance, at.mean.shape)
    y = jnp.broadcast_to(datum.y, (size, datum.y.shape[1]))
    figures = jnp.where(datum.observed, model.likelihood.log_z(at.mean, variance, y), 0.0)
    return Paths(noise, hidden, at.mean, variance, jnp.sum(figures, axis=1))


def guide(model: DeepGP, gps: tuple[OnlineGP, ...], datum: Datum) -> Guide:
    """Where the datum will send the particles, to first order.

    With J the derivative of the last layer's mean in e, and s and r slope and curvature of the datum, the log
    likelihood at e + d is about s^T J d + 1/2 d^T J^T r J d: a Gaussian with precision I - J^T r J, taken around e = 0.
    Under noise that varies it is taken again around where the functions have come to, as the noise is another there;
    what the noise itself says counts only then. A positive curvature, as heavy tails have it, counts as none.
    """
    widths = [layer.width for layer in model.layers[:-1]]
    varying = isinstance(model.likelihood, HeteroscedasticGaussian)

    def last_mean(e: Float[Array, " W"]) -> tuple[Float[Array, " Q"], Paths]:
        paths = follow(model, gps, datum, _split(e[None], widths))
        return paths.mean[0], paths

    def around(e: Float[Array, " W"], *, judge_noise: bool = False) -> Guide:
        J, paths = jax.jacfwd(last_mean, has_aux=True)(e)
        at = (model.likelihood, paths.mean, paths.variance, datum)
        slope, curvature = expected_site(*at, judge_noise=judge_noise) if varying else site(*at)
        curvature = jnp.minimum(curvature, 0.0)
        root = safe_cholesky(jnp.eye(len(e)) - (J.T * curvature) @ J, jitter=0.0).lower
        inverse = inverse_lower(root)
        centre = inverse.T @ (inverse @ (J.T @ (slope[0] - curvature[0] * (J @ e))))
        return Guide(centre, inverse, jnp.sum(jnp.log(jnp.diagonal(root))))

    answer = around(jnp.zeros(sum(widths), jnp.float64))
    for judge_noise in _GUIDE_ROUNDS if varying else ():
        answer = around(answer.centre, judge_noise=judge_noise)
    return answer


def draw_guided(model: DeepGP, guide: Guide, size: int, key: PRNGKeyArray) -> tuple[Noise, Float[Array, " S"]]:
    """Particles from the guide, and the logarithms of prior over guide."""
    widths = [layer.width for layer in model.layers[:-1]]
    xi = balanced_normal(key, (size, sum(widths)), jnp.float64)
    e = guide.centre[None, :] + xi @ guide.inverse_root
    log_ratio = 0.5 * jnp.sum(xi**2 - e**2, axis=1) - guide.log_root
    return _split(e, widths), log_ratio


def resample_and_move(
    model: DeepGP, gps: tuple[OnlineGP, ...], datum: Datum, paths: Paths, log_weights: Array, key: PRNGKeyArray
) -> Paths:
    """Particles of equal weight: drawn by their weights, then moved by one step that leaves p(e | y) as it is.

    The step is preconditioned Crank-Nicolson, e' = sqrt(1 - b^2) e + b z, which keeps the prior: whether it is
    accepted depends on the likelihoods alone (Cotter et al. 2013).
    """
    pick_key, step_key, accept_key = jax.random.split(key, 3)
    chosen = systematic_resample(pick_key, log_weights)
    old = jax.tree.map(lambda leaf: leaf[chosen], paths)
    steps = draw_noise(model, len(chosen), step_key)
    trial = [(1.0 - _MOVE**2) ** 0.5 * e + _MOVE * step for e, step in zip(old.noise, steps, strict=True)]
    moved = follow(model, gps, datum, trial)
    uniform = jax.random.uniform(accept_key, chosen.shape, log_weights.dtype)
    accepted = jnp.log(uniform) < moved.log_likelihood - old.log_likelihood
    return jax.tree.map(lambda a, b: jnp.where(accepted.reshape(-1, *(1,) * (a.ndim - 1)), a, b), moved, old)


def update_layers(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: Datum,
    paths: Paths,
    log_weights: Float[Array, " S"],
    noise_share: float = 1.0,
) -> tuple[OnlineGP, ...]:
    """Every layer learns at the weighted estimate of its input; a log noise as if the datum were so much of one."""
    x, weights = datum.x, jax.nn.softmax(log_weights)[None, :]
    h, new = x, []
    for level, (noise, hidden) in enumerate(zip(paths.noise, paths.hidden, strict=True)):
        at = project_layer(model, gps, level, x, h)
        total = at.variance[0] + noise_between(model.layers[level])
        slope, curvature = change_of_noise(weights, noise, total)
        new.append(absorb(gps[level], at, model.layer_input(level, x, h), slope, curvature))
        h = weights @ hidden
    return (*new, _update_last(model, gps[-1], datum, paths, weights[0], h, noise_share))


def _update_last(
    model: DeepGP,
    gp: OnlineGP,
    datum: Datum,
    paths: Paths,
    weights: Float[Array, " S"],
    h: Float[Array, "1 _"],
    noise_share: float,
) -> OnlineGP:
    """The last layer learns the datum at all particles; without inner layers, at the input itself."""
    x, layer = datum.x, model.layers[-1]
    slope, curvature = site(model.likelihood, paths.mean, paths.variance, datum)
    if isinstance(model.likelihood, HeteroscedasticGaussian):
        share = jnp.where(jnp.arange(layer.width)[None, :] < layer.width // 2, 1.0, noise_share)
        slope, curvature = share_of_datum(slope, curvature, paths.variance, share)
    if not paths.hidden:
        at = project(gp, layer, x)
        total = curvature[0] if at.variance.shape[1] > 1 else jnp.mean(curvature[0], keepdims=True)
        return absorb(gp, at, x, slope[0], total)
    particles = paths.hidden[-1]
    inputs = model.layer_input(model.depth - 1, jnp.broadcast_to(x, (len(particles), x.shape[1])), particles)
    centre = model.layer_input(model.depth - 1, x, h)
    return absorb_mixture(gp, layer, centre, inputs, weights, slope, curvature)


def site(
    likelihood: AbstractLikelihood,
    mean: Float[Array, "S Q"],
    variance: Float[Array, "S Q"],
    datum: Datum,
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Slope and curvature of ``log Z``, the datum's log predictive density, in the mean of each latent function.

    The second derivative follows from the first ones: ``d2/dm2 log Z = 2 d/dv log Z - (d/dm log Z)^2``. Both are taken
    as they are, so that the function values get the moments of their posterior, however far out the datum lies. In
    heavy tails the curvature is positive: an outlier may be the noise's or the function's, which is then less certain.
    """
    y = jnp.broadcast_to(datum.y, (len(mean), datum.y.shape[1]))

    def log_z(mean: Float[Array, "S Q"], variance: Float[Array, "S Q"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(datum.observed, likelihood.log_z(mean, variance, y), 0.0))

    slope, by_variance = jax.grad(log_z, (0, 1))(mean, variance)
    # The variance after the datum is v + v^2 curvature: rounding must not make it negative.
    return slope, jnp.maximum(2.0 * by_variance - slope**2, -1.0 / variance)


def share_of_datum(
    slope: Float[Array, "S Q"],
    curvature: Float[Array, "S Q"],
    variance: Float[Array, "S Q"],
    share: Float[Array, "1 Q"],
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Slope and curvature of a share t of a datum: its Gaussian site to the power of t.

    A site of precision ``-c / (1 + c v)`` has curvature c, so that of t times the precision has
    ``t c / (1 + (1 - t) c v)``, and slopes go likewise. Shares that add up to 1 are the whole datum.
    """
    factor = share / (1.0 + (1.0 - share) * curvature * variance)
    return factor * slope, factor * curvature


def expected_site(
    likelihood: AbstractLikelihood,
    mean: Float[Array, "S Q"],
    variance: Float[Array, "S Q"],
    datum: Datum,
    *,
    judge_noise: bool,
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Slope and expected curvature of a normal density with the noise that is expected, at first in functions alone.

    With functions still far from the datum the slopes of log Z would call for more noise instead of better functions,
    and a datum in the tail of all noise that is possible has no curvature there.
    """
    function, total = likelihood.predict_moments(mean, variance)
    precision = jnp.where(datum.observed, 1.0 / total, 0.0)
    misfit = datum.y - function
    noisy = 1.0 - variance[:, : misfit.shape[1]] * precision if judge_noise else jnp.zeros_like(precision)
    noisy = jnp.where(datum.observed, noisy, 0.0)
    by_noise = jnp.clip(0.5 * noisy * (misfit**2 * precision - 1.0), *_NOISE_SLOPE)
    slope = jnp.concatenate([precision * misfit, by_noise], axis=1)
    return slope, -jnp.concatenate([precision, 0.5 * noisy**2], axis=1)


def change_of_noise(
    weights: Float[Array, "1 S"], noise: Float[Array, "S W"], variance: Float[Array, " R"]
) -> tuple[Float[Array, " W"], Float[Array, " R"]]:
    """Slope and curvature that give a layer's noise its weighted moments.

    Outputs that share one variance share the mean curvature. A step that is cut leaves the mean where the noise is not:
    its variance is then the second moment about the step.
    """
    mean = weights @ noise
    spread = weights @ (noise - mean) ** 2
    # A weighted variance of few particles is too small on average; equal weights are to give exactly 1.
    lost = jnp.minimum(jnp.sum(weights**2), 0.5)
    spread = spread * (1.0 - 1.0 / max(len(noise), 2)) / (1.0 - lost)
    step = jnp.clip(mean, -_FARTHEST, _FARTHEST)
    moment = (spread + (mean - step) ** 2)[0]
    moment = jnp.mean(moment, keepdims=True) if len(variance) == 1 else moment
    return step[0] / jnp.sqrt(variance), jnp.minimum(moment - 1.0, 0.0) / variance


# --- taking a datum out again -----------------------------------------------------------------------------------------


def unlearned(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    datum: Datum,
    weigh: Callable[[tuple[OnlineGP, ...]], tuple[Paths, Float[Array, " S"]]],
) -> tuple[OnlineGP, ...]:
    """The layers as if they had not learned a datum that they have.

    What it taught a layer is a Gaussian site on the function at the layer's input, whose precision and precision-mean
    depend little on what the layer knew before: not at all where layers are linear and noise is Gaussian. So the datum
    is learned again by layers without it, the sites are read off and taken out of the layers, and round again.

    Args:
        model: the model.
        gps: the layers, which have learned the datum.
        datum: the datum.
        weigh: particles and their log weights under given layers.
    """
    before = gps
    for _ in range(_ROUNDS_BACK):
        paths, log_weights = weigh(before)
        before = _without_sites(model, gps, before, datum, paths, log_weights)
    return before


def _without_sites(
    model: DeepGP,
    gps: tuple[OnlineGP, ...],
    before: tuple[OnlineGP, ...],
    datum: Datum,
    paths: Paths,
    log_weights: Float[Array, " S"],
) -> tuple[OnlineGP, ...]:
    """``gps`` without the sites that the datum would teach ``before``."""
    x, weights = datum.x, jax.nn.softmax(log_weights)[None, :]
    h, new = x, []
    for level, (noise, hidden) in enumerate(zip(paths.noise, paths.hidden, strict=True)):
        at = project_layer(model, before, level, x, h)
        slope, curvature = change_of_noise(weights, noise, at.variance[0] + noise_between(model.layers[level]))
        new.append(_without_site(gps[level], project_layer(model, gps, level, x, h), at, slope, curvature))
        h = weights @ hidden
    last = model.depth - 1
    at = project_layer(model, before, last, x, h)
    slopes, curvatures = site(model.likelihood, at.mean, jnp.broadcast_to(at.variance, at.mean.shape), datum)
    curvature = jnp.mean(curvatures[0], keepdims=True) if at.variance.shape[1] == 1 else curvatures[0]
    return (*new, _without_site(gps[last], project_layer(model, gps, last, x, h), at, slopes[0], curvature))


def _without_site(
    gp: OnlineGP, now: Projection, before: Projection, slope: Float[Array, " P"], curvature: Float[Array, " R"]
) -> OnlineGP:
    """An online GP without a site, which is given by its slope and curvature at another GP's N(m, v).

    The site's precision is ``t = -c / (1 + c v)``, its precision-mean ``s / (1 + c v) + t m``. No function is made less
    certain than the prior.
    """
    shrinks = jnp.maximum(1.0 + curvature * before.variance[0], _SMALLEST_SHARE)
    precision = -curvature / shrinks
    shift = slope / shrinks + precision * before.mean[0]
    mean, variance = now.mean[0], now.variance[0]
    left = jnp.maximum(1.0 - precision * variance, variance / now.prior)
    psi = now.spread[:, :, 0] / variance[:, None]
    move = (mean - variance * shift) / left - mean
    growth = variance / left - variance
    covariance = gp.covariance + growth[:, None, None] * (psi[:, :, None] * psi[:, None, :])
    return OnlineGP(gp.x, gp.mean + psi.T * move[None, :], covariance, gp.root, gp.active, gp.delta)


# --- weights ----------------------------------------------------------------------------------------------------------


def balanced_normal(key: PRNGKeyArray, shape: tuple[int, int], dtype: Any) -> Float[Array, "S W"]:
    """Standard normal draws whose columns have mean 0 and variance 1 exactly, so that equal weights teach nothing.

    Where rows are twice as many as columns, these are uncorrelated too: a guide mixes them.
    """
    draws = jax.random.normal(key, shape, dtype)
    if shape[0] < 3:
        return draws
    centred = draws - jnp.mean(draws, axis=0, keepdims=True)
    if shape[0] < 2 * shape[1]:
        return centred / jnp.sqrt(jnp.mean(centred**2, axis=0, keepdims=True))
    return centred @ inverse_lower(safe_cholesky(centred.T @ centred / shape[0], jitter=0.0).lower).T


def effective_sample_size(log_weights: Float[Array, " S"]) -> Float[Array, ""]:
    """``1 / sum w^2`` of the normalised weights: S when all are equal, 1 when one has everything."""
    return jnp.exp(2.0 * jax.nn.logsumexp(log_weights) - jax.nn.logsumexp(2.0 * log_weights))


def systematic_resample(key: PRNGKeyArray, log_weights: Float[Array, " S"]) -> Int[Array, " S"]:
    """Indices drawn in proportion to the weights with one uniform number: particle i appears S w_i times, rounded."""
    size = len(log_weights)
    edges = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(size, dtype=edges.dtype) + jax.random.uniform(key, (), edges.dtype)) / size
    return jnp.minimum(jnp.searchsorted(edges, points * edges[-1]), size - 1)


# --- pieces -----------------------------------------------------------------------------------------------------------


def project_layer(model: DeepGP, gps: tuple[OnlineGP, ...], level: int, x: Array, h: Array) -> Projection:
    """What layer ``level`` says about h; one row of x serves all particles."""
    if len(x) < len(h):
        x = jnp.broadcast_to(x, (len(h), x.shape[1]))
    return project(gps[level], model.layers[level], model.layer_input(level, x, h))


def noise_between(layer: Layer) -> Float[Array, ""]:
    """The variance of the white noise that the next layer sees."""
    return jnp.zeros((), jnp.float64) if layer.noise is None else layer.noise.value


def _split(e: Float[Array, "S W"], widths: list[int]) -> Noise:
    edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
    return [e[:, a:b] for a, b in itertools.pairwise(edges)]
