"""The sparse online Gaussian process (Csato and Opper 2002; Van Vaerenbergh et al. 2012): one datum at a time.

A budget of inputs, the active set X~, carries everything learned: q(u) = N(mu, Sigma) for the function values u there,
and a root V of Q = k(X~, X~)^-1 = V^T V. At a new input, with q_n = Q k(X~, x) (equations 1-6 of Wang et al. 2016,
supplement),

    gamma^2 = k(x, x) - k(x, X~) q_n           what the active set cannot explain
    mean    = q_n^T mu + m(x)                  variance = gamma^2 + q_n^T Sigma q_n

A datum enters through two numbers an output, the slope and the curvature of its log predictive density as a function of
that mean: with psi the covariance of the function values with the one at x,

    mu <- mu + slope psi            Sigma <- Sigma + curvature psi psi^T

which for Gaussian noise s2 is (y - mean) / (variance + s2) and -1 / (variance + s2): the exact update. The input then
joins the active set if gamma^2 is worth it, and the member that is predicted best by the others leaves a full one.

Function values at inputs that lie close together are nearly the same number, and Q of such values loses every digit;
its root loses half of them. So V is what is carried: an input that joins appends the row (-q_n, 1) / gamma, and before
one leaves, a reflection turns V so that its column lies in its own row. And u_i is f(x~_i) with white noise of variance
delta k(x~_i, x~_i), delta = 1e-6 by default: no direction of k(X~, X~) is then smaller, whatever becomes of the
hyperparameters, at a cost of some 1e-5 in the mean. With delta = 0 there is none. Inputs join down to a gamma^2 of
1e-6 k(x, x), as in the paper, or of delta k(x, x) if that is more.

Buffers hold one slot more than the budget, with a mask: every datum costs the same, and a pass is one compiled scan.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fathomgp.linalg import JitterReport, inverse_lower, safe_cholesky
from fathomgp.model import Conditional, Layer
from fathomgp.precision import clamp_variance
from fathomgp.tags import tagged

#: gamma^2 below this share of k(x, x) is too near to rounding where each input extrapolates from those before.
_SMALLEST_NOVELTY = 1e-6


@tagged("sequential/online-gp")
class OnlineGP(eqx.Module):
    """What a layer has learned so far. Slots that are not active hold zeros.

    Attributes:
        x: the active inputs, A slots of which one at least is free.
        mean: mu, less the layer's mean function.
        covariance: Sigma, one that all outputs share or one an output.
        root: V.
        active: which slots count.
        delta: the white noise of the function values, and the least gamma^2 with which an input joins, as shares of
            k(x, x).
    """

    x: Float[Array, "A D"]
    mean: Float[Array, "A P"]
    covariance: Float[Array, "R A A"]
    root: Float[Array, "A A"]
    active: Bool[Array, " A"]
    delta: float = eqx.field(static=True, default=1e-6)


class Projection(eqx.Module):
    """What an online GP says about N inputs.

    Attributes:
        q: Q k(X~, x).
        novelty: gamma^2.
        spread: Sigma q.
        mean: of the function, the layer's mean function included.
        variance: of the function, shared by all outputs or one an output.
        prior: k(x, x).
    """

    q: Float[Array, "A N"]
    novelty: Float[Array, " N"]
    spread: Float[Array, "R A N"]
    mean: Float[Array, "N P"]
    variance: Float[Array, "N R"]
    prior: Float[Array, " N"]


def empty(layer: Layer, num_inputs: int, budget: int, *, shared: bool, delta: float = 1e-6) -> OnlineGP:
    """An online GP that has seen nothing. ``shared``: all outputs will see the same points and noise."""
    slots, dtype = budget + 1, jnp.float64
    return OnlineGP(
        jnp.zeros((slots, num_inputs), dtype),
        jnp.zeros((slots, layer.width), dtype),
        jnp.zeros((1 if shared else layer.width, slots, slots), dtype),
        jnp.zeros((slots, slots), dtype),
        jnp.zeros(slots, bool),
        delta,
    )


def prior_at(gp: OnlineGP, layer: Layer, x: Float[Array, "A D"], active: Bool[Array, " A"]) -> OnlineGP:
    """The prior, with ``x`` as the active set: what an episode starts from that knows which inputs matter."""
    start = OnlineGP(
        jnp.where(active[:, None], x, 0.0),
        jnp.zeros_like(gp.mean),
        gp.covariance,
        gp.root,
        active,
        gp.delta,
    )
    covariance = jnp.broadcast_to(_prior(start, layer), gp.covariance.shape)
    return refresh((eqx.tree_at(lambda gp: gp.covariance, start, covariance),), (layer,))[0]


def project(gp: OnlineGP, layer: Layer, x: Float[Array, "N D"]) -> Projection:
    """The predictive at ``x``, and what :func:`absorb` needs."""
    cross = jnp.where(gp.active[:, None], layer.kernel(gp.x, x), 0.0)
    prior = layer.kernel.diagonal(x)
    features = gp.root @ cross
    q = gp.root.T @ features
    novelty = jnp.maximum(prior - jnp.sum(features**2, axis=0), 0.0)
    spread = gp.covariance @ q
    variance = clamp_variance(novelty[None] + jnp.sum(spread * q[None], axis=1))
    mean = features.T @ (gp.root @ gp.mean) + layer.mean(x)
    return Projection(q, novelty, spread, mean, variance.T, prior)


def absorb(
    gp: OnlineGP,
    at: Projection,
    x: Float[Array, "1 D"],
    slope: Float[Array, " P"],
    curvature: Float[Array, " R"],
) -> OnlineGP:
    """Learn one datum at ``x``, whose projection is ``at`` (equations 2-5), within the budget.

    Args:
        gp: before the datum.
        at: ``project(gp, layer, x)``.
        x: the input.
        slope: of the datum's log predictive density in the mean of each output; 0 where nothing was observed.
        curvature: the same, second derivative.
    """
    joined = _join(gp, at, x)
    new = joined.active & ~gp.active
    psi = jnp.where(new[None, :], at.variance[0][:, None], at.spread[:, :, 0])
    mean = joined.mean + psi.T * slope[None, :]
    covariance = joined.covariance + curvature[:, None, None] * (psi[:, :, None] * psi[:, None, :])
    return _within_budget(OnlineGP(joined.x, mean, covariance, joined.root, joined.active, gp.delta))


def absorb_mixture(
    gp: OnlineGP,
    layer: Layer,
    x: Float[Array, "1 D"],
    particles: Float[Array, "S D"],
    weights: Float[Array, " S"],
    slope: Float[Array, "S P"],
    curvature: Float[Array, "S P"],
) -> OnlineGP:
    """Learn one datum whose input is only known as weighted particles: the moments of the mixture, within the budget.

    Each particle i would move the function values by slope_i psi_i, with psi_i their covariance with f at its place,

        mu <- mu + d,    d = sum_i w_i slope_i psi_i
        Sigma <- Sigma + sum_i w_i (curvature_i + slope_i^2) psi_i psi_i^T - d d^T

    These differ from output to output, whatever the noise: a covariance that outputs share gets the mean over them.
    To learn at the mean particle instead would bend the function towards every datum: an output that pulls its own
    input along leaves a residual that looks like a function of this input.

    Args:
        gp: before the datum.
        layer: of the kernel.
        x: the input that may join the active set: the particles' mean.
        particles: inputs.
        weights: of the particles; they sum to 1.
        slope: of the log predictive density at each particle, see :func:`absorb`.
        curvature: likewise.
    """
    joined = _join(gp, project(gp, layer, x), x)
    psi = project(joined, layer, particles).spread
    shared = len(psi) == 1
    share = weights[:, None] * slope
    shift = psi[0] @ share if shared else jnp.einsum("pas,sp->ap", psi, share)
    moment = weights[:, None] * (curvature + slope**2)
    moment = jnp.mean(moment, axis=1, keepdims=True) if shared else moment
    spread = jnp.einsum("ras,sr,rbs->rab", psi, moment, psi)
    back = jnp.einsum("ap,bp->pab", shift, shift)
    back = jnp.mean(back, axis=0, keepdims=True) if shared else back
    mean, covariance = joined.mean + shift, joined.covariance + (spread - back)
    return _within_budget(OnlineGP(joined.x, mean, covariance, joined.root, joined.active, joined.delta))


def forget(gp: OnlineGP, layer: Layer, factor: float) -> OnlineGP:
    """Move a step back to the prior, so that old data count less: mu <- sqrt(f) mu, Sigma <- f Sigma + (1 - f) K.

    That is what becomes of a function which drifts, its covariance k(x, x') sqrt(f)^|n - m| between rows n and m.
    """
    root = factor**0.5
    covariance = factor * gp.covariance + (1.0 - factor) * _prior(gp, layer)[None]
    return OnlineGP(gp.x, root * gp.mean, covariance, gp.root, gp.active, gp.delta)


def refresh(gps: tuple[OnlineGP, ...], layers: tuple[Layer, ...]) -> tuple[OnlineGP, ...]:
    """V from its definition instead of by recursion: takes rounding out, and lets hyperparameters change."""
    return tuple(
        OnlineGP(gp.x, gp.mean, gp.covariance, root, gp.active, gp.delta)
        for gp, root in zip(gps, _inverse_factors(gps, layers)[0], strict=True)
    )


def conditionals(
    gps: tuple[OnlineGP, ...], layers: tuple[Layer, ...]
) -> tuple[tuple[Conditional, ...], list[JitterReport]]:
    """The same q(f) as every algorithm with inducing inputs has it: the active inputs are the inducing ones."""
    factors, reports = _inverse_factors(gps, layers)
    answers = []
    for gp, factor in zip(gps, factors, strict=True):
        whitened = factor[None] @ gp.covariance @ factor.T[None]
        free = jnp.diag(jnp.where(gp.active, 0.0, 1.0))[None]
        lower = safe_cholesky(0.5 * (whitened + jnp.swapaxes(whitened, 1, 2)) + free).lower
        answers.append(Conditional(gp.x, factor @ gp.mean, factor, jnp.swapaxes(lower, 1, 2)))
    return tuple(answers), reports


def _join(gp: OnlineGP, at: Projection, x: Float[Array, "1 D"]) -> OnlineGP:
    """The same function with ``x`` in the active set, if its gamma^2 is worth it: no datum is learned (equation 5)."""
    q, novelty = at.q[:, 0], at.novelty[0]
    white = gp.delta * at.prior[0]
    joins = novelty > max(gp.delta, _SMALLEST_NOVELTY) * at.prior[0]
    new = (jnp.arange(len(gp.active)) == jnp.argmin(gp.active)) & joins
    row = jnp.where(new[None, :], at.variance[0][:, None], at.spread[:, :, 0])
    mean = jnp.where(new[:, None], (q @ gp.mean)[None, :], gp.mean)
    covariance = jnp.where(new[None, :, None], row[:, None, :], gp.covariance)
    covariance = jnp.where(new[None, None, :], row[:, :, None], covariance)
    covariance = covariance + jnp.diag(jnp.where(new, white, 0.0))[None]
    added = jnp.where(new, 1.0, -q) / jnp.sqrt(jnp.where(joins, novelty + white, 1.0))
    root = jnp.where(new[:, None], added[None, :], gp.root)
    return OnlineGP(jnp.where(new[:, None], x, gp.x), mean, covariance, root, gp.active | new, gp.delta)


def _within_budget(gp: OnlineGP) -> OnlineGP:
    """Without the member of lowest squared leave-one-out error, summed over outputs, if no slot is free."""
    full = jnp.all(gp.active)
    pivots = jnp.where(gp.active, jnp.sum(gp.root**2, axis=0), 1.0)
    weights = gp.root.T @ (gp.root @ gp.mean)
    scores = jnp.sum((weights / pivots[:, None]) ** 2, axis=1)
    victim = jnp.argmin(jnp.where(gp.active, scores, jnp.inf))
    keep = ~(full & (jnp.arange(len(gp.active)) == victim))
    # V may be turned: reflect it so that the member's column lies in its row, and what is left of Q is left of V.
    column = gp.root[:, victim] / jnp.sqrt(pivots[victim])
    mirror = column + jnp.where(keep, 0.0, jnp.where(column >= 0.0, 1.0, -1.0))
    twice = jnp.where(full, 2.0 / jnp.maximum(jnp.sum(mirror**2), 1.0), 0.0)
    root = gp.root - (twice * mirror)[:, None] * (mirror @ gp.root)[None, :]
    return OnlineGP(
        jnp.where(keep[:, None], gp.x, 0.0),
        jnp.where(keep[:, None], gp.mean, 0.0),
        _masked(gp.covariance, keep),
        _masked(root, keep),
        gp.active & keep,
        gp.delta,
    )


def _inverse_factors(
    gps: tuple[OnlineGP, ...], layers: tuple[Layer, ...]
) -> tuple[list[Float[Array, "A A"]], list[JitterReport]]:
    """Lz^-1 of every active set, zero in free slots; one batched factorisation where all have the same size."""
    covariances = [
        _prior(gp, layer) + jnp.diag(jnp.where(gp.active, 0.0, 1.0)) for gp, layer in zip(gps, layers, strict=True)
    ]
    if len({covariance.shape for covariance in covariances}) > 1:
        factors = [safe_cholesky(covariance, jitter=0.0) for covariance in covariances]
        inverses = [inverse_lower(factor.lower) for factor in factors]
        reports = [factor.report for factor in factors]
    else:
        factor = safe_cholesky(jnp.stack(covariances), jitter=0.0)
        inverses = list(inverse_lower(factor.lower))
        reports = [jax.tree.map(lambda leaf, i=i: leaf[i], factor.report) for i in range(len(gps))]
    return [_masked(inverse, gp.active) for inverse, gp in zip(inverses, gps, strict=True)], reports


def _prior(gp: OnlineGP, layer: Layer) -> Float[Array, "A A"]:
    """The covariance of the function values before any data, zero in free slots."""
    covariance = layer.kernel(gp.x)
    return _masked(covariance + gp.delta * jnp.diag(jnp.diagonal(covariance)), gp.active)


def _masked(matrix: Float[Array, "*batch A A"], keep: Bool[Array, " A"]) -> Float[Array, "*batch A A"]:
    both = keep[:, None] & keep[None, :]
    return jnp.where(jnp.broadcast_to(both, matrix.shape), matrix, 0.0)
