"""A CSV file that grows by one row a fit, so that an interrupted benchmark goes on where it stopped."""

import csv
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fathomgp.errors import DataError


class ResultFile:
    """Rows of results on disk. Every row is there, whole, as soon as :meth:`append` returns.

    Args:
        path: the CSV file, which is made when the first row comes.
        columns: its columns.
        key: the columns that tell one fit from another.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], key: Sequence[str]):
        self.path = pathlib.Path(path)
        self._columns, self._key = list(columns), list(key)
        self.rows = self._read()
        self._known = {self._identity(row): row for row in self.rows}

    def find(self, key: Mapping[str, Any]) -> dict[str, str] | None:
        """The row of a fit, or ``None`` if it has not been run."""
        return self._known.get(self._identity(key))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row and wait until the disk has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = io.StringIO()
        writer = csv.DictWriter(lines, self._columns, lineterminator="\n")
        if self._is_new():
            writer.writeheader()
        writer.writerow(row)
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(lines.getvalue())
            file.flush()
            os.fsync(file.fileno())
        written = {column: str(row[column]) for column in self._columns}
        self.rows.append(written)
        self._known[self._identity(written)] = written

    def _identity(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in self._key)

    def _read(self) -> list[dict[str, str]]:
        if self._is_new():
            return []
        self._check_header()
        self._drop_torn_line()
        with open(self.path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _check_header(self) -> None:
        """Only a file of this benchmark may be touched; a machine that stopped may have left half of its header."""
        expected = io.StringIO()
        csv.writer(expected, lineterminator="\n").writerow(self._columns)
        with open(self.path, "rb") as file:
            begin = file.read(len(expected.getvalue().encode()))
        if begin != expected.getvalue().encode()[: len(begin)]:
            raise DataError(
                f"{self.path} has other columns than this benchmark writes ({', '.join(self._columns)}): "
                "choose another file, or move this one away."
            )

    def _is_new(self) -> bool:
        return not self.path.exists() or self.path.stat().st_size == 0

    def _drop_torn_line(self) -> None:
        """A machine that stopped while it wrote may leave half a row at the end."""
        content = self.path.read_bytes()
        os.truncate(self.path, content.rfind(b"\n") + 1)
