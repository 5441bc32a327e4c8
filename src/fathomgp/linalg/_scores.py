"""The collapsed sparse bound, and what each inducing point adds to it: births and deaths, all at once.

With Lz = chol(K_mm), V = Lz^-1 K_mn and noise variances W^-1, the bound of Titsias (2009) for outputs of one kernel is

    F = sum_p log N(Y_p; 0, V^T V + W_p^-1) - 1/2 tr W_p (K_nn - V^T V)

Outputs with the same W share a factorisation: they are a group. A row that an output was not measured in has W = 0.
Inducing points may sit in padded slots: inactive ones count as absent, so one compiled program serves any number.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from fathomgp.linalg._cholesky import Factor, safe_cholesky
from fathomgp.linalg._inverse import inverse_lower, logdet_lower
from fathomgp.linalg._products import product, transpose, transposed_product
from fathomgp.precision import variance_floor

#: Candidates worked on at a time, and entries of K_jn formed at a time for them: a few megabytes, which caches hold.
_CANDIDATES = 1024
_ENTRIES = 1 << 19

Outputs = Float[Array, "G N R"] | Float[Array, "N P"] | Float[Array, " N"]
Noise = Float[Array, "G N"] | Float[Array, ""] | float


class SparseBound(eqx.Module):
    """The collapsed bound at one set of inducing points, with the pieces that its scores and its posterior share.

    Attributes:
        value: the bound F.
        factor: ``Lz``, the factor of K_mm.
        inverse: ``Lz^-1``.
        V: ``Lz^-1 K_mn``.
        variances: the diagonal of K_nn.
        precision: the diagonal of W for every group of outputs.
        weighted: ``W Y``.
        lower: ``L_B``, the factor of ``B = I + V W V^T``.
        whitening: ``L_B^-1``.
        explained: ``L_B^-1 V W Y``.
        active: which of the M slots hold an inducing point.
    """

    value: Float[Array, ""]
    factor: Factor
    inverse: Float[Array, "M M"]
    V: Float[Array, "M N"]
    variances: Float[Array, " N"]
    precision: Float[Array, "G N"]
    weighted: Float[Array, "G N R"]
    lower: Float[Array, "G M M"]
    whitening: Float[Array, "G M M"]
    explained: Float[Array, "G M R"]
    active: Bool[Array, " M"]


def sparse_bound(
    Kmm: Float[Array, "M M"],
    Kmn: Float[Array, "M N"],
    knn_diag: Float[Array, " N"],
    y: Outputs,
    noise_variance: Noise,
    *,
    active: Bool[Array, " M"] | None = None,
    jitter: float | None = None,
) -> SparseBound:
    """Titsias' bound with its pieces.

    Args:
        Kmm: covariance of the inducing values.
        Kmn: their covariance with the data.
        knn_diag: variances of the data.
        y: outputs (N, P), or G groups of R outputs (G, N, R).
        noise_variance: of every row and output, or of every group of outputs and row; infinite where none was measured.
        active: which slots hold an inducing point; all by default.
        jitter: the relative amount for K_mm, as in :func:`safe_cholesky`.
    """
    active = jnp.ones(Kmm.shape[:1], bool) if active is None else active
    Y = y if y.ndim == 3 else y.reshape(1, len(y), -1)
    noise = jnp.broadcast_to(jnp.asarray(noise_variance, Kmm.dtype), Y.shape[:2])
    factor = safe_cholesky(_without_inactive(Kmm, active), jitter=jitter)
    inverse = inverse_lower(factor.lower)
    V = product(inverse, jnp.where(active[:, None], Kmn, jnp.zeros_like(Kmn)))
    unexplained = knn_diag - jnp.sum(V**2, axis=0)

    def of_group(own: tuple[Array, Array]) -> tuple[Array, ...]:
        Y, noise = own
        precision = 1.0 / noise
        weighted, scaled = precision[:, None] * Y, V * jnp.sqrt(precision)[None, :]
        # B has no eigenvalue below 1, so it needs no jitter, except where rounding says otherwise.
        B = jnp.eye(len(V), dtype=V.dtype) + product(scaled, transpose(scaled))
        lower = safe_cholesky(B, jitter=0.0).lower
        whitening = inverse_lower(lower)
        explained = whitening @ (V @ weighted)
        measured = precision > 0.0
        logs = jnp.sum(jnp.where(measured, jnp.log(2.0 * math.pi * jnp.where(measured, noise, 1.0)), 0.0))
        slack = Y.shape[1] * (logs + logdet_lower(lower) + precision @ unexplained)
        value = 0.5 * (jnp.sum(explained**2) - jnp.sum(Y * weighted) - slack)
        return value, precision, weighted, lower, whitening, explained

    value, precision, weighted, lower, whitening, explained = _each_group(of_group, (Y, noise))
    whole = jnp.sum(value)
    return SparseBound(whole, factor, inverse, V, knn_diag, precision, weighted, lower, whitening, explained, active)


def collapsed_bound(
    Kmm: Float[Array, "M M"],
    Kmn: Float[Array, "M N"],
    knn_diag: Float[Array, " N"],
    y: Outputs,
    noise_variance: Noise,
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

    With ``v_j = (K_jn - V_:j^T V) / sqrt(r_j)``, the new row of V, ``b_j = L_B^-1 V W v_j`` and
    ``s_j = 1 + v_j^T W v_j - |b_j|^2``, a group of R outputs adds

        gain = 1/2 [ |v_j^T W Y - b_j^T L_B^-1 V W Y|^2 / s_j - R log s_j + R v_j^T W v_j ]

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
    data = _data_in_blocks(bound, -(-size * len(bound.variances) // _ENTRIES))
    gains = lax.map(lambda block: _gains(bound, data, block, block_fn), padded.reshape(-1, size))
    return gains.reshape(-1)[: candidates.shape[0]]


def death_scores(bound: SparseBound) -> Float[Array, " M"]:
    """How F changes when inducing point i is removed, for every i at once; minus infinity for inactive slots.

    With ``A = K_mm + S``, ``S = K_mn W K_nm``, ``a = K_mn W Y``, by the inverse of a matrix without one row, a group of
    R outputs loses

        change = -1/2 [ R log (A^-1)_ii - R log (K^-1)_ii + |(A^-1 a)_i|^2 / (A^-1)_ii
                        + R (K^-1 S K^-1)_ii / (K^-1)_ii ]

    It costs M^3 beyond the bound. A is never formed: ``A^-1 = U^T U`` with ``U = L_B^-1 Lz^-1``.
    """
    outputs = bound.weighted.shape[2]
    K_diagonal = jnp.sum(bound.inverse**2, axis=0)

    def of_group(own: tuple[Array, Array, Array]) -> Float[Array, " M"]:
        lower, whitening, explained = own
        whitened = whitening @ bound.inverse
        A_diagonal = jnp.sum(whitened**2, axis=0)
        weights = transposed_product(whitened, explained)
        # K^-1 S K^-1 = Lz^-T (B - I) Lz^-1
        seen = jnp.sum(transposed_product(lower, bound.inverse) ** 2, axis=0) - K_diagonal
        fit = jnp.sum(weights**2, axis=1) / A_diagonal
        return -0.5 * (outputs * jnp.log(A_diagonal / K_diagonal) + fit + outputs * seen / K_diagonal)

    change = jnp.sum(_each_group(of_group, (bound.lower, bound.whitening, bound.explained)), axis=0)
    return jnp.where(bound.active, change, jnp.full_like(change, -jnp.inf))


class _Data(NamedTuple):
    """Data in blocks: their indices, columns of V, and W and W Y of every group (0 in what fills up the last block)."""

    rows: Int[Array, "b B"]
    V: Float[Array, "b M B"]
    precision: Float[Array, "b G B"]
    weighted: Float[Array, "b G B R"]


def _data_in_blocks(bound: SparseBound, count: int) -> _Data:
    V, N = bound.V, len(bound.variances)
    extra = -N % count

    def blocks(array: Array, axis: int) -> Array:
        """Cut along an axis of N entries."""
        widths = [(0, extra if place == axis else 0) for place in range(array.ndim)]
        shape = (*array.shape[:axis], count, -1, *array.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(array, widths).reshape(shape), axis, 0)

    return _Data(blocks(jnp.arange(N), 0), blocks(V, 1), blocks(bound.precision, 1), blocks(bound.weighted, 1))


def _gains(
    bound: SparseBound,
    data: _Data,
    block: Int[Array, " C"],
    block_fn: Callable[[Int[Array, " C"], Int[Array, " B"]], Float[Array, "C B"]],
) -> Float[Array, " C"]:
    known, variance = jnp.take(bound.V, block, axis=1), bound.variances[block]
    (G, M, R), C, dtype = bound.explained.shape, len(block), known.dtype
    # With the jitter of K_mm on its own diagonal too, a birth is exactly the next column of the same factor.
    residual = variance + bound.factor.jitter - jnp.sum(known**2, axis=0)
    is_new = residual > variance_floor(dtype) * variance
    scale = jnp.where(is_new, residual, jnp.ones_like(residual)) ** -0.5

    def add(sums: tuple[Array, ...], part: _Data) -> tuple[tuple[Array, ...], None]:
        v = (block_fn(block, part.rows) - transposed_product(known, part.V)) * scale[:, None]

        def of_group(own: tuple[Array, Array]) -> tuple[Array, ...]:
            precision, weighted = own
            seen = v * precision[None, :]
            return jnp.sum(v * seen, axis=1), part.V @ seen.T, v @ weighted

        return jax.tree.map(jnp.add, sums, _each_group(of_group, (part.precision, part.weighted))), None

    start = tuple(jnp.zeros(shape, dtype) for shape in ((G, C), (G, M, C), (G, C, R)))
    sums, _ = lax.scan(add, start, data)

    def gain(own: tuple[Array, ...]) -> Float[Array, " C"]:
        square, overlap, fit, whitening, explained = own
        overlap = whitening @ overlap
        s = 1.0 + square - jnp.sum(overlap**2, axis=0)
        fit = fit - transposed_product(overlap, explained)
        return 0.5 * (jnp.sum(fit**2, axis=1) / s + R * (square - jnp.log(s)))

    total = jnp.sum(_each_group(gain, (*sums, bound.whitening, bound.explained)), axis=0)
    return jnp.where(is_new, total, jnp.zeros_like(total))


def _each_group(function: Callable[[PyTree], PyTree], own: PyTree) -> PyTree:
    """``function`` of every group's own, one after the other; a single one needs no loop."""
    if len(jax.tree.leaves(own)[0]) > 1:
        return lax.map(function, own)
    return jax.tree.map(lambda leaf: leaf[None], function(jax.tree.map(lambda leaf: leaf[0], own)))


def _without_inactive(Kmm: Float[Array, "M M"], active: Bool[Array, " M"]) -> Float[Array, "M M"]:
    """K_mm with only the mean variance in each inactive slot: the scale of the jitter is that of the active ones."""
    diagonal = jnp.where(active, jnp.diagonal(Kmm), jnp.zeros_like(Kmm[0]))
    count = jnp.sum(active.astype(Kmm.dtype))
    fill = jnp.where(count > 0, jnp.sum(diagonal) / jnp.maximum(count, 1.0), 1.0)
    both = active[:, None] & active[None, :]
    return jnp.where(both, Kmm, jnp.diag(jnp.where(active, jnp.zeros_like(diagonal), fill)))
