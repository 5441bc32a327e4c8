"""What the algorithms with a data axis share: sums over blocks of rows, and one sample path through the layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.data import Batch
from fathomgp.model import Conditional, DeepGP, Layer, moments

#: Rows that stream through the layers at a time.
BLOCK = 2048

#: x, y, observed and weight of a block.
Rows = tuple[Array, Array, Array, Array]


def stream_sum(
    function: Callable[[Rows, PRNGKeyArray], Any], batch: Batch, key: PRNGKeyArray, block: int | None = None
) -> Any:
    """``function(rows, key)`` summed over blocks of rows; the last block is padded with rows of weight 0.

    Memory is one block's, whatever the batch, when ``function`` returns sums: a value and its gradients, for instance.
    ``block`` is the number of rows that it should see at a time.
    """
    rows = (batch.x, batch.y, batch.observed, batch.weight)
    size = len(batch.x)
    blocks = max(1, round(size / (block or BLOCK)))
    if blocks == 1:
        return function(rows, key)
    length = -(-size // blocks)

    def split(part: Array) -> Array:
        padded = jnp.pad(part, ((0, blocks * length - size),) + ((0, 0),) * (part.ndim - 1))
        # Every block takes rows from everywhere: devices that share the batch then share each block.
        return jnp.swapaxes(padded.reshape(length, blocks, *part.shape[1:]), 0, 1)

    def add(total: Any, block: Any) -> tuple[Any, None]:
        number, rows = block
        return jax.tree.map(jnp.add, total, function(rows, jax.random.fold_in(key, number))), None

    stacked = (jnp.arange(blocks), jax.tree.map(split, rows))
    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda s: s[0], stacked[1]), key))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zero, stacked)[0]


def last_moments(
    model: DeepGP, conditionals: Sequence[Conditional], x: Float[Array, "B D"], *, key: PRNGKeyArray
) -> tuple[Float[Array, "B Q"], Float[Array, "B Q"]]:
    """Mean and variance of the last layer at inputs that were sampled through the inner ones, one path a row."""
    h = x
    for level, (layer, conditional) in enumerate(zip(model.layers, conditionals, strict=True)):
        mean, variance = moments(layer, conditional, model.layer_input(level, x, h))
        if level < model.depth - 1:
            h = _sample(layer, mean, variance, jax.random.fold_in(key, level))
    return mean, variance


def _sample(
    layer: Layer, mean: Float[Array, "B P"], variance: Float[Array, "B P"], key: PRNGKeyArray
) -> Float[Array, "B P"]:
    """``mean + sqrt(variance) e``, with the noise between layers.

    e is drawn in float32, so that a key gives the same path in every precision.
    """
    if layer.noise is not None:
        variance = variance + layer.noise.value
    return mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape, jnp.float32).astype(mean.dtype)
