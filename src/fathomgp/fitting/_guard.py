"""The non-finite guard: a bad step is undone and counted; many in a row back off, then stop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fathomgp.inference import Buffer

#: Every so many failed steps in a row the algorithm is asked to be more careful ...
BACK_OFF_AFTER = 5
#: ... and after so many the run stops.
STOP_AFTER = 25


class Guard(eqx.Module):
    """Counts of failed steps: part of the checkpoint, so that a resumed run behaves as if never interrupted.

    Attributes:
        in_a_row: failed steps since the last good one.
        total: failed steps of the run.
    """

    in_a_row: Int[Array, ""]
    total: Int[Array, ""]

    @property
    def stops(self) -> Bool[Array, ""]:
        """Whether the run must end."""
        return self.in_a_row >= STOP_AFTER


def new_guard() -> Guard:
    """A guard that has seen nothing fail."""
    return Guard(jnp.asarray(0, jnp.int32), jnp.asarray(0, jnp.int32))


def guarded(inference: Any, guard: Guard, old: Any, new: Any, ok: Bool[Array, ""]) -> tuple[Guard, Any]:
    """The new state where ``ok``, else the old one, backed off after every few failures in a row."""
    in_a_row = jnp.where(ok, 0, guard.in_a_row + 1)
    total = guard.total + jnp.where(ok, 0, 1)
    state = select(ok, new, old)
    back_off = (in_a_row > 0) & (in_a_row % BACK_OFF_AFTER == 0)
    return Guard(in_a_row, total), select(back_off, inference.back_off(state), state)


def select(condition: Bool[Array, ""], yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, leaf by leaf; buffers are always those of ``yes``."""

    def leaf(a: Any, b: Any) -> Any:
        if not eqx.is_array(a):
            return a
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.where(condition, jax.random.key_data(a), jax.random.key_data(b)))
        return jnp.where(condition, a, b)

    return jax.tree.map(leaf, yes, no, is_leaf=lambda node: isinstance(node, Buffer))
