"""Default fits beside the exact GP on ordinary small regression sets, none of which any setting was chosen on.

    python benchmarks/small_sets.py [--methods dsvi,aep] [--datasets diabetes,sine] [--splits 2]

Every method promises to stay within some nats of the exact GP's mean test log density. Rows already in the file are
not run again; the last lines say what holds.
"""

import argparse

import numpy as np
from sklearn import datasets

from fathomgp import DeepGPRegressor
from fathomgp.bench import ResultFile
from fathomgp.data import random_split

#: How far below the exact GP a default fit may be, in nats.
PROMISES = {"dsvi": 0.15, "sghmc": 0.15, "aep": 0.3, "meanfield": 0.5, "sequential": 0.6, "stride": 0.2}
COLUMNS = ("dataset", "split", "method", "n", "d", "log_density", "seconds")
KEY = ("dataset", "split", "method")


def _friedman(number: int, rows: int, noise: float):
    return lambda: getattr(datasets, f"make_friedman{number}")(rows, noise=noise, random_state=0)


def sine():
    """One input, a period that changes, noise a tenth of the signal."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(150, 1))
    return X, np.sin(np.exp(1.0 + 0.5 * X[:, 0])) + 0.1 * rng.normal(size=150)


def linear():
    """Five inputs of which two matter, and half of the variance is noise: nothing to be deep about."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 5))
    return X, X[:, 0] - X[:, 1] + 1.4 * rng.normal(size=200)


SETS = {
    "sine": sine,
    "linear": linear,
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": _friedman(1, 1500, 1.0),
    "friedman2": _friedman(2, 400, 50.0),
    "friedman3": _friedman(3, 400, 0.1),
}


def run(names, splits, methods, results):
    for name in names:
        X, y = SETS[name]()
        for method in ("exact", *methods):
            for split in splits:
                key = {"dataset": name, "split": split, "method": method}
                if results.find(key) is None:
                    results.append(key | score(X, y, method, split))
                    row = results.rows[-1]
                    print(f"{name} {split} {method}: {row['log_density']} nats, {row['seconds']} s", flush=True)


def score(X, y, method, split):
    train, test = random_split(len(X), 0.2, split)
    model = DeepGPRegressor(method, random_state=split, verbose=False).fit(X[train], y[train])
    density = model.log_density(X[test], y[test]).mean()
    size = {"n": len(X), "d": X.shape[1]}
    return size | {"log_density": round(float(density), 5), "seconds": round(model.fit_seconds_, 1)}


def report(names, splits, methods, results):
    def mean(name, method):
        rows = [results.find({"dataset": name, "split": split, "method": method}) for split in splits]
        return np.mean([float(row["log_density"]) for row in rows])

    print(f"\n{'dataset':10}{'exact':>9}" + "".join(f"{method:>12}" for method in methods))
    behind = {method: [] for method in methods}
    for name in names:
        exact = mean(name, "exact")
        for method in methods:
            behind[method].append(exact - mean(name, method))
        print(f"{name:10}{exact:9.3f}" + "".join(f"{-behind[method][-1]:+12.3f}" for method in methods))
    for method, nats in behind.items():
        verdict = "holds" if np.max(nats) <= PROMISES[method] else "FAILS"  # NaN fails
        print(f"{method}: at most {PROMISES[method]} nats below the exact GP on every set: {verdict}.")
    return all(np.max(nats) <= PROMISES[method] for method, nats in behind.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(PROMISES), help="with commas: " + ", ".join(PROMISES))
    parser.add_argument("--splits", type=int, default=2, help="how many random 80/20 splits")
    parser.add_argument("--out", default="results/small_sets.csv")
    arguments = parser.parse_args()
    names, methods, splits = arguments.datasets.split(","), arguments.methods.split(","), range(arguments.splits)
    if unknown := set(methods) - set(PROMISES):
        parser.error(f"there is no promise for {', '.join(sorted(unknown))}: choose from {', '.join(PROMISES)}.")
    results = ResultFile(arguments.out, COLUMNS, KEY)
    run(names, splits, methods, results)
    return 0 if report(names, splits, methods, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
