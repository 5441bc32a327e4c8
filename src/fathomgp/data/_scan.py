"""One pass over a stream: what its columns look like, a random sample of its rows, and which rows count."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fathomgp.data._exchange import exchange_arrays
from fathomgp.data._parquet_files import ParquetFiles
from fathomgp.data._scaling import Moments
from fathomgp.errors import DataError

#: Rows of the random sample that recipes and starts look at.
SAMPLE_ROWS = 20_000
#: Held-out rows that are kept in memory, at the most.
HELD_OUT_ROWS = 100_000
#: A target with more distinct values than this holds no labels.
_MOST_LABELS = 1000


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which rows of a row group the stream takes.

    Attributes:
        skip_nan: whether rows with NaN or infinity are left out.
        hold_out: the share of rows that is left out at random.
        seed: decides which.
    """

    skip_nan: bool
    hold_out: float
    seed: int

    def priorities(self, group: int, rows: int) -> np.ndarray:
        """A uniform number a row: rows below ``hold_out`` are held out, the smallest of the others are the sample."""
        return np.random.default_rng([self.seed, group]).random(rows)

    def taken(self, group: int, values: np.ndarray) -> np.ndarray:
        """True for the rows of the stream."""
        taken = np.isfinite(values).all(axis=1) if self.skip_nan else np.ones(len(values), bool)
        if self.hold_out > 0.0:
            taken &= self.priorities(group, len(values)) >= self.hold_out
        return taken


class Smallest:
    """The rows of the smallest priorities so far: a random sample that merges, whoever saw which row first."""

    def __init__(self, size: int, columns: int):
        self._size = size
        self.priorities = np.zeros(0)
        self.rows = np.zeros((0, columns))

    def add(self, priorities: np.ndarray, rows: np.ndarray) -> None:
        """Take what is small enough."""
        if len(self.priorities) >= self._size:
            small = priorities < self.priorities[-1]
            priorities, rows = priorities[small], rows[small]
        together = np.concatenate([self.priorities, priorities])
        chosen = np.argsort(together, kind="stable")[: self._size]
        self.priorities, self.rows = together[chosen], np.concatenate([self.rows, rows])[chosen]


@dataclasses.dataclass
class Scan:
    """What one pass found.

    Attributes:
        moments: count, mean and spread of every column.
        counts: rows taken of every row group.
        sample: random rows of the stream.
        held_out: random rows of those held out.
        broken: rows with NaN or infinity.
        first_broken: a sentence's end about the first of them, or nothing.
        labels: the distinct values of every target, or ``None`` where there are too many to be labels.
    """

    moments: Moments
    counts: np.ndarray
    sample: np.ndarray
    held_out: np.ndarray
    broken: int
    first_broken: str
    labels: list[np.ndarray | None]


def scan_files(
    files: ParquetFiles,
    choice: Choice,
    shards: list[np.ndarray],
    mine: Iterable[int],
    progress: Callable[[int], Any] | None = None,
) -> Scan:
    """Look at every row once. Each process looks at its own shards; what they found is then put together."""
    if jax.process_count() == 1:
        return _merge(files, [_scan_shard(files, choice, shards[shard], progress) for shard in mine])
    own, error = None, ""
    try:
        [own] = [_scan_shard(files, choice, shards[shard], progress) for shard in mine]
    except DataError as complaint:
        error = str(complaint)
    # Everyone must hear of it, or the others would wait for this process.
    complaints = [str(found["error"]) for found in exchange_arrays({"error": np.asarray(error)})]
    if any(complaints):
        raise DataError(next(filter(None, complaints)))
    assert own is not None
    return _merge(files, _exchange(files, own))


def _scan_shard(files: ParquetFiles, choice: Choice, groups: np.ndarray, progress: Any) -> Scan:
    width = len(files.columns)
    moments, counts = Moments.empty(width), np.zeros(len(files.groups), np.int64)
    sample, held_out = Smallest(SAMPLE_ROWS, width), Smallest(HELD_OUT_ROWS, width)
    labels: list[np.ndarray | None] = [np.zeros(0) for _ in files.targets]
    broken, first_broken = 0, ""
    for group in map(int, groups):
        values = files.read(group)
        priorities = choice.priorities(group, len(values))
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            broken += int((~finite).sum())
            first_broken = first_broken or _describe(files, group, values, finite)
        taken = finite & (priorities >= choice.hold_out)
        if not taken.all():
            held = finite & (priorities < choice.hold_out)
            held_out.add(priorities[held], values[held])
            values, priorities = values[taken], priorities[taken]
        counts[group] = len(values)
        moments = moments.update(values)
        sample.add(priorities, values)
        labels = [_more_labels(seen, values[:, len(files.inputs) + p]) for p, seen in enumerate(labels)]
        if progress is not None:
            progress(files.groups[group].rows)
    packed = [np.column_stack([kept.priorities, kept.rows]) for kept in (sample, held_out)]
    return Scan(moments, counts, packed[0], packed[1], broken, first_broken, labels)


def _more_labels(seen: np.ndarray | None, values: np.ndarray) -> np.ndarray | None:
    if seen is None:
        return None
    if len(seen) and np.isin(values[:100], seen).all() and np.isin(values, seen).all():
        return seen
    distinct = np.union1d(seen, values)
    return distinct if len(distinct) <= _MOST_LABELS else None


def _describe(files: ParquetFiles, group: int, values: np.ndarray, finite: np.ndarray) -> str:
    row = int(np.argmin(finite))
    column = int(np.argmin(np.isfinite(values[row])))
    start = files.groups[group]
    inside = row + sum(g.rows for g in files.groups if g.file == start.file and g.number < start.number)
    return f"column {files.columns[column]!r} of {files.paths[start.file].name} in row {inside}"


def _merge(files: ParquetFiles, parts: list[Scan]) -> Scan:
    """One summary of several, in the order of the shards; the samples lose their column of priorities."""
    moments = Moments.empty(len(files.columns))
    for part in parts:
        moments = moments.merge(part.moments)
    labels: list[np.ndarray | None] = []
    for p in range(len(files.targets)):
        found = [values for part in parts if (values := part.labels[p]) is not None]
        labels.append(np.unique(np.concatenate(found)) if len(found) == len(parts) else None)
    return Scan(
        moments,
        np.sum([part.counts for part in parts], axis=0),
        _smallest([part.sample for part in parts], SAMPLE_ROWS),
        _smallest([part.held_out for part in parts], HELD_OUT_ROWS),
        sum(part.broken for part in parts),
        next((part.first_broken for part in parts if part.first_broken), ""),
        labels,
    )


def _smallest(packed: list[np.ndarray], size: int) -> np.ndarray:
    rows = np.concatenate(packed)
    return rows[np.argsort(rows[:, 0], kind="stable")[:size], 1:]


def _exchange(files: ParquetFiles, mine: Scan) -> list[Scan]:
    """Every process's summary, in every process."""
    arrays = {"counts": mine.counts, "sample": mine.sample, "held_out": mine.held_out}
    arrays |= {"moments": np.stack([mine.moments.count, mine.moments.mean, mine.moments.M2])}
    arrays |= {"broken": np.asarray(mine.broken), "first_broken": np.asarray(mine.first_broken)}
    arrays |= {f"labels{p}": values for p, values in enumerate(mine.labels) if values is not None}
    return [
        Scan(
            Moments(*found["moments"]),
            found["counts"],
            found["sample"],
            found["held_out"],
            int(found["broken"]),
            str(found["first_broken"]),
            [found.get(f"labels{p}") for p in range(len(files.targets))],
        )
        for found in exchange_arrays(arrays)
    ]
