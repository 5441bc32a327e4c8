"""One process of a distributed fit, for test_distributed; its arguments are in the order of the line below."""

import os
import signal
import sys

rank, processes, port, data, checkpoint, out, kill_at, method = sys.argv[1:]

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)

import numpy as np  # noqa: E402

import toy  # noqa: E402
from fathomgp.cli._streams import leaving_when_lost  # noqa: E402
from fathomgp.data import ParquetSource, Standardizer  # noqa: E402
from fathomgp.fitting import Checkpointing, _devices, fit_model, start_distributed  # noqa: E402
from fathomgp.inference import DSVI  # noqa: E402
from fathomgp.likelihoods import Gaussian  # noqa: E402
from fathomgp.model import build_model  # noqa: E402

if int(processes) > 1:
    start_distributed(f"localhost:{port}", int(processes), int(rank))

_devices._ROWS_A_DEVICE = 1  # the batches here are small, and several devices must share them all the same
steps = [0]


class Source(ParquetSource):
    """Kills its process when the loop asks for the batches of a certain chunk."""

    def feed(self, **request):
        steps[0] += 1
        if steps[0] == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().feed(**request)


with leaving_when_lost():
    source = Source(data, "y", buffer_rows=150, shards=2)
    source = source.standardized(Standardizer.identity(2), Standardizer.identity(1), np.float64)
    if method == "walk":
        inference, model = toy.Walk(batch_size=20, phases=2), toy.tiny_model()
    else:
        x, _, _ = source.subset(500, seed=0)
        model = build_model(x, Gaussian(0.5), 1, depth=2, num_inducing=6)
        inference = DSVI(steps=200, batch_size=20, shallow_start=False, test_samples=5)
    settings = Checkpointing(checkpoint, every_seconds=None, every_steps=4)
    result = fit_model(inference, model, source, key=jax.random.key(7), checkpointing=settings, verbose=False)

if method == "walk":
    leaves = [np.asarray(result.posterior.state.position)]
else:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.posterior) if hasattr(leaf, "dtype")]
if int(rank) == 0:
    np.savez(out, *leaves, objective=result.history["objective"])
