r"""Expectations of Gaussian bumps under Gaussian inputs: what psi statistics of the RBF kernel are made of.

A bump is ``exp(w - 1/2 (h - c)^T diag(p) (h - c))``. An RBF kernel at inducing inputs is a row of bumps, and so are the
products of two of them. Under :math:`h \sim N(\mu, C)`, with :math:`R = (P^{-1} + C)^{-1}`,

.. math:: \log E = w - \tfrac12 \log|I + P C| - \tfrac12 (\mu - c)^T R (\mu - c),

which is bilinear in features of the input and features of the bump: one narrow matrix product and one ``exp`` for all.

The covariance of two bumps, ``E[b b'] - E[b] E[b']``, is a difference of numbers that are nearly equal where inputs are
nearly certain. It comes from ``g = log E[b b'] - log E[b] - log E[b']`` in closed form, without such a difference: with
:math:`K = (C^{-1} + P + P')^{-1}`, :math:`u = P (\mu - c)` and :math:`u' = P' (\mu - c')`,

.. math:: g = \tfrac12 \log \frac{|I + P C|\,|I + P' C|}{|I + (P + P') C|} + u^T K u'
              - \tfrac12 u^T K P' (C^{-1} + P)^{-1} u - \tfrac12 u'^T K P (C^{-1} + P')^{-1} u' .
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp.kernels._arguments import log_like
from fathomgp.kernels._exponential import excess, exponential
from fathomgp.kernels._stationary import RBF
from fathomgp.linalg import inverse_lower, logdet_lower, product, safe_cholesky
from fathomgp.tags import tagged

#: A diagonal or a full covariance of every input.
Spread = Float[Array, "B _"] | Float[Array, "B _ _"]


@tagged("kernel/bumps")
class Bumps(eqx.Module):
    """J bumps with one precision.

    Attributes:
        centres: c.
        precision: p; zero along the inputs that do not matter.
        log_heights: w.
    """

    centres: Float[Array, "J D"]
    precision: Float[Array, " D"]
    log_heights: Float[Array, " J"]


def bumps_of(kernel: RBF, z: Float[Array, "M D"]) -> Bumps:
    """``k(., z_m)`` as bumps."""
    dims = range(z.shape[1]) if kernel.active_dims is None else kernel.active_dims
    inverse = jnp.broadcast_to(kernel.lengthscale.value.astype(z.dtype) ** -2, (len(dims),))
    precision = jnp.zeros(z.shape[1], z.dtype).at[jnp.asarray(dims)].set(inverse)
    return Bumps(z, precision, jnp.broadcast_to(log_like(kernel.variance, z), (len(z),)))


def multiply(first: Bumps, second: Bumps) -> Bumps:
    """The product of the j-th of ``first`` and the j-th of ``second``, for every j.

    Precisions add, centres average, and the height falls with the distance between the centres.
    """
    total = first.precision + second.precision
    safe = jnp.where(total > 0.0, total, 1.0)
    share = first.precision / safe
    centres = second.centres + share[None] * (first.centres - second.centres)
    misfit = (first.centres - second.centres) ** 2 @ (share * second.precision)
    return Bumps(centres, total, first.log_heights + second.log_heights - 0.5 * misfit)


class Pairs(eqx.Module):
    """The j-th bump of one row beside the j-th of another, and their product."""

    first: Bumps
    second: Bumps
    both: Bumps


def pair(first: Bumps, second: Bumps) -> Pairs:
    """Every bump of ``first`` with the one of ``second`` in the same place."""
    return Pairs(first, second, multiply(first, second))


def expected_bumps(bumps: Bumps, mean: Float[Array, "B D"], spread: Spread) -> Float[Array, "B J"]:
    """``E[bump_j(h_b)]`` under ``h_b ~ N(mean_b, spread_b)``."""
    return exponential(_log_expected(bumps, mean, spread))


def bump_covariances(pairs: Pairs, mean: Float[Array, "B D"], spread: Spread) -> Float[Array, "B J"]:
    """``Cov[first_j(h_b), second_j(h_b)]``."""
    return excess(_log_expected(pairs.both, mean, spread), _log_ratio(pairs, mean, spread))


def _log_expected(bumps: Bumps, mean: Float[Array, "B D"], spread: Spread) -> Float[Array, "B J"]:
    origin = jnp.mean(bumps.centres, axis=0)
    c, mu = bumps.centres - origin[None], mean - origin[None]
    logdet, R = shrink(bumps.precision, spread)
    pull = times(R, mu)
    constant = -0.5 * (logdet + jnp.sum(pull * mu, axis=1))
    one = jnp.ones_like(constant)
    rows = jnp.concatenate([one[:, None], constant[:, None], pull, -0.5 * R.reshape(len(R), -1)], axis=1)
    columns = [bumps.log_heights[:, None], jnp.ones_like(c[:, :1]), c, _products(c, c, spread)]
    return product(rows, jnp.concatenate(columns, axis=1).T)


def _log_ratio(pairs: Pairs, mean: Float[Array, "B D"], spread: Spread) -> Float[Array, "B J"]:
    """G of the module's docstring. With T = P + P', ``K T = C (T^-1 + C)^-1``, and so for P: no inverse of C."""
    p, q = pairs.first.precision, pairs.second.precision
    origin = jnp.mean(pairs.both.centres, axis=0)
    c, d, mu = pairs.first.centres - origin[None], pairs.second.centres - origin[None], mean - origin[None]
    (first, R), (second, Q), (both, T) = (shrink(one, spread) for one in (p, q, p + q))
    share = p / jnp.where(p + q > 0.0, p + q, 1.0)
    if spread.ndim == 2:
        cross = share[None] * (p + q)[None] * spread * T * (1.0 - share)[None]
        own, other = cross * spread * R, cross * spread * Q
    else:
        cross = (share * (p + q))[None, :, None] * (spread @ T) * (1.0 - share)[None, None, :]
        own, other = cross @ (spread @ R), jnp.swapaxes(cross, 1, 2) @ (spread @ Q)
    across, back = times(cross, mu), times(cross if cross.ndim == 2 else jnp.swapaxes(cross, 1, 2), mu)
    first_pull, second_pull = times(own, mu) - across, times(other, mu) - back
    constant = 0.5 * (first + second - both + jnp.sum(mu * (2.0 * across - times(own, mu) - times(other, mu)), axis=1))
    flat = [part.reshape(len(part), -1) for part in (cross, -0.5 * own, -0.5 * other)]
    rows = jnp.concatenate([constant[:, None], first_pull, second_pull, *flat], axis=1)
    products = [_products(*two, spread) for two in ((c, d), (c, c), (d, d))]
    columns = jnp.concatenate([jnp.ones_like(c[:, :1]), c, d, *products], axis=1)
    return product(rows, columns.T)


def _products(c: Float[Array, "J D"], d: Float[Array, "J D"], spread: Spread) -> Float[Array, "J _"]:
    """What a diagonal or a full matrix of every row multiplies."""
    return c * d if spread.ndim == 2 else (c[:, :, None] * d[:, None, :]).reshape(len(c), -1)


def shrink(precision: Float[Array, " D"], spread: Spread) -> tuple[Float[Array, " B"], Spread]:
    """``log|I + P C|`` and ``R = (P^-1 + C)^-1``; zeros in p are welcome."""
    if spread.ndim == 2:
        factor = 1.0 + precision[None] * spread
        return jnp.sum(jnp.log1p(precision[None] * spread), axis=1), precision[None] / factor
    root = jnp.where(precision > 0.0, jnp.sqrt(jnp.where(precision > 0.0, precision, 1.0)), 0.0)
    scaled = root[None, :, None] * spread * root[None, None, :]
    lower = safe_cholesky(jnp.eye(len(root), dtype=root.dtype)[None] + scaled, jitter=0.0).lower
    half = inverse_lower(lower) * root[None, None, :]
    return logdet_lower(lower), jnp.swapaxes(half, 1, 2) @ half


def times(spread: Spread, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """A diagonal or full matrix of every row times that row."""
    return spread * x if spread.ndim == 2 else jnp.einsum("bde,be->bd", spread, x)
