"""Batches, and the sources that hand them to the fit loop.

A source answers two questions. What do the data look like (``num_data``, ``everything``, ``subset``)? And which rows
does step t see? The second answer is a pure function of the seed and t, so a resumed run sees the same batches.
"""

import abc
import hashlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from fathomgp.compilation import padded_length
from fathomgp.errors import DataError


class Batch(eqx.Module):
    """Rows of data as the algorithms see them; fields may carry leading axes when several batches are stacked.

    Attributes:
        x: inputs.
        y: outputs; 0.0 where missing.
        observed: true where an output was measured; false in rows of padding.
        weight: 1 for a real row, 0 for padding.
        index: the row's number in the source, for algorithms that keep something a datum.
        num_data: how many real rows the source holds, N: sums over a batch are scaled to it.
        mesh: the devices that share the rows in equal pieces, along its axis "rows"; ``None`` for a single one.
        noise: the known noise variance of every output, 1 in padding; ``None`` where the model's own holds.
    """

    x: Float[Array, "*stack B D"]
    y: Float[Array, "*stack B P"]
    observed: Bool[Array, "*stack B P"]
    weight: Float[Array, "*stack B"]
    index: Int[Array, "*stack B"]
    num_data: Float[Array, ""]
    mesh: Mesh | None = eqx.field(static=True, default=None)
    noise: Float[Array, "*stack B P"] | None = None

    @property
    def scale(self) -> Float[Array, ""]:
        """N / B: turns a sum over the real rows of this batch into an estimate of the sum over all data."""
        return self.num_data / jnp.sum(self.weight)


class AbstractPlacement(abc.ABC):
    """Puts the arrays of a feed on the devices: one, those of this machine, or those of several processes.

    Attributes:
        mesh: the devices that share a batch, along its axis "rows"; ``None`` for a single one.
    """

    mesh: Mesh | None

    @abc.abstractmethod
    def everywhere(self, array: Any) -> Array:
        """The whole array on every device."""

    @abc.abstractmethod
    def split(self, array: Any, axis: int) -> Array:
        """An array that every process holds, cut along an axis: each device gets its piece."""

    @abc.abstractmethod
    def join(self, array: Any, axis: int) -> Array:
        """An array of which every process holds its own piece along an axis."""


class AbstractFeed(eqx.Module):
    """What one compiled chunk of steps needs in order to make its batches."""

    @abc.abstractmethod
    def batch(self, i: Int[Array, ""]) -> Batch:
        """The batch of the chunk's i-th step."""

    @abc.abstractmethod
    def placed(self, on: AbstractPlacement) -> "AbstractFeed":
        """The feed with its arrays on the devices, rows shared out among them."""


class FullFeed(AbstractFeed):
    """Every step sees all rows."""

    data: Batch

    def batch(self, i: Int[Array, ""]) -> Batch:
        """All rows, whatever the step."""
        return self.data

    def placed(self, on: AbstractPlacement) -> "FullFeed":
        """Every device sees all rows: algorithms that ask for them are not sums over rows."""
        return FullFeed(jax.tree.map(on.everywhere, self.data))


class IndexFeed(AbstractFeed):
    """Every step sees the rows whose numbers stand in ``rows``, gathered on the device."""

    data: Batch
    rows: Int[Array, "capacity *batches B"]
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def batch(self, i: Int[Array, ""]) -> Batch:
        """The rows of step i."""
        rows = self.rows[i]
        data = self.data
        return Batch(
            data.x[rows],
            data.y[rows],
            data.observed[rows],
            data.weight[rows],
            data.index[rows],
            data.num_data,
            self.mesh,
            None if data.noise is None else data.noise[rows],
        )

    def placed(self, on: AbstractPlacement) -> "IndexFeed":
        """All data everywhere; row numbers, and with them the batches, are shared out."""
        return IndexFeed(jax.tree.map(on.everywhere, self.data), on.split(self.rows, -1), on.mesh)


class StreamFeed(AbstractFeed):
    """Every step sees rows that came from a stream, in float32; they become the precision of ``num_data`` on arrival.

    Attributes:
        x: inputs of every step.
        y: outputs of every step.
        index: the rows' numbers in the source.
        weight: what a row counts, the same at every step.
        num_data: N.
    """

    x: Float32[Array, "capacity *batches B D"] | Float32[np.ndarray, "capacity *batches B D"]
    y: Float32[Array, "capacity *batches B P"] | Float32[np.ndarray, "capacity *batches B P"]
    index: Int[Array, "capacity *batches B"] | Int[np.ndarray, "capacity *batches B"]
    weight: Float[Array, " B"] | Float[np.ndarray, " B"]
    num_data: Float[Array, ""] | Float[np.ndarray, ""]
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def batch(self, i: Int[Array, ""]) -> Batch:
        """The rows of step i."""
        x, y, index = (jnp.asarray(part)[i] for part in (self.x, self.y, self.index))
        dtype = self.num_data.dtype
        weight = jnp.broadcast_to(jnp.reshape(self.weight, (1,) * (index.ndim - 1) + (-1,)), index.shape)
        num_data, observed = jnp.asarray(self.num_data), jnp.ones(y.shape, bool)
        return Batch(x.astype(dtype), y.astype(dtype), observed, weight, index, num_data, self.mesh)

    def placed(self, on: AbstractPlacement) -> "StreamFeed":
        """Every process has read its own rows."""
        return StreamFeed(
            on.join(self.x, -2),
            on.join(self.y, -2),
            on.join(self.index, -1),
            on.join(self.weight, -1),
            on.everywhere(self.num_data),
            on.mesh,
        )


class AbstractSource(abc.ABC):
    """Where rows come from. It lives on the host; only what it returns goes to the device."""

    num_data: int
    num_inputs: int
    num_outputs: int

    @property
    @abc.abstractmethod
    def max_chunk_rows(self) -> int:
        """Rows that one feed may hold: bounds the memory of a chunk of steps."""

    @abc.abstractmethod
    def everything(self) -> Batch:
        """All rows as one batch; sources larger than memory refuse."""

    @abc.abstractmethod
    def subset(self, size: int, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``x``, ``y`` and ``observed`` of at most ``size`` random rows, for recipes."""

    def noise_of_subset(self, size: int, *, seed: int) -> np.ndarray | None:
        """The known noise variances of the rows of :meth:`subset`; ``None`` where none are known."""
        return None

    @abc.abstractmethod
    def feed(
        self,
        *,
        start: int,
        count: int,
        capacity: int,
        batch_size: int | None,
        batches_per_step: int = 1,
        ordered: bool = False,
        seed: int = 0,
    ) -> AbstractFeed:
        """The batches of the steps ``start, ..., start + count - 1`` of a phase, in arrays for ``capacity`` steps."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs when the data differ: a checkpoint is only resumed on the data it was made from."""


class ArraySource(AbstractSource):
    """Rows held in memory.

    Args:
        x: inputs (N, D).
        y: outputs (N, P), 0.0 where missing.
        observed: true where an output was measured; all by default.
        noise: the known noise variance of every output (N, P), if it is known.
        dtype: the floating-point type on the device.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        observed: np.ndarray | None = None,
        *,
        noise: np.ndarray | None = None,
        dtype: Any = np.float64,
    ):
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
            raise DataError(f"x must be (N, D) and y (N, P) with the same N, but they are {x.shape} and {y.shape}.")
        self.x = np.ascontiguousarray(x, dtype)
        self.y = np.ascontiguousarray(y, dtype)
        self.observed = np.ones(y.shape, bool) if observed is None else np.ascontiguousarray(observed, bool)
        self.noise = None if noise is None else np.ascontiguousarray(noise, dtype)
        self.num_data, self.num_inputs = x.shape
        self.num_outputs = y.shape[1]
        self._device: dict[int, Batch] = {}
        self._permutations: dict[tuple[int, int], np.ndarray] = {}

    @property
    def max_chunk_rows(self) -> int:
        """Many: a feed holds row numbers only."""
        return 1 << 21

    def everything(self) -> Batch:
        """All rows, padded with rows of weight 0 so that small data of many sizes share few compiled shapes."""
        return self._on_device(padded_size(self.num_data))

    def subset(self, size: int, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """At most ``size`` random rows, in their original order."""
        rows = self._some_rows(size, seed)
        return self.x[rows], self.y[rows], self.observed[rows]

    def noise_of_subset(self, size: int, *, seed: int) -> np.ndarray | None:
        """The same rows of ``noise``."""
        return None if self.noise is None else self.noise[self._some_rows(size, seed)]

    def feed(
        self,
        *,
        start: int,
        count: int,
        capacity: int,
        batch_size: int | None,
        batches_per_step: int = 1,
        ordered: bool = False,
        seed: int = 0,
    ) -> AbstractFeed:
        """All rows when ``batch_size`` covers them, else rows drawn without replacement, epoch after epoch."""
        if batch_size is None or (batch_size >= self.num_data and batches_per_step == 1 and not ordered):
            return FullFeed(self.everything())
        size = min(batch_size, self.num_data)
        width = size * batches_per_step
        rows = np.zeros(capacity * width, np.int32)
        rows[: count * width] = self._positions(start * width, count * width, ordered, seed)
        shape = (capacity, size) if batches_per_step == 1 else (capacity, batches_per_step, size)
        return IndexFeed(self.everything(), jnp.asarray(rows.reshape(shape)))

    def fingerprint(self) -> str:
        """Shape, dtype and a hash of the values."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.observed, self.noise):
            digest.update(b"" if array is None else array.tobytes())
        return f"{self.x.shape}{self.y.shape}{self.x.dtype}{digest.hexdigest()[:16]}"

    def _some_rows(self, size: int, seed: int) -> np.ndarray:
        if size >= self.num_data:
            return np.arange(self.num_data)
        return np.sort(np.random.default_rng(seed).choice(self.num_data, size, replace=False))

    def _positions(self, first: int, count: int, ordered: bool, seed: int) -> np.ndarray:
        """Entries ``first, ..., first + count - 1`` of the endless row sequence: one permutation an epoch."""
        size, last = self.num_data, first + count
        if ordered:
            return np.arange(first, last) % size
        pieces = []
        for epoch in range(first // size, -(-last // size)):
            begin, end = max(first - epoch * size, 0), min(last - epoch * size, size)
            pieces.append(self._permutation(seed, epoch)[begin:end])
        return np.concatenate(pieces)

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if (seed, epoch) not in self._permutations:
            if len(self._permutations) > 8:  # two neighbouring epochs are all that a forward pass needs
                self._permutations.clear()
            self._permutations[seed, epoch] = np.random.default_rng([seed, epoch]).permutation(self.num_data)
        return self._permutations[seed, epoch]

    def _on_device(self, rows: int) -> Batch:
        if rows not in self._device:
            extra = rows - self.num_data
            weight = np.concatenate([np.ones(self.num_data, self.x.dtype), np.zeros(extra, self.x.dtype)])
            self._device[rows] = Batch(
                # Padding repeats the first row: its inputs are harmless and its weight is 0.
                x=jnp.asarray(np.concatenate([self.x, np.repeat(self.x[:1], extra, axis=0)])),
                y=jnp.asarray(np.concatenate([self.y, np.zeros((extra, self.num_outputs), self.y.dtype)])),
                observed=jnp.asarray(np.concatenate([self.observed, np.zeros((extra, self.num_outputs), bool)])),
                weight=jnp.asarray(weight),
                index=jnp.asarray(np.arange(rows, dtype=np.int32)),
                num_data=jnp.asarray(np.asarray(self.num_data, self.x.dtype)),
                noise=None if self.noise is None else jnp.asarray(_lengthened(self.noise, extra, 1.0)),
            )
        return self._device[rows]


def _lengthened(rows: np.ndarray, extra: int, value: float) -> np.ndarray:
    """With so many more rows, of one value."""
    return np.pad(rows, [(0, extra), (0, 0)], constant_values=value)


def padded_size(rows: int) -> int:
    """The number of rows after padding, so that data of many sizes share few programs: see ``padded_length``."""
    return padded_length(rows, smallest=16)
