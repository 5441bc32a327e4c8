"""The long campaign of faults: ``make faults``, or ``python tests/faults/long.py [campaign ...] [--share 0.01]``.

Each campaign appends rows to results/faults.csv as it goes and, started again, goes on where it stopped. At the end the
table of docs/reliability.md is printed: cases, and how many of them lost something, ended in a raw error, hung, or had
something executed. What was found stands in words in results/faults.log.
"""

import argparse
import importlib
import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Campaigns and their sizes: cases, or whatever the module's ``run`` says.
BUDGETS = {
    "files": 10_000,
    "saves": 100,
    "kills": 90,
    "streams": 32,
    "processes": 40,
    "cli": 2_000,
    "input": 20_000,
}


def table(path):
    """The rows of all campaigns, summed, as Markdown."""
    from outcomes import COLUMNS

    from fathomgp.bench import ResultFile

    sums = {}
    for row in ResultFile(path, COLUMNS, ("campaign",)).rows:
        found = sums.setdefault(row["campaign"], dict.fromkeys(COLUMNS[1:], 0.0))
        for name in found:
            found[name] += float(row[name])
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for name, found in sums.items():
        counts = [f"{int(found[column]):,}" for column in COLUMNS[1:-1]]
        lines.append(f"| {name} | " + " | ".join(counts) + f" | {found['hours']:.2f} |")
    return "\n".join(lines)


def main():
    """Run the campaigns that are asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaigns", nargs="*", default=list(BUDGETS))
    parser.add_argument("--share", type=float, default=1.0, help="run this share of each campaign's cases")
    parser.add_argument("--out", type=pathlib.Path, default=_ROOT / "results" / "faults.csv")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(given.out.parent / "compiled"))
    for name in given.campaigns:
        print(f"{name} ...", file=sys.stderr, flush=True)
        module = importlib.import_module(f"campaign_{name}")
        module.run(max(1, int(given.share * BUDGETS[name])), given.out.absolute())
    print(table(given.out))


if __name__ == "__main__":
    main()
