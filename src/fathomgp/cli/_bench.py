"""``fathomgp bench``: the papers' tables, run again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fathomgp.cli import _bench_sampling
from fathomgp.cli._console import note, show_table
from fathomgp.cli._files import check_csv
from fathomgp.cli._parse import splits as parse_splits
from fathomgp.cli._parse import words

app = typer.Typer(help="The papers' tables, run again beside their published numbers.", no_args_is_help=True)

TITLES = {"loglik": "Mean test log-likelihood (higher is better)", "rmse": "RMSE (lower is better)"}


@app.callback()
def _group() -> None:
    """The papers' tables, run again beside their published numbers."""


@app.command("uci")
def uci(
    datasets: Annotated[str, typer.Option(help="Names with commas between them, see fathomgp data list.")],
    methods: Annotated[str, typer.Option(help="Names with commas between them: exact, sgpr, linear, ...")] = "exact",
    splits: Annotated[
        str, typer.Option(help='How many of the standard splits ("5"), or which ("0,1,4", "0-4").')
    ] = "5",
    depth: Annotated[int | None, typer.Option(help="Layers of the deep methods.")] = None,
    num_inducing: Annotated[int | None, typer.Option(help="Inducing points of the sparse methods.")] = None,
    hidden_dim: Annotated[int | None, typer.Option(help="Width of the deep methods' inner layers.")] = None,
    max_iter: Annotated[int | None, typer.Option(help="At most so many steps a fit.")] = None,
    out: Annotated[Path, typer.Option(help="A CSV file; what it holds already is not run again.")] = Path(
        "results/uci.csv"
    ),
) -> None:
    """Regression on the UCI sets, with the standard splits of Gal and Ghahramani.

    Every fit adds a row to --out at once, so that an interrupted run goes on where it stopped. The tables at the end
    show the numbers of the DSVI paper (Salimbeni and Deisenroth 2017, 20 splits) below ours, and average ranks over
    datasets and splits; a critical-difference diagram is drawn beside the CSV file.
    """
    from fathomgp import bench

    check_csv(out, "--out")
    names, chosen = words(datasets, "--datasets"), parse_splits(splits)
    options = {"depth": depth, "num_inducing": num_inducing, "hidden_dim": hidden_dim, "max_iter": max_iter}
    settings = {name: bench.configure(name, **options) for name in words(methods, "--methods")}
    results = bench.open_results(out)
    jobs = bench.plan_jobs(names, chosen, settings)
    failed = _run(jobs, results)
    rows = bench.select_rows(results.rows, names, chosen)
    for metric, title in TITLES.items():
        ours, theirs = bench.mean_scores(rows, metric), bench.published_scores(metric)
        _show_scores(title, names, ours, theirs, splits=len(chosen))
    _show_ranks(rows, out)
    typer.echo(f"Results: {out}")
    if failed:
        typer.echo(f"Error: {failed} of {len(jobs)} fits failed; the lines above say why.", err=True)
        raise typer.Exit(2)


for command in (
    _bench_sampling.multimodal,
    _bench_sampling.gaussianity,
    _bench_sampling.mcem,
    _bench_sampling.convergence,
):
    app.command(command.__name__)(command)


def _run(jobs: Sequence[Any], results: Any) -> int:
    """Run what is left to do, a line each, and count what failed."""
    from fathomgp import __version__, bench

    done = [row for job in jobs if (row := results.find(job.key)) is not None]
    old = {row["version"] for row in done} - {__version__}
    if old:
        note(f"{results.path} holds results of version {', '.join(sorted(old))}, which are not run again.")
    outcomes = [_tell(outcome) for outcome in bench.run_jobs(jobs, results)]
    return sum(outcome.error is not None for outcome in outcomes)


def _tell(outcome: Any) -> Any:
    job, row = outcome.job, outcome.row
    begin = f"{job.dataset}, split {job.split}, {job.label}:"
    if row is None:
        note(f"{begin} {outcome.error}")
    else:
        typer.echo(f"{begin} log-likelihood {row['loglik']:.3f}, RMSE {row['rmse']:.4g}, {row['seconds']:.1f} s")
    return outcome


def _show_scores(
    title: str,
    datasets: Sequence[str],
    ours: Mapping[tuple[str, str], Any],
    theirs: Mapping[tuple[str, str], Any],
    *,
    splits: int,
) -> None:
    """A row a method, a column a dataset: ours, and below the line the published ones."""
    table = Table("method", *datasets, title=title, title_justify="left")
    for method in dict.fromkeys(method for _, method in ours):
        table.add_row(method, *[_cell(ours.get((name, method)), splits) for name in datasets], style="bold")
    table.add_section()
    for method in dict.fromkeys(method for _, method in theirs):
        cells = [_cell(theirs.get((name, method))) for name in datasets]
        if any(cells):
            table.add_row(f"{method} (published)", *cells)
    Console().print(table)


def _cell(score: Any, splits: int | None = None) -> str:
    """A mean with its error; fewer splits than were asked for are counted in brackets."""
    if score is None:
        return ""
    mean = str(score) if score.splits > 1 else f"{score.mean:.2f}"
    return mean if splits in (None, score.splits) else f"{mean} ({score.splits})"


def _show_ranks(rows: Sequence[Mapping[str, str]], out: Path) -> None:
    from fathomgp import bench

    ranks, pairs = bench.average_ranks(rows)
    seconds = bench.mean_scores([{**row, "dataset": ""} for row in rows], "seconds")
    if len(ranks) < 2:
        return
    table = [
        {"method": name, "average rank": f"{rank:.2f}", "seconds a fit": f"{seconds['', name].mean:.1f}"}
        for name, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    show_table(table, title=f"Average rank by log-likelihood over {pairs} dataset splits (1 is best)")
    diagram = bench.save_rank_diagram(ranks, pairs, out.with_name(f"{out.stem}_ranks.png"))
    typer.echo(f"Diagram: {diagram}")
