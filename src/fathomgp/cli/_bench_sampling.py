"""``fathomgp bench multimodal | gaussianity | mcem | convergence``: the analyses of Havasi et al. (2018)."""

from pathlib import Path
from typing import Annotated

import typer

from fathomgp.cli._console import show_table
from fathomgp.cli._files import check_csv
from fathomgp.cli._parse import words


def multimodal(
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 20,
    out: Annotated[Path, typer.Option(help="A CSV file; the figure is drawn beside it.")] = Path(
        "results/multimodal.csv"
    ),
) -> None:
    """Seven points with two explanations: which of them sampling (sghmc) and a Gaussian q (dsvi) find."""
    from fathomgp import bench

    check_csv(out, "--out")
    results, last = bench.open_multimodal_results(out), {}
    for seed in range(seeds):
        for method in ("sghmc", "dsvi"):
            row = results.find({"seed": seed, "method": method})
            if row is None or seed == 0:
                last[method, seed] = bench.fit_toy(method, seed)
            if row is None:
                results.append(bench.toy_row(method, seed, last[method, seed]))
                typer.echo(
                    "{method}, seed {seed}: mode A {mode_a}, mode B {mode_b}; crossings {crossings}".format(
                        **results.rows[-1]
                    )
                )
    table = []
    for method in ("sghmc", "dsvi"):
        found = [int(row["modes_found"]) for row in results.rows if row["method"] == method]
        crossings = [row["crossings"] for row in results.rows if row["method"] == method]
        mixing = " ".join(map(str, crossings)) if method == "sghmc" else ""
        both = {"both modes": found.count(2), "one": found.count(1), "crossings of each chain": mixing}
        table.append({"method": method, "seeds": len(found)} | both)
    show_table(table, title="Seeds whose draws are in both modes, and in one")
    figure = bench.save_multimodal_figure({"sghmc": last["sghmc", 0], "dsvi": last["dsvi", 0]}, out.with_suffix(".png"))
    typer.echo(f"Results: {out}\nFigure: {figure}")


def gaussianity(
    datasets: Annotated[str, typer.Option(help="Names with commas between them, see fathomgp data list.")],
    depth: Annotated[int, typer.Option(help="Layers of the deep model.")] = 2,
    burn_in: Annotated[int, typer.Option(help="Steps that tune sampler and hyperparameters.")] = 2000,
    sampling: Annotated[int, typer.Option(help="Steps that sample, of each chain.")] = 20_000,
    chains: Annotated[int, typer.Option(help="Chains.")] = 4,
    num_inducing: Annotated[int, typer.Option(help="Inducing points a layer.")] = 100,
    out: Annotated[Path, typer.Option(help="A CSV file; what it holds already is not run again.")] = Path(
        "results/gaussianity.csv"
    ),
) -> None:
    """Kurtosis tests on 100 inducing values: is the posterior Gaussian? One layer is the check: there it is."""
    from fathomgp import bench
    from fathomgp.inference import SGHMC

    check_csv(out, "--out")
    inference = SGHMC(burn_in, sampling, draws=max(1, sampling // 20), chains=chains, start="prior")
    results, rows = bench.open_gaussianity_results(out), []
    for name in words(datasets, "--datasets"):
        for layers in dict.fromkeys((1, depth)):
            row = results.find(bench.gaussianity_key(name, layers, inference))
            if row is None:
                results.append(bench.judge_gaussianity(name, layers, inference, num_inducing=num_inducing))
                row = results.rows[-1]
            rows.append(row)
    columns = ("dataset", "depth", "tested", "draws", "smallest_p", "below_threshold", "apart")
    show_table([{name: row[name] for name in columns} for row in rows], title="p-values of a Gaussian; threshold 1e-5")
    typer.echo(f"Results: {out}\nFigure: {bench.save_gaussianity_figure(rows, out.with_suffix('.png'))}")


def mcem(
    dataset: Annotated[str, typer.Option(help="A regression set.")] = "kin8nm",
    burn_in: Annotated[int, typer.Option(help="Steps that tune the hyperparameters.")] = 20_000,
    sampling: Annotated[int, typer.Option(help="Steps that sample.")] = 1000,
    out: Annotated[Path, typer.Option(help="A CSV file; interrupted runs go on.")] = Path("results/mcem.csv"),
) -> None:
    """Moving-window MCEM beside plain MCEM and the naive way: test log-likelihood against iterations (Figure 3)."""
    from fathomgp.inference import SGHMC

    runs = {
        name: SGHMC(burn_in, sampling, chains=1, hyperparameters=name) for name in ("moving-window", "mcem", "naive")
    }
    _watch(dataset, runs, out, against="step")


def convergence(
    dataset: Annotated[str, typer.Option(help="A regression set.")] = "protein",
    burn_in: Annotated[int, typer.Option(help="SGHMC: steps that tune the hyperparameters; DSVI: steps.")] = 20_000,
    sampling: Annotated[int, typer.Option(help="SGHMC: steps that sample.")] = 10_000,
    batch_size: Annotated[int, typer.Option(help="Rows a batch.")] = 10_000,
    precision: Annotated[str, typer.Option(help='"double" or "mixed".')] = "mixed",
    out: Annotated[Path, typer.Option(help="A CSV file; interrupted runs go on.")] = Path("results/convergence.csv"),
) -> None:
    """SGHMC beside DSVI: test log-likelihood against the clock (Figure 3)."""
    from fathomgp.inference import DSVI, SGHMC

    runs = {
        "sghmc": SGHMC(burn_in, sampling, chains=1, batch_size=batch_size),
        "dsvi": DSVI(steps=burn_in, batch_size=batch_size),
    }
    _watch(dataset, runs, out, against="seconds", precision=precision)


def _watch(dataset, runs, out: Path, *, against: str, precision: str = "double") -> None:
    from fathomgp import bench
    from fathomgp.estimators._settings import PRECISIONS, choose

    check_csv(out, "--out")
    results, dtype = bench.open_watched_results(out), PRECISIONS[choose("precision", precision, PRECISIONS)]
    for name, inference in runs.items():
        bench.watch_fit(dataset, inference, results, run=name, dtype=dtype, tell=typer.echo)
    rows = [row for row in results.rows if row["dataset"] == dataset and row["run"] in runs]
    ends = [[row for row in rows if row["run"] == name][-1] for name in runs]
    columns = ("run", "step", "seconds", "loglik")
    show_table([{name: row[name] for name in columns} for row in ends], title=f"{dataset}: where the runs ended")
    typer.echo(f"Results: {out}\nFigure: {bench.save_watched_figure(rows, out.with_suffix('.png'), against=against)}")
