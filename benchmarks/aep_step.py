"""Step time of approximate EP beside doubly stochastic inference, in one process, and the memory of a step.

python benchmarks/aep_step.py

M = 100, 8 inputs, minibatch 1,000. psi2 needs M (M + 1) / 2 exponentials a row: their time alone is the bound.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fathomgp.data import ArraySource
from fathomgp.inference import AEP, DSVI
from fathomgp.kernels._exponential import exponential
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model

ROWS, INDUCING, INPUTS = 1000, 100, 8


def seconds(function, *arguments, repeats: int = 10) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def step_of(algorithm, width: int, rows: int):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, INPUTS))
    source = ArraySource(x, np.sin(x[:, :1]) + 0.1 * rng.normal(size=(rows, 1)))
    model = build_model(x[:1000], Gaussian(0.1), 1, depth=2, num_inducing=INDUCING, hidden_dim=width)
    state = algorithm.init(model, source, key=jax.random.key(0))
    phase = algorithm.plan(rows, None)[0]
    arrays, rest = eqx.partition(state, eqx.is_array)

    @jax.jit
    def step(arrays, batch):
        return eqx.filter(algorithm.step(phase, eqx.combine(arrays, rest), batch, key=jax.random.key(1)), eqx.is_array)

    return step, (arrays, source.everything())


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    pairs = INDUCING * (INDUCING + 1) // 2
    block = jnp.asarray(-np.random.default_rng(0).uniform(0, 5, size=(100, pairs)))
    bound = seconds(jax.jit(exponential), block) * ROWS / 100
    print(f"{ROWS * pairs:.2g} exponentials alone: {1e3 * bound:.1f} ms")
    for width in (2, INPUTS):
        times = {}
        for algorithm in (AEP(shallow_start=False), DSVI(shallow_start=False)):
            step, arguments = step_of(algorithm, width, ROWS)
            times[type(algorithm).__name__] = seconds(step, *arguments)
        ratio = times["AEP"] / times["DSVI"]
        figures = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())
        print(
            f"width {width}: {figures}; AEP / DSVI {ratio:.1f}; exponentials are {bound / times['AEP']:.0%} of a step"
        )
    for rows in (1000, 4000, 16000):
        step, arguments = step_of(AEP(shallow_start=False, batch_size=rows), 2, rows)
        memory = step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        print(f"minibatch {rows}: {memory / 2**20:.0f} MiB beside the state")


if __name__ == "__main__":
    main()
