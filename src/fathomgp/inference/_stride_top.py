"""The last layer given the hidden ones: what a particle's likelihood is, for S particles at once.

collapsed   Gaussian noise: the last layer is integrated out, given M inducing points (the first two terms of F_V)
sampled     any other likelihood: whitened values v at the inducing points are sampled too, f = k(., Z) L^-T v
standard    Gaussian noise and no inducing points: the exact evidence, O(S N^3)
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fathomgp.data import Batch
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
)
from fathomgp.model import DeepGP, Layer

KINDS = ("collapsed", "sampled", "standard")

#: Entries of K_mn, of several particles or of some rows, that are formed at a time: what a core's caches hold. Four
#: times as many, or one particle of 700 rows at a time, take a fifth longer (measured).
_ENTRIES = 1 << 18
#: Nats that the quicker likelihood may be off, on average over the particles: less than chains of a few hundred steps
#: can tell. On energy (noise variance 0.002) it is off by 0.01 to 0.04, on concrete and boston by less than 1e-4.
_TOLERANCE = 0.1


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


class Whitening(eqx.Module):
    """Lz^-1 of every particle, and what the factorisations had to say."""

    inverse: Float[Array, "S M M"]
    report: JitterReport


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
    inputs: Float[Array, "S N F"],
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
    *,
    raw: Bool[Array, ""] | bool = False,
) -> Float[Array, " S"]:
    """Phi: the log likelihood of every particle; NaN where a matrix has no factor.

    ``raw`` takes the quicker way to it, whose rounding grows as the noise falls: see :func:`way_and_log_likelihood`.
    """
    if top.kind == "standard":
        return _exact_evidence(model, batch, inputs)
    if top.kind == "sampled":
        return _sampled(model, batch, inputs, inducing, white)
    z, factor = _factorise(model, inputs, inducing)  # once for both ways: factorisations take long to compile
    ways = (functools.partial(_collapsed, model, top, batch, inputs, raw=way) for way in (True, False))
    return jax.lax.cond(raw, *ways, z, factor.lower)


def way_and_log_likelihood(
    model: DeepGP,
    top: Top,
    batch: Batch,
    inputs: Float[Array, "S N F"],
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
) -> tuple[Bool[Array, ""], Float[Array, " S"]]:
    """Whether the quicker way to Phi will do, and Phi by the way that will be taken."""
    if top.kind != "collapsed":
        return jnp.asarray(False), log_likelihood(model, top, batch, inputs, inducing, white)
    z, factor = _factorise(model, inputs, inducing)
    quick, sure = (_collapsed(model, top, batch, inputs, z, factor.lower, raw=way) for way in (True, False))
    raw = jnp.mean(jnp.abs(quick - sure)) <= _TOLERANCE
    return raw, jnp.where(raw, quick, sure)


def bound(
    model: DeepGP, top: Top, batch: Batch, inputs: Float[Array, "S N F"], inducing: Int[Array, " M"]
) -> Float[Array, " S"]:
    """F_V of every particle, all three terms: what the M step maximises."""
    return evidence_from_sums(sums(model, top, batch, inputs, inducing)[0], _noise(model, top, batch))[1]


def sums(
    model: DeepGP, top: Top, batch: Batch, inputs: Float[Array, "S N F"], inducing: Int[Array, " M"]
) -> tuple[WhitenedSums, Whitening]:
    """V V^T and its companions, in blocks of particles so that memory stays O(N M); and the factors of K_mm."""
    z, factor = _factorise(model, inputs, inducing)
    inverse = inverse_lower(factor.lower)
    return _sums_in_blocks(model, top, batch, inputs, z, inverse), Whitening(inverse, factor.report)


def condition_top(
    model: DeepGP,
    top: Top,
    batch: Batch,
    inputs: Float[Array, "S N F"],
    inducing: Int[Array, " M"],
    white: Float[Array, "S k"],
) -> tuple[Conditioned, JitterReport]:
    """The last layer's posterior GP given every particle."""
    if top.kind == "standard":
        return _condition_exactly(model, batch, inputs)
    z = jnp.take(inputs, inducing, axis=1)
    data, whitening = sums(model, top, batch, inputs, inducing)
    inverse = whitening.inverse
    if top.kind == "sampled":
        return Conditioned(
            z, _top_white(model, white, len(inducing)), inverse, inverse[:, None][:, :0]
        ), whitening.report
    scale = _noise(model, top, batch)[None, :, None, None]
    B = jnp.eye(len(inducing), dtype=scale.dtype)[None, None] + data.gram / scale
    root = inverse_lower(safe_cholesky(B, jitter=0.0).lower)
    mean = jnp.swapaxes(root, 2, 3) @ (root @ (data.cross / scale))
    flat = jnp.moveaxis(mean, 1, 2).reshape(len(inputs), len(inducing), -1)
    return Conditioned(z, flat, inverse, root), whitening.report


def members(top: Top, batch: Batch) -> Float[Array, " N"]:
    """1 for rows with an observation, 0 for the others."""
    return jnp.where(jnp.any(batch.observed, axis=1), batch.weight, 0.0)


def residuals(model: DeepGP, batch: Batch, h: Float[Array, "N F"]) -> Float[Array, "N P"]:
    """What the mean leaves of y; 0 where nothing was observed."""
    return jnp.where(batch.observed, batch.y - model.layers[-1].mean(h), 0.0)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _block(inputs: Float[Array, "S N F"], num_inducing: int) -> int:
    """Particles at a time: a divisor of S, so that one program serves all blocks."""
    most = max(1, _ENTRIES // (num_inducing * inputs.shape[1]))
    return max(size for size in range(1, len(inputs) + 1) if len(inputs) % size == 0 and size <= most)


def _factorise(
    model: DeepGP, inputs: Float[Array, "S N F"], inducing: Int[Array, " M"]
) -> tuple[Float[Array, "S M F"], Factor]:
    """What the last layer sees at the inducing points, and the factors of K_mm."""
    z = jnp.take(inputs, inducing, axis=1)
    return z, safe_cholesky(jax.vmap(model.layers[-1].kernel.gram)(z))


def _collapsed(
    model: DeepGP,
    top: Top,
    batch: Batch,
    inputs: Float[Array, "S N F"],
    z: Float[Array, "S M F"],
    Lz: Float[Array, "S M M"],
    *,
    raw: bool,
) -> Float[Array, " S"]:
    """Phi with the last layer integrated out, from sums of K_mn (raw) or of V = Lz^-1 K_mn."""
    noise = _noise(model, top, batch)
    data = _sums_in_blocks(model, top, batch, inputs, z, None if raw else inverse_lower(Lz))
    evidence, lower = evidence_from_raw_sums(data, noise, Lz) if raw else evidence_from_sums(data, noise)
    return lower if top.trace else evidence


def _noise(model: DeepGP, top: Top, batch: Batch) -> Float[Array, " G"]:
    noise = gaussian_noise(model, batch.y.shape[1])
    return noise[:1] if top.shared else noise


def _groups(top: Top, batch: Batch) -> Bool[Array, "G N"]:
    return (batch.observed[:, :1] if top.shared else batch.observed).T


def _sums_in_blocks(
    model: DeepGP,
    top: Top,
    batch: Batch,
    inputs: Float[Array, "S N F"],
    z: Float[Array, "S M F"],
    inverse: Float[Array, "S M M"] | None,
) -> WhitenedSums:
    groups, layer = _groups(top, batch), model.layers[-1]
    count = -(-len(batch.y) * z.shape[1] // _ENTRIES)  # blocks of rows

    def one(parts: tuple[Array, Array, Array | None]) -> WhitenedSums:
        h, z, inverse = parts
        rows = _Rows(batch.y, batch.observed, groups.T, h)
        if count == 1:
            return _sums(layer, rows, z, inverse)
        blocks = jax.tree.map(lambda leaf: _in_blocks(leaf, count), rows)
        by_block = jax.lax.map(lambda block: _sums(layer, block, z, inverse), blocks)
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), by_block)

    return jax.lax.map(one, (inputs, z, inverse), batch_size=_block(inputs, z.shape[1]))


def _in_blocks(rows: Array, count: int) -> Array:
    """``count`` blocks of equal length; rows that fill up the last one are observed by no group."""
    size = -(-len(rows) // count)
    padded = jnp.pad(rows, [(0, count * size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    return padded.reshape(count, size, *rows.shape[1:])


class _Rows(NamedTuple):
    """What a particle's sums run over, by rows of data."""

    y: Float[Array, "N P"]
    observed: Bool[Array, "N P"]
    in_group: Bool[Array, "N G"]
    h: Float[Array, "N F"]


def _sums(layer: Layer, rows: _Rows, z: Float[Array, "M F"], inverse: Float[Array, "M M"] | None) -> WhitenedSums:
    """One particle's sums, raw without L^-1; rows that a single group lacks are struck from K: that costs nothing."""
    groups, h = rows.in_group.T, rows.h
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
    model: DeepGP, batch: Batch, inputs: Float[Array, "S N F"], inducing: Int[Array, " M"], white: Float[Array, "S k"]
) -> Float[Array, " S"]:
    """``sum_i log p(y_i | f_i)`` with ``f = m + k(., Z) Lz^-T v``."""
    layer = model.layers[-1]
    z = jnp.take(inputs, inducing, axis=1)
    lower = safe_cholesky(jax.vmap(layer.kernel.gram)(z)).lower
    v = _top_white(model, white, len(inducing))
    weights = jax.lax.linalg.triangular_solve(lower, v, left_side=True, lower=True, transpose_a=True)

    def one(parts: tuple[Array, Array, Array]) -> Float[Array, ""]:
        h, z, weights = parts
        f = layer.kernel(h, z) @ weights + layer.mean(h)
        return jnp.sum(jnp.where(batch.observed, model.likelihood.log_prob(f, batch.y), 0.0))

    return jax.lax.map(one, (inputs, z, weights), batch_size=_block(inputs, len(inducing)))


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
