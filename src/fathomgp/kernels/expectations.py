r"""Psi statistics: expectations of kernels under Gaussian inputs :math:`h \sim N(\mu, C)`.

.. math:: \psi_0 = E[k(h, h)], \qquad \psi_1 = E[k(h, Z)], \qquad \psi_2 = E[k(Z, h)\, k(h, Z)]

RBF, linear, constant and white kernels and their sums: in closed form, also between unlike parts of a sum. Any other
kernel: Gauss-Hermite for one or two inputs, quasi Monte Carlo for more. C is a diagonal, (B, D), or full, (B, D, D).

psi2 of a batch is (B, M, M), and hardly anyone wants it. Where inputs are nearly certain it is nearly
:math:`\psi_1^T \psi_1`, and what variances are made of is the difference. That is computed for itself,

.. math:: \mathrm{Cov}[k(Z, h)] = \psi_2 - \psi_1^T \psi_1,

and :func:`covariance_trace` and :func:`covariance_sum` contract it while it streams by in blocks of rows, forward and
backward, so that memory does not grow with B.

Example:
    >>> import jax.numpy as jnp
    >>> from fathomgp.kernels import RBF
    >>> z, mean, variance = jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.full((1, 1), 3.0)
    >>> round(float(psi1(RBF(), z, mean, variance)[0, 0]), 6)
    0.5

References:
    Titsias and Lawrence (2010), Bayesian Gaussian process latent variable model. AISTATS.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fathomgp._rules import hermite, sobol_normal
from fathomgp.kernels._algebra import Sum
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._bumps import Bumps, Pairs, Spread, bump_covariances, bumps_of, expected_bumps, pair, shrink
from fathomgp.kernels._distance import safe_sqrt
from fathomgp.kernels._dot_product import Linear
from fathomgp.kernels._simple import Constant, White
from fathomgp.kernels._stationary import RBF
from fathomgp.linalg import product, safe_cholesky, transposed_product

#: Numbers that a block of rows may hold at a time: about what a core's cache does.
_BLOCK_NUMBERS = 1 << 19
#: Nodes along each of one or two inputs, and points for more.
_NODES = 24
_POINTS = 1024


def psi0(kernel: AbstractKernel, mean: Float[Array, "B D"], variance: Spread) -> Float[Array, " B"]:
    """``E[k(h, h)]``."""
    parts = _closed_parts(kernel)
    if parts is None:
        return _numerical_psi0(kernel, mean, variance)
    affine = _affine(parts, mean)
    heights = [part.variance.value.astype(mean.dtype) for part in parts if isinstance(part, (RBF, White))]
    diagonal = variance if variance.ndim == 2 else jnp.diagonal(variance, axis1=1, axis2=2)
    return sum(heights, start=affine.bias) + (mean**2 + diagonal) @ affine.variance


def psi1(
    kernel: AbstractKernel, z: Float[Array, "M D"], mean: Float[Array, "B D"], variance: Spread
) -> Float[Array, "B M"]:
    """``E[k(h, Z)]``."""
    parts = _closed_parts(kernel)
    if parts is None:
        return _numerical_psi1(kernel, z, mean, variance)
    total = _affine(parts, z).at(mean, z)
    for bumps in _all_bumps(parts, z):
        total = total + expected_bumps(bumps, mean, variance)
    return total


def psi2(
    kernel: AbstractKernel, z: Float[Array, "M D"], mean: Float[Array, "B D"], variance: Spread
) -> Float[Array, "B M M"]:
    """``E[k(Z, h) k(h, Z)]``, all of it: for a few rows."""
    rows = jnp.eye(len(mean), dtype=mean.dtype)
    first = psi1(kernel, z, mean, variance)
    return covariance_sum(kernel, z, mean, variance, rows) + first[:, :, None] * first[:, None, :]


class Contraction(eqx.Module):
    """Symmetric matrices W_k, ready to be contracted with covariances: all that does not depend on the inputs h.

    Attributes:
        kernel: the kernel.
        z: the inducing inputs.
        weights: W.
        pairs: for every two RBF parts of a sum, pairs of their bumps and what these weigh in every W_k.
    """

    kernel: AbstractKernel
    z: Float[Array, "M D"]
    weights: Float[Array, "K M M"]
    pairs: tuple[tuple[Pairs, Float[Array, "_ K"]], ...]


def contraction(kernel: AbstractKernel, z: Float[Array, "M D"], weights: Float[Array, "K M M"]) -> Contraction:
    """Prepare ``tr(W_k Cov[k(Z, h)])``."""
    rows = _all_bumps(_closed_parts(kernel) or (), z)
    flat = 2.0 * weights.reshape(len(weights), -1).T
    pairs = []
    for number, bumps in enumerate(rows):
        pairs.append((_pairs(bumps), _pack(weights).T))
        pairs.extend((_all_pairs(bumps, other), flat) for other in rows[:number])
    return Contraction(kernel, z, weights, tuple(pairs))


def covariance_trace(contraction: Contraction, mean: Float[Array, "B D"], variance: Spread) -> Float[Array, "B K"]:
    """``tr(W_k Cov[k(Z, h_b)])``, without holding the covariances."""
    kernel, z = contraction.kernel, contraction.z
    parts = _closed_parts(kernel)

    def block(mean: Array, variance: Array) -> Array:
        if parts is None:
            return _numerical_trace(kernel, z, mean, variance, contraction.weights)
        return _closed_trace(parts, contraction, mean, variance)

    return _map_rows(block, block_rows(kernel, z), mean, variance)


def covariance_sum(
    kernel: AbstractKernel,
    z: Float[Array, "M D"],
    mean: Float[Array, "B D"],
    variance: Spread,
    rows: Float[Array, "B K"],
) -> Float[Array, "K M M"]:
    """``sum_b rows_bk Cov[k(Z, h_b)]``, without holding the covariances."""
    parts = _closed_parts(kernel)

    def block(mean: Array, variance: Array, rows: Array) -> Array:
        if parts is None:
            return _numerical_sum(kernel, z, mean, variance, rows)
        return _closed_sum(parts, z, mean, variance, rows)

    return _sum_rows(block, block_rows(kernel, z), mean, variance, rows)


def block_rows(kernel: AbstractKernel, z: Float[Array, "M D"]) -> int:
    """Rows whose covariances fit into a block; half as many again are not worth a second one."""
    M, D = z.shape
    per_row = M * (M + 1) // 2 if _closed_parts(kernel) is not None else M * len(_points(D)[0])
    return max(8, _BLOCK_NUMBERS // per_row)


# --- closed forms -----------------------------------------------------------------------------------------------------


class _Affine(eqx.Module):
    """The linear and constant parts of a sum as one kernel: ``h^T V z + b``."""

    variance: Float[Array, " D"]
    bias: Float[Array, ""]

    def at(self, x: Float[Array, "B D"], z: Float[Array, "M D"]) -> Float[Array, "B M"]:
        return (x * self.variance[None]) @ z.T + self.bias


def _closed_parts(kernel: AbstractKernel) -> tuple[AbstractKernel, ...] | None:
    parts = kernel.parts if isinstance(kernel, Sum) else (kernel,)
    return parts if all(isinstance(part, (RBF, Linear, Constant, White)) for part in parts) else None


def _all_bumps(parts: tuple[AbstractKernel, ...], z: Float[Array, "M D"]) -> list[Bumps]:
    return [bumps_of(part, z) for part in parts if isinstance(part, RBF)]


def _affine(parts: tuple[AbstractKernel, ...], z: Float[Array, "M D"]) -> _Affine:
    D = z.shape[1]
    variance, bias = jnp.zeros(D, z.dtype), jnp.zeros((), z.dtype)
    for part in parts:
        if isinstance(part, Constant):
            bias = bias + part.variance.value.astype(z.dtype)
        if isinstance(part, Linear):
            dims = np.arange(D) if part.active_dims is None else np.asarray(part.active_dims)
            variance = variance.at[dims].add(jnp.broadcast_to(part.variance.value.astype(z.dtype), (len(dims),)))
            if part.bias_variance is not None:
                bias = bias + part.bias_variance.value.astype(z.dtype)
    return _Affine(variance, bias)


def _has_affine(parts: tuple[AbstractKernel, ...]) -> bool:
    return any(isinstance(part, (Linear, Constant)) for part in parts)


def _pairs(bumps: Bumps) -> Pairs:
    """A row of bumps with itself, each pair once."""
    centres, heights = _take_pairs(bumps.centres), _take_pairs(bumps.log_heights[:, None])
    first, second = (Bumps(c, bumps.precision, w[:, 0]) for c, w in zip(centres, heights, strict=True))
    return pair(first, second)


def _all_pairs(first: Bumps, second: Bumps) -> Pairs:
    """Every bump of one row with every bump of another."""
    M, J = len(first.centres), len(second.centres)
    left = Bumps(jnp.repeat(first.centres, J, axis=0), first.precision, jnp.repeat(first.log_heights, J))
    right = Bumps(jnp.tile(second.centres, (M, 1)), second.precision, jnp.tile(second.log_heights, M))
    return pair(left, right)


def _closed_trace(
    parts: tuple[AbstractKernel, ...], contraction: Contraction, mean: Array, variance: Array
) -> Float[Array, "B K"]:
    z, weights = contraction.z, contraction.weights
    total = jnp.zeros((len(mean), len(weights)), mean.dtype)
    for pairs, packed in contraction.pairs:
        total = total + product(bump_covariances(pairs, mean, variance), packed)
    if not _has_affine(parts):
        return total
    affine = _affine(parts, z)
    slopes = z * affine.variance[None]
    total = total + _contract(variance, jnp.einsum("md,kmn,ne->kde", slopes, weights, slopes))
    for bumps in _all_bumps(parts, z):
        cross = _bumps_with_affine(bumps, affine, z, mean, variance)
        total = total + 2.0 * jnp.einsum("bmn,kmn->bk", cross, weights)
    return total


def _closed_sum(
    parts: tuple[AbstractKernel, ...], z: Array, mean: Array, variance: Array, rows: Float[Array, "B K"]
) -> Float[Array, "K M M"]:
    M, K = len(z), rows.shape[1]
    total = jnp.zeros((K, M, M), mean.dtype)
    every = _all_bumps(parts, z)
    for number, bumps in enumerate(every):
        packed = transposed_product(rows, bump_covariances(_pairs(bumps), mean, variance))
        total = total + _unpack(packed)
        for other in every[:number]:
            unlike = transposed_product(rows, bump_covariances(_all_pairs(bumps, other), mean, variance))
            total = total + _twice_symmetric(unlike.reshape(K, M, M))
    if not _has_affine(parts):
        return total
    affine = _affine(parts, z)
    slopes = z * affine.variance[None]
    total = total + jnp.einsum("md,kde,ne->kmn", slopes, _summed(variance, rows), slopes)
    for bumps in every:
        cross = _bumps_with_affine(bumps, affine, z, mean, variance)
        total = total + _twice_symmetric(jnp.einsum("bk,bmn->kmn", rows, cross))
    return total


def _bumps_with_affine(bumps: Bumps, affine: _Affine, z: Array, mean: Array, variance: Array) -> Float[Array, "B M M"]:
    """``Cov[bump_m(h), h^T V z_n]``: the bump tilts h's mean from mu to ``mu + C R (z_m - mu)``."""
    _, R = shrink(bumps.precision, variance)
    away = z[None] - mean[:, None]
    if variance.ndim == 2:
        tilt = (variance * R)[:, None] * away
    else:
        tilt = jnp.einsum("bde,bef,bmf->bmd", variance, R, away)
    values = jnp.einsum("bmd,nd->bmn", tilt * affine.variance[None, None], z)
    return expected_bumps(bumps, mean, variance)[:, :, None] * values


def _contract(variance: Array, matrices: Float[Array, "K D D"]) -> Float[Array, "B K"]:
    """``tr(C_b G_k)``."""
    if variance.ndim == 2:
        return variance @ jnp.diagonal(matrices, axis1=1, axis2=2).T
    return jnp.einsum("bde,kde->bk", variance, matrices)


def _summed(variance: Array, rows: Float[Array, "B K"]) -> Float[Array, "K D D"]:
    """``sum_b rows_bk C_b``."""
    if variance.ndim == 3:
        return jnp.einsum("bk,bde->kde", rows, variance)
    return (rows.T @ variance)[:, :, None] * jnp.eye(variance.shape[1], dtype=variance.dtype)[None]


def _twice_symmetric(matrices: Float[Array, "K M M"]) -> Float[Array, "K M M"]:
    return matrices + jnp.swapaxes(matrices, 1, 2)


# --- pairs ------------------------------------------------------------------------------------------------------------
#
# The pull-back of a gather is a scatter, which XLA does one number at a time on a CPU. Here it is a gather again.


@jax.custom_vjp
def _take_pairs(x: Float[Array, "M D"]) -> tuple[Float[Array, "J D"], Float[Array, "J D"]]:
    """``x_i`` and ``x_j`` of every pair i <= j."""
    i, j = np.triu_indices(len(x))
    return x[i], x[j]


def _take_pairs_pull(_: None, cotangents: tuple[Array, Array]) -> tuple[Array]:
    places = _places(len(cotangents[0]))
    upper = jnp.asarray(np.triu(np.ones(places.shape)), cotangents[0].dtype)[:, :, None]
    first, second = (part[places] * upper for part in cotangents)
    return (jnp.sum(first, axis=1) + jnp.sum(second, axis=0),)


_take_pairs.defvjp(lambda x: (_take_pairs(x), None), _take_pairs_pull)


@jax.custom_vjp
def _pack(matrices: Float[Array, "K M M"]) -> Float[Array, "K J"]:
    """Entries of symmetric matrices, each pair once, with those off the diagonal doubled."""
    i, j = np.triu_indices(matrices.shape[1])
    return matrices[:, i, j] * jnp.asarray(np.where(i == j, 1.0, 2.0), matrices.dtype)[None]


_pack.defvjp(lambda matrices: (_pack(matrices), None), lambda _, packed: (packed[:, _places(packed.shape[1])],))


@jax.custom_vjp
def _unpack(packed: Float[Array, "K J"]) -> Float[Array, "K M M"]:
    """Symmetric matrices from their packed entries."""
    return packed[:, _places(packed.shape[1])]


_unpack.defvjp(lambda packed: (_unpack(packed), None), lambda _, cotangent: (_pack(0.5 * _twice_symmetric(cotangent)),))


def _places(J: int) -> Int[np.ndarray, "M M"]:
    """Where entry (i, j) of a symmetric matrix stands among its J packed pairs."""
    M = math.isqrt(2 * J)
    index = np.zeros((M, M), int)
    i, j = np.triu_indices(M)
    index[i, j] = index[j, i] = np.arange(len(i))
    return index


# --- any kernel -------------------------------------------------------------------------------------------------------


def _points(D: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of the standard normal in D dimensions."""
    if D > 2:
        return sobol_normal(D, _POINTS), np.full(_POINTS, 1.0 / _POINTS)
    nodes, log_weights = hermite(_NODES)
    grids, weights = np.meshgrid(*[nodes] * D, indexing="ij"), np.meshgrid(*[log_weights] * D, indexing="ij")
    return np.stack(grids, axis=-1).reshape(-1, D), np.exp(sum(weights)).reshape(-1)


def _scatter(mean: Array, variance: Array) -> tuple[Float[Array, "S B D"], Float[Array, " S"]]:
    """Inputs to evaluate at, and their weights."""
    points, weights = (jnp.asarray(part, mean.dtype) for part in _points(mean.shape[1]))
    if variance.ndim == 2:
        shifts = points[:, None] * safe_sqrt(variance)[None]
    else:
        shifts = jnp.einsum("bde,se->sbd", safe_cholesky(variance).lower, points)
    return mean[None] + shifts, weights


def _numerical_psi0(kernel: AbstractKernel, mean: Array, variance: Array) -> Float[Array, " B"]:
    inputs, weights = _scatter(mean, variance)
    return weights @ jax.vmap(kernel.diagonal)(inputs)


def _numerical_psi1(kernel: AbstractKernel, z: Array, mean: Array, variance: Array) -> Float[Array, "B M"]:
    inputs, weights = _scatter(mean, variance)
    return jnp.einsum("s,sbm->bm", weights, jax.vmap(lambda x: kernel.gram(x, z))(inputs))


def _numerical_trace(
    kernel: AbstractKernel, z: Array, mean: Array, variance: Array, matrices: Array
) -> Float[Array, "B K"]:
    values, weights = _centred_values(kernel, z, mean, variance)
    return jnp.einsum("s,sbm,kmn,sbn->bk", weights, values, matrices, values, optimize="optimal")


def _numerical_sum(
    kernel: AbstractKernel, z: Array, mean: Array, variance: Array, rows: Array
) -> Float[Array, "K M M"]:
    values, weights = _centred_values(kernel, z, mean, variance)
    return jnp.einsum("s,bk,sbm,sbn->kmn", weights, rows, values, values, optimize="optimal")


def _centred_values(
    kernel: AbstractKernel, z: Array, mean: Array, variance: Array
) -> tuple[Float[Array, "S B M"], Float[Array, " S"]]:
    """``k(h, Z)`` less its expectation at the inputs to evaluate at, and their weights."""
    inputs, weights = _scatter(mean, variance)
    values = jax.vmap(lambda x: kernel.gram(x, z))(inputs)
    return values - jnp.einsum("s,sbm->bm", weights, values)[None], weights


# --- streams ----------------------------------------------------------------------------------------------------------


def _map_rows(function: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """``function`` over blocks of rows, recomputed for gradients; the last ones are padded."""
    count = len(arrays[0])
    blocks = max(1, round(count / block))
    if blocks == 1:
        return function(*arrays)
    answers = jax.lax.map(jax.checkpoint(lambda parts: function(*parts)), tuple(_split(a, blocks) for a in arrays))
    return answers.reshape(-1, *answers.shape[2:])[:count]


def _sum_rows(function: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """The sum of ``function`` over blocks of rows; the last array holds weights, which padding lacks."""
    count = max(1, round(len(arrays[0]) / block))
    if count == 1:
        return function(*arrays)

    @jax.checkpoint
    def add(total: Array, parts: Any) -> tuple[Array, None]:
        return total + function(*parts), None

    blocks = (*(_split(array, count) for array in arrays[:-1]), _split(arrays[-1], count, fill=0.0))
    shape = jax.eval_shape(function, *(part[0] for part in blocks))
    return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), blocks)[0]


def _split(array: Array, blocks: int, *, fill: float = 1.0) -> Array:
    """Blocks of rows; padding is ``fill`` times the last row, as a covariance of zeros might have no factor."""
    block = -(-len(array) // blocks)
    padded = jnp.concatenate([array, fill * jnp.repeat(array[-1:], blocks * block - len(array), axis=0)])
    return padded.reshape(blocks, block, *array.shape[1:])
