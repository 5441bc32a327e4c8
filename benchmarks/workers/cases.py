"""The work that every library is timed on: one training step of the doubly stochastic deep GP, and the worker's loop.

A worker reads the name of a case a line and answers with one line of JSON. It stays alive between cases, so that the
benchmark can ask two libraries in turn: the machine's moods then fall on both alike.
"""

import itertools
import json
import resource
import statistics
import sys
import time

import numpy as np

NUM_INPUTS = 8
NUM_DATA = 100_000  # rows that the minibatch stands for

# name: (layers, inner width, inducing points, minibatch)
CASES = {
    "SGP": (1, 1, 100, 10_000),
    "SGP500": (1, 1, 500, 10_000),
    **{f"DGP{depth}": (depth, 1, 100, 10_000) for depth in (2, 3, 4, 5)},
    **{f"DGP{depth}-wide": (depth, 8, 100, 10_000) for depth in (2, 3, 4, 5)},
    **{f"DGP{depth}-wide-1k": (depth, 8, 100, 1_000) for depth in (2, 3, 4, 5)},
}
# DGP2-wide with ten times the rows, for its memory.
LARGE = {"DGP2-wide-100k": (2, 8, 100, 100_000)}


def layer_widths(depth, inner):
    """Pairs of input and output width, layer by layer."""
    widths = [NUM_INPUTS] + [inner] * (depth - 1) + [1]
    return list(itertools.pairwise(widths))


def step_flops(case):
    """Floating-point operations of the matrix products of a step: forward, and twice that backward."""
    depth, inner, m, b = CASES[case]
    forward = sum(2 * m * b * d + 2 * m * m * b * (1 + p) for d, p in layer_widths(depth, inner))
    return 3 * forward


def batch(size, dtype):
    """Synthetic rows."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(size, NUM_INPUTS))
    y = np.sin(x.sum(1, keepdims=True)) + 0.1 * rng.normal(size=(size, 1))
    return x.astype(dtype), y.astype(dtype)


def serve(make_step, peak_gflops, repeats=7, steps_a_call=1):
    """Answer requests on standard input until it closes; ``peak`` asks for the library's own GEMM rate.

    ``steps_a_call`` is how many training steps a call of what ``make_step`` returns makes.
    """
    steps = {}
    for line in sys.stdin:
        case = line.strip()
        if case == "peak":
            print(json.dumps({"gflops": peak_gflops()}), flush=True)
            continue
        if case not in steps:
            steps[case] = make_step(*(CASES | LARGE)[case])
            for _ in range(3):
                steps[case]()
        seconds = statistics.median(timed(steps[case], repeats)) / steps_a_call
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"case": case, "ms": 1e3 * seconds, "peak_mib": mib}), flush=True)


def timed(step, repeats):
    """Seconds of each repeat."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def gemm_gflops(multiply, size=2000, repeats=9):
    """The rate of square matrix products."""
    multiply()
    return 2e-9 * size**3 / statistics.median(timed(multiply, repeats))
