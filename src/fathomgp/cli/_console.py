"""How the commands speak: tables on stdout, notes and errors on stderr, one line each."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from fathomgp.errors import FathomError, FathomWarning


class OneLineErrors(TyperGroup):
    """A group of commands whose expected errors end in one line and exit code 2, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; its warnings become notes."""
        try:
            with warnings_as_notes():
                return super().invoke(ctx)
        except FathomError as error:
            _fail(str(error))
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            _fail(f"{error.strerror or error}{place}: check the path and its permissions.")


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Show every warning of fathomgp as one line on stderr."""

    def show(message, category, filename, lineno, file=None, line=None):
        note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", FathomWarning)
        warnings.showwarning = show
        yield


def note(sentence: str) -> None:
    """Say something worth knowing, beside the result."""
    typer.echo(f"Note: {_one_line(sentence)}", err=True)


def show_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print rows of column to value; numbers stand to the right."""
    table = Table(title=title or None, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def show_pairs(pairs: Mapping[str, Any], title: str = "") -> None:
    """Print names and values."""
    table = Table(title=title or None, title_justify="left", show_header=False)
    for name, value in pairs.items():
        table.add_row(name, _cell(value))
    Console().print(table)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fail(sentence: str) -> None:
    typer.echo(f"Error: {_one_line(sentence)}", err=True)
    raise typer.Exit(2)


def _one_line(text: str) -> str:
    return " ".join(text.split())
