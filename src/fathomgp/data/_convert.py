"""From CSV to Parquet, a block of rows at a time: numbers in float32, in row groups that a stream shuffles well."""

import glob
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from fathomgp.data._files import open_csv
from fathomgp.data._generate import GROUP_ROWS, GroupWriter, empty_directory
from fathomgp.data._tables import place_of
from fathomgp.errors import DataError


def convert_csv(
    path: str | os.PathLike | Sequence[Any],
    out: str | os.PathLike,
    *,
    progress: Callable[[int], Any] | None = None,
) -> list[pathlib.Path]:
    """Write each CSV file as a Parquet file of the same name into the directory ``out``.

    Numbers are stored in float32, empty fields as NaN. Text is refused by its column's name. Memory holds one block
    of rows, whatever the size of the file.

    Args:
        path: a CSV file, a directory of them, a glob, or a list of these.
        out: a directory, empty or yet to be made.
        progress: called with a number of bytes read, block by block.
    """
    files = find_csv(path)
    repeated = {file.stem for file in files if sum(other.stem == file.stem for other in files) > 1}
    if repeated:
        raise DataError(f"Several files are named {sorted(repeated)[0]!r}: convert them into different directories.")
    directory = empty_directory(out)
    return [_convert(file, directory / f"{file.stem}.parquet", progress) for file in files]


def find_csv(path: Any) -> list[pathlib.Path]:
    """The CSV files of a directory, a glob, a list, or the one file."""
    if isinstance(path, (list, tuple)):
        return [file for part in path for file in find_csv(part)]
    place = pathlib.Path(path)
    if place.is_dir():
        found = sorted(place.rglob("*.csv"))
    else:
        found = [place] if place.is_file() else sorted(pathlib.Path(name) for name in glob.glob(str(path)))
    if not found:
        raise DataError(f"There is no CSV file at {path}: check the path.")
    return found


def _convert(path: pathlib.Path, out: pathlib.Path, progress: Callable[[int], Any] | None) -> pathlib.Path:
    rows = before = 0
    with open_csv(path) as (table, file), GroupWriter(out) as writer:
        while (block := table.take(GROUP_ROWS)) is not None:
            writer.write({str(name): _as_float32(block[name], path) for name in block.columns})
            rows += len(block)
            if progress is not None:
                progress(file.tell() - before)
                before = file.tell()
    if rows == 0:
        raise DataError(f"{path} has column names but no rows: give a table with data.")
    return out


def _as_float32(values: Any, path: pathlib.Path) -> Any:
    import numpy as np
    import pandas as pd

    if values.dtype.kind not in "biuf":
        numbers = pd.to_numeric(values, errors="coerce")
        bad = numbers.isna() & values.notna()
        if bad.any():
            row = int(np.argmax(bad.to_numpy()))
            raise DataError(
                f"Column {values.name!r} of {path.name} holds text ({str(values.iloc[row])!r} in "
                f"{place_of(values.index, row)}): encode it as numbers or drop it."
            )
        values = numbers
    doubles = values.to_numpy(dtype=np.float64, na_value=np.nan)
    with np.errstate(over="ignore"):
        singles = doubles.astype(np.float32)
    lost = np.isinf(singles) & np.isfinite(doubles)
    if lost.any():
        row = int(np.argmax(lost))
        raise DataError(
            f"Column {values.name!r} of {path.name} holds {doubles[row]:g} in {place_of(values.index, row)}, which is "
            "too large for float32: scale the column."
        )
    return singles
