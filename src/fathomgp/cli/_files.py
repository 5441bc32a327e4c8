"""Tables of any length, a block of rows at a time: read, matched to a model's inputs, written."""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from fathomgp.data._tables import near_miss
from fathomgp.errors import DataError, SettingError

Frame = Any
"""A pandas frame. Pandas is imported by the commands that need it, not by those that only show their help."""

SUFFIXES = (".csv", ".parquet")

BLOCK_ROWS = 16_384
"""Rows in memory at a time."""


def read_blocks(path: pathlib.Path) -> Iterator[Frame]:
    """The table of a CSV or Parquet file, at most :data:`BLOCK_ROWS` rows at a time."""
    if not path.is_file():
        raise DataError(f"There is no file {path}: check the path.")
    check_suffix(path)
    seen = 0
    try:
        for block in _parquet_blocks(path) if path.suffix.lower() == ".parquet" else _csv_blocks(path):
            seen += len(block)
            if len(block):
                yield block
    except (ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path.name} cannot be read ({reason}): check or export it again.") from error
    if seen == 0:
        raise DataError(f"{path.name} has column names but no rows: give a table with data.")


def read_whole(path: pathlib.Path) -> Frame:
    """The table of a CSV or Parquet file."""
    import pandas as pd

    return pd.concat(read_blocks(path), ignore_index=True)


def check_suffix(path: pathlib.Path) -> None:
    """Refuse what is neither CSV nor Parquet."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path.name} has the unknown type {path.suffix!r}: use .csv or .parquet.")


class ColumnMatcher:
    """Leaves of a table what a model takes as its inputs.

    Columns beside the inputs are dropped, and the first time said to ``note``. When an input is missing nothing is
    dropped but known targets, so that the model's complaint can point at a misspelt name.
    """

    def __init__(self, model: Any, note: Any):
        self._inputs = [str(name) for name in getattr(model, "feature_names_in_", ())]
        self._targets = list(model.target_names_ or ())
        self._note = note

    def __call__(self, table: Frame) -> Any:
        """The columns for the model, in the order of the table; plain numbers if the model knows no names."""
        if not self._inputs:
            return table.to_numpy()
        complete = set(self._inputs) <= set(table.columns)
        kept = [c for c in table.columns if (c in self._inputs if complete else c not in self._targets)]
        dropped = [str(c) for c in table.columns if c not in kept]
        if dropped and complete and self._note is not None:
            self._note(f"Not an input of the model, so left out: {', '.join(dropped)}.")
            self._note = None
        return table[kept]


def take_targets(table: Frame, targets: Sequence[str], name: str) -> Any:
    """The target of a table, or a table of several; one that is not there is refused by name."""
    columns = [str(column) for column in table.columns]
    for target in targets:
        if target not in columns:
            hint = near_miss(target, columns) or f" its columns are {', '.join(map(repr, columns))}."
            raise DataError(f"{name} has no target column {target!r}:{hint}")
    return table[targets[0]] if len(targets) == 1 else table[list(targets)]


class TableWriter:
    """Writes a CSV or Parquet file block by block; it appears under its name when it is complete, or not at all."""

    def __init__(self, path: pathlib.Path):
        check_suffix(path)
        if path.is_dir():
            raise SettingError(f"{path} is a directory: name a file.")
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._writer: Any = None

    def __enter__(self) -> "TableWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def write(self, block: Frame) -> None:
        """Add rows."""
        if self._path.suffix.lower() == ".parquet":
            self._write_parquet(block)
        else:
            block.to_csv(self._part, mode="a" if self._writer else "w", header=not self._writer, index=False)
            self._writer = True

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if hasattr(self._writer, "close"):
            self._writer.close()
        if kind is None and self._writer is not None:
            os.replace(self._part, self._path)
        self._part.unlink(missing_ok=True)

    def _write_parquet(self, block: Frame) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = pyarrow.Table.from_pandas(block, preserve_index=False)
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._part, rows.schema)
        self._writer.write_table(rows)


def _csv_blocks(path: pathlib.Path) -> Iterator[Frame]:
    import pandas as pd

    try:
        reader = pd.read_csv(path, chunksize=BLOCK_ROWS, low_memory=False)
    except pd.errors.EmptyDataError as error:
        raise DataError(f"{path.name} is empty: give a table with column names and rows.") from error
    with reader:
        yield from reader


def _parquet_blocks(path: pathlib.Path) -> Iterator[Frame]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BLOCK_ROWS):
            yield batch.to_pandas()
