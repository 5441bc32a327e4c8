"""Where a fit computes: one device, the devices of this machine, or those of several processes.

State is on every device, batches are shared out among them, and XLA inserts the sum that a step needs (see
``stream_sum``): the mathematics is that of one device. ``jax.distributed`` joins processes; each reads its own rows and
all compute the same state, so that process 0 alone writes what is worth keeping.
"""

import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fathomgp.data import AbstractPlacement
from fathomgp.data._exchange import exchange_arrays

#: Fewer rows a device than this are not shared among devices of one machine. The design notes saw a gain at batches of
#: 10,000 and a loss at 1,000; the place between the two was not measured.
_ROWS_A_DEVICE = 4096


class OneDevice(AbstractPlacement):
    """Everything on JAX's default device."""

    replicated: NamedSharding | None = None
    mesh = None

    def everywhere(self, array: Any) -> Array:
        """The array as it is."""
        return jnp.asarray(array)

    def split(self, array: Any, axis: int) -> Array:
        """The array as it is."""
        return jnp.asarray(array)

    def join(self, array: Any, axis: int) -> Array:
        """The array as it is."""
        return jnp.asarray(array)

    def spread(self, tree: Any) -> Any:
        """A state as it is."""
        return tree

    def collect(self, tree: Any) -> Any:
        """A state as it is."""
        return tree


class ManyDevices(AbstractPlacement):
    """State on every device, rows shared out among them in the order of the devices."""

    def __init__(self, devices: list[Any]):
        self.mesh: Mesh = jax.make_mesh((len(devices),), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self._known: dict[int, tuple[Any, Array]] = {}

    def everywhere(self, array: Any) -> Array:
        """A copy on every device; copies are kept, because a source's arrays come again with every chunk."""
        if id(array) not in self._known:
            if len(self._known) > 32:
                self._known.clear()
            self._known[id(array)] = array, self._put(array, PartitionSpec())
        return self._known[id(array)][1]

    def split(self, array: Any, axis: int) -> Array:
        """Each device's piece of an array that every process holds."""
        return self._put(array, _spec(array, axis))

    def join(self, array: Any, axis: int) -> Array:
        """One array of what the processes hold."""
        sharding = NamedSharding(self.mesh, _spec(array, axis))
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))

    def spread(self, tree: Any) -> Any:
        """A state's arrays, on every device."""
        return jax.tree.map(lambda leaf: self._put(leaf, PartitionSpec()) if eqx.is_array(leaf) else leaf, tree)

    def collect(self, tree: Any) -> Any:
        """A state's arrays, on this process's first device alone."""
        return jax.tree.map(lambda leaf: from_numpy(leaf, to_numpy(leaf)) if eqx.is_array(leaf) else leaf, tree)

    def _put(self, array: Any, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(self.mesh, spec)
        if _is_key(array):
            return jax.random.wrap_key_data(self._put(jax.random.key_data(array), spec))
        values = np.asarray(array)
        return jax.make_array_from_callback(values.shape, sharding, lambda piece: values[piece])


def choose_placement(batch_size: int | None) -> OneDevice | ManyDevices:
    """All devices of all processes; in one process, its devices where batches are large."""
    if jax.process_count() > 1:
        return ManyDevices(jax.devices())
    devices = jax.local_devices()
    shared = batch_size is not None and batch_size % len(devices) == 0
    if len(devices) > 1 and shared and batch_size // len(devices) >= _ROWS_A_DEVICE:  # type: ignore[operator]
        return ManyDevices(devices)
    return OneDevice()


def available_cores() -> int:
    """The cores that this process may use, where they are what computes; 1 elsewhere."""
    if jax.default_backend() != "cpu":
        return 1
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def keep_everywhere(tree: Any, replicated: NamedSharding | None) -> Any:
    """Inside a compiled step: tell XLA to hold arrays on every device, whole."""
    if replicated is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, replicated), tree)


def agree(tree: Any) -> Any:
    """Process 0's arrays, in every process: starts computed on different machines may differ in their last bits."""
    if jax.process_count() == 1:
        return tree
    arrays, rest = eqx.partition(tree, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    first = exchange_arrays({str(i): to_numpy(leaf) for i, leaf in enumerate(leaves)})[0]
    new = [from_numpy(leaf, first[str(i)]) for i, leaf in enumerate(leaves)]
    return eqx.combine(jax.tree.unflatten(structure, new), rest)


def to_numpy(leaf: Any) -> np.ndarray:
    """An array on the host; a key as its data."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def from_numpy(leaf: Any, value: np.ndarray) -> Any:
    """A value on the device as the kind of array that ``leaf`` is."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(value))
    return jnp.asarray(value) if isinstance(leaf, jax.Array) else value


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _spec(array: Any, axis: int) -> PartitionSpec:
    names: list[str | None] = [None] * array.ndim
    names[axis] = "rows"
    return PartitionSpec(*names)
