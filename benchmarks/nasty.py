"""Every method on sets that hurt: how far the held-out density is above or below a constant prediction.

    nice -n 19 python benchmarks/nasty.py [--methods exact,dsvi] [--sets duplicates,step] [--seeds 1]

The constant predictor is a Gaussian with the mean and the standard deviation of the training targets. Settings are the
defaults. Every fit adds its row at once and rows in the file are not run again; every method has a process of its own,
so that one that dies costs no other. What fails is a row too, with its error. ``--table`` prints the rows as Markdown.
"""

import argparse
import subprocess
import sys
import warnings

import numpy as np

from fathomgp import DeepGPRegressor
from fathomgp.bench import ResultFile

METHODS = ("exact", "sgpr", "dsvi", "decoupled", "sghmc", "stride", "sequential", "aep", "meanfield")
COLUMNS = ("set", "method", "seed", "above_constant", "coverage_95", "rmse_ratio", "seconds", "said")
KEY = ("set", "method", "seed")
_TEST_ROWS = 100
#: Most sets have these sizes, so that one process compiles its programs once.
_ROWS, _COLUMNS = 120, 3


def _smooth(x):
    return np.sin(2.0 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]


def _normal(rng, rows=_ROWS, columns=_COLUMNS):
    return rng.normal(size=(rows + _TEST_ROWS, columns))


def wide(rng, rows=60):
    """``y = x0 + 0.1 e`` and 299 columns that do nothing."""
    x = _normal(rng, rows, 300)
    return x, x[:, 0] + 0.1 * rng.normal(size=len(x))


def five_rows(rng):
    """Five rows of one column."""
    x = _normal(rng, 5, 1)
    return x, np.sin(2.0 * x[:, 0]) + 0.1 * rng.normal(size=len(x))


def five(rng):
    """Five rows of three columns."""
    x = _normal(rng, 5)
    return x, _smooth(x) + 0.1 * rng.normal(size=len(x))


def duplicates(rng):
    """Every training row eight times, with its target."""
    x = _normal(rng)
    x[:_ROWS] = np.tile(x[: _ROWS // 8], (8, 1))
    y = _smooth(x) + 0.1 * rng.normal(size=len(x))
    y[:_ROWS] = np.tile(y[: _ROWS // 8], 8)
    return x, y


def collinear(rng):
    """The third column is the sum of the others."""
    x = _normal(rng)
    x[:, 2] = x[:, 0] + x[:, 1]
    return x, _smooth(x) + 0.1 * rng.normal(size=len(x))


def cauchy(rng):
    """Noise without a variance."""
    x = _normal(rng)
    return x, _smooth(x) + 0.1 * rng.standard_cauchy(size=len(x))


def one_hot(rng):
    """A level of six per row, as six columns of 0 and 1, and nothing else."""
    level = rng.integers(6, size=_ROWS + _TEST_ROWS)
    return np.eye(6)[level], np.array([0.0, 1.0, -1.0, 2.0, 0.5, 3.0])[level] + 0.2 * rng.normal(size=len(level))


def step(rng):
    """A jump."""
    x = _normal(rng)
    return x, np.where(x[:, 0] > 0.0, 1.0, -1.0) + 0.05 * rng.normal(size=len(x))


def noiseless(rng):
    """A smooth function as it is."""
    x = _normal(rng)
    return x, _smooth(x)


def heteroscedastic(rng):
    """Noise from 0.02 to 2, growing with the first column."""
    x = _normal(rng)
    return x, _smooth(x) + 0.2 * np.exp(np.clip(x[:, 0], -2.3, 2.3)) * rng.normal(size=len(x))


def tiny_inputs(rng):
    """Inputs of 1e-12."""
    x = _normal(rng)
    return 1e-12 * x, _smooth(x) + 0.1 * rng.normal(size=len(x))


def huge_inputs(rng):
    """Inputs of 1e12."""
    x = _normal(rng)
    return 1e12 * x, _smooth(x) + 0.1 * rng.normal(size=len(x))


def one_value(rng):
    """Every target is 0 but for one training row's, which is 1."""
    x = _normal(rng)
    y = np.zeros(len(x))
    y[0] = 1.0
    return x, y


def periodic(rng):
    """Twenty periods of a sine in one column."""
    x = rng.uniform(-1.0, 1.0, size=(_ROWS + _TEST_ROWS, _COLUMNS))
    return x, np.sin(20.0 * np.pi * x[:, 0]) + 0.1 * rng.normal(size=len(x))


def lifted(rng):
    """Targets around 1e9."""
    x = _normal(rng)
    return x, 1e9 + _smooth(x) + 0.1 * rng.normal(size=len(x))


def columns_300(rng):
    """120 rows, 300 columns of which three matter."""
    x = _normal(rng, _ROWS, 300)
    return x, _smooth(x) + 0.1 * rng.normal(size=len(x))


def outlier(rng):
    """One training target is a million standard deviations away."""
    x = _normal(rng)
    y = _smooth(x) + 0.1 * rng.normal(size=len(x))
    y[0] = 1e6
    return x, y


def zero_one(rng):
    """Targets that are 0 or 1, as numbers."""
    x = _normal(rng)
    return x, (_smooth(x) + 0.3 * rng.normal(size=len(x)) > 0.0).astype(float)


SETS = {
    "60 x 300": wide,
    "5 rows, 1 column": five_rows,
    "5 rows, 3 columns": five,
    "120 x 300": columns_300,
    "exact duplicates": duplicates,
    "collinear": collinear,
    "Cauchy noise": cauchy,
    "one-hot": one_hot,
    "step": step,
    "noiseless": noiseless,
    "heteroscedastic": heteroscedastic,
    "X at 1e-12": tiny_inputs,
    "X at 1e12": huge_inputs,
    "one non-constant y": one_value,
    "periodic": periodic,
    "y + 1e9": lifted,
    "one y of 1e6 sd": outlier,
    "y in {0, 1}": zero_one,
}


def score(name, method, seed):
    """A row of results: what the fit gave, or how it failed."""
    x, y = SETS[name](np.random.default_rng([seed, list(SETS).index(name)]))
    train, test = slice(None, -_TEST_ROWS), slice(-_TEST_ROWS, None)
    mean, sd = y[train].mean(), y[train].std()
    constant = np.mean(-0.5 * np.log(2.0 * np.pi * sd**2) - 0.5 * ((y[test] - mean) / sd) ** 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = DeepGPRegressor(method, random_state=seed, verbose=False).fit(x[train], y[train])
            answer = model.predict_distribution(x[test])
            above = np.mean(answer.log_density(y[test])) - constant
            low, high = answer.interval(0.95)
            ratio = np.sqrt(np.mean((answer.mean() - y[test]) ** 2) / np.mean((y[test] - mean) ** 2))
    except Exception as error:
        return {"above_constant": "", "coverage_95": "", "rmse_ratio": "", "seconds": "", "said": repr(error)[:300]}
    return {
        "above_constant": round(float(above), 4),
        "coverage_95": round(float(np.mean((low <= y[test]) & (y[test] <= high))), 3),
        "rmse_ratio": f"{ratio:.4g}",
        "seconds": round(model.fit_seconds_, 1),
        "said": " ".join(" | ".join(model.messages_).split())[:300],
    }


def run(names, method, seeds, results):
    for name in names:
        for seed in seeds:
            key = {"set": name, "method": method, "seed": seed}
            if results.find(key) is None:
                results.append(key | score(name, method, seed))
                row = results.rows[-1]
                print(f"{name}, {method}, seed {seed}: {row['above_constant'] or row['said']}", flush=True)


def table(names, methods, results):
    """Markdown: a row per set, a column per method, the mean over seeds; a failure in words."""
    print("| | " + " | ".join(methods) + " |\n|---" + "|---" * len(methods) + "|")
    for name in names:
        cells = []
        for method in methods:
            found = [row for row in results.rows if (row["set"], row["method"]) == (name, method)]
            values = [float(row["above_constant"]) for row in found if row["above_constant"]]
            cells.append("failed" if len(values) < len(found) else f"{np.mean(values):+.2f}" if values else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas: " + ", ".join(METHODS))
    parser.add_argument("--sets", default="", help="numbers with commas, from 0: " + ", ".join(SETS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", default="results/nasty.csv")
    parser.add_argument("--table", action="store_true", help="print the rows of the file and fit nothing")
    arguments = parser.parse_args()
    names = list(SETS)
    chosen = [names[int(number)] for number in arguments.sets.split(",")] if arguments.sets else names
    methods = arguments.methods.split(",")
    if arguments.table:
        table(chosen, methods, ResultFile(arguments.out, COLUMNS, KEY))
    elif len(methods) == 1:
        run(chosen, methods[0], range(arguments.seeds), ResultFile(arguments.out, COLUMNS, KEY))
    else:
        for method in methods:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--methods", method], check=False)


if __name__ == "__main__":
    main()
