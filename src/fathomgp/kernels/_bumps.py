r"""Expectations of Gaussian bumps under Gaussian inputs: what psi statistics of the RBF kernel are made of.

A bump is ``exp(w - 1/2 (h - c)^T diag(p) (h - c))``. An RBF kernel at inducing inputs is a row of bumps, and so are the
products of two of them. Under :math:`h \sim N(\mu, C)`, with :math:`R = (P^{-1} + C)^{-1}`,

.. math:: \log E = w - \tfrac12 \log|I + P C| - \tfrac12 (\mu - c)^T R (\mu - c),

which is bilinear in features of the input and features of the bump: one narrow matrix product and one ``exp`` for all.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp.kernels._arguments import log_like
from fathomgp.kernels._exponential import exponential
from fathomgp.kernels._stationary import RBF
from fathomgp.linalg import inverse_lower, logdet_lower, product, safe_cholesky

#: A diagonal or a full covariance of every input.
Spread = Float[Array, "B _"] | Float[Array, "B _ _"]


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


def expected_bumps(bumps: Bumps, mean: Float[Array, "B D"], spread: Spread) -> Float[Array, "B J"]:
    """``E[bump_j(h_b)]`` under ``h_b ~ N(mean_b, spread_b)``."""
    origin = jnp.mean(bumps.centres, axis=0)
    c, mu = bumps.centres - origin[None], mean - origin[None]
    logdet, R = shrink(bumps.precision, spread)
    pull = times(R, mu)
    constant = -0.5 * (logdet + jnp.sum(pull * mu, axis=1))
    one = jnp.ones_like(constant)
    squares = c**2 if R.ndim == 2 else (c[:, :, None] * c[:, None, :]).reshape(len(c), -1)
    rows = jnp.concatenate([one[:, None], constant[:, None], pull, -0.5 * R.reshape(len(R), -1)], axis=1)
    columns = jnp.concatenate([bumps.log_heights[:, None], jnp.ones_like(c[:, :1]), c, squares], axis=1)
    return exponential(product(rows, columns.T))


def shrink(precision: Float[Array, " D"], spread: Spread) -> tuple[Float[Array, " B"], Spread]:
    """``log|I + P C|`` and ``R = (P^-1 + C)^-1``; zeros in p are welcome."""
    if spread.ndim == 2:
        factor = 1.0 + precision[None] * spread
        return jnp.sum(jnp.log(factor), axis=1), precision[None] / factor
    root = jnp.where(precision > 0.0, jnp.sqrt(jnp.where(precision > 0.0, precision, 1.0)), 0.0)
    scaled = root[None, :, None] * spread * root[None, None, :]
    lower = safe_cholesky(jnp.eye(len(root), dtype=root.dtype)[None] + scaled, jitter=0.0).lower
    half = inverse_lower(lower) * root[None, None, :]
    return logdet_lower(lower), jnp.swapaxes(half, 1, 2) @ half


def times(spread: Spread, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """A diagonal or full matrix of every row times that row."""
    return spread * x if spread.ndim == 2 else jnp.einsum("bde,be->bd", spread, x)
