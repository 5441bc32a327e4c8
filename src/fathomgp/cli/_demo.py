"""``fathomgp demo``: every method on two problems, on one page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fathomgp.cli._console import show_table


def demo(
    out: Annotated[Path, typer.Option(help="The directory for the page.")] = Path("fathomgp-demo"),
    max_iter: Annotated[int | None, typer.Option(help="Fewer steps, for a hasty look.")] = None,
) -> None:
    """Fit every method to a function with jumps and to real data, and write a page that compares them."""
    from fathomgp.demo import run_demo

    console = Console(stderr=True)
    with console.status("Starting") as status:

        def tell(message: str) -> None:
            status.update(f"Fitting {message}")
            console.print(f"Fitting {message}", highlight=False)

        result = run_demo(out, max_iter=max_iter, tell=tell)
    show_table([{"data": name, **row} for name, row in result.scores])
    typer.echo(f"Report: {result.path.resolve()}")
