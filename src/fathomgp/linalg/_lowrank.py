"""Low rank plus diagonal: ``A = V^T V + diag(d)`` with V (M, N), at a cost of N M^2 (Woodbury's identity)."""

import math

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fathomgp.linalg._cholesky import Factor, differentiable_lower, safe_cholesky
from fathomgp.linalg._inverse import inverse_lower, logdet_lower
from fathomgp.linalg._products import product, transpose, transposed_product
from fathomgp.tags import tagged


@tagged("linalg/low-rank-plus-diagonal")
class LowRankPlusDiagonal(eqx.Module):
    """``A = V^T V + diag(d)``, held by the factor of ``B = I + V diag(d)^-1 V^T``.

        A^-1 = D^-1 - D^-1 V^T B^-1 V D^-1,    log |A| = log |B| + sum_n log d_n

    Attributes:
        V: the low-rank part.
        diagonal: d.
        factor: the Cholesky factor ``L_B`` of B.
        inverse: ``L_B^-1``.

    Example:
        >>> import jax.numpy as jnp
        >>> A = low_rank_plus_diagonal(jnp.ones((1, 3)), 2.0)
        >>> [round(x, 6) for x in A.solve(jnp.ones((3, 1))).ravel().tolist()]
        [0.2, 0.2, 0.2]
    """

    V: Float[Array, "M N"]
    diagonal: Float[Array, " N"]
    factor: Factor
    inverse: Float[Array, "M M"]

    def solve(self, Y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``A^-1 Y``."""
        inner = transposed_product(self.inverse, self.project(Y))
        return (Y - transposed_product(self.V, inner)) / self.diagonal[:, None]

    def log_determinant(self) -> Float[Array, ""]:
        """``log |A|``."""
        return logdet_lower(self.factor.lower) + jnp.sum(jnp.log(self.diagonal))

    def quadratic_form(self, Y: Float[Array, "N P"]) -> Float[Array, " P"]:
        """``y^T A^-1 y`` of every column of Y."""
        return jnp.sum(Y**2 / self.diagonal[:, None], axis=0) - jnp.sum(self.project(Y) ** 2, axis=0)

    def project(self, Y: Float[Array, "N P"]) -> Float[Array, "M P"]:
        """``L_B^-1 V D^-1 Y``: what the low-rank part explains of Y."""
        return self.inverse @ (self.V @ (Y / self.diagonal[:, None]))


def low_rank_plus_diagonal(
    V: Float[Array, "M N"], diagonal: Float[Array, " N"] | Float[Array, ""] | float
) -> LowRankPlusDiagonal:
    """Factorise ``V^T V + diag(d)``; a scalar ``diagonal`` is the same number in every row.

    B has no eigenvalue below 1, so it needs no jitter, except where rounding says otherwise.
    """
    d = jnp.broadcast_to(jnp.asarray(diagonal, V.dtype), V.shape[1:])
    scaled = V / jnp.sqrt(d)[None, :]
    B = jnp.eye(V.shape[0], dtype=V.dtype) + product(scaled, transpose(scaled))
    factor = safe_cholesky(B, jitter=0.0)
    return LowRankPlusDiagonal(V, d, factor, inverse_lower(factor.lower))


def sparse_evidence(
    V: Float[Array, "M N"],
    Y: Float[Array, "N P"],
    noise_variance: Float[Array, " N"] | Float[Array, ""] | float,
) -> Float[Array, ""]:
    """``sum_p log N(Y_p; 0, V^T V + noise)``: a sparse GP's evidence with ``V = Lz^-1 K_mn``, without the trace."""
    return log_density(low_rank_plus_diagonal(V, noise_variance), Y)


def log_density(covariance: LowRankPlusDiagonal, Y: Float[Array, "N P"]) -> Float[Array, ""]:
    """``sum_p log N(Y_p; 0, A)``."""
    constant = Y.shape[0] * math.log(2.0 * math.pi)
    return -0.5 * jnp.sum(covariance.quadratic_form(Y) + covariance.log_determinant() + constant)


class WhitenedSums(eqx.Module):
    """All that a sparse evidence needs to know of the data, for F groups of R outputs each, with ``V = Lz^-1 K_mn``.

    Attributes:
        gram: ``V V^T`` over the rows of each group.
        cross: ``V Y``.
        square: ``|Y|^2``, summed over the group's outputs.
        prior: ``tr K_nn`` over the rows of each group.
        count: the number of rows.
    """

    gram: Float[Array, "*batch F M M"]
    cross: Float[Array, "*batch F M R"]
    square: Float[Array, "*batch F"]
    prior: Float[Array, "*batch F"]
    count: Float[Array, "*batch F"]


def evidence_from_sums(
    sums: WhitenedSums, noise_variance: Float[Array, " F"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The sparse evidence and the collapsed bound from M x M sums alone: the form for many evaluations at once.

    With B = I + V V^T / s2, summed over groups,

        evidence = -1/2 [N R log(2 pi s2) + R log |B| + |Y|^2 / s2 - |L_B^-1 V Y|^2 / s2^2]
        bound = evidence - R / (2 s2) (tr K_nn - tr V V^T)

    All matrices of all batch entries are factorised in one call. NaN where a matrix has no factor: a sampler rejects
    there.
    """
    identity = jnp.broadcast_to(jnp.eye(sums.gram.shape[-1], dtype=sums.gram.dtype), sums.gram.shape)
    explained = jnp.trace(sums.gram, axis1=-2, axis2=-1)
    return _evidence(sums, noise_variance, identity, jnp.zeros_like(sums.square), explained)


def evidence_from_raw_sums(
    sums: WhitenedSums, noise_variance: Float[Array, " F"], Lz: Float[Array, "*batch M M"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """:func:`evidence_from_sums` where K_mn itself stands for V.

        log |B| = log |K_mm + K_mn K_nm / s2| - log |K_mm|

    That saves a product with the data. The price: the rounding of K_mn K_nm is seen through K_mm^-1, and noise that is
    small magnifies it.
    """
    inverse = inverse_lower(Lz)[..., None, :, :]
    explained = jnp.sum((inverse @ sums.gram) * inverse, axis=(-2, -1))
    Kmm = jnp.broadcast_to((Lz @ transpose(Lz))[..., None, :, :], sums.gram.shape)
    logdet = jnp.broadcast_to(logdet_lower(Lz)[..., None], sums.square.shape)
    return _evidence(sums, noise_variance, Kmm, logdet, explained)


def _evidence(
    sums: WhitenedSums,
    noise_variance: Float[Array, " F"],
    prior: Float[Array, "*batch F M M"],
    prior_logdet: Float[Array, "*batch F"],
    explained: Float[Array, "*batch F"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Evidence and bound from sums of what has the covariance ``prior``, of which ``explained`` is tr V V^T."""
    outputs, s2 = sums.cross.shape[-1], jnp.broadcast_to(noise_variance, sums.square.shape)
    B = prior + sums.gram / s2[..., None, None]
    lower = lax.linalg.cholesky(lax.stop_gradient(B), symmetrize_input=False)
    lower = differentiable_lower(B, lower)
    white = lax.linalg.triangular_solve(lower, sums.cross, left_side=True, lower=True)
    fit = jnp.sum(white**2, axis=(-2, -1)) / s2
    constant = outputs * (sums.count * jnp.log(2.0 * math.pi * s2) + logdet_lower(lower) - prior_logdet)
    evidence = -0.5 * jnp.sum(constant + (sums.square - fit) / s2, axis=-1)
    return evidence, evidence - 0.5 * jnp.sum(outputs * (sums.prior - explained) / s2, axis=-1)
