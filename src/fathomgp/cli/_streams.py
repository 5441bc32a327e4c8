"""Tables larger than memory on the command line: opened as streams, fitted by one process or by several."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from fathomgp.errors import LostProcessError, SettingError

#: Rows held out of a stream to score the model, at the most.
_TEST_ROWS = 50_000


def is_stream(data: Path) -> bool:
    """Whether a path names many Parquet files: a directory or a glob."""
    return data.is_dir() or any(sign in data.name for sign in "*?[")


def open_stream(
    data: Path, targets: Sequence[str], *, test_fraction: float, seed: int, skip_nan: bool, quiet: bool
) -> Any:
    """The stream, after its first pass, with the rows held out that will score the model."""
    from fathomgp.data import ParquetSource
    from fathomgp.data._parquet_files import ParquetFiles

    if not 0.0 <= test_fraction < 1.0:
        raise SettingError(f"--test-fraction must be at least 0 and below 1, but it is {test_fraction:g}.")
    rows = ParquetFiles(str(data), targets).num_rows
    with row_progress("Looking at the rows", rows, quiet=quiet) as progress:
        stream = ParquetSource(
            str(data),
            targets[0] if len(targets) == 1 else targets,
            nan="skip" if skip_nan else "error",
            hold_out=min(test_fraction, _TEST_ROWS / rows),
            seed=seed,
            progress=progress,
        )
        stream.moments()
    return stream


@contextlib.contextmanager
def row_progress(title: str, total: int, *, quiet: bool = False) -> Iterator[Any]:
    """A bar on a terminal; gives the function that moves it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


@contextlib.contextmanager
def leaving_when_lost() -> Iterator[None]:
    """When another process is lost, say so and leave at once: an orderly end would wait for it."""
    try:
        yield
    except LostProcessError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
