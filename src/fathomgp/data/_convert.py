"""From CSV to Parquet, a block of rows at a time: numbers in float32, in row groups that a stream shuffles well."""

import glob
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from fathomgp.data._generate import GROUP_ROWS, GroupWriter, empty_directory
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
    import pandas as pd

    if path.stat().st_size == 0:
        raise DataError(f"{path} is an empty file: remove it, or write it again.")
    rows = 0
    try:
        with (
            path.open("rb") as file,
            GroupWriter(out) as writer,
            pd.read_csv(file, chunksize=GROUP_ROWS, low_memory=False) as reader,
        ):
            before = 0
            for block in reader:
                writer.write(_as_float32(block, path, rows))
                rows += len(block)
                if progress is not None:
                    progress(file.tell() - before)
                    before = file.tell()
    except pd.errors.ParserError as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): check or export it again.") from error
    if rows == 0:
        raise DataError(f"{path} has column names but no rows: give a table with data.")
    return out


def _as_float32(block: Any, path: pathlib.Path, first: int) -> Any:
    import numpy as np
    import pandas as pd

    columns = {}
    for name in block.columns:
        values = block[name]
        if values.dtype.kind not in "biuf":
            numbers = pd.to_numeric(values, errors="coerce")
            bad = numbers.isna() & values.notna()
            if bad.any():
                row = int(np.argmax(bad.to_numpy()))
                raise DataError(
                    f"Column {name!r} of {path.name} holds text ({str(values.iloc[row])!r} in row {first + row}): "
                    "encode it as numbers or drop it."
                )
            values = numbers
        columns[str(name)] = values.to_numpy(dtype=np.float32, na_value=np.nan)
    return columns
