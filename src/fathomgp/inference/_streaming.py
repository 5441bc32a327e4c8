"""What the algorithms with a data axis share: sums over blocks of rows, and one sample path through the layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.data import Batch
from fathomgp.model import Conditional, DeepGP, Layer, moments

#: Rows that stream through the layers at a time, when a layer's products are small; see :func:`rows_a_block`.
BLOCK = 5000
#: Numbers in a block's largest product, W k(Z, x): more fall out of the cache, fewer waste time on small products.
_BLOCK_NUMBERS = 2_000_000

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


def rows_a_block(conditionals: Sequence[Conditional], num_samples: int = 1) -> int:
    """How many rows should stream through layers at a time."""
    largest = max(math.prod(conditional.maps.shape[:-1]) for conditional in conditionals)
    return max(1, min(BLOCK, _BLOCK_NUMBERS // largest) // num_samples)


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
