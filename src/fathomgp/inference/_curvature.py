"""What the data say about each layer's inducing values while the other layers stand still: a metric for samplers.

With A_i = Lz^-1 k(Z, h_i) of a layer, g_ip the slope of the last layer's mean in the layer's output p at row i, and c_i
the curvature of -log p(y_i) in that mean, the data add to the prior's unit precision of a layer's v_p

    F_p = sum_i c_i g_ip^2 A_i A_i^T

(Gauss and Newton's approximation; in one layer with Gaussian noise it is exact). The root T of (I + F_p)^-1 turns v
into coordinates in which every output of a layer, taken alone, has unit curvature: no direction is then stiffer than
the number of all outputs, however many rows there are and however little noise.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.inference._streaming import Noise, Rows, num_paths, sample_layer
from fathomgp.linalg import inverse_lower, product, safe_cholesky
from fathomgp.model import Conditional, DeepGP, Layer, moments

#: F of every layer, one matrix an output.
Precisions = tuple[Float[Array, "P _ _"], ...]


def data_precisions(
    model: DeepGP, conditionals: Sequence[Conditional], rows: Rows, noise: Noise, *, key: PRNGKeyArray, bound: bool
) -> Precisions:
    """F of every layer, summed over rows and averaged over their sample paths.

    Where a row has several latent functions, their curvatures are weighed with random signs, which is right on average;
    so is the part that a varying variance of the last layer has in the ``"marginal"`` energy.
    """
    x, y, observed, weight = (jnp.repeat(part, num_paths(noise), axis=0) for part in rows)
    offsets = [jnp.zeros((len(x), layer.width), x.dtype) for layer in model.layers]
    (mean, variance), pull, seen = jax.vjp(
        lambda offsets: _shifted(model, conditionals, x, noise, offsets), offsets, has_aux=True
    )
    score = model.likelihood.expected_log_prob if bound else model.likelihood.log_z

    def slope(mean: Array) -> Array:
        figures = lambda mean: jnp.where(observed, score(mean, variance, y), 0.0)  # noqa: E731
        return jax.grad(lambda mean: jnp.sum(figures(mean)))(mean)

    mean_key, variance_key = jax.random.split(key)
    signs = jax.random.rademacher(mean_key, mean.shape, mean.dtype)
    curvature = jnp.maximum(-signs * jax.jvp(slope, (mean,), (signs,))[1], 0.0)
    # A Gaussian with precision c has curvature c^2 / 2 in its variance.
    others = jax.random.rademacher(variance_key, mean.shape, mean.dtype) * (0.0 if bound else jnp.sqrt(0.5))
    (slopes,) = pull((signs * jnp.sqrt(curvature), others * curvature))
    share = (weight / num_paths(noise))[:, None]
    parts = zip(model.layers, conditionals, seen, slopes, strict=True)
    return tuple(_weighted_gram(layer, part, h, share * slope**2) for layer, part, h, slope in parts)


def metric_root(precision: Float[Array, "*stack M M"]) -> Float[Array, "*stack M M"]:
    """T with T T^T = (I + F)^-1."""
    prior = jnp.broadcast_to(jnp.eye(precision.shape[-1], dtype=precision.dtype), precision.shape)
    factor = safe_cholesky(prior + precision, jitter=0.0)
    return jnp.swapaxes(inverse_lower(factor.lower), -1, -2)


def _shifted(
    model: DeepGP, conditionals: Sequence[Conditional], x: Array, noise: Noise, offsets: list[Array]
) -> tuple[tuple[Array, Array], list[Array]]:
    """The last layer's moments where every layer's mean has moved a little; and what each layer has seen."""
    h, seen = x, []
    for level, (layer, conditional) in enumerate(zip(model.layers, conditionals, strict=True)):
        seen.append(model.layer_input(level, x, h))
        mean, variance = moments(layer, conditional, seen[-1])
        mean = mean + offsets[level]
        if level < model.depth - 1:
            h = sample_layer(layer, mean, variance, noise[level])
    return (mean, variance), seen


def _weighted_gram(layer: Layer, conditional: Conditional, h: Array, weights: Float[Array, "N P"]) -> Any:
    """``sum_i w_ip A_i A_i^T`` of every output."""
    if layer.separate:
        own = jax.vmap(lambda kernel, part: product(part.whitening, kernel(part.z, h)))
        A = own(layer.kernel, conditional)
        return (A * weights.T[:, None, :]) @ jnp.swapaxes(A, 1, 2)
    A = product(conditional.whitening, layer.kernel(conditional.z, h))
    return jax.lax.map(lambda w: (A * w[None, :]) @ A.T, weights.T)
