"""Tables of any length, a block of rows at a time: read, matched to a model's inputs, written."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

from fathomgp._outputs import replacing
from fathomgp.cli._console import note
from fathomgp.data import Frame, check_suffix
from fathomgp.data._tables import near_miss
from fathomgp.errors import DataError, SettingError


def check_csv(path: pathlib.Path, what: str) -> None:
    """Refuse what is not named as CSV, where rows are read or written one by one."""
    if path.suffix.lower() != ".csv":
        raise DataError(f"{what} is {path}, which is no .csv file: name one.")


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
            return table.set_axis(range(table.shape[1]), axis=1)
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


def _as_text(value: Any) -> Any:
    """A cell that a spreadsheet shows instead of running it: formulas begin with one of these signs."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n") or _is_number(value):
        return value
    return f"'{value}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class TableWriter:
    """Writes a CSV or Parquet file block by block; it appears under its name when it is complete, or not at all."""

    def __init__(self, path: pathlib.Path):
        check_suffix(path)
        if path.is_dir():
            raise SettingError(f"{path} is a directory: name a file.")
        self._is_parquet = path.suffix.lower() == ".parquet"
        self._path, self._told = path, False
        self._writer: Any = None

    def __enter__(self) -> "TableWriter":
        self._end = contextlib.ExitStack()
        self._part = self._end.enter_context(replacing(self._path))
        self._end.callback(self._close)
        return self

    def write(self, block: Frame) -> None:
        """Add rows."""
        if self._is_parquet:
            self._write_parquet(block)
        else:
            harmless = self._without_formulas(block)
            harmless.to_csv(self._part, mode="a" if self._writer else "w", header=not self._writer, index=False)
            self._writer = True

    def _without_formulas(self, block: Frame) -> Frame:
        """The block with an apostrophe before whatever a spreadsheet would run; the first time it is said."""
        marked = block.rename(columns=_as_text)
        for name in marked.columns[[dtype.kind not in "biuf" for dtype in marked.dtypes]]:
            marked[name] = marked[name].map(_as_text)
        if not self._told and not marked.astype(object).equals(block.astype(object)):
            self._told = True
            note(f"Labels in {self._path.name} that begin like a formula of a spreadsheet got an apostrophe in front.")
        return marked

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._end.__exit__(kind, value, trace)

    def _close(self) -> None:
        if hasattr(self._writer, "close"):
            self._writer.close()

    def _write_parquet(self, block: Frame) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = pyarrow.Table.from_pandas(block, preserve_index=False)
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._part, rows.schema)
        self._writer.write_table(rows)
