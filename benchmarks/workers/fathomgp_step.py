"""fathomgp's training step as a worker of step_time.py: ``python fathomgp_step.py [mixed|double]``.

Steps run as in a fit: several in one compiled chunk of the loop that all algorithms share, with its guard.
Like the peer's, every step sees the same rows: nothing is gathered.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from cases import NUM_DATA, batch, gemm_gflops, layer_widths, serve
from threadpoolctl import threadpool_limits

from fathomgp.data import ArraySource
from fathomgp.fitting._guard import new_guard
from fathomgp.fitting._loop import run_chunk
from fathomgp.inference import DSVI
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Linear, Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import real

#: Steps of a chunk: a fit takes as many as last a quarter of a second.
CHUNK = 5
DTYPE = {"mixed": np.float32, "double": np.float64}[sys.argv[1] if len(sys.argv) > 1 else "mixed"]


def make_model(depth, inner, num_inducing):
    rng = np.random.default_rng(0)

    def layer(width_in, width_out, last):
        weights = rng.normal(size=(width_in, width_out)) * width_in**-0.5
        mean = Zero(width_out) if last else Linear(weights, trainable=True)
        kernel = RBF(jnp.full(width_in, 2.0), 2.0)
        return Layer(kernel, mean, real(rng.normal(size=(num_inducing, width_in))), width_out, None)

    widths = layer_widths(depth, inner)
    layers = tuple(layer(i, o, number == depth - 1) for number, (i, o) in enumerate(widths))
    return DeepGP(layers, Gaussian(0.01))


def make_step(depth, inner, num_inducing, size):
    inference = DSVI(natural=0.0, shallow_start=False, inner_root=1.0, batch_size=size)
    phase, key = inference.plan(NUM_DATA, 1000)[0], jax.random.key(0)
    model = make_model(depth, inner, num_inducing)
    state = inference.enter(phase, inference.init(model, None, key=key), None, key=key)
    source = ArraySource(*batch(size, DTYPE), dtype=DTYPE)
    feed = source.feed(start=0, count=CHUNK, capacity=CHUNK, batch_size=size, batches_per_step=1, seed=0)
    guard, done = new_guard(), 0

    def step():
        nonlocal state, guard, done
        state, guard, infos, *_ = run_chunk(inference, phase, state, guard, feed, done, CHUNK, key, CHUNK)
        infos.objective.block_until_ready()
        done += CHUNK

    return step


def peak():
    a = jnp.asarray(np.random.default_rng(0).normal(size=(2000, 2000)), DTYPE)
    multiply = jax.jit(jnp.matmul)
    return gemm_gflops(lambda: multiply(a, a).block_until_ready())


with jax.enable_x64(True), threadpool_limits(1, user_api="blas"):
    serve(make_step, peak, steps_a_call=CHUNK)
