"""Data larger than memory: Parquet files, streamed in a seeded random order by a thread that reads ahead."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32

from fathomgp.data._parquet_files import ParquetFiles
from fathomgp.data._scaling import Moments, Standardizer
from fathomgp.data._scan import Choice, Scan, scan_files
from fathomgp.data._shuffle import ShuffledOrder
from fathomgp.data._sources import AbstractFeed, AbstractSource, Batch, StreamFeed
from fathomgp.data._splits import check_seed
from fathomgp.errors import DataError, SettingError

#: Bytes of a shuffle buffer: three are alive at the most (in use, next, being read).
_BUFFER_BYTES = 1 << 24
_MOST_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Request:
    """A stretch of steps of a phase, and the shape of their batches."""

    start: int
    count: int
    capacity: int
    batch_size: int
    batches_per_step: int
    ordered: bool
    seed: int


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of some row groups in memory, in the order of the files."""

    x: Float32[np.ndarray, "N D"]
    y: Float32[np.ndarray, "N P"]
    index: Int32[np.ndarray, " N"]


class ParquetSource(AbstractSource):
    """Rows of Parquet files, never all in memory.

    Row groups are read in a seeded random order into a bounded buffer and shuffled there, epoch after epoch, every row
    once an epoch; see :class:`~fathomgp.data._shuffle.ShuffledOrder`. A thread reads and assembles the next batches
    while the device computes. Rows travel in float32. Before the first batch one pass over the files gathers the
    scaling constants and a random sample.

    Args:
        path: a file, a directory, a glob, or a list of files.
        target: the column to predict, or several.
        inputs: the input columns; all others by default.
        nan: what to do about rows with NaN or infinity: ``"error"`` refuses them, ``"skip"`` leaves them out.
        hold_out: the share of rows that never appear in the stream, chosen at random; see :meth:`held_out`.
        seed: decides the sample and the rows held out.
        buffer_rows: rows of a shard's shuffle buffer, about; 16 MiB of them by default.
        shards: into how many shares the row groups are dealt, from each of which comes an equal share of a batch; as
            many as processes by default.
        progress: called with a number of rows after every row group of the first pass.

    Example:
        >>> import tempfile
        >>> from fathomgp.data import ParquetSource, generate_table
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = generate_table("taxi", 1000, directory + "/trips")
        ...     source = ParquetSource(directory + "/trips", "duration")
        ...     source.num_data, source.num_inputs
        (1000, 9)
    """

    def __init__(
        self,
        path: Any,
        target: str | Sequence[str],
        *,
        inputs: Sequence[str] | None = None,
        nan: str = "error",
        hold_out: float = 0.0,
        seed: int = 0,
        buffer_rows: int | None = None,
        shards: int | None = None,
        progress: Callable[[int], Any] | None = None,
    ):
        if nan not in ("error", "skip"):
            raise SettingError(f"nan must be 'error' or 'skip', but it is {nan!r}.")
        if not 0.0 <= hold_out < 1.0:
            raise SettingError(f"hold_out must be at least 0 and below 1, but it is {hold_out!r}.")
        self.squeeze = isinstance(target, str)
        self._files = ParquetFiles(path, [target] if isinstance(target, str) else list(target), inputs)
        self.num_inputs, self.num_outputs = len(self._files.inputs), len(self._files.targets)
        self._choice = Choice(nan == "skip", hold_out, check_seed(seed))
        width = 4 * len(self._files.columns)
        self._buffer_rows = max(1, _BUFFER_BYTES // width if buffer_rows is None else buffer_rows)
        self._num_shards, self._progress = shards, progress
        self._x_scaler: Standardizer | None = None
        self._y_scaler: Standardizer | None = None
        self._dtype: Any = np.dtype(np.float32)
        self._found: Scan | None = None
        self._orders: dict[tuple[int, int, bool], ShuffledOrder] = {}  # the reading thread's
        self._reader = _Reader(self)

    # --- what the data look like --------------------------------------------------------------------------------------

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the input columns."""
        return self._files.inputs

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the target columns."""
        return self._files.targets

    @property
    def num_data(self) -> int:  # type: ignore[override]
        """Rows of the stream: those that are neither skipped nor held out."""
        return int(self._scan.counts.sum())

    def moments(self) -> tuple[Moments, Moments]:
        """Count, mean and spread of the inputs and of the targets, in their own units."""
        found, split = self._scan.moments, self.num_inputs
        return (
            Moments(found.count[:split], found.mean[:split], found.M2[:split]),
            Moments(found.count[split:], found.mean[split:], found.M2[split:]),
        )

    def labels(self) -> np.ndarray | None:
        """The distinct values of the one target, sorted; ``None`` if there are more than a thousand."""
        return self._scan.labels[0]

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the rows held out (at most 100,000 of them), in their own units."""
        rows = self._scan.held_out
        y = rows[:, self.num_inputs :]
        return rows[:, : self.num_inputs], y[:, 0] if self.squeeze else y

    def everything(self) -> Batch:
        """Refused: the rows may not fit into memory."""
        raise DataError(
            f"A stream of {self.num_data:,} rows is not held in memory, but the method asks for all rows at once: "
            "choose one that learns from batches, such as method='dsvi'."
        )

    def subset(self, size: int, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """At most ``size`` random rows of a random sample of 20,000."""
        rows = self._scan.sample
        if size < len(rows):
            rows = rows[np.sort(np.random.default_rng(seed).choice(len(rows), size, replace=False))]
        x, y = self._scale(rows)
        return x.astype(self._dtype), y.astype(self._dtype), np.ones(y.shape, bool)

    def fingerprint(self) -> str:
        """Columns, rows of every row group, and a digest of their moments."""
        digest = hashlib.sha256(repr((self._files.columns, self._choice, self._shards)).encode())
        found = self._scan
        for array in (found.counts, found.moments.mean, found.moments.M2, *self._scaling()):
            digest.update(np.ascontiguousarray(array).tobytes())
        return f"({self.num_data}, {self.num_inputs}){self._dtype}{self._buffer_rows}{digest.hexdigest()[:16]}"

    def standardized(self, x_scaler: Standardizer, y_scaler: Standardizer, dtype: Any) -> "ParquetSource":
        """The same stream in standard units, as batches of ``dtype``."""
        other = copy.copy(self)
        other._x_scaler, other._y_scaler, other._dtype = x_scaler, y_scaler, np.dtype(dtype)
        other._orders, other._reader = {}, _Reader(other)
        return other

    # --- batches ------------------------------------------------------------------------------------------------------

    @property
    def max_chunk_rows(self) -> int:
        """Rows that travel to the device at once."""
        return max(1, min(1 << 17, self._buffer_rows // 2))

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
        """The next batches, which the reading thread has most often assembled already."""
        if batch_size is None:
            self.everything()
        size = min(batch_size or 0, self.num_data)
        if size % self._shards:
            raise SettingError(
                f"batch_size is {size}, which {self._shards} processes cannot share equally: "
                f"take a multiple of {self._shards}."
            )
        request = _Request(start, count, capacity, size, batches_per_step, ordered, seed)
        x, y, index = self._reader.take(request)
        weight = np.concatenate([np.full(size // self._shards, self._row_weight(shard)) for shard in self._mine])
        return StreamFeed(x, y, index, weight.astype(self._dtype), np.asarray(float(self.num_data), self._dtype))

    def assemble(self, request: _Request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and row numbers of a stretch of steps: (steps, [batches,] rows, columns)."""
        parts = [self._assemble_shard(request, shard) for shard in self._mine]
        x, y, index = (np.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True))
        if request.batches_per_step == 1:
            x, y, index = x[:, 0], y[:, 0], index[:, 0]
        return x, y, index

    def _assemble_shard(self, request: _Request, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = request.batch_size // self._shards
        width = rows * request.batches_per_step
        filled = request.count * width
        shape = (request.capacity, request.batches_per_step, rows)
        x = np.zeros((request.capacity * width, self.num_inputs), np.float32)
        y = np.zeros((request.capacity * width, self.num_outputs), np.float32)
        index = np.zeros(request.capacity * width, np.int32)
        done = 0
        for stretch in self._order(request, shard).stretches(request.start * width, filled):
            pool, places = self._reader.pool(request, shard, stretch.epoch, stretch.pool)
            chosen, here = places[stretch.begin : stretch.end], slice(done, done + stretch.end - stretch.begin)
            x[here], y[here], index[here] = pool.x[chosen], pool.y[chosen], pool.index[chosen]
            done = here.stop
        return x.reshape(*shape, -1), y.reshape(*shape, -1), index.reshape(shape)

    def load_groups(self, groups: np.ndarray) -> _Rows:
        """Read row groups."""
        counts = self._scan.counts
        rows = int(counts[groups].sum())
        x = np.empty((rows, self.num_inputs), np.float32)
        y = np.empty((rows, self.num_outputs), np.float32)
        index = np.empty(rows, np.int32)
        first, done = np.cumsum(counts) - counts, 0
        for group in map(int, groups):
            count = int(counts[group])
            here = slice(done, done + count)
            x[here], y[here] = self._scale(self._read(group, count))
            index[here] = np.arange(first[group], first[group] + count)
            done = here.stop
        return _Rows(x, y, index)

    def pool_groups(self, request: _Request, shard: int, epoch: int, pool: int) -> np.ndarray:
        """The row groups of a pool."""
        return self._dealt[shard][self._order(request, shard).groups(epoch, pool)]

    def pool_places(self, request: _Request, shard: int, epoch: int, pool: int, rows: int) -> np.ndarray:
        """The order of a pool's rows."""
        return self._order(request, shard).permutation(epoch, pool, rows)

    def after(self, request: _Request) -> list[tuple[int, int, int]]:
        """Shard, epoch and number of the pools that follow those of the request's first rows."""
        width = request.batch_size // self._shards * request.batches_per_step
        orders = [(shard, self._order(request, shard)) for shard in self._mine]
        return [(shard, *order.after(order.stretches(request.start * width, 1)[0])) for shard, order in orders]

    def _read(self, group: int, count: int) -> np.ndarray:
        values = self._files.read(group)
        return values if count == len(values) else values[self._choice.taken(group, values)]

    def _scale(self, rows: Float[np.ndarray, "N C"]) -> tuple[np.ndarray, np.ndarray]:
        x, y = rows[:, : self.num_inputs], rows[:, self.num_inputs :]
        if self._x_scaler is None or self._y_scaler is None:
            return x, y
        return np.asarray(self._x_scaler.transform(x)), np.asarray(self._y_scaler.transform(y))

    def _scaling(self) -> list[np.ndarray]:
        scalers = (self._x_scaler, self._y_scaler)
        return [np.asarray(part) for s in scalers if s is not None for part in (s.shift, s.scale)]

    def _order(self, request: _Request, shard: int) -> ShuffledOrder:
        name = (request.seed, shard, request.ordered)
        if name not in self._orders:
            sizes = self._scan.counts[self._dealt[shard]]
            self._orders[name] = ShuffledOrder(sizes, self._buffer_rows, name[:2], ordered=request.ordered)
        return self._orders[name]

    # --- shards and the first pass ------------------------------------------------------------------------------------

    @property
    def _shards(self) -> int:
        return jax.process_count() if self._num_shards is None else self._num_shards

    @property
    def _mine(self) -> list[int]:
        """The shards that this process reads: its own, or all when it is alone."""
        return list(range(self._shards)) if jax.process_count() == 1 else [jax.process_index()]

    @property
    def _dealt(self) -> list[np.ndarray]:
        """The row groups of every shard, dealt like cards, so that each shard spans all files."""
        numbers = np.arange(len(self._files.groups))
        return [numbers[shard :: self._shards] for shard in range(self._shards)]

    def _row_weight(self, shard: int) -> float:
        """What a shard's row counts, so that sums over a batch are unbiased where shards differ in size."""
        counts = self._scan.counts
        return float(counts[self._dealt[shard]].sum()) * self._shards / float(counts.sum())

    @property
    def _scan(self) -> Scan:
        if self._found is None:
            self._check_shards()
            found = scan_files(self._files, self._choice, self._dealt, self._mine, self._progress)
            self._check_scan(found)
            self._found = found
        return self._found

    def _check_shards(self) -> None:
        groups, processes = len(self._files.groups), jax.process_count()
        if processes > 1 and self._shards != processes:
            raise SettingError(f"shards is {self._shards}, but there are {processes} processes: leave it to them.")
        if self._shards > groups:
            raise DataError(
                f"{self._shards} processes are to share {groups} row groups, so some would read nothing: "
                "start fewer, or write the files again with smaller row groups."
            )
        if self._files.num_rows > _MOST_ROWS:
            raise DataError(f"There are {self._files.num_rows:,} rows, more than {_MOST_ROWS:,}: give fewer files.")

    def _check_scan(self, found: Scan) -> None:
        if found.broken and not self._choice.skip_nan:
            raise DataError(
                f"{found.broken:,} rows hold NaN or infinity, the first in {found.first_broken}: "
                "clean the files, or leave such rows out with nan='skip'."
            )
        if not found.counts.sum():
            raise DataError("No row is left: all were skipped or held out.")
        empty = [shard for shard in range(self._shards) if not found.counts[self._dealt[shard]].sum()]
        if empty:
            raise DataError(f"No row is left for process {empty[0]}: start fewer processes.")
        for name, spread in zip(self.target_names, found.moments.M2[self.num_inputs :], strict=True):
            if spread == 0.0:
                rows = found.counts.sum()
                raise DataError(f"The target {name!r} is constant over all {rows:,} rows: choose another.")


class _Reader:
    """The thread that reads ahead. All that it touches, it alone touches; what it hands over is NumPy."""

    def __init__(self, source: ParquetSource):
        self._source = source
        self._rows: dict[tuple[int, bytes], _Rows] = {}
        self._places: dict[tuple[int, ...], np.ndarray] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[_Request, Future] | None = None

    def take(self, request: _Request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a request; the thread then goes on with what will be asked next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fathomgp-reader")
        if self._ahead is None or not _covers(self._ahead[0], request):
            self._ahead = request, self._thread.submit(self._source.assemble, request)
        arrays = self._ahead[1].result()
        # The loop at most doubles the length of its chunks.
        count = min(request.capacity, 2 * request.count + 1)
        following = dataclasses.replace(request, start=request.start + request.count, count=count)
        self._ahead = following, self._thread.submit(self._source.assemble, following)
        self._thread.submit(self._warm, following)
        return arrays

    def pool(self, request: _Request, shard: int, epoch: int, pool: int) -> tuple[_Rows, np.ndarray]:
        """The rows of a pool, read if they are not in memory, and their order."""
        groups = self._source.pool_groups(request, shard, epoch, pool)
        rows = self._recall(self._rows, (shard, groups.tobytes()), lambda: self._source.load_groups(groups))
        size = len(rows.index)
        name = (shard, request.seed, int(request.ordered), epoch, pool)
        order = self._recall(
            self._places, name, lambda: self._source.pool_places(request, shard, epoch, pool, size).astype(np.int32)
        )
        return rows, order

    def _warm(self, request: _Request) -> None:
        for place in self._source.after(request):
            self.pool(request, *place)

    @staticmethod
    def _recall(known: dict, name: tuple, make: Callable[[], Any]) -> Any:
        """What is known under a name whose first part is the shard; of each shard the last two are kept."""
        if name not in known:
            for old in [other for other in known if other[0] == name[0]][:-1]:
                del known[old]
            known[name] = make()
        return known[name]


def _covers(ahead: _Request, request: _Request) -> bool:
    return ahead.count >= request.count and dataclasses.replace(ahead, count=request.count) == request
