"""Tables in files, a block of rows at a time: the one reader of CSV and of Parquet.

pandas reads numbers fast, but what does not add up it takes without a word: of a row with one field too many it makes
an index of the first. So lines are decoded and fields are counted here, and pandas sees only rows that fit the header.
The index of every block tells where its rows stand in the file: the number of the line, or of the row in Parquet.
"""

import contextlib
import csv
import io
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fathomgp.errors import DataError

Frame = Any
"""A pandas frame. Pandas is imported by what needs it, not by what only shows its help."""

SUFFIXES = (".csv", ".parquet")

#: Longer lines than this, in characters, and more columns are no table but another kind of file.
_LONGEST_LINE = 1 << 24
_MOST_COLUMNS = 100_000
_FOREIGN = {
    b"\x1f\x8b": "is compressed with gzip: unpack it",
    b"PK\x03\x04": "is a zip archive or a spreadsheet: unpack it, or export it as CSV",
    b"BZh": "is compressed with bzip2: unpack it",
    b"\xfd7zXZ": "is compressed with xz: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it",
    b"PAR1": "is a Parquet file: name it .parquet",
    b"\xff\xfe": "is in UTF-16: save it as UTF-8",
    b"\xfe\xff": "is in UTF-16: save it as UTF-8",
}


def check_suffix(path: pathlib.Path) -> None:
    """Refuse what is neither CSV nor Parquet."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path.name} has the unknown type {path.suffix!r}: use .csv or .parquet.")


def read_blocks(path: pathlib.Path, rows: int | None = None) -> Iterator[Frame]:
    """The table of a CSV or Parquet file, at most ``rows`` rows at a time; ``None``: all at once."""
    if not path.is_file():
        raise DataError(f"There is no file {path}: check the path.")
    check_suffix(path)
    seen = 0
    try:
        for block in (_parquet_blocks if path.suffix.lower() == ".parquet" else _csv_blocks)(path, rows):
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


class CsvFile:
    """A CSV file that is open: its columns, and its rows as they are asked for.

    Rows with more or fewer fields than the header, bytes that are not UTF-8 and quotes that do not match are refused
    with the number of their line. Blank lines are passed over.

    Args:
        file: bytes, as ``open(path, "rb")`` gives them.
        name: how messages call it.

    Attributes:
        columns: the names in the first line.
    """

    def __init__(self, file: Any, name: str):
        self._name = name
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._lines: list[str] = []
        records = self._records()
        self.columns = self._check_header(next(records, None))
        self._rows = self._fitting(records)

    def take(self, rows: int | None = None) -> Frame | None:
        """The next ``rows`` rows, or those that are left; ``None`` at the end."""
        import pandas as pd

        taken = list(itertools.islice(self._rows, rows))
        if not taken:
            return None
        numbers = [record.line for record in taken]
        text = io.StringIO("".join(record.text for record in taken))
        where = f"The lines {numbers[0]} to {numbers[-1]} of {self._name}"
        try:
            frame = pd.read_csv(text, header=None, names=self.columns, index_col=False, low_memory=False)
        except ValueError as error:
            raise DataError(f"{where} cannot be read ({error}): check or export them again.") from error
        if len(frame) != len(taken):
            raise DataError(f"{where} hold {len(taken)} rows, of which {len(frame)} can be read: export them again.")
        for name in frame.columns[frame.dtypes == np.dtype(object)]:
            frame[name] = _long_integers_as_floats(frame[name])
        frame.index = pd.Index(numbers, name="line")
        return frame

    def skip(self, rows: int) -> None:
        """Pass over rows."""
        next(itertools.islice(self._rows, rows, rows), None)

    def close(self) -> None:
        """Let the file go; who opened it closes it."""
        self._text.detach()

    def _records(self) -> Iterator["_Record"]:
        """Rows with their lines: of several where a field in quotes holds an end of line."""
        reader, line = csv.reader(self._checked_lines(), strict=True), 1
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise DataError(f"Line {line} of {self._name} cannot be read ({error}): check its quotes.") from None
            if fields is None:
                return
            text = "".join(self._lines)
            if text.strip():
                yield _Record(line, fields, text if text.endswith(("\n", "\r")) else f"{text}\n")
            line += len(self._lines)
            self._lines.clear()

    def _checked_lines(self) -> Iterator[str]:
        """Lines of text; they are also kept until their row is complete."""
        for number in itertools.count(1):
            line = self._text.readline(_LONGEST_LINE)
            if not line:
                return
            if number == 1:
                self._refuse_foreign(line.encode("utf-8", "surrogateescape"))
            if len(line) == _LONGEST_LINE or "\0" in line:
                raise DataError(f"Line {number} of {self._name} is no text: give a CSV file.")
            if not line.isascii():
                self._refuse_undecoded(line, number)
            self._lines.append(line)
            yield line

    def _refuse_foreign(self, begin: bytes) -> None:
        for mark, what in _FOREIGN.items():
            if begin.startswith(mark):
                raise DataError(f"{self._name} {what}.")

    def _refuse_undecoded(self, line: str, number: int) -> None:
        bad = next((c for c in line if "\udc80" <= c <= "\udcff"), None)
        if bad is not None:
            raise DataError(
                f"{self._name} is not in UTF-8 (byte 0x{ord(bad) - 0xDC00:02x} in line {number}): save it as UTF-8."
            )

    def _check_header(self, header: "_Record | None") -> list[str]:
        if header is None:
            raise DataError(f"{self._name} is empty: give a table with column names and rows.")
        if len(header.fields) > _MOST_COLUMNS:
            raise DataError(
                f"{self._name} has {len(header.fields):,} columns, and at most {_MOST_COLUMNS:,} can be read: "
                "give fewer columns, with rows below one another."
            )
        names = [name or f"Unnamed: {j}" for j, name in enumerate(header.fields)]
        for sign, what in ((";", "semicolons"), ("\t", "tabs")):
            if len(names) == 1 and sign in names[0]:
                raise DataError(
                    f"{self._name} has {what} between its fields: export it with commas, and points in numbers."
                )
        known: set[str] = set()
        repeated = next((name for name in names if name in known or known.add(name)), None)  # type: ignore[func-returns-value]
        if repeated is not None:
            raise DataError(f"{self._name} has several columns named {repeated!r}: rename or drop all but one.")
        return names

    def _fitting(self, records: Iterator["_Record"]) -> Iterator["_Record"]:
        """The rows, as long as they have a field for every column and no more."""
        expected = len(self.columns)
        for record in records:
            if len(record.fields) != expected:
                raise DataError(
                    f"Line {record.line} of {self._name} has {_count(len(record.fields), 'field')}, but the header "
                    f"names {_count(expected, 'column')}: give every row one value for each column."
                )
            yield record


@contextlib.contextmanager
def open_csv(path: pathlib.Path) -> Iterator[tuple[CsvFile, Any]]:
    """A CSV file, and its bytes, which know how far it was read."""
    with path.open("rb") as file:
        table = CsvFile(file, path.name)
        try:
            yield table, file
        finally:
            table.close()


class _Record(NamedTuple):
    line: int
    fields: list[str]
    text: str


def _csv_blocks(path: pathlib.Path, rows: int | None) -> Iterator[Frame]:
    with open_csv(path) as (table, _):
        while (block := table.take(rows)) is not None:
            yield block


def _parquet_blocks(path: pathlib.Path, rows: int | None) -> Iterator[Frame]:
    import pandas as pd
    import pyarrow.parquet

    seen = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in [file.read()] if rows is None else file.iter_batches(batch_size=rows):
            block = batch.to_pandas()
            block.index = pd.RangeIndex(seen, seen + len(block), name="row")
            seen += len(block)
            yield block


def _long_integers_as_floats(column: Any) -> Any:
    """Pandas keeps whole numbers that no integer type holds as Python's; the largest are infinite as floats."""
    if not all(type(value) is int for value in column):
        return column
    return column.map(lambda value: float(value) if abs(value) < 1 << 1023 else float("inf"))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
