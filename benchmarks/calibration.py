"""Whether samplers sample their targets: simulation-based calibration, closed forms, and long Hamiltonian runs.

    python benchmarks/calibration.py ranks       ranks of simulated truths among draws, row by row
    python benchmarks/calibration.py moments     means and variances beside known ones, row by row
    python benchmarks/calibration.py report      both tables as in docs/calibration.md, and whether all holds
    python benchmarks/calibration.py picture     docs/calibration.png

Rows go to ``results/calibration_*.csv`` with the commit they were made on; rows that are there are not made again.
Cases of a target that is the model which made the data must have uniform ranks: 20 bins, chi-square, p above 1e-3 for
every quantity, and mean and variance of the ranks within four standard errors. The others (variational, expectation
propagation, sequential with several layers) are printed beside.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# Other hosts' programs in a shared cache of compiled ones fill the screen.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from scipy import stats

from calibration_cases import DEEP, AbstractRankCase, rank_cases
from calibration_moments import AbstractMomentCase, moment_cases
from fathomgp.bench import ResultFile
from fathomgp.precision import double_precision

BINS = 20
#: Ranks are refused below this p-value.
SMALLEST_P = 1e-3
#: So are ranks whose mean or variance is further off, in standard errors.
LARGEST_Z = 4.0
RANK_COLUMNS = ("case", "replicate", "code", "draws", "ranks", "cpu_seconds")
MOMENT_COLUMNS = (
    "case",
    "replicate",
    "code",
    "ess",
    "variance_ratio",
    "mean_z",
    "square_z",
    "temperature",
    "cpu_seconds",
)
KEY = ("case", "replicate")
_QUIET: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "calibration.png"


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks_of(case: AbstractRankCase, number: int) -> tuple[np.ndarray, int]:
    """The rank of every quantity's truth among L draws, between 0 and L, and L."""
    truth, draws = case.replicate(number)
    if not (np.all(np.isfinite(truth)) and np.all(np.isfinite(draws))):
        raise FloatingPointError(f"Replicate {number} of {case.name} has draws that are not finite.")
    return np.sum(draws < truth, axis=0), len(draws)


def histogram(ranks: np.ndarray, draws: int, bins: int = BINS) -> np.ndarray:
    """Counts of ranks (replicates, Q) in equal bins: (Q, bins)."""
    if (draws + 1) % bins:
        raise ValueError(f"L + 1 must be a multiple of {bins}, but L is {draws}.")
    return np.stack([np.bincount(column, minlength=bins) for column in (ranks * bins // (draws + 1)).T])


def p_values(counts: np.ndarray) -> np.ndarray:
    """Of uniform ranks, one a quantity."""
    return np.asarray(stats.chisquare(counts, axis=1).pvalue)


def shift_and_width(ranks: np.ndarray, draws: int) -> np.ndarray:
    """How far mean and variance of ranks (replicates, Q) are from uniform ones', in standard errors: (2, Q).

    A positive width means answers that are too narrow. These two see such faults in far fewer ranks than chi-square.
    """
    levels = (np.arange(draws + 1) + 0.5) / (draws + 1) - 0.5
    figures = []
    for power in (1, 2):
        uniform, found = levels**power, ((ranks + 0.5) / (draws + 1) - 0.5) ** power
        figures.append((found.mean(axis=0) - uniform.mean()) / uniform.std() * np.sqrt(len(ranks)))
    return np.array(figures)


def coverage(counts: np.ndarray) -> np.ndarray:
    """The share of truths inside the central nine tenths."""
    return counts[:, 1:-1].sum(axis=1) / counts.sum(axis=1)


@double_precision
def run_ranks(cases: Mapping[str, AbstractRankCase], replicates: int | None, results: ResultFile) -> None:
    for case in cases.values():
        for number in range(replicates or case.replicates):
            if results.find({"case": case.name, "replicate": number}) is not None:
                continue
            began = time.process_time()
            ranks, draws = ranks_of(case, number)
            row = {"case": case.name, "replicate": number, "code": _commit(), "draws": draws}
            results.append(row | {"ranks": " ".join(map(str, ranks)), "cpu_seconds": _seconds(began)})
        print(f"{case.name}: {len(_ranks(case, results)[0])} replicates", flush=True)


def report_ranks(cases: Mapping[str, AbstractRankCase], results: ResultFile) -> bool:
    """Print the table, and say whether every provable case is uniform: all replicates must be there."""
    print("p of uniform ranks / width in standard errors / share of truths in the central 90 %:\n")
    print(f"| case | replicates | {' | '.join(DEEP)} | code |\n{'|---' * (len(DEEP) + 3)}|")
    fails, missing = [], []
    for case in cases.values():
        ranks, draws, codes = _ranks(case, results)
        missing += [case.name] if len(ranks) < case.replicates else []
        if not len(ranks):
            continue
        counts, z = histogram(ranks, draws), shift_and_width(ranks, draws)
        p, share = p_values(counts), coverage(counts)
        bad = ~((p > SMALLEST_P) & np.all(np.abs(z) < LARGEST_Z, axis=0))
        fails += [f"{case.name}, {case.quantities[i]}" for i in np.flatnonzero(bad) if case.provable]
        cells = [f"{_short(a)} / {b:+.1f} / {100 * c:.0f} %" for a, b, c in zip(p, z[1], share, strict=True)]
        cells += [""] * (len(DEEP) - len(cells))
        print(f"| {case.name} | {len(ranks)} | {' | '.join(cells)} | {codes} |")
    return _verdict("Ranks are uniform wherever that is provable", fails, missing)


def _ranks(case: AbstractRankCase, results: ResultFile) -> tuple[np.ndarray, int, str]:
    """The ranks of a case so far, (replicates, Q), L, and the commits they rest on."""
    rows = [row for row in results.rows if row["case"] == case.name]
    ranks = np.array([row["ranks"].split() for row in rows], int).reshape(len(rows), len(case.quantities))
    return ranks, int(rows[0]["draws"]) if rows else 0, ", ".join(sorted({row["code"] for row in rows}))


# --- moments ----------------------------------------------------------------------------------------------------------


@double_precision
def run_moments(cases: Mapping[str, AbstractMomentCase], replicates: int | None, results: ResultFile) -> None:
    for case in cases.values():
        for number in range(replicates or case.replicates):
            if results.find({"case": case.name, "replicate": number}) is not None:
                continue
            began = time.process_time()
            comparison = case.compare(number)
            row = {"case": case.name, "replicate": number, "code": _commit(), "cpu_seconds": _seconds(began)}
            results.append(row | {name: f"{figure:.4g}" for name, figure in comparison._asdict().items()})
            print(f"{case.name} {number}: {comparison}, {_seconds(began)} s of processor", flush=True)


def report_moments(cases: Mapping[str, AbstractMomentCase], results: ResultFile) -> bool:
    """Print the table, and say whether every case keeps its promise."""
    print("| case | replicates | variance ratio | worst z of means | of squares | least ESS | temperature | code |")
    print("|---|---|---|---|---|---|---|---|")
    fails, missing = [], []
    for case in cases.values():
        rows = [row for row in results.rows if row["case"] == case.name]
        missing += [case.name] if len(rows) < case.replicates else []
        if not rows:
            continue
        figures = {name: np.array([float(row[name]) for row in rows]) for name in MOMENT_COLUMNS[3:]}
        ratio, ess = figures["variance_ratio"].mean(), figures["ess"].min()
        worst = np.abs(figures["mean_z"]).max(), np.abs(figures["square_z"]).max()
        codes = ", ".join(sorted({row["code"] for row in rows}))
        fails += [] if case.holds(ratio, worst, ess) else [case.name]
        heat = figures["temperature"].mean()
        print(
            f"| {case.name} | {len(rows)} | {ratio:.3f} | {worst[0]:.1f} | {worst[1]:.1f} | {ess:.0f} | "
            f"{'' if np.isnan(heat) else f'{heat:.2f}'} | {codes} |"
        )
    return _verdict("Moments are those of the targets", fails, missing)


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(cases: Mapping[str, AbstractRankCase], results: ResultFile, path: pathlib.Path) -> None:
    """A row of histograms a case, with the band that 99 % of uniform bins keep."""
    from matplotlib.figure import Figure

    from fathomgp.plots import BLUE, GREY, ORANGE

    shown = [case for case in cases.values() if len(_ranks(case, results)[0])]
    columns = max(len(case.quantities) for case in shown)
    figure = Figure(figsize=(1.55 * columns, 1.15 * len(shown) + 0.4), layout="constrained")
    axes = figure.subplots(len(shown), columns, squeeze=False)
    for case, line in zip(shown, axes, strict=True):
        counts = histogram(*_ranks(case, results)[:2])
        total = counts[0].sum()
        low, high = stats.binom.ppf([0.005, 0.995], total, 1.0 / BINS)
        for i, ax in enumerate(line):
            ax.set_axis_off() if i >= len(counts) else ax.set(xticks=[], yticks=[], xlim=(-0.5, BINS - 0.5))
            if i >= len(counts):
                continue
            ax.axhspan(low, high, color=GREY, alpha=0.3, lw=0)
            ax.bar(np.arange(BINS), counts[i], width=0.85, color=BLUE if case.provable else ORANGE)
            ax.set_ylim(0, max(2.2 * total / BINS, 1.05 * counts[i].max()))
            ax.set_title(case.quantities[i], fontsize=7, pad=2)
            ax.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(case.name.replace(", ", ",\n"), fontsize=7, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=130)


# --- the command ------------------------------------------------------------------------------------------------------


@functools.cache
def _commit() -> str:
    """The last commit of the library's code when this was started; a star where its files differ from it."""
    root = pathlib.Path(__file__).parents[1]
    git = lambda *words: subprocess.run(["git", "-C", root, *words, "--", "src"], **_QUIET).stdout.strip()  # noqa: E731
    return git("log", "-1", "--format=%h") + ("*" if git("status", "--porcelain") else "")


def _verdict(claim: str, fails: Sequence[str], missing: Sequence[str]) -> bool:
    """Print it. A case that was not run to its end is not a success."""
    print(f"\n{claim}: {'NO: ' + '; '.join(fails) if fails else 'yes, of what was run' if missing else 'yes'}.")
    print(f"Not run to the end: {'; '.join(missing)}.\n" if missing else "")
    return not (fails or missing)


def _seconds(began: float) -> float:
    return round(time.process_time() - began, 2)


def _short(p: float) -> str:
    return f"{p:.2f}" if p >= 0.01 else f"{p:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("ranks", "moments", "report", "picture"))
    parser.add_argument("--cases", help="parts of names, with semicolons; all cases by default")
    parser.add_argument("--replicates", type=int, help="instead of each case's own number")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("results"))
    arguments = parser.parse_args()
    wanted = (arguments.cases or "").split(";")
    by_rank, by_moment = (
        {name: case for name, case in double_precision(make)().items() if any(part in name for part in wanted)}
        for make in (rank_cases, moment_cases)
    )
    ranks = ResultFile(arguments.results / "calibration_ranks.csv", RANK_COLUMNS, KEY)
    moments = ResultFile(arguments.results / "calibration_moments.csv", MOMENT_COLUMNS, KEY)
    warnings.simplefilter("ignore")
    if arguments.what == "ranks":
        run_ranks(by_rank, arguments.replicates, ranks)
    elif arguments.what == "moments":
        run_moments(by_moment, arguments.replicates, moments)
    elif arguments.what == "picture":
        draw(by_rank, ranks, PICTURE)
    else:
        held = report_ranks(by_rank, ranks), report_moments(by_moment, moments)
        return 0 if all(held) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
