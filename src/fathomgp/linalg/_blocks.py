"""Sums over rows of data, a block of rows at a time: memory is one block's, whatever the number of rows."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

_Sums = TypeVar("_Sums")


def sum_blocks(
    function: Callable[[PyTree], _Sums],
    rows: PyTree[Shaped[Array, "N ..."]],
    count: int,
    *,
    recompute: bool = False,
) -> _Sums:
    """``function(rows)``, an array or a tree of arrays, summed over ``count`` blocks of equal length.

    Args:
        function: sums over the rows it is given; rows of zeros, which fill up the last block, must add nothing.
        rows: arrays that have an entry for every row along their first axis.
        count: the number of blocks.
        recompute: whether gradients evaluate every block again instead of keeping what it formed.

    Example:
        >>> import jax.numpy as jnp
        >>> float(sum_blocks(jnp.sum, jnp.arange(10.0), 3))
        45.0
    """
    if count == 1:
        return function(rows)

    def add(total: _Sums, block: PyTree) -> tuple[_Sums, None]:
        return jax.tree.map(jnp.add, total, function(block)), None

    blocks = jax.tree.map(lambda leaf: _in_blocks(leaf, count), rows)
    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], blocks))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(jax.checkpoint(add) if recompute else add, zero, blocks)[0]


def _in_blocks(rows: Shaped[Array, "N ..."], count: int) -> Shaped[Array, "count B ..."]:
    size = -(-len(rows) // count)
    padded = jnp.pad(rows, [(0, count * size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    return padded.reshape(count, size, *rows.shape[1:])
