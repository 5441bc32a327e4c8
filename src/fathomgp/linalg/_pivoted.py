"""Pivoted Cholesky, which for a covariance is adaptive cross-approximation (ACA): ``K ~ F F^T`` from a few columns."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fathomgp.errors import SettingError
from fathomgp.precision import variance_floor
from fathomgp.tags import tagged


@tagged("linalg/pivoted-cholesky")
class PivotedCholesky(eqx.Module):
    """``K ~ factor factor^T``, exact on the pivots' rows and columns.

    Attributes:
        factor: columns after ``rank_used`` are zero.
        pivots: the chosen indices in order, -1 after ``rank_used``.
        residual_diagonal: what is left of the variances, ``diag(K - factor factor^T)``.
        rank_used: how many columns the tolerance asked for.
    """

    factor: Float[Array, "N R"]
    pivots: Int[Array, " R"]
    residual_diagonal: Float[Array, " N"]
    rank_used: Int[Array, ""]


def pivoted_cholesky(
    diagonal: Float[Array, " N"],
    column_fn: Callable[[Int[Array, ""]], Float[Array, " N"]],
    rank: int,
    tol: float = 0.0,
) -> PivotedCholesky:
    """Greedy low-rank factor of K that reads ``rank`` of its columns and never forms it.

        p = argmax d,    l = (K_:p - F F_p^T) / sqrt(d_p),    d <- d - l^2

    Args:
        diagonal: the diagonal of K.
        column_fn: ``column_fn(i)`` is column i of K; ``i`` is traced.
        rank: the number of columns of the padded result.
        tol: stop once the largest residual variance is at most this share of the largest variance. What rounding
            leaves of the variances never counts.

    Example:
        >>> import jax.numpy as jnp
        >>> K = jnp.array([[4.0, 2.0], [2.0, 1.0]])
        >>> result = pivoted_cholesky(jnp.diagonal(K), lambda i: K[:, i], rank=2)
        >>> result.factor.tolist(), result.pivots.tolist(), int(result.rank_used)
        ([[2.0, 0.0], [1.0, 0.0]], [0, -1], 1)
    """
    if rank < 1:
        raise SettingError(f"rank must be at least 1, but it is {rank}.")
    threshold = max(tol, variance_floor(diagonal.dtype)) * jnp.max(diagonal)

    def step(k, state):
        rows, pivots, residual = state
        pivot = jnp.argmax(residual)
        wanted = residual[pivot] > threshold
        scale = jnp.where(wanted, residual[pivot], jnp.ones_like(threshold))
        row = (column_fn(pivot) - rows[:, pivot] @ rows) / jnp.sqrt(scale)
        row = jnp.where(wanted, row, jnp.zeros_like(row))
        # A pivot's residual is zero on paper; rounding must not let it be chosen twice.
        left = jnp.maximum(residual - row**2, 0.0).at[pivot].set(0.0)
        chosen = jnp.where(wanted, pivot.astype(pivots.dtype), -1)
        return rows.at[k].set(row), pivots.at[k].set(chosen), jnp.where(wanted, left, residual)

    rows = jnp.zeros((rank, diagonal.shape[0]), diagonal.dtype)
    rows, pivots, residual = lax.fori_loop(0, rank, step, (rows, jnp.full((rank,), -1, jnp.int32), diagonal))
    return PivotedCholesky(rows.T, pivots, residual, jnp.sum(pivots >= 0))
