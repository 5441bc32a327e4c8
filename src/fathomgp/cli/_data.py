"""``fathomgp data``: the named datasets, generated ones, and CSV into Parquet."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fathomgp.cli._console import show_table

app = typer.Typer(
    help="Datasets: list the named ones, fetch one, generate one of any size, convert CSV to Parquet.",
    no_args_is_help=True,
)


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


@app.command("generate")
def generate(
    name: Annotated[str, typer.Argument(help="taxi (journey times) or collider (a binary label).")],
    rows: Annotated[int, typer.Option(help="How many rows.")],
    out: Annotated[Path, typer.Option(help="A directory for the Parquet files, empty or new.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 0,
) -> None:
    """Write a table of any size whose best reachable score is known."""
    from fathomgp.cli._streams import row_progress
    from fathomgp.data._generate import find_generator, generate_table

    generator = find_generator(name)
    with row_progress("Rows", rows) as progress:
        files = generate_table(name, rows, out, seed=seed, progress=progress)
    typer.echo(f"{rows:,} rows in {len(files)} files: {out}. The target is {generator.target}. {generator.best()}")


@app.command("convert")
def convert(
    path: Annotated[list[Path], typer.Argument(help="CSV files, or directories of them.")],
    out: Annotated[Path, typer.Option(help="A directory for the Parquet files, empty or new.")],
) -> None:
    """Convert CSV to Parquet, which can be streamed: numbers in float32, one file a file."""
    from fathomgp.cli._streams import row_progress
    from fathomgp.data._convert import convert_csv, find_csv

    total = sum(file.stat().st_size for file in find_csv(path))
    with row_progress("Bytes", total) as progress:
        files = convert_csv(path, out, progress=progress)
    typer.echo(f"{len(files)} files: {out}")
