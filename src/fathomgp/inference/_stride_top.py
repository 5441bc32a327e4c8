"""The last layer given the hidden ones: what a particle's likelihood is, for S particles at once.

collapsed   Gaussian noise: the last layer is integrated out, given M inducing points (the first two terms of F_V)
sampled     any other likelihood: whitened values v at the inducing points are sampled too, f = k(., Z) L^-T v
standard    Gaussian noise and no inducing points: the exact evidence, O(S N^3)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from fathomgp.data import Batch
from fathomgp.inference._stride_hidden import Sight
from fathomgp.inference.exact import gaussian_noise
from fathomgp.linalg import (
    Factor,
    JitterReport,
    WhitenedSums,
    evidence_from_raw_sums,
    evidence_from_sums,
    inverse_lower,
    logdet_lower,
    product,
    safe_cholesky,
    sum_blocks,
)
from fathomgp.model import DeepGP, Layer
from fathomgp.tags import tagged

KINDS = ("collapsed", "sampled", "standard")

#: Entries of K_mn, of several particles or of some rows, that are formed at a time: what a core's caches hold. Four
#: times as many, or one particle of 700 rows at a time, take a fifth longer (measured).
_ENTRIES = 1 << 18
#: Where rows come in blocks, a block has at least so many: particles are worked on several at a time, since XLA
#: multiplies a batch of matrices as they are, but copies the transpose of a single one and evaluates its kernel again.
_FEWEST_ROWS = 256
#: Nats that the quicker likelihood may be off, on average over the particles: less than chains of a few hundred steps
#: can tell. On energy (noise variance 0.002) it is off by 0.01 to 0.04, on concrete and boston by less than 1e-4.
_TOLERANCE = 0.1


@tagged("stride/top")
class Top(eqx.Module):
    """How the last layer is treated.

    Attributes:
        kind: one of :data:`KINDS`.
        shared: whether all outputs were measured in the same rows and have the same noise: one group of outputs.
        trace: whether the likelihood of a particle is F_V with its trace term, not the sparse evidence alone.
    """

    kind: str = eqx.field(static=True)
    shared: bool = eqx.field(static=True)
    trace: bool = eqx.field(static=True, default=False)

    def num_white(self, model: DeepGP, num_inducing: int) -> int:
        """The number of white variables of the last layer."""
        return num_inducing * model.layers[-1].width if self.kind == "sampled" else 0


@tagged("stride/whitening")
class Whitening(eqx.Module):
    """Lz^-1 of every particle, and what the factorisations had to say."""

    inverse: Float[Array, "S M M"]
    report: JitterReport


@tagged("stride/conditioned")
class Conditioned(eqx.Module):
    """The last layer's GP given every particle: see :class:`fathomgp.model.Conditional`.

    Attributes:
        z: what the layer sees at the inducing points.
        mean: whitened means.
        whitening: Lz^-1.
        roots: where inducing values are uncertain, T^T of every group of outputs.
    """

    z: Float[Array, "S M F"]
    mean: Float[Array, "S M Q"]
    whitening: Float[Array, "S M M"]
    roots: Float[Array, "S R M M"]


def log_likelihood(
    model: DeepGP,
    top: Top,
    batch: Batch,
    sight: Sight,
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
    *,
    raw: Bool[Array, ""] | bool = False,
) -> Float[Array, " S"]:
    """Phi: the log likelihood of every particle; NaN where a matrix has no factor.

    ``raw`` takes the quicker way to it, whose rounding grows as the noise falls: see :func:`way_and_log_likelihood`.
    """
    if top.kind == "standard":
        return _exact_evidence(model, batch, sight.everywhere())
    if top.kind == "sampled":
        return _sampled(model, top, batch, sight, inducing, white)
    z, factor = _factorise(model, sight, inducing)  # once for both ways: factorisations take long to compile
    ways = (functools.partial(_collapsed, model, top, batch, sight, raw=way) for way in (True, False))
    return jax.lax.cond(raw, *ways, z, factor.lower)


def way_and_log_likelihood(
    model: DeepGP,
    top: Top,
    batch: Batch,
    sight: Sight,
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
) -> tuple[Bool[Array, ""], Float[Array, " S"]]:
    """Whether the quicker way to Phi will do, and Phi by the way that will be taken."""
    if top.kind != "collapsed":
        return jnp.asarray(False), log_likelihood(model, top, batch, sight, inducing, white)
    z, factor = _factorise(model, sight, inducing)
    quick, sure = (_collapsed(model, top, batch, sight, z, factor.lower, raw=way) for way in (True, False))
    raw = mean_of_possible(jnp.abs(quick - sure), sure) <= _TOLERANCE
    return raw, jnp.where(raw, quick, sure)


def mean_of_possible(figures: Float[Array, "S ..."], values: Float[Array, " S"]) -> Float[Array, "..."]:
    """The mean over the particles with a finite likelihood ``values``; NaN where there is none."""
    return jnp.mean(figures, axis=0, where=jnp.isfinite(values).reshape(-1, *[1] * (figures.ndim - 1)))


def bound(model: DeepGP, top: Top, batch: Batch, sight: Sight, inducing: Int[Array, " M"]) -> Float[Array, " S"]:
    """F_V of every particle, all three terms: what the M step maximises."""
    return evidence_from_sums(sums(model, top, batch, sight, inducing)[0], _noise(model, top, batch))[1]


def sums(
    model: DeepGP, top: Top, batch: Batch, sight: Sight, inducing: Int[Array, " M"]
) -> tuple[WhitenedSums, Whitening]:
    """V V^T and its companions, formed in blocks; and the factors of K_mm."""
    z, factor = _factorise(model, sight, inducing)
    inverse = inverse_lower(factor.lower)
    return _sums_in_blocks(model, top, batch, sight, z, inverse), Whitening(inverse, factor.report)


def condition_top(
    model: DeepGP,
    top: Top,
    batch: Batch,
    sight: Sight,
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
) -> tuple[Conditioned, JitterReport]:
    """The last layer's posterior GP given every particle."""
    if top.kind == "standard":
        return _condition_exactly(model, batch, sight.everywhere())
    z = sight.at_index(inducing)
    data, whitening = sums(model, top, batch, sight, inducing)
    inverse = whitening.inverse
    if top.kind == "sampled":
        return Conditioned(
            z, _top_white(model, white, len(inducing)), inverse, inverse[:, None][:, :0]
        ), whitening.report
    scale = _noise(model, top, batch)[None, :, None, None]
    B = jnp.eye(len(inducing), dtype=scale.dtype)[None, None] + data.gram / scale
    root = inverse_lower(safe_cholesky(B, jitter=0.0).lower)
    mean = jnp.swapaxes(root, 2, 3) @ (root @ (data.cross / scale))
    flat = jnp.moveaxis(mean, 1, 2).reshape(len(z), len(inducing), -1)
    return Conditioned(z, flat, inverse, root), whitening.report


def carried_over(
    model: DeepGP, sight: Sight, old: Int[Array, " M"], new: Int[Array, " M"], white: Float[Array, "S k"]
) -> Float[Array, "S k"]:
    """White variables at new inducing points where the sampled functions keep the values that they have there."""
    z, factor = _factorise(model, sight, old)
    z_new, factor_new = _factorise(model, sight, new)
    v = _top_white(model, white, len(old))
    weights = jax.lax.linalg.triangular_solve(factor.lower, v, left_side=True, lower=True, transpose_a=True)
    values = jax.vmap(model.layers[-1].kernel.gram)(z_new, z) @ weights
    return jax.lax.linalg.triangular_solve(factor_new.lower, values, left_side=True, lower=True).reshape(white.shape)


def members(top: Top, batch: Batch) -> Float[Array, " N"]:
    """1 for rows with an observation, 0 for the others."""
    return jnp.where(jnp.any(batch.observed, axis=1), batch.weight, 0.0)


def residuals(model: DeepGP, batch: Batch, h: Float[Array, "N F"]) -> Float[Array, "N P"]:
    """What the mean leaves of y; 0 where nothing was observed."""
    return jnp.where(batch.observed, batch.y - model.layers[-1].mean(h), 0.0)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _blocks(num_particles: int, num_rows: int, num_inducing: int) -> tuple[int, int]:
    """Particles and rows at a time; particles are a divisor of S, so that one program serves all blocks."""
    all_at_once = num_rows * num_inducing <= _ENTRIES
    fewest = num_rows if all_at_once else min(num_rows, _FEWEST_ROWS)
    sizes = (size for size in range(1, num_particles + 1) if num_particles % size == 0)
    particles = max(size for size in sizes if size == 1 or size * fewest * num_inducing <= _ENTRIES)
    return particles, min(num_rows, max(_FEWEST_ROWS, _ENTRIES // (particles * num_inducing)))


def _factorise(model: DeepGP, sight: Sight, inducing: Int[Array, " M"]) -> tuple[Float[Array, "S M F"], Factor]:
    """What the last layer sees at the inducing points, and the factors of K_mm."""
    z = sight.at_index(inducing)
    return z, safe_cholesky(jax.vmap(model.layers[-1].kernel.gram)(z))


def _collapsed(
    model: DeepGP,
    top: Top,
    batch: Batch,
    sight: Sight,
    z: Float[Array, "S M F"],
    Lz: Float[Array, "S M M"],
    *,
    raw: bool,
) -> Float[Array, " S"]:
    """Phi with the last layer integrated out, from sums of K_mn (raw) or of V = Lz^-1 K_mn."""
    noise = _noise(model, top, batch)
    data = _sums_in_blocks(model, top, batch, sight, z, None if raw else inverse_lower(Lz))
    evidence, lower = evidence_from_raw_sums(data, noise, Lz) if raw else evidence_from_sums(data, noise)
    return lower if top.trace else evidence


def _noise(model: DeepGP, top: Top, batch: Batch) -> Float[Array, " G"]:
    noise = gaussian_noise(model, batch.y.shape[1])
    return noise[:1] if top.shared else noise


def _groups(top: Top, batch: Batch) -> Bool[Array, "G N"]:
    return (batch.observed[:, :1] if top.shared else batch.observed).T


class _Rows(NamedTuple):
    """What sums run over, by rows of data; ``sight`` is what :attr:`Sight.rows` holds of them."""

    y: Float[Array, "N P"]
    observed: Bool[Array, "N P"]
    in_group: Bool[Array, "N G"]
    sight: PyTree[Shaped[Array, "N ..."]]


def _sums_in_blocks(
    model: DeepGP,
    top: Top,
    batch: Batch,
    sight: Sight,
    z: Float[Array, "S M F"],
    inverse: Float[Array, "S M M"] | None,
) -> WhitenedSums:
    def one(rows: _Rows, h: Float[Array, "B F"], own: tuple[Array, Array | None]) -> WhitenedSums:
        return _sums(model.layers[-1], rows, h, *own)

    return _over_blocks(top, batch, sight, (z, inverse), z.shape[1], one)


def _over_blocks(
    top: Top,
    batch: Batch,
    sight: Sight,
    own: PyTree[Float[Array, "S ..."]],
    num_inducing: int,
    one: Callable[[_Rows, Float[Array, "B F"], PyTree], PyTree],
) -> PyTree:
    """The sum over the data of ``one(rows, h, own)``, for every particle: what it sees there, and what is its own.

    All is done with a block of rows before the next is formed, and done again for gradients: unless the sight holds it,
    nothing of the size of S times N is in memory (with 63,000 rows, a move takes less than half the time).
    """
    rows = _Rows(batch.y, batch.observed, _groups(top, batch).T, sight.rows)
    particles, size = _blocks(len(jax.tree.leaves(own)[0]), len(batch.y), num_inducing)

    def block(rows: _Rows) -> PyTree:
        each = lambda parts: one(rows, *parts)  # noqa: E731
        return jax.lax.map(each, (sight.at(rows.sight), own), batch_size=particles)

    return sum_blocks(block, rows, _num_blocks(len(batch.y), size), recompute=True)


def _num_blocks(num_rows: int, size: int) -> int:
    """Blocks of at most ``size`` rows; of equal length if that can be, for filling up the last one copies all."""
    fewest = -(-num_rows // size)
    equal = (count for count in range(fewest, num_rows // _FEWEST_ROWS + 1) if num_rows % count == 0)
    return next(equal, fewest)


def _sums(
    layer: Layer,
    rows: _Rows,
    h: Float[Array, "B F"],
    z: Float[Array, "M F"],
    inverse: Float[Array, "M M"] | None,
) -> WhitenedSums:
    """One particle's sums, raw without L^-1; rows that a single group lacks are struck from K: that costs nothing."""
    groups = rows.in_group.T
    struck = len(groups) == 1
    if inverse is None:
        K = layer.kernel(z, h)
        V = _computed_once(jnp.where(groups, K, 0.0) if struck else K)
    else:
        # L^-1 k(h, z)^T and not L^-1 k(z, h): for many small matrices XLA is twice as fast at A B^T as at A B.
        K = layer.kernel(h, z)
        V = inverse @ _computed_once(jnp.where(groups.T, K, 0.0) if struck else K).T
    residual = jnp.where(rows.observed, rows.y - layer.mean(h), 0.0)
    member = jnp.where(groups, jnp.ones((), V.dtype), 0.0)
    columns = residual[None] if len(groups) == 1 else residual.T[:, :, None]
    own = V[None] if len(groups) == 1 else V[None] * member[:, None]
    return WhitenedSums(
        gram=jnp.stack([product(part, V.T) for part in own]),
        cross=jnp.stack([product(V, part) for part in columns]),
        square=jnp.sum(columns**2, axis=(1, 2)),
        prior=member @ layer.kernel.diagonal(h),
        count=jnp.sum(member, axis=1),
    )


def _computed_once(K: Array) -> Array:
    """A barrier that keeps XLA from evaluating the kernel once for every use."""
    return jax.lax.optimization_barrier(K)


def _top_white(model: DeepGP, white: Float[Array, "S k"], num_inducing: int) -> Float[Array, "S M Q"]:
    return white.reshape(len(white), num_inducing, model.layers[-1].width)


def _sampled(
    model: DeepGP, top: Top, batch: Batch, sight: Sight, inducing: Int[Array, " M"], white: Float[Array, "S k"]
) -> Float[Array, " S"]:
    """``sum_i log p(y_i | f_i)`` with ``f = m + k(., Z) Lz^-T v``."""
    layer = model.layers[-1]
    z, factor = _factorise(model, sight, inducing)
    v = _top_white(model, white, len(inducing))
    weights = jax.lax.linalg.triangular_solve(factor.lower, v, left_side=True, lower=True, transpose_a=True)

    def one(rows: _Rows, h: Float[Array, "B F"], own: tuple[Array, Array]) -> Float[Array, ""]:
        z, weights = own
        f = layer.kernel(h, z) @ weights + layer.mean(h)
        return jnp.sum(jnp.where(rows.observed, model.likelihood.log_prob(f, rows.y), 0.0))

    return _over_blocks(top, batch, sight, (z, weights), len(inducing), one)


def _covariances(
    model: DeepGP, batch: Batch, inputs: Float[Array, "S N F"]
) -> tuple[Float[Array, "S N N"], Bool[Array, " N"], Float[Array, "S N P"]]:
    """K + s2 I on measured rows, the identity on the others; and the residuals."""
    observed = batch.observed[:, 0]
    both = observed[:, None] & observed[None, :]
    noise = jnp.diag(jnp.where(observed, gaussian_noise(model, 1)[0], 1.0))
    K = jnp.where(both[None], jax.vmap(model.layers[-1].kernel.gram)(inputs), 0.0) + noise[None]
    return K, observed, jax.vmap(lambda h: residuals(model, batch, h))(inputs)


def _exact_evidence(model: DeepGP, batch: Batch, inputs: Float[Array, "S N F"]) -> Float[Array, " S"]:
    K, observed, Y = _covariances(model, batch, inputs)
    lower = safe_cholesky(K, jitter=0.0).lower
    white = jax.lax.linalg.triangular_solve(lower, Y, left_side=True, lower=True)
    outputs = Y.shape[2]
    count = outputs * jnp.sum(jnp.where(observed, jnp.ones((), Y.dtype), 0.0))
    constant = count * jnp.log(2.0 * jnp.pi)
    return -0.5 * (jnp.sum(white**2, axis=(1, 2)) + outputs * logdet_lower(lower) + constant)


def _condition_exactly(model: DeepGP, batch: Batch, inputs: Float[Array, "S N F"]) -> tuple[Conditioned, JitterReport]:
    """With all rows as inducing points and K + s2 I in the place of K_zz, the exact posterior has the same form."""
    K, observed, Y = _covariances(model, batch, inputs)
    factor = safe_cholesky(K, jitter=0.0)
    inverse = jnp.where(observed[None, None, :], inverse_lower(factor.lower), 0.0)
    return Conditioned(inputs, inverse @ Y, inverse, inverse[:, None][:, :0]), factor.report
