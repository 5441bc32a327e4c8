"""One sparse conditional for every algorithm with inducing inputs, computed once for all outputs of a layer.

With Lz Lz^T = k(Z, Z), whitened inducing values v = Lz^-1 u ~ N(m~, T T^T) and A = Lz^-1 k(Z, x):

    mean(x) = A^T m~ + m(x)          var(x) = k(x, x) - |A|^2 + |T^T A|^2

The work splits in two. :func:`prepare` and :func:`condition_on` do what has no data axis (factorise, invert, M x M
products, in the precision of the parameters); :func:`moments` does what has one, by a single matrix product with the
stacked maps Lz^-1 and T^T Lz^-1. Large triangular solves are several times slower than products on a CPU, so the factor
is inverted once.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp.errors import SettingError
from fathomgp.linalg import JitterReport, inverse_lower, product, safe_cholesky
from fathomgp.model._deep import Layer
from fathomgp.precision import clamp_variance


class Whitener(eqx.Module):
    """Lz^-1 of a layer, with what its factorisation had to say."""

    inverse_factor: Float[Array, "M M"]
    report: JitterReport


class Whitened(eqx.Module):
    """q(v) of a layer's outputs: independent Gaussians on the whitened inducing values.

    Attributes:
        mean: m~, one column an output.
        root: T with covariance T T^T, one matrix an output, or a single one that all outputs share; none at all
            (R = 0) when v is known, see :func:`known`.
    """

    mean: Float[Array, "M P"]
    root: Float[Array, "R M M"]


class MeanTerm(eqx.Module):
    """A part of the mean that has points of its own: ``k(x, points) weights``."""

    points: Float[Array, "G D"]
    weights: Float[Array, "G P"]


class Conditional(eqx.Module):
    """A layer's q(f), ready to be asked at any inputs.

    Attributes:
        z: the inducing inputs.
        mean: m~.
        maps: Lz^-1 first, then T^T Lz^-1 of every output (or of all; none when v is known): what multiplies k(Z, x).
        extra: what decoupled algorithms add to the mean, or ``None``.
    """

    z: Float[Array, "M D"]
    mean: Float[Array, "M P"]
    maps: Float[Array, "C M M"]
    extra: MeanTerm | None = None


def prepare(layer: Layer) -> Whitener:
    """Factorise and invert k(Z, Z)."""
    factor = safe_cholesky(_inducing_covariance(layer))
    return Whitener(inverse_lower(factor.lower), factor.report)


def prepare_all(layers: tuple[Layer, ...]) -> list[Whitener]:
    """:func:`prepare` for every layer, with one batched factorisation where all have the same M."""
    covariances = [_inducing_covariance(layer) for layer in layers]
    if len({covariance.shape for covariance in covariances}) > 1:
        return [prepare(layer) for layer in layers]
    factor = safe_cholesky(jnp.stack(covariances))
    inverses = inverse_lower(factor.lower)
    reports = [jax.tree.map(lambda leaf, level=level: leaf[level], factor.report) for level in range(len(layers))]
    return [Whitener(inverse, report) for inverse, report in zip(inverses, reports, strict=True)]


def condition_on(layer: Layer, whitener: Whitener, q: Whitened) -> Conditional:
    """Everything of a layer's q(f) that does not depend on the data."""
    assert layer.z is not None
    spread = jnp.swapaxes(q.root, 1, 2) @ whitener.inverse_factor
    return Conditional(layer.z.value, q.mean, jnp.concatenate([whitener.inverse_factor[None], spread]))


def known(v: Float[Array, "M P"]) -> Whitened:
    """q(v) of inducing values that are known, a draw of a sampler: no root, so nothing is multiplied by zeros."""
    return Whitened(v, jnp.zeros((0, len(v), len(v)), v.dtype))


def project(layer: Layer, whitener: Whitener, x: Float[Array, "N D"]) -> Float[Array, "M N"]:
    """A = Lz^-1 k(Z, x)."""
    assert layer.z is not None
    return product(whitener.inverse_factor, layer.kernel(layer.z.value, x))


def moments(
    layer: Layer, conditional: Conditional, x: Float[Array, "N D"]
) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
    """Mean and variance of a layer's outputs at ``x``."""
    mapped = _apply(layer, conditional, x)
    mean = _mean(layer, conditional, mapped[0], x)
    squares = jnp.sum(mapped**2, axis=1)
    variance = layer.kernel.diagonal(x)[None] - squares[:1]
    if len(squares) > 1:
        variance = variance + squares[1:]
    return mean, jnp.broadcast_to(clamp_variance(variance).T, mean.shape)


def joint_moments(
    layer: Layer, conditional: Conditional, x: Float[Array, "N D"]
) -> tuple[Float[Array, "N P"], Float[Array, "P N N"]]:
    """Mean and covariance between rows of a layer's outputs at ``x``."""
    mapped = _apply(layer, conditional, x)
    mean = _mean(layer, conditional, mapped[0], x)
    squares = jnp.swapaxes(mapped, 1, 2) @ mapped
    covariance = layer.kernel(x)[None] - squares[:1]
    if len(squares) > 1:
        covariance = covariance + squares[1:]
    return mean, jnp.broadcast_to(covariance, (layer.width, len(x), len(x)))


def sample_path(
    layer: Layer, conditional: Conditional, prior: Callable[[Array], Array], e: Float[Array, "M P"]
) -> Callable[[Float[Array, "N D"]], Float[Array, "N P"]]:
    """A layer's function as a whole: a draw of the prior, corrected at the inducing inputs (Matheron's rule).

        f(x) = m(x) + A^T (m~ + T e) + [prior(x) - A^T Lz^-1 prior(Z)]

    Args:
        layer: gives kernel and mean.
        conditional: q(f).
        prior: a draw of the layer's outputs without their mean function, at any inputs.
        e: standard normal noise.
    """
    at_inducing = conditional.maps[0] @ prior(conditional.z)

    def function(x: Float[Array, "N D"]) -> Float[Array, "N P"]:
        mapped = _apply(layer, conditional, x)
        value = _mean(layer, conditional, mapped[0], x) + prior(x) - mapped[0].T @ at_inducing
        if len(mapped) == 1:
            return value
        spread = jnp.broadcast_to(mapped[1:], (layer.width, *mapped.shape[1:]))
        return value + jnp.einsum("pmn,mp->np", spread, e)

    return function


def _mean(layer: Layer, conditional: Conditional, A: Float[Array, "M N"], x: Float[Array, "N D"]) -> Array:
    mean = A.T @ conditional.mean + layer.mean(x)
    if conditional.extra is None:
        return mean
    return mean + product(layer.kernel(x, conditional.extra.points), conditional.extra.weights)


def _inducing_covariance(layer: Layer) -> Float[Array, "M M"]:
    if layer.z is None:
        raise SettingError("This algorithm needs inducing inputs, but a layer has none: set num_inducing.")
    return layer.kernel(layer.z.value)


def _apply(layer: Layer, conditional: Conditional, x: Float[Array, "N D"]) -> Float[Array, "C M N"]:
    """All maps at once: one tall matrix product is faster than several small ones."""
    maps = conditional.maps
    tall = product(maps.reshape(-1, maps.shape[2]), layer.kernel(conditional.z, x))
    return tall.reshape(*maps.shape[:2], len(x))
