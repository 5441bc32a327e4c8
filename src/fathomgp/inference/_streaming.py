"""What the algorithms with a data axis share: sums over blocks of rows, and one sample path through the layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.data import Batch
from fathomgp.linalg import sum_blocks
from fathomgp.model import Conditional, DeepGP, Layer, moments

#: Rows that stream through the layers at a time, when a layer's products are small; see :func:`rows_a_block`.
BLOCK = 5000
#: Numbers in a block's largest product, W k(Z, x): more fall out of the cache, fewer waste time on small products.
_BLOCK_NUMBERS = 2_000_000

#: x, y, observed and weight of a block; and the noise variances where those of every row are known.
Rows = tuple[Array, ...]
#: Standard normal numbers for the sample paths through a block, one array an inner layer.
Noise = list[Float[Array, "B S _"]]


def stream_sum(function: Callable[[Rows, Any], Any], batch: Batch, noise: Any = (), block: int | None = None) -> Any:
    """``function(rows, noise)`` summed over blocks of rows; the last block is padded with rows of weight 0.

    Memory is one block's, whatever the batch, when ``function`` returns sums: a value and its gradients, for instance.
    ``noise`` holds arrays with a row for every row of the batch, ``block`` is the number of rows at a time.
    """

    def in_blocks(parts: tuple[Rows, Any]) -> Any:
        count = max(1, round(len(parts[0][0]) / (block or BLOCK)))
        return sum_blocks(lambda parts: function(*parts), parts, count)

    def on_one_device(parts: tuple[Rows, Any]) -> Any:
        # Every device sums what it holds first, so that they meet once a step and not once a block.
        return jax.lax.psum(in_blocks(parts), "rows")

    parts = (rows_of(batch), noise)
    if batch.mesh is None:
        return in_blocks(parts)

    spread = jax.shard_map(
        on_one_device, mesh=batch.mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec(), check_vma=False
    )
    return spread(parts)


def rows_of(batch: Batch) -> Rows:
    """What the functions that :func:`stream_sum` sums see of a batch."""
    rows = (batch.x, batch.y, batch.observed, batch.weight)
    return rows if batch.noise is None else (*rows, batch.noise)


def rows_a_block(conditionals: Sequence[Conditional], num_samples: int = 1) -> int:
    """How many rows should stream through layers at a time."""
    largest = max(math.prod(part.shape[:-1]) for one in conditionals for part in (one.whitening, one.roots))
    return max(1, min(BLOCK, _BLOCK_NUMBERS // largest) // num_samples)


def path_noise(model: DeepGP, num_rows: int, num_samples: int = 1, *, key: PRNGKeyArray) -> Noise:
    """What sample paths of a batch need, drawn for all of it: neither blocks nor devices change a row's path."""
    return [
        # In float32, so that a key gives the same path in every precision.
        jax.random.normal(jax.random.fold_in(key, level), (num_rows, num_samples, layer.width), jnp.float32)
        for level, layer in enumerate(model.layers[:-1])
    ]


def last_moments(
    model: DeepGP, conditionals: Sequence[Conditional], x: Float[Array, "B D"], noise: Noise
) -> tuple[Float[Array, "_ Q"], Float[Array, "_ Q"]]:
    """Mean and variance of the last layer at inputs that were sampled through the inner ones.

    S paths a row, those of a row side by side; with one layer there is nothing to sample, and S is 1.
    """
    h = x = jnp.repeat(x, num_paths(noise), axis=0)
    for level, (layer, conditional) in enumerate(zip(model.layers, conditionals, strict=True)):
        mean, variance = moments(layer, conditional, model.layer_input(level, x, h))
        if level < model.depth - 1:
            h = sample_layer(layer, mean, variance, noise[level])
    return mean, variance


def num_paths(noise: Noise) -> int:
    """S."""
    return noise[0].shape[1] if noise else 1


def sample_layer(
    layer: Layer, mean: Float[Array, "_ P"], variance: Float[Array, "_ P"], noise: Float[Array, "B S P"]
) -> Float[Array, "_ P"]:
    """``mean + sqrt(variance) e``, with the noise between layers."""
    if layer.noise is not None:
        variance = variance + layer.noise.value
    return mean + jnp.sqrt(variance) * noise.reshape(mean.shape).astype(mean.dtype)
