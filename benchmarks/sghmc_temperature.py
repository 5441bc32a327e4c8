"""SGHMC on real tables, with the temperatures at which its draws were taken: 1 where they are the posterior's.

    nice -n 10 python benchmarks/sghmc_temperature.py [--jobs energy:5,boston:5,concrete:5,power:2,kin8nm:2,protein:1]

Two layers, 100 inducing points, precision "mixed", default settings, standard splits: the figures beside those of DSVI
in docs/benchmarks.md. Rows already in the file are not run again; the last lines say which temperatures hold.
"""

import argparse

import numpy as np

from fathomgp import DeepGPRegressor
from fathomgp._version import __version__
from fathomgp.bench import ResultFile
from fathomgp.data import load_dataset, standard_split
from fathomgp.inference import SGHMC
from fathomgp.metrics import coverage, mean_log_density, rmse

JOBS = "energy:5,boston:5,concrete:5,power:2,kin8nm:2,protein:1"
LOWEST, HIGHEST = 0.9, 1.1
KEY = ("dataset", "split", "energy")
COLUMNS = (
    *KEY,
    *("loglik", "rmse", "coverage95", "kinetic", "configurational", "r_hat", "ess", "seconds", "version"),
)


def score(name, split, energy):
    dataset = load_dataset(name)
    train, test = standard_split(dataset, split)
    X, y = dataset.X.astype(float), dataset.Y[:, 0].astype(float)
    model = DeepGPRegressor(SGHMC(energy=energy), depth=2, num_inducing=100, precision="mixed", random_state=0)
    model.set_params(verbose=False).fit(X[train], y[train])
    predictive, history = model.predict_distribution(X[test]), model.history_
    sampling = history["phase"] == history["phase"].max()
    figures = {
        "loglik": mean_log_density(y[test], predictive),
        "rmse": rmse(y[test], predictive.mean()),
        "coverage95": coverage(y[test], predictive, 0.95),
        "kinetic": np.mean(history["temperature"][sampling]),
        "configurational": np.mean(history["configurational"][sampling]),
        "r_hat": history["r_hat"],
        "ess": history["ess"],
        "seconds": model.fit_seconds_,
    }
    return {name: f"{float(value):.5g}" for name, value in figures.items()} | {"version": __version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default=JOBS, help="sets and numbers of splits")
    parser.add_argument("--energy", default="auto", choices=("auto", "bound", "marginal"))
    parser.add_argument("--out", default="results/sghmc_temperature.csv")
    arguments = parser.parse_args()
    results, held = ResultFile(arguments.out, COLUMNS, KEY), True
    for job in arguments.jobs.split(","):
        name, splits = job.split(":")
        for split in range(int(splits)):
            key = {"dataset": name, "split": split, "energy": arguments.energy}
            if results.find(key) is None:
                results.append(key | score(name, split, arguments.energy))
            row = results.find(key)
            fine = all(LOWEST <= float(row[which]) <= HIGHEST for which in ("kinetic", "configurational"))
            held &= fine
            print(f"{row}: {'holds' if fine else 'FAILS'}", flush=True)
    print(f"Temperatures from {LOWEST} to {HIGHEST}: {'hold' if held else 'FAIL'}.")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
