"""Writing generated tables: deterministic for a seed, in parallel, a row group at a time, whole or not at all."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fathomgp._outputs import replacing
from fathomgp.data._collider import best_collider_auc, draw_collisions
from fathomgp.data._journeys import JOURNEY_NOISE, draw_journeys
from fathomgp.data._splits import check_seed
from fathomgp.data._tables import near_miss
from fathomgp.errors import DataError, SettingError

#: Rows a row group: small enough that a shuffle buffer holds many, large enough to be read at full speed.
GROUP_ROWS = 1 << 16
_GROUPS_A_FILE = 64


@dataclasses.dataclass(frozen=True)
class Generator:
    """A table that can be drawn: its rows, its target, and what the best model can reach.

    Attributes:
        draw: columns of so many rows, from a random generator.
        target: the name of the target column.
        best: a sentence about the best reachable score.
    """

    draw: Callable[[int, np.random.Generator], dict[str, np.ndarray]]
    target: str
    best: Callable[[], str]


GENERATORS: dict[str, Generator] = {
    "taxi": Generator(draw_journeys, "duration", lambda: f"The best reachable RMSE is the noise, {JOURNEY_NOISE:g} s."),
    "collider": Generator(
        draw_collisions, "label", lambda: f"The best reachable AUC is {best_collider_auc():.4f}, that of the truth."
    ),
}


def find_generator(name: str) -> Generator:
    """The generator of that name; an unknown one is refused."""
    if name not in GENERATORS:
        hint = near_miss(name, GENERATORS) or f" choose one of {', '.join(map(repr, GENERATORS))}."
        raise SettingError(f"There is no generator {name!r}:{hint}")
    return GENERATORS[name]


def generate_table(
    name: str,
    rows: int,
    out: str | os.PathLike,
    *,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[pathlib.Path]:
    """Write ``rows`` generated rows as Parquet files into the directory ``out``.

    Every row group has a random generator of its own, so the values depend on the seed alone and not on the number
    of workers, and the first rows of a longer table are those of a shorter one, row group by row group.

    Args:
        name: ``"taxi"`` or ``"collider"``.
        rows: how many.
        out: a directory, empty or yet to be made.
        seed: decides every value.
        workers: threads; as many as cores by default.
        progress: called with the number of rows after every row group.
    """
    generator = find_generator(name)
    if rows < 1:
        raise SettingError(f"rows must be at least 1, but it is {rows}.")
    check_seed(seed)
    directory = empty_directory(out)
    groups = -(-rows // GROUP_ROWS)
    files = -(-groups // _GROUPS_A_FILE)

    def write(number: int) -> pathlib.Path:
        path = directory / f"{name}-{number:05d}.parquet"
        mine = range(number * _GROUPS_A_FILE, min(groups, (number + 1) * _GROUPS_A_FILE))
        with GroupWriter(path) as writer:
            for group in mine:
                count = min(GROUP_ROWS, rows - group * GROUP_ROWS)
                # Rows are drawn for a whole group, so that a shorter last one is the beginning of a whole one.
                table = generator.draw(GROUP_ROWS, np.random.default_rng([seed, group]))
                writer.write({column: values[:count] for column, values in table.items()})
                if progress is not None:
                    progress(count)
        return path

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(write, range(files)))


def empty_directory(out: str | os.PathLike) -> pathlib.Path:
    """The directory, made if need be; one that holds anything is refused."""
    directory = pathlib.Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} is not an empty directory: name another one, or empty it first.")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class GroupWriter:
    """Writes a Parquet file row group by row group; it appears under its name when it is complete, or not at all."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._writer: Any = None

    def __enter__(self) -> "GroupWriter":
        self._end = contextlib.ExitStack()
        self._part = self._end.enter_context(replacing(self._path))
        self._end.callback(self._close)
        return self

    def write(self, columns: Any) -> None:
        """Add a row group: names to arrays, or a pyarrow table."""
        import pyarrow
        import pyarrow.parquet

        table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
        if self._writer is None:
            # Random floats do not repeat: dictionaries would cost time and save nothing.
            self._writer = pyarrow.parquet.ParquetWriter(
                self._part, table.schema, use_dictionary=False, compression="none"
            )
        self._writer.write_table(table, row_group_size=GROUP_ROWS)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._end.__exit__(kind, value, trace)

    def _close(self) -> None:
        if hasattr(self._writer, "close"):
            self._writer.close()
