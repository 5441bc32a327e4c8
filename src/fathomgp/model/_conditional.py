"""One sparse conditional for every algorithm with inducing inputs, computed once for all outputs of a layer.

With Lz Lz^T = k(Z, Z), whitened inducing values v = Lz^-1 u ~ N(m~, T T^T) and A = Lz^-1 k(Z, x):

    mean(x) = A^T m~ + m(x)          var(x) = k(x, x) - |A|^2 + |T^T A|^2

The work splits in two. :func:`prepare` and :func:`condition_on` do what has no data axis (factorise, invert, M x M
products, in the precision of the parameters); :func:`moments` does what has one: A by a product with Lz^-1, then T^T A
of all outputs by a single product with the stacked roots. Large triangular solves are several times slower than
products on a CPU, so the factor is inverted once.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.errors import SettingError
from fathomgp.kernels import AbstractKernel, prior_function
from fathomgp.linalg import JitterReport, inverse_factor, product, safe_inverse_factor, transposed_product
from fathomgp.model._deep import Layer
from fathomgp.precision import clamp_variance
from fathomgp.tags import tagged


@tagged("model/whitener")
class Whitener(eqx.Module):
    """Lz^-1 of a layer (one an output if these are separate), with what its factorisation had to say."""

    inverse_factor: Float[Array, "*separate M M"]
    report: JitterReport


@tagged("model/whitened")
class Whitened(eqx.Module):
    """q(v) of a layer's outputs: independent Gaussians on the whitened inducing values.

    Attributes:
        mean: m~, one column an output.
        root: T with covariance T T^T, one matrix an output, or a single one that all outputs share; none at all
            (R = 0) when v is known, see :func:`known`.
    """

    mean: Float[Array, "*separate M P"]
    root: Float[Array, "*separate R M M"]


@tagged("model/informed")
class Informed(eqx.Module):
    """q(v) as what a noisy observation of v would leave, one for every output: never wider than the prior.

    With the observation's noise V = T T^T and the lower-triangular R = chol(I + V)^-1, q(v) = N(R^T mu, S) where

        S = V (I + V)^-1 = I - R^T R,

    so that var(x) = k(x, x) - |R A|^2: the single map R Lz^-1 gives mean and variance, where :class:`Whitened` needs
    Lz^-1 and then T^T. That halves the data-sized work of a layer whose outputs have a k(Z, x) each.

    Attributes:
        mean: mu, one column an output.
        root: T, lower triangular.
    """

    mean: Float[Array, "M P"]
    root: Float[Array, "P M M"]

    def shrinkage(self) -> Float[Array, "P M M"]:
        """R."""
        V = self.root @ jnp.swapaxes(self.root, 1, 2)
        return inverse_factor(jnp.eye(V.shape[-1], dtype=V.dtype)[None] + V)

    def whitened(self) -> Whitened:
        """The same q(v) with a root of S: ``T chol(I + T^T T)^-T``, exact for the smallest S."""
        inner = Informed(self.mean, jnp.swapaxes(self.root, 1, 2)).shrinkage()
        mean = jnp.einsum("pnm,np->mp", self.shrinkage(), self.mean)
        return Whitened(mean, self.root @ jnp.swapaxes(inner, 1, 2))


@tagged("model/mean-term")
class MeanTerm(eqx.Module):
    """A part of the mean that has points of its own: ``k(x, points) weights``."""

    points: Float[Array, "G D"]
    weights: Float[Array, "G P"]


@tagged("model/conditional")
class Conditional(eqx.Module):
    """A layer's q(f), ready to be asked at any inputs.

    Separate outputs have one conditional each, all with a leading axis.

    Attributes:
        z: the inducing inputs.
        mean: m~.
        whitening: Lz^-1, which turns k(Z, x) into A. Of an :class:`Informed` q, R Lz^-1, and ``mean`` is mu.
        roots: T^T of every output (or of all), which multiplies A; none when v is known or q informed.
        extra: what decoupled algorithms add to the mean, or ``None``.
    """

    z: Float[Array, "*separate M D"]
    mean: Float[Array, "*separate M P"]
    whitening: Float[Array, "*separate M M"]
    roots: Float[Array, "*separate R M M"]
    extra: MeanTerm | None = None

    @property
    def maps(self) -> Float[Array, "*separate C M M"]:
        """What multiplies k(Z, x) in all: Lz^-1 first, then T^T Lz^-1 of every output."""
        one = self.whitening[..., None, :, :]
        return jnp.concatenate([one, self.roots @ one], axis=-3)


def prepare(layer: Layer, *, jitter: float | None = None) -> Whitener:
    """Factorise and invert k(Z, Z); ``jitter`` is the first to be tried, of :func:`~fathomgp.linalg.safe_cholesky`."""
    return prepare_all((layer,), jitter=jitter)[0]


def prepare_all(layers: tuple[Layer, ...], *, jitter: float | None = None) -> list[Whitener]:
    """:func:`prepare` for every layer, with one batched factorisation where all have the same M."""
    covariances = [_inducing_covariance(layer) for layer in layers]
    if len({covariance.shape[-1] for covariance in covariances}) > 1:
        return [prepare(layer, jitter=jitter) for layer in layers]
    inverses, report = safe_inverse_factor(jnp.concatenate(covariances), jitter=jitter)
    whiteners, start = [], 0
    for layer, covariance in zip(layers, covariances, strict=True):
        own = slice(start, start + len(covariance)) if layer.separate else start
        whiteners.append(Whitener(inverses[own], jax.tree.map(lambda leaf, own=own: leaf[own], report)))
        start += len(covariance)
    return whiteners


def condition_on(layer: Layer, whitener: Whitener, q: Whitened) -> Conditional:
    """Everything of a layer's q(f) that does not depend on the data."""
    assert layer.z is not None
    if not layer.separate:
        return Conditional(layer.z.value, q.mean, whitener.inverse_factor, jnp.swapaxes(q.root, 1, 2))
    roots = q.root[:, None] if len(q.root) else jnp.zeros((layer.width, *q.root.shape), q.root.dtype)
    return Conditional(layer.z.value, q.mean.T[:, :, None], whitener.inverse_factor, jnp.swapaxes(roots, 2, 3))


def condition_on_informed(
    layer: Layer, whitener: Whitener, mean: Float[Array, "M P"], shrinkage: Float[Array, "P M M"]
) -> Conditional:
    """:func:`condition_on` for an :class:`Informed` q of outputs with a k(Z, x) each."""
    assert layer.z is not None
    if not layer.separate:
        assert layer.width == 1, "outputs that share a kernel need a map each and Lz^-1"
        return Conditional(layer.z.value, mean, shrinkage[0] @ whitener.inverse_factor, shrinkage[:0])
    return Conditional(
        layer.z.value, mean.T[:, :, None], shrinkage @ whitener.inverse_factor, shrinkage[:, None][:, :0]
    )


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
    if layer.separate:
        own = jax.vmap(lambda kernel, part: _shift_and_variance(kernel, part, x))
        shift, variance = (figure[:, :, 0].T for figure in own(layer.kernel, conditional))
    else:
        shift, variance = _shift_and_variance(layer.kernel, conditional, x)
    mean = shift + _rest_of_mean(layer, conditional, x)
    return mean, jnp.broadcast_to(clamp_variance(variance), mean.shape)


def _shift_and_variance(kernel: AbstractKernel, conditional: Conditional, x: Array) -> tuple[Array, Array]:
    K = kernel(conditional.z, x)
    shift, change = mean_and_spread(K, conditional.whitening, conditional.roots, conditional.mean)
    return shift, (kernel.diagonal(x)[None] + change).T


def joint_moments(
    layer: Layer, conditional: Conditional, x: Float[Array, "N D"]
) -> tuple[Float[Array, "N P"], Float[Array, "P N N"]]:
    """Mean and covariance between rows of a layer's outputs at ``x``."""
    if layer.separate:
        own = jax.vmap(lambda kernel, part: _shift_and_covariance(kernel, part, x))
        shift, covariance = own(layer.kernel, conditional)
        shift, covariance = shift[:, :, 0].T, covariance[:, 0]
    else:
        shift, covariance = _shift_and_covariance(layer.kernel, conditional, x)
    mean = shift + _rest_of_mean(layer, conditional, x)
    return mean, jnp.broadcast_to(covariance, (layer.width, len(x), len(x)))


def _shift_and_covariance(kernel: AbstractKernel, conditional: Conditional, x: Array) -> tuple[Array, Array]:
    A = product(conditional.whitening, kernel(conditional.z, x))
    covariance = (kernel(x) - A.T @ A)[None]
    if len(conditional.roots):
        spread = _spread(conditional.roots, A)
        covariance = covariance + jnp.swapaxes(spread, 1, 2) @ spread
    return A.T @ conditional.mean, covariance


def sample_path(
    layer: Layer, conditional: Conditional, x: Float[Array, "N D"], *, key: PRNGKeyArray
) -> Float[Array, "N P"]:
    """A draw of a layer's function as a whole, at ``x``: the same key is the same function, whatever the rows.

    A draw of the prior, corrected at the inducing inputs (Matheron's rule; Wilson et al. 2020), with e standard normal:

        f(x) = m(x) + A^T (m~ + T e) + [prior(x) - A^T Lz^-1 prior(Z)]
    """
    rest = _rest_of_mean(layer, conditional, x)
    if not layer.separate:
        return _centred_path(layer.kernel, conditional, x, key, layer.width) + rest
    own = jax.vmap(lambda kernel, part, one: _centred_path(kernel, part, x, one, 1)[:, 0])
    return own(layer.kernel, conditional, jax.random.split(key, layer.width)).T + rest


def _centred_path(kernel: AbstractKernel, conditional: Conditional, x: Array, key: PRNGKeyArray, width: int) -> Array:
    prior_key, noise_key = jax.random.split(key)
    e = jax.random.normal(noise_key, conditional.mean.shape, conditional.mean.dtype)
    prior = prior_function(kernel, conditional.z.shape[1], key=prior_key, width=width, like=e)
    A = product(conditional.whitening, kernel(conditional.z, x))
    value = A.T @ (conditional.mean - conditional.whitening @ prior(conditional.z)) + prior(x)
    if not len(conditional.roots):
        return value
    spread = _spread(conditional.roots, A)
    return value + jnp.einsum("pmn,mp->np", jnp.broadcast_to(spread, (width, *spread.shape[1:])), e)


@jax.custom_vjp
def mean_and_spread(
    K: Float[Array, "M N"], whitening: Float[Array, "M M"], roots: Float[Array, "R M M"], mean: Float[Array, "M P"]
) -> tuple[Float[Array, "N P"], Float[Array, "_ N"]]:
    """``A^T m~``, and what the data change in the variance, ``|T^T A|^2 - |A|^2`` (``-|A|^2`` when v is known).

    All the data-sized products of a layer, with a pull-back by hand, which weighs rows where that is cheapest: with B =
    T^T A and a weight g a row and root,

        T^T_bar = 2 B (g A)^T,    A_bar = 2 (T (g B) - g A) + m~ g_mean^T,

        K_bar = Lz^-T A_bar,      Lz^-1_bar = A_bar K^T.

    ``T (A g A^T)`` would save a product, but such sums lose the gradient in float32 (more than 1 % after 400 steps).
    """
    return _mean_and_spread(K, whitening, roots, mean)[0]


def _mean_and_spread(
    K: Array, whitening: Array, roots: Array, mean: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    A = product(whitening, K)
    B = _spread(roots, A)
    if len(roots) == 1:  # summed at once: half the passes over the largest arrays
        change = jnp.sum(B[0] ** 2 - A**2, axis=0)[None]
    else:
        own = _sum_of_squares(A[None])
        change = _sum_of_squares(B) - own if len(roots) else -own
    return (A.T @ mean, change), (K, whitening, roots, mean, A, B)


def _sum_of_squares(mapped: Float[Array, "C M N"]) -> Float[Array, "C N"]:
    """``sum_m mapped^2`` in short stretches: XLA makes a longer sum in several passes over the array."""
    stretches = [mapped[:, start : start + 20] for start in range(0, mapped.shape[1], 20)]
    return sum((jnp.sum(part**2, axis=1) for part in stretches[1:]), start=jnp.sum(stretches[0] ** 2, axis=1))


def _pull_back(residuals: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    (K, whitening, roots, mean, A, B), (g_mean, g) = residuals, cotangents
    A_bar = mean @ g_mean.T - 2.0 * jnp.sum(g, axis=0, keepdims=True) * A
    if len(roots) == 1:
        roots_bar = (2.0 * B[0]) @ (g * A).T
        A_bar, roots_bar = A_bar + 2.0 * g * transposed_product(roots[0], B[0]), roots_bar[None]
    elif len(roots):
        G = ((2.0 * g)[:, None] * B).reshape(-1, K.shape[1])
        A_bar = A_bar + transposed_product(roots.reshape(-1, roots.shape[2]), G)
        roots_bar = (G @ A.T).reshape(roots.shape)
    else:
        roots_bar = roots
    return transposed_product(whitening, A_bar), A_bar @ K.T, roots_bar, A @ g_mean


mean_and_spread.defvjp(_mean_and_spread, _pull_back)


def _rest_of_mean(layer: Layer, conditional: Conditional, x: Float[Array, "N D"]) -> Array:
    """The mean function, and what decoupled algorithms add."""
    mean = layer.mean(x)
    if conditional.extra is None:
        return mean
    return mean + product(layer.kernel(x, conditional.extra.points), conditional.extra.weights)


def _inducing_covariance(layer: Layer) -> Float[Array, "_ M M"]:
    """k(Z, Z), one matrix or one an output."""
    if layer.z is None:
        raise SettingError("This algorithm needs inducing inputs, but a layer has none: set num_inducing.")
    if layer.separate:
        return jax.vmap(lambda kernel, z: kernel(z))(layer.kernel, layer.z.value)
    return layer.kernel(layer.z.value)[None]


def _spread(roots: Float[Array, "R M M"], A: Float[Array, "M N"]) -> Float[Array, "R M N"]:
    """``T^T A`` of all outputs at once: one tall matrix product is faster than several small ones."""
    return product(roots.reshape(-1, roots.shape[2]), A).reshape(*roots.shape[:2], A.shape[1])
