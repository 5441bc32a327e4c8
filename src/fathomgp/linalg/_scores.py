"""The collapsed sparse bound, and what each inducing point adds to it: births and deaths, all at once.

With Lz = chol(K_mm), V = Lz^-1 K_mn and noise variance s2, the bound of Titsias (2009) for P outputs of one kernel is

    F = sum_p log N(Y_p; 0, V^T V + s2 I) - P / (2 s2) (tr K_nn - |V|^2)

Inducing points may sit in padded slots: inactive ones count as absent, so one compiled program serves any number.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fathomgp.linalg._cholesky import Factor, safe_cholesky
from fathomgp.linalg._inverse import inverse_lower
from fathomgp.linalg._lowrank import LowRankPlusDiagonal, log_density, low_rank_plus_diagonal
from fathomgp.linalg._products import product, transposed_product
from fathomgp.precision import variance_floor

#: Candidates worked on at a time, and entries of K_jn formed at a time for them: a few megabytes, which caches hold.
_CANDIDATES = 1024
_ENTRIES = 1 << 19

Outputs = Float[Array, "N P"] | Float[Array, " N"]
Scalar = Float[Array, ""] | float


class SparseBound(eqx.Module):
    """The collapsed bound at one set of inducing points, with the pieces that its scores and its posterior share.

    Attributes:
        value: the bound F.
        factor: ``Lz``, the factor of K_mm.
        inverse: ``Lz^-1``.
        covariance: ``V^T V + s2 I``.
        variances: the diagonal of K_nn.
        Y: outputs (N, P).
        noise_variance: s2.
        active: which of the M slots hold an inducing point.
    """

    value: Float[Array, ""]
    factor: Factor
    inverse: Float[Array, "M M"]
    covariance: LowRankPlusDiagonal
    variances: Float[Array, " N"]
    Y: Float[Array, "N P"]
    noise_variance: Float[Array, ""]
    active: Bool[Array, " M"]


def sparse_bound(
    Kmm: Float[Array, "M M"],
    Kmn: Float[Array, "M N"],
    knn_diag: Float[Array, " N"],
    y: Outputs,
    noise_variance: Scalar,
    *,
    active: Bool[Array, " M"] | None = None,
    jitter: float | None = None,
) -> SparseBound:
    """Titsias' bound with its pieces; ``jitter`` is the relative amount for K_mm, as in :func:`safe_cholesky`."""
    active = jnp.ones(Kmm.shape[:1], bool) if active is None else active
    Y = y if y.ndim == 2 else y[:, None]
    s2 = jnp.asarray(noise_variance, Kmm.dtype)
    factor = safe_cholesky(_without_inactive(Kmm, active), jitter=jitter)
    inverse = inverse_lower(factor.lower)
    V = product(inverse, jnp.where(active[:, None], Kmn, jnp.zeros_like(Kmn)))
    covariance = low_rank_plus_diagonal(V, s2)
    unexplained = jnp.sum(knn_diag) - jnp.sum(V**2)
    value = log_density(covariance, Y) - 0.5 * Y.shape[1] * unexplained / s2
    return SparseBound(value, factor, inverse, covariance, knn_diag, Y, s2, active)


def collapsed_bound(
    Kmm: Float[Array, "M M"],
    Kmn: Float[Array, "M N"],
    knn_diag: Float[Array, " N"],
    y: Outputs,
    noise_variance: Scalar,
    *,
    active: Bool[Array, " M"] | None = None,
    jitter: float | None = None,
) -> Float[Array, ""]:
    """The value of Titsias' bound: :func:`sparse_bound` without the pieces."""
    return sparse_bound(Kmm, Kmn, knn_diag, y, noise_variance, active=active, jitter=jitter).value


def birth_scores(
    bound: SparseBound,
    candidates: Int[Array, " J"],
    block_fn: Callable[[Int[Array, " C"], Int[Array, " B"]], Float[Array, "C B"]],
    *,
    chunk: int | None = None,
) -> Float[Array, " J"]:
    """How much F gains when data point j becomes an inducing point too, for every candidate j at once.

    With ``v_j = (K_jn - V_:j^T V) / sqrt(r_j)``, the new row of V, ``b_j = V v_j / s2``, and
    ``s_j = 1 + |v_j|^2 / s2 - b_j^T B^-1 b_j``:

        gain = 1/2 [ |v_j^T Y - b_j^T B^-1 V Y|^2 / (s2^2 s_j) - P log s_j + P |v_j|^2 / s2 ]

    It costs J N M in all; v_j is never held as a whole, so memory stays at N M. A candidate that the inducing points
    explain up to rounding gains 0.

    Args:
        bound: the bound so far.
        candidates: indices of data points.
        block_fn: ``block_fn(rows, columns)`` is that block of K_nn.
        chunk: candidates worked on at a time; the default keeps what is formed at a time to a few megabytes.
    """
    size = min(chunk or _CANDIDATES, candidates.shape[0])
    padded = jnp.pad(candidates, (0, -candidates.shape[0] % size))
    data = _data_in_blocks(bound, -(-size * bound.Y.shape[0] // _ENTRIES))
    gains = lax.map(lambda block: _gains(bound, data, block, block_fn), padded.reshape(-1, size))
    return gains.reshape(-1)[: candidates.shape[0]]


def death_scores(bound: SparseBound) -> Float[Array, " M"]:
    """How F changes when inducing point i is removed, for every i at once; minus infinity for inactive slots.

    With ``A = K_mm + K_mn K_nm / s2``, ``S = K_mn K_nm``, ``a = K_mn Y``, by the inverse of a matrix without one row:

        change = -1/2 [ P log (A^-1)_ii - P log (K^-1)_ii + |(A^-1 a)_i|^2 / (s2^2 (A^-1)_ii)
                        + P (K^-1 S K^-1)_ii / (s2 (K^-1)_ii) ]

    It costs M^3 beyond the bound. A is never formed: ``A^-1 = W^T W`` with ``W = L_B^-1 Lz^-1``.
    """
    P = bound.Y.shape[1]
    whitened = bound.covariance.inverse @ bound.inverse
    A_diagonal = jnp.sum(whitened**2, axis=0)
    K_diagonal = jnp.sum(bound.inverse**2, axis=0)
    weights = transposed_product(whitened, bound.covariance.project(bound.Y))
    # K^-1 S K^-1 / s2 = Lz^-T (B - I) Lz^-1
    explained = jnp.sum(transposed_product(bound.covariance.factor.lower, bound.inverse) ** 2, axis=0) - K_diagonal
    fit = jnp.sum(weights**2, axis=1) / A_diagonal
    change = -0.5 * (P * jnp.log(A_diagonal / K_diagonal) + fit + P * explained / K_diagonal)
    return jnp.where(bound.active, change, jnp.full_like(change, -jnp.inf))


class _Data(NamedTuple):
    """Data in blocks: their indices, columns of V, outputs, and 1 (0 for those that fill up the last block)."""

    rows: Int[Array, "b B"]
    V: Float[Array, "b M B"]
    Y: Float[Array, "b B P"]
    real: Float[Array, "b B"]


def _data_in_blocks(bound: SparseBound, count: int) -> _Data:
    V, Y, N = bound.covariance.V, bound.Y, bound.Y.shape[0]
    extra = -N % count
    V_blocks = jnp.pad(V, ((0, 0), (0, extra))).reshape(V.shape[0], count, -1).swapaxes(0, 1)
    rows = jnp.pad(jnp.arange(N), (0, extra)).reshape(count, -1)
    real = jnp.pad(jnp.ones(N, Y.dtype), (0, extra)).reshape(count, -1)
    return _Data(rows, V_blocks, jnp.pad(Y, ((0, extra), (0, 0))).reshape(count, -1, Y.shape[1]), real)


def _gains(
    bound: SparseBound,
    data: _Data,
    block: Int[Array, " C"],
    block_fn: Callable[[Int[Array, " C"], Int[Array, " B"]], Float[Array, "C B"]],
) -> Float[Array, " C"]:
    s2, covariance, P = bound.noise_variance, bound.covariance, bound.Y.shape[1]
    known = jnp.take(covariance.V, block, axis=1)
    variance = bound.variances[block]
    # With the jitter of K_mm on its own diagonal too, a birth is exactly the next column of the same factor.
    residual = variance + bound.factor.jitter - jnp.sum(known**2, axis=0)
    is_new = residual > variance_floor(known.dtype) * variance
    scale = jnp.where(is_new, residual, jnp.ones_like(residual)) ** -0.5

    def add(sums: tuple[Array, ...], part: _Data) -> tuple[tuple[Array, ...], None]:
        rest = block_fn(block, part.rows) - transposed_product(known, part.V)
        v = rest * (scale[:, None] * part.real[None, :])
        square, overlap, fit = sums
        return (square + jnp.sum(v**2, axis=1), overlap + part.V @ v.T, fit + v @ part.Y), None

    shapes = ((len(block),), known.shape, (len(block), P))
    (square, overlap, fit), _ = lax.scan(add, tuple(jnp.zeros(shape, known.dtype) for shape in shapes), data)
    overlap = covariance.inverse @ (overlap / s2)
    energy = square / s2
    s = 1.0 + energy - jnp.sum(overlap**2, axis=0)
    fit = fit / s2 - transposed_product(overlap, covariance.project(bound.Y))
    gain = 0.5 * (jnp.sum(fit**2, axis=1) / s + P * (energy - jnp.log(s)))
    return jnp.where(is_new, gain, jnp.zeros_like(gain))


def _without_inactive(Kmm: Float[Array, "M M"], active: Bool[Array, " M"]) -> Float[Array, "M M"]:
    """K_mm with only the mean variance in each inactive slot: the scale of the jitter is that of the active ones."""
    diagonal = jnp.where(active, jnp.diagonal(Kmm), jnp.zeros_like(Kmm[0]))
    count = jnp.sum(active.astype(Kmm.dtype))
    fill = jnp.where(count > 0, jnp.sum(diagonal) / jnp.maximum(count, 1.0), 1.0)
    both = active[:, None] & active[None, :]
    return jnp.where(both, Kmm, jnp.diag(jnp.where(active, jnp.zeros_like(diagonal), fill)))
