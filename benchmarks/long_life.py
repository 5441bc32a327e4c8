"""A process that fits and asks for hours must not die of its programs: memory maps and memory over hundreds of fits.

    python benchmarks/long_life.py --fits 400 --questions 2000

Every fit has another number of rows (100 to 500) and every tenth another number of columns; methods take turns, with
small budgets. Then one model answers `sample_y` again and again. A row is written every twenty fits.
"""

import argparse
import csv
import pathlib
import resource
import time
import warnings

import numpy as np

from fathomgp import DeepGPRegressor
from fathomgp.compilation import count_compilations, memory_maps, programs

METHODS = ("exact", "sgpr", "dsvi", "decoupled", "sghmc", "aep", "meanfield", "stride", "sequential")
COLUMNS = ("what", "done", "seconds", "compiled", "kept", "maps", "megabytes")


def fit(number: int, method: str, seed: int = 0) -> DeepGPRegressor:
    """A fit of few steps whose number of rows, and now and then of columns, is new."""
    rng = np.random.default_rng([seed, number])
    rows, columns = int(100 + (number * 37) % 401), 3 + (number // 10) % 4
    X = rng.uniform(size=(rows, columns))
    y = np.sin(5.0 * X[:, 0]) + 0.1 * rng.normal(size=rows)
    settings = {} if method == "exact" else {"num_inducing": 10}
    model = DeepGPRegressor(method, max_iter=2, random_state=0, **settings).fit(X, y)
    model.predict(X[:5], return_std=True)
    return model


def megabytes() -> float:
    """What the process holds now, or held at most where the system does not tell."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=400)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/long_life.csv"))
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    methods = settings.methods.split(",")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with settings.out.open("w", newline="") as file, count_compilations() as count:
        table = csv.writer(file)
        table.writerow(COLUMNS)

        def note(what: str, done: int) -> None:
            seconds = time.monotonic() - began
            row = (what, done, round(seconds), count.programs, len(programs), memory_maps(), round(megabytes()))
            table.writerow(row)
            file.flush()
            print(*row, flush=True)

        for number in range(settings.fits):
            fit(number, methods[number % len(methods)])
            if number % 20 == 19:
                note("fits", number + 1)
        model = fit(0, "dsvi")
        for number in range(settings.questions):
            model.sample_y(np.full((5, 3), 0.5), 2, random_state=number)
            if number % 500 == 499:
                note("sample_y", number + 1)


if __name__ == "__main__":
    main()
