"""The commands, gathered."""

from typing import Annotated

import typer

from fathomgp._version import __version__
from fathomgp.cli import _bench, _data, _demo, _evaluate, _fit, _predict, _stream
from fathomgp.cli._console import OneLineErrors

app = typer.Typer(
    name="fathomgp",
    cls=OneLineErrors,
    help="Deep Gaussian processes with honest error bars.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("fit")(_fit.fit)
app.command("predict")(_predict.predict)
app.command("evaluate")(_evaluate.evaluate)
app.command("stream")(_stream.stream)
app.command("demo")(_demo.demo)
app.add_typer(_data.app, name="data")
app.add_typer(_bench.app, name="bench")


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"fathomgp {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Deep Gaussian processes with honest error bars."""
