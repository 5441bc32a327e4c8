"""SIGKILL at random moments of every method's fit; what is resumed must equal what nobody disturbed, bit for bit.

A fit is killed up to three times in a row, at a random step or at a random second (so also while it compiles, reads a
checkpoint or writes one), then left alone. Each kill is a case.
"""

import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time

import numpy as np
from outcomes import Tally

NAME = "kills of fits"
#: Settings of each method that make a short fit with several phases and checkpoints.
METHODS = {
    "exact": {},
    "sgpr": {},
    "dsvi": {"depth": 2, "batch_size": 16},
    "decoupled": {"depth": 2},
    "sghmc": {"depth": 2},
    "stride": {"depth": 2},
    "sequential": {"depth": 2},
    "aep": {"depth": 2},
    "meanfield": {"depth": 2},
    "classes": {"depth": 2},
}
_STEPS = 12
_ROWS = 40
_EVERY = 2
_KILLS = 3
_PATIENCE = 3600.0
#: What multiprocessing says when the process that starts all others has gone (an impatient neighbour ended it): nothing
#: about the fit.
_NO_SERVER = 255


def fit(method, directory, place, pipe):
    """In a process of its own: fit with checkpoints in a directory, and leave all that was learned at a place."""
    import warnings

    import jax

    import fathomgp.estimators._base as base
    from fathomgp import DeepGPClassifier, DeepGPRegressor
    from fathomgp.fitting import Checkpointing

    warnings.simplefilter("ignore")
    base.Checkpointing = lambda folder: Checkpointing(folder, every_seconds=None, every_steps=_EVERY)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(_ROWS, 2))
    y = np.sin(2.0 * X[:, 0]) + 0.1 * rng.normal(size=_ROWS)
    settings = {"num_inducing": 6, "max_iter": _STEPS, "random_state": 0, "verbose": False, **METHODS[method]}
    tell = {"checkpoint": directory, "callbacks": [lambda event: pipe.send(event["total"])]}
    if method == "classes":
        estimator = DeepGPClassifier("dsvi", **settings, **tell).fit(X, y > 0)
    else:
        estimator = DeepGPRegressor(method, **settings, **tell).fit(X, y)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(estimator.posterior_) if isinstance(leaf, jax.Array)]
    part = pathlib.Path(f"{place}.part.npz")
    np.savez(part, *leaves, objective=estimator.history_["objective"])
    os.replace(part, place)


def spawn(method, directory, place):
    """Start a fit; gives the process and the end of a pipe where it tells its steps."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fathomgp.estimators"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=fit, args=(method, str(directory), str(place), there))
    child.start()
    there.close()
    return child, here


def kill(child, here, rng, seconds):
    """Kill at a random step, or at a random second; false if the fit ended before."""
    if rng.random() < 0.7:
        target, until = int(rng.integers(1, 2 * _STEPS)), time.monotonic() + _PATIENCE
        try:
            while time.monotonic() < until and here.poll(until - time.monotonic()) and here.recv() < target:
                pass
        except EOFError:
            pass
        time.sleep(float(rng.exponential(0.02)))
    else:
        child.join(float(rng.uniform(0.0, seconds)))
    child.kill()  # SIGKILL, unless it has just ended
    child.join()
    return child.exitcode == -signal.SIGKILL


def leave_alone(method, directory, place):
    """Fit to the end: how long it took, or words that say how it failed."""
    for _ in range(5):
        end = _fit_to_the_end(method, directory, place)
        if end != f"ended with code {_NO_SERVER}":
            break
    return end


def _fit_to_the_end(method, directory, place):
    began = time.monotonic()
    child, here = spawn(method, directory, place)
    until = began + _PATIENCE
    try:
        while time.monotonic() < until and here.poll(max(0.0, until - time.monotonic())):
            here.recv()
    except EOFError:
        pass
    child.join(10.0)
    if child.exitcode is None:
        child.kill()
        child.join()
        return "hung"
    return time.monotonic() - began if child.exitcode == 0 else f"ended with code {child.exitcode}"


def same(one, two):
    """Whether two files hold the same arrays, bit for bit."""
    with np.load(one) as a, np.load(two) as b:
        return a.files == b.files and all(a[name].tobytes() == b[name].tobytes() for name in a.files)


def run(budget, out):
    """Up to ``budget`` kills in all, those in the file included."""
    tally = Tally(NAME, out)
    with tempfile.TemporaryDirectory() as place:
        calm = {}
        while tally.done < budget:
            rng = np.random.default_rng(tally.done)
            method = list(METHODS)[(tally.done // _KILLS) % len(METHODS)]
            root = pathlib.Path(tempfile.mkdtemp(dir=place))
            if method not in calm:
                target = pathlib.Path(place) / f"{method}.npz"
                calm[method] = (target, leave_alone(method, root / "calm", target))
            target, seconds = calm[method]
            _disturb(tally, method, root, target, seconds, rng, min(_KILLS, budget - tally.done))
            tally.write()
    return tally.rows


def _disturb(tally, method, root, target, seconds, rng, kills):
    if isinstance(seconds, str):
        for _ in range(kills):
            tally.add("raw", method, f"the fit that nobody disturbed {seconds}")
        return
    moments = 0
    for _ in range(kills):
        child, here = spawn(method, root / "checkpoint", root / "out.npz")
        moments += kill(child, here, rng, seconds)
        if child.exitcode not in (0, -signal.SIGKILL, _NO_SERVER):
            tally.add("raw", method, f"ended with code {child.exitcode}")
            return
    end = leave_alone(method, root / "checkpoint", root / "out.npz")
    if isinstance(end, str):
        kind, said = ("hung" if end == "hung" else "raw"), f"after {moments} kills the fit {end}"
    else:
        kind, said = ("fine" if same(root / "out.npz", target) else "lost"), "the resumed fit differs"
    left = sorted(path.name for path in (root / "checkpoint").iterdir())
    if kind == "fine" and len(left) > 2:
        kind, said = "lost", f"files left behind: {left}"
    for number in range(kills):
        tally.add(kind if number == 0 else "fine", method, said)


if __name__ == "__main__":
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
