"""The cost of an SGHMC iteration beside a DSVI iteration of the same model, batch and precision, in one process.

Havasi et al. (2018) report 1.6 times less for a burn-in iteration (a step of the sampler and one of the
hyperparameters). An iteration of the sampling phase, with the factors of k(Z, Z) at hand, should cost a third or less.

    python benchmarks/sghmc_cost.py [--depth 2] [--precision mixed] [--steps 20] [--rounds 3]

One chain, inner width 8, M = 100, batches of 10,000 rows. Rounds alternate; the best time of each counts.
"""

import argparse
import time

import jax
import numpy as np

from fathomgp.data import ArraySource
from fathomgp.fitting._guard import new_guard
from fathomgp.fitting._loop import run_chunk
from fathomgp.inference import DSVI, SGHMC
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model

ROWS, BATCH, WIDTH, INDUCING = 20_000, 10_000, 8, 100
BURN_IN, SAMPLING = 1.6, 3.0


def problem(depth, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH))
    y = np.sin(x[:, :1]) * x[:, 1:2] + 0.1 * rng.normal(size=(ROWS, 1))
    model = build_model(x[:2000], Gaussian(0.05), 1, depth=depth, num_inducing=INDUCING)
    return model, ArraySource(x, y, dtype=dtype)


def iteration(inference, name, model, source, steps):
    """A function that runs so many steps of the first phase of that name and returns the seconds of one."""
    key = jax.random.key(0)
    state = inference.init(model, source, key=key)
    for phase in inference.plan(source.num_data, None):
        state = inference.enter(phase, state, source, key=key)
        if phase.name == name:
            break
    feed = source.feed(
        start=0, count=steps, capacity=steps, batch_size=BATCH, batches_per_step=phase.batches_per_step, seed=0
    )

    def run():
        began = time.perf_counter()
        answer = run_chunk(inference, phase, state, new_guard(), feed, 0, steps, key, steps)
        jax.block_until_ready(answer[2].objective)
        return (time.perf_counter() - began) / steps

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--precision", default="double", choices=("double", "mixed"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with jax.enable_x64(True):
        model, source = problem(arguments.depth, np.float64 if arguments.precision == "double" else np.float32)
        common = {"batch_size": BATCH, "shallow_start": False}
        runs = {
            "DSVI": iteration(DSVI(**common), "optimise", model, source, arguments.steps),
            "SGHMC, sweep": iteration(SGHMC(chains=1, **common), "sweep", model, source, arguments.steps),
            "SGHMC, burn-in": iteration(SGHMC(chains=1, **common), "burn-in", model, source, arguments.steps),
            "SGHMC, sampling": iteration(SGHMC(chains=1, **common), "sampling", model, source, arguments.steps),
        }
        for run in runs.values():
            run()  # compiles
        best = dict.fromkeys(runs, np.inf)
        for _ in range(arguments.rounds):
            best = {name: min(best[name], run()) for name, run in runs.items()}
    ratios = {name: best["DSVI"] / seconds for name, seconds in best.items()}
    print(f"depth {arguments.depth}, {arguments.precision}:")
    for name, seconds in best.items():
        print(f"  {name:16} {1000 * seconds:7.1f} ms an iteration, DSVI / this = {ratios[name]:.2f}")
    held = ratios["SGHMC, burn-in"] >= BURN_IN and ratios["SGHMC, sampling"] >= SAMPLING
    print(f"At least {BURN_IN} in burn-in and {SAMPLING} in sampling: {'holds' if held else 'FAILS'}.")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
