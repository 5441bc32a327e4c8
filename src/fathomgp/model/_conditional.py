"""One sparse conditional for every algorithm with inducing inputs, computed once for all outputs of a layer.

With Lz Lz^T = k(Z, Z), whitened inducing values v = Lz^-1 u ~ N(m~, T T^T) and A = Lz^-1 k(Z, x):

    mean(x) = A^T m~ + m(x)          var(x) = k(x, x) - |A|^2 + |T^T A|^2

The work splits in two. :func:`prepare` does what has no data axis (factorise and invert, M x M, always in the precision
of the parameters); :func:`project` and :func:`moments` do what has one, by matrix products only. Large triangular solves
are several times slower than products on a CPU, so the factor is inverted once.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fathomgp.errors import SettingError
from fathomgp.linalg import inverse_lower, safe_cholesky
from fathomgp.model._deep import Layer
from fathomgp.precision import clamp_variance


class Whitener(eqx.Module):
    """Lz^-1 of a layer, with what its factorisation had to say.

    Attributes:
        z: the inducing inputs.
        inverse_factor: Lz^-1.
        jitter: the amount added to the diagonal of k(Z, Z).
        ok: whether the factor is finite.
    """

    z: Float[Array, "M D"]
    inverse_factor: Float[Array, "M M"]
    jitter: Float[Array, ""]
    ok: Bool[Array, ""]


class Whitened(eqx.Module):
    """q(v) of a layer's outputs: independent Gaussians on the whitened inducing values.

    Attributes:
        mean: m~, one column an output.
        root: T with covariance T T^T, one matrix an output, or a single one that all outputs share.
    """

    mean: Float[Array, "M P"]
    root: Float[Array, "R M M"]


def prepare(layer: Layer) -> Whitener:
    """Factorise and invert k(Z, Z): everything of a layer that does not depend on the data."""
    if layer.z is None:
        raise SettingError("This algorithm needs inducing inputs, but a layer has none: set num_inducing.")
    z = layer.z.value
    factor = safe_cholesky(layer.kernel(z))
    return Whitener(z, inverse_lower(factor.lower), factor.jitter, factor.ok)


def project(layer: Layer, whitener: Whitener, x: Float[Array, "N D"]) -> Float[Array, "M N"]:
    """A = Lz^-1 k(Z, x)."""
    return whitener.inverse_factor @ layer.kernel(whitener.z, x)


def moments(
    layer: Layer, whitener: Whitener, q: Whitened, x: Float[Array, "N D"]
) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
    """Mean and variance of a layer's outputs at ``x``."""
    a = project(layer, whitener, x)
    mean = a.T @ q.mean + layer.mean(x)
    unexplained = layer.kernel.diagonal(x) - jnp.sum(a**2, axis=0)
    learned = jnp.sum((jnp.swapaxes(q.root, 1, 2) @ a) ** 2, axis=1)
    return mean, jnp.broadcast_to(clamp_variance(unexplained[None] + learned).T, mean.shape)


def joint_moments(
    layer: Layer, whitener: Whitener, q: Whitened, x: Float[Array, "N D"]
) -> tuple[Float[Array, "N P"], Float[Array, "P N N"]]:
    """Mean and covariance between rows of a layer's outputs at ``x``."""
    a = project(layer, whitener, x)
    mean = a.T @ q.mean + layer.mean(x)
    spread = jnp.swapaxes(q.root, 1, 2) @ a
    covariance = (layer.kernel(x) - a.T @ a)[None] + jnp.swapaxes(spread, 1, 2) @ spread
    return mean, jnp.broadcast_to(covariance, (layer.width, len(x), len(x)))
