"""``fathomgp data``: the named datasets."""

import os
from typing import Annotated

import typer

from fathomgp.cli._console import show_table

app = typer.Typer(help="The named datasets: list them, fetch one, see where they are kept.", no_args_is_help=True)


@app.command("list")
def list_names() -> None:
    """List every dataset and whether it is on this machine."""
    from fathomgp.data import list_datasets

    rows = [
        {
            "name": row.name,
            "rows": row.num_rows,
            "inputs": row.num_features,
            "task": row.task,
            "here": "yes" if row.local else "no",
        }
        for row in list_datasets()
    ]
    show_table(rows)


@app.command("fetch")
def fetch(name: Annotated[str, typer.Argument(help="A name of fathomgp data list.")]) -> None:
    """Download a dataset, check it, and keep it in the cache; nothing happens when it is on this machine."""
    from fathomgp.data import load_dataset

    dataset = load_dataset(name)
    typer.echo(f"{name}: {len(dataset.X):,} rows, {dataset.X.shape[1]} inputs. {dataset.description}")


@app.command("path")
def path() -> None:
    """Print the directories where datasets are looked for, one a line."""
    from fathomgp.data._named import cache_directory

    for place in filter(None, [os.environ.get("FATHOMGP_DATA"), str(cache_directory())]):
        typer.echo(place)
