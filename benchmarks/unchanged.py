"""Whether a change of the code has changed an answer: bounds and predictions of every method, before and after.

    python benchmarks/unchanged.py write before.npz        # with the code before
    python benchmarks/unchanged.py write after.npz         # with the code after
    python benchmarks/unchanged.py compare before.npz after.npz

Three small sets, fixed seeds, float64, two layers where there are several: every phase takes 20 steps (SGHMC and
STRIDE: 5), then the posterior is asked for means, deviations and quantiles. The first entry of a history is the bound
right after the start. ``compare`` prints the worst difference of each method, relative to the largest number of its
array, and fails above 1e-6: what is deliberate belongs into a sentence. ``write`` goes on where an earlier run stopped.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np

from fathomgp import DeepGPRegressor
from fathomgp.inference import AEP, DSVI, SGHMC, SGPR, STRIDE, Decoupled, Exact, MeanField, Sequential

LARGEST = 1e-6
QUANTILES = [0.05, 0.5, 0.95]
#: Every method, with what its phases cannot be told by ``max_iter``.
METHODS = {
    "exact": lambda: (Exact(restarts=1), 1),
    "sgpr": lambda: (SGPR(), 1),
    "sgpr-greedy": lambda: (SGPR("greedy", rounds=2), 1),
    "dsvi": lambda: (DSVI(test_samples=5), 2),
    "dsvi-batches": lambda: (DSVI(test_samples=5, batch_size=16, num_samples=2), 3),
    "decoupled": lambda: (Decoupled(test_samples=5), 2),
    "sghmc": lambda: (SGHMC(burn_in=5, sampling=5, draws=5, chains=2, hyperparameters="moving-window"), 2),
    "stride": lambda: (STRIDE(particles=4, rounds=2, moves=5, exchanges=5, candidates=10), 2),
    "sequential": lambda: (Sequential(num_particles=10, test_samples=5), 2),
    "aep": lambda: (AEP(), 2),
    "meanfield": lambda: (MeanField(), 2),
}
#: Methods whose numbers of steps are settings of their own.
OWN_STEPS = ("sghmc", "stride")


def sine() -> tuple[np.ndarray, np.ndarray]:
    """One input, a jump."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2.0, 2.0, size=(50, 1)), axis=0)
    return X, np.sin(3.0 * X[:, 0]) + (X[:, 0] > 0.5) + 0.1 * rng.normal(size=50)


def friedman() -> tuple[np.ndarray, np.ndarray]:
    """Friedman's first function: five inputs."""
    rng = np.random.default_rng(1)
    X = rng.uniform(size=(60, 5))
    y = 10.0 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20.0 * (X[:, 2] - 0.5) ** 2 + 10.0 * X[:, 3] + 5.0 * X[:, 4]
    return X, y + rng.normal(size=60)


def outputs() -> tuple[np.ndarray, np.ndarray]:
    """Two inputs, two outputs in units of their own."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(40, 2))
    y = np.stack([X[:, 0] * np.tanh(2.0 * X[:, 1]), 100.0 + 5.0 * np.cos(X[:, 0])], axis=1)
    return X, y + np.array([0.1, 0.5]) * rng.normal(size=y.shape)


SETS = {"sine": sine, "friedman": friedman, "outputs": outputs}


def answers(data: str, method: str) -> dict[str, np.ndarray]:
    """What a method says of a set after a few steps, by name."""
    X, y = SETS[data]()
    algorithm, depth = METHODS[method]()
    steps = None if method in OWN_STEPS else 20
    model = DeepGPRegressor(algorithm, depth=depth, num_inducing=8, max_iter=steps, random_state=0, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X[:-10], y[:-10])
    mean, std = model.predict(X[-10:], return_std=True)
    quantiles = model.predict_quantiles(X[-10:], QUANTILES)
    return {"bounds": model.history_["objective"], "mean": mean, "std": std, "quantiles": quantiles}


def write(path: pathlib.Path, methods: list[str]) -> None:
    """Fill ``path`` with the answers that it lacks."""
    kept = dict(np.load(path)) if path.exists() else {}
    for method in methods:
        for data in SETS:
            if f"{method}/{data}/mean" in kept:
                continue
            began = time.perf_counter()
            kept.update({f"{method}/{data}/{name}": value for name, value in answers(data, method).items()})
            np.savez_compressed(path, **kept)
            print(f"{method:14} {data:10} {time.perf_counter() - began:6.1f} s", flush=True)


def differences(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, tuple[float, str]]:
    """The worst relative difference of every method that both have, and where it is."""
    worst: dict[str, tuple[float, str]] = {}
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        method = name.split("/")[0]
        same = old.shape == new.shape and bool(np.all(np.isfinite(old) == np.isfinite(new)))
        fine = np.isfinite(old)
        difference = (
            np.abs(new - old)[fine].max(initial=0.0) / np.abs(old[fine]).max(initial=1e-300) if same else np.inf
        )
        worst[method] = max(worst.get(method, (0.0, name)), (float(difference), name))
    return worst


def compare(before: pathlib.Path, after: pathlib.Path) -> bool:
    """Print a row a method; whether all are small."""
    old, new = dict(np.load(before)), dict(np.load(after))
    worst = differences(old, new)
    for method, (difference, name) in worst.items():
        verdict = "" if difference <= LARGEST else f"  more than {LARGEST:g}: {name}"
        print(f"{method:14} {difference:9.1e}{verdict}")
    for name in sorted(old.keys() ^ new.keys()):
        print(f"only in {'the first' if name in old else 'the second'} file: {name}")
    return old.keys() == new.keys() and all(difference <= LARGEST for difference, _ in worst.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=pathlib.Path)
    writing.add_argument("--methods", default=",".join(METHODS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.path, arguments.methods.split(","))
    elif not compare(arguments.before, arguments.after):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
