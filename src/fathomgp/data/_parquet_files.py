"""Parquet files seen as one list of row groups: found, checked and read, with a sentence for each thing amiss."""

import glob
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from fathomgp.data._tables import _listing, near_miss
from fathomgp.errors import DataError


class RowGroup(NamedTuple):
    """A row group: its file's number, its number in the file, its rows and its first row's number in all files."""

    file: int
    number: int
    rows: int
    first: int


class ParquetFiles:
    """The chosen columns of one or more Parquet files.

    Args:
        path: a file, a directory, a glob, or a list of files.
        targets: columns that come last.
        inputs: columns that come first; all others by default.
    """

    def __init__(self, path: Any, targets: Sequence[str], inputs: Sequence[str] | None = None):
        self.paths = find_files(path)
        metadata = [_open_metadata(file) for file in self.paths]
        names = list(metadata[0].schema.to_arrow_schema().names)
        self.targets = tuple(targets)
        self.inputs = tuple(inputs) if inputs is not None else tuple(name for name in names if name not in self.targets)
        if not self.inputs:
            raise DataError(f"{self.paths[0].name} has no column beside the target: give at least one input column.")
        for file, content in zip(self.paths, metadata, strict=True):
            self._check_schema(file, content.schema.to_arrow_schema(), names if inputs is None else None)
        self._metadata = metadata
        self.groups = _list_groups(metadata)
        self.num_rows = sum(group.rows for group in self.groups)

    @property
    def columns(self) -> list[str]:
        """Names of the columns as they are read: inputs, then targets."""
        return [*self.inputs, *self.targets]

    def read(self, group: int) -> Float64[np.ndarray, "N C"]:
        """A row group's columns, NaN where a value is missing."""
        import pyarrow
        import pyarrow.parquet

        chosen = self.groups[group]
        path = self.paths[chosen.file]
        try:
            with pyarrow.parquet.ParquetFile(path, metadata=self._metadata[chosen.file]) as file:
                table = file.read_row_group(chosen.number, columns=self.columns, use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise _unreadable(path, error) from error
        values = np.empty((len(table), len(self.columns)))
        for j, name in enumerate(self.columns):
            values[:, j] = table[name].to_numpy()
        return values

    def _check_schema(self, path: pathlib.Path, schema: Any, expected: list[str] | None) -> None:
        """Every column is there and holds numbers; where all are taken, there is no other."""
        import pyarrow.types as kinds

        for name in self.columns:
            if name not in schema.names:
                raise self._lacks(path, name, schema.names)
            kind = schema.field(name).type
            if not (kinds.is_floating(kind) or kinds.is_integer(kind) or kinds.is_boolean(kind)):
                raise DataError(f"Column {name!r} of {path.name} holds {kind}: encode it as numbers, or leave it out.")
        more = [] if expected is None else [name for name in schema.names if name not in expected]
        if more:
            raise DataError(
                f"{path.name} has other columns than {self.paths[0].name} (also {_listing(more)}): "
                "name the inputs, or give files with the same columns."
            )

    def _lacks(self, path: pathlib.Path, name: str, names: list[str]) -> DataError:
        what = "target column" if name in self.targets else "column"
        hint = near_miss(name, names) or f" its columns are {_listing(names, most=20)}."
        if path != self.paths[0]:
            hint = f" {self.paths[0].name} has one, so the files differ:{hint}"
        return DataError(f"{path.name} has no {what} {name!r}:{hint}")


def find_files(path: Any) -> list[pathlib.Path]:
    """The Parquet files of a directory (with those below it), of a glob, of a list, or the one file, sorted by name."""
    if isinstance(path, (list, tuple)):
        return [file for part in path for file in find_files(part)]
    place = pathlib.Path(path)
    if place.is_dir():
        found = sorted(file for file in place.rglob("*.parquet") if not file.name.startswith((".", "_")))
        if not found and any(place.rglob("*.csv")):
            raise DataError(f"{place} holds CSV files: convert them with 'fathomgp data convert {place} --out DIR'.")
    elif place.is_file():
        found = [place]
    else:
        found = sorted(pathlib.Path(name) for name in glob.glob(str(path), recursive=True))
    if not found:
        raise DataError(f"There is no Parquet file at {path}: name a .parquet file, a directory of them, or a glob.")
    for file in found:
        if file.suffix.lower() == ".csv":
            raise DataError(f"{file.name} is CSV: convert it with 'fathomgp data convert {file} --out DIR'.")
    return found


def _open_metadata(path: pathlib.Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:
        raise DataError(f"{path} is an empty file: remove it, or write it again.")
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    if metadata.num_rows == 0:
        raise DataError(f"{path} has columns but no rows: remove it, or write it again.")
    return metadata


def _unreadable(path: pathlib.Path, error: Exception) -> DataError:
    reason = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{path} cannot be read as Parquet, it may be truncated ({reason}): remove it or write it again.")


def _list_groups(metadata: list[Any]) -> list[RowGroup]:
    groups, first = [], 0
    for file, content in enumerate(metadata):
        for number in range(content.num_row_groups):
            rows = content.row_group(number).num_rows
            if rows:
                groups.append(RowGroup(file, number, rows, first))
                first += rows
    return groups
