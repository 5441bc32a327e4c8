"""Safe Cholesky factors: the one jitter policy of the library.

A covariance matrix that is positive definite on paper may not be in floating point. Then the smallest jitter of a
ladder that yields a factor is added to its diagonal, and the result says how much that was.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fathomgp.errors import JitterWarning, NonFiniteError, NotPositiveDefiniteError, SettingError
from fathomgp.linalg._inverse import inverse_lower
from fathomgp.linalg._products import multiply_from_left, transpose
from fathomgp.notices import tell
from fathomgp.tags import tagged

_GROWTH = 10.0


@tagged("linalg/jitter-policy")
class JitterPolicy(eqx.Module):
    """Which multiples of a matrix's mean diagonal are tried as jitter: ``first``, then tenfold up to ``largest``."""

    first: float = eqx.field(static=True)
    largest: float = eqx.field(static=True)

    def ladder(self, jitter: float | None = None) -> tuple[float, ...]:
        """The relative amounts in the order they are tried; ``jitter`` replaces the first one."""
        start = self.first if jitter is None else float(jitter)
        if not (start >= 0.0 and math.isfinite(start)):
            raise SettingError(f"jitter must be a finite number and at least 0, but it is {start:g}.")
        rungs = round(math.log10(self.largest / self.first))
        raised = [self.first * _GROWTH**k for k in range(rungs + 1)]
        return (start, *(amount for amount in raised if amount > start))


def default_policy(dtype: Any) -> JitterPolicy:
    """From 1e-10 to 1e-4 in float64, from 1e-6 to 1e-2 in float32, as shares of the mean of the diagonal."""
    double = jnp.finfo(dtype).bits == 64
    return JitterPolicy(1e-10, 1e-4) if double else JitterPolicy(1e-6, 1e-2)


@tagged("linalg/jitter-report")
class JitterReport(eqx.Module):
    """What became of a factorisation, one entry a matrix: small enough to travel in a step's Info.

    Attributes:
        jitter: the absolute amount added to the diagonal.
        raised: whether the first jitter was not enough.
        ok: whether the input and the factor are finite.
        finite_input: whether the input was finite; if it was, a failure means "not positive definite".
    """

    jitter: Float[Array, "*batch"]
    raised: Bool[Array, "*batch"]
    ok: Bool[Array, "*batch"]
    finite_input: Bool[Array, "*batch"]


@tagged("linalg/factor")
class Factor(eqx.Module):
    """``lower lower^T = K + jitter I``. A matrix without a factor has NaN there."""

    lower: Float[Array, "*batch M M"]
    report: JitterReport

    @property
    def jitter(self) -> Float[Array, "*batch"]:
        """The absolute amount added to the diagonal."""
        return self.report.jitter

    @property
    def ok(self) -> Bool[Array, "*batch"]:
        """Whether the input and the factor are finite."""
        return self.report.ok

    @property
    def finite_input(self) -> Bool[Array, "*batch"]:
        """Whether the input had neither NaN nor infinity."""
        return self.report.finite_input


def safe_cholesky(
    K: Float[Array, "*batch M M"], *, jitter: float | None = None, policy: JitterPolicy | None = None
) -> Factor:
    """The Cholesky factor of ``K + jitter I``, with the smallest jitter of the policy's ladder that yields one.

    Every matrix of a batch gets its own jitter. The jitter counts as a constant in derivatives. Nothing is raised
    here, so it works under ``jit`` and ``vmap``; :func:`check_factor` turns the report into an error or a warning.

    Args:
        K: symmetric matrices; only the lower triangle is read.
        jitter: the first amount tried, as a share of the mean of the diagonal (0 is allowed); ``None``: the policy's.
        policy: the ladder; ``None``: :func:`default_policy`.

    Example:
        >>> import jax.numpy as jnp
        >>> factor = safe_cholesky(jnp.array([[4.0, 2.0], [2.0, 5.0]]), jitter=0.0)
        >>> factor.lower.tolist(), bool(factor.ok)
        ([[2.0, 0.0], [1.0, 2.0]], True)
    """
    ladder = (policy or default_policy(K.dtype)).ladder(jitter)
    factor = _search(lax.stop_gradient(K), ladder)
    return Factor(differentiable_lower(K, factor.lower), factor.report)


def check_factor(result: Factor | JitterReport, name: str = "The covariance matrix") -> None:
    """Raise if a factorisation failed, warn if it needed more than the first jitter. On the host, outside ``jit``.

    Args:
        result: a factor or its report, of one matrix or of many.
        name: what the matrix is, as the beginning of a sentence.
    """
    report = result.report if isinstance(result, Factor) else result
    jitter, raised, ok, finite = (np.atleast_1d(np.asarray(leaf)) for leaf in jax.tree.leaves(report))
    if not np.all(finite):
        raise NonFiniteError(
            f"{name} holds NaN or infinity{_count(~finite)}: look for non-finite inputs, "
            "or for kernel parameters that have diverged."
        )
    if not np.all(ok):
        raise NotPositiveDefiniteError(
            f"{name} is not positive definite{_count(~ok)}, even with a jitter of "
            f"{np.max(jitter[~ok]):.3g} on its diagonal: use float64, more noise, or no repeated points."
        )
    if np.any(raised):
        tell(
            f"{name} is nearly singular{_count(raised)}: a jitter of {np.max(jitter[raised]):.3g} "
            "was added to its diagonal. Float64, more noise, or fewer and more distant points avoid this.",
            JitterWarning,
            stacklevel=2,
        )


@jax.custom_jvp
def differentiable_lower(
    K: Float[Array, "*batch M M"], lower: Float[Array, "*batch M M"]
) -> Float[Array, "*batch M M"]:
    """``lower``, found without derivatives, as the differentiable factor of ``K``: ``dL = L Phi(L^-1 dK L^-T)``.

    ``Phi`` takes the lower triangle and halves the diagonal. The search for the jitter stays out of the derivative, and
    the rule needs one explicit inverse where JAX's own needs two large triangular solves.
    """
    return lower


@differentiable_lower.defjvp
def _differentiable_lower_jvp(primals, tangents):
    K, lower = primals
    dK = tangents[0]
    # The call below carries the dependence on K, which second derivatives need.
    lower = differentiable_lower(K, lower)
    inverse = inverse_lower(lower)
    inner = multiply_from_left(inverse, 0.5 * (dK + transpose(dK))) @ transpose(inverse)
    return lower, multiply_from_left(lower, _half_lower(inner))


def safe_inverse_factor(
    K: Float[Array, "*batch M M"], *, jitter: float | None = None
) -> tuple[Float[Array, "*batch M M"], JitterReport]:
    """``L^-1`` of :func:`safe_cholesky`'s factor, and the report.

    With ``d(L^-1) = -Phi(L^-1 dK L^-T) L^-1`` a pull-back takes three products of M x M matrices; through L it is five.
    """
    factor = safe_cholesky(lax.stop_gradient(K), jitter=jitter)
    return _differentiable_inverse(K, inverse_lower(factor.lower)), factor.report


def inverse_factor(K: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """``L^-1`` without jitter or report, for matrices that cannot be singular (near ``I``, or above it)."""
    lower = lax.linalg.cholesky(lax.stop_gradient(K), symmetrize_input=False)
    return _differentiable_inverse(K, inverse_lower(lower))


@jax.custom_jvp
def _differentiable_inverse(K: Float[Array, "*batch M M"], inverse: Float[Array, "*batch M M"]) -> Array:
    return inverse


@_differentiable_inverse.defjvp
def _differentiable_inverse_jvp(primals, tangents):
    K, inverse = primals
    dK = tangents[0]
    inverse = _differentiable_inverse(K, inverse)  # carries the dependence on K, as above
    inner = multiply_from_left(inverse, 0.5 * (dK + transpose(dK))) @ transpose(inverse)
    return inverse, -_half_lower(inner) @ inverse


def _half_lower(matrix: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    weight = jnp.tril(jnp.ones(matrix.shape[-2:], matrix.dtype)) - 0.5 * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return matrix * jnp.broadcast_to(weight, matrix.shape)


@functools.partial(jax.jit, static_argnames="ladder")
def _search(K: Float[Array, "*batch M M"], ladder: tuple[float, ...]) -> Factor:
    """Try the ladder's amounts, each matrix on its own rung."""
    scale = _mean_diagonal(K)
    amounts = jnp.asarray(ladder, K.dtype)

    def attempt(rung: Int[Array, "*batch"]):
        jitter = amounts[rung] * scale
        lower = lax.linalg.cholesky(_add_to_diagonal(K, jitter), symmetrize_input=False)
        return _Attempt(rung, jitter, lower, _has_finite_diagonal(lower))

    def climb(first: _Attempt):
        finite = jnp.all(jnp.isfinite(K), axis=(-2, -1))
        return _climb(attempt, first, finite, len(ladder)), finite

    # Outside the loop, because a loop copies what it carries even when its body never runs: a fifth of the time.
    first = attempt(jnp.zeros(K.shape[:-2], jnp.int32))
    last, finite = lax.cond(jnp.all(first.ok), lambda first: (first, first.ok), climb, first)
    return Factor(last.lower, JitterReport(last.jitter, last.rung > 0, last.ok & finite, finite))


class _Attempt(NamedTuple):
    rung: Int[Array, "*batch"]
    jitter: Float[Array, "*batch"]
    lower: Float[Array, "*batch M M"]
    ok: Bool[Array, "*batch"]


def _climb(
    attempt: Callable[[Int[Array, "*batch"]], _Attempt], first: _Attempt, finite: Bool[Array, "*batch"], num_rungs: int
) -> _Attempt:
    """Raise the rung of every finite matrix without a factor, until all have one or stand on the last rung."""

    def wanting(last: _Attempt) -> Bool[Array, "*batch"]:
        return finite & ~last.ok & (last.rung < num_rungs - 1)

    return lax.while_loop(
        lambda last: jnp.any(wanting(last)),
        lambda last: attempt(last.rung + wanting(last).astype(jnp.int32)),
        first,
    )


def _mean_diagonal(K: Float[Array, "*batch M M"]) -> Float[Array, "*batch"]:
    """The scale of the jitter; 1 where the diagonal has no positive mean to offer."""
    mean = jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
    return jnp.where(mean > 0.0, mean, jnp.ones_like(mean))


def _add_to_diagonal(K: Float[Array, "*batch M M"], amount: Float[Array, "*batch"]) -> Float[Array, "*batch M M"]:
    identity = jnp.broadcast_to(jnp.eye(K.shape[-1], dtype=K.dtype), K.shape)
    return K + amount[..., None, None] * identity


def _has_finite_diagonal(lower: Float[Array, "*batch M M"]) -> Bool[Array, "*batch"]:
    """A failed factorisation leaves its mark on the diagonal: what is not finite elsewhere enters a later pivot."""
    return jnp.all(jnp.isfinite(jnp.diagonal(lower, axis1=-2, axis2=-1)), axis=-1)


def _count(affected: np.ndarray) -> str:
    return f" ({np.sum(affected)} of {affected.size} matrices)" if affected.size > 1 else ""
