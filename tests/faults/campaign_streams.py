"""``fathomgp stream`` killed at random moments and started again: its answers equal those that nobody disturbed."""

import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from outcomes import Tally

NAME = "kills of streams"
_ROWS = 3000
_KILLS = 4
_PATIENCE = 900.0


def start(table, place, out):
    """The command, in a process of its own."""
    words = ["stream", table, "--target", "y", "-o", out, "--model", place, "--num-inducing", "10", "--block", "100"]
    words += ["--depth", "1", "--kernel", "rbf"]
    return subprocess.Popen(
        [sys.executable, "-m", "fathomgp", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers_of(out):
    """Lines that are there; none before the first."""
    return out.read_bytes().count(b"\n") if out.exists() else 0


def finish(child):
    """``"fine"``, or how it failed, and what it said."""
    try:
        said = child.communicate(timeout=_PATIENCE)[1]
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "hung", ""
    return ("fine" if child.returncode == 0 else "raw"), said[-2000:]


def run(budget, out):
    """Up to ``budget`` kills in all, those in the file included."""
    tally = Tally(NAME, out)
    with tempfile.TemporaryDirectory() as here:
        here = pathlib.Path(here)
        rng = np.random.default_rng(0)
        X = rng.normal(size=(_ROWS, 2))
        y = np.sin(2.0 * X[:, 0]) + 0.1 * rng.normal(size=_ROWS)
        table = here / "data.csv"
        np.savetxt(table, np.column_stack([X, y]), delimiter=",", header="a,b,y", comments="")
        kind, said = finish(start(table, here / "calm", here / "calm.csv"))
        while tally.done < budget:
            kills = min(_KILLS, budget - tally.done)
            if kind == "fine":
                _disturb(
                    tally, table, here / f"model{tally.done}", here / f"out{tally.done}.csv", here / "calm.csv", kills
                )
            else:
                for _ in range(kills):
                    tally.add(kind, "the stream that nobody disturbed", said)
            tally.write()
    return tally.rows


def _disturb(tally, table, place, out, calm, kills):
    rng = np.random.default_rng([3, tally.done])
    for number in range(kills):
        child = start(table, place, out)
        target, until = int(rng.integers(0, _ROWS)), time.monotonic() + _PATIENCE
        while child.poll() is None and answers_of(out) < target and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(float(rng.exponential(0.05)))
        child.kill()  # SIGKILL, unless it has just ended
        said = child.communicate()[1]
        if child.returncode not in (0, -signal.SIGKILL):
            tally.add("raw", f"{place.name} kill {number}", said[-2000:])
            return
    kind, said = finish(start(table, place, out))
    if kind == "fine" and out.read_bytes() != calm.read_bytes():
        kind, said = "lost", "the answers differ"
    for number in range(kills):
        tally.add(kind if number == 0 else "fine", place.name, said)


if __name__ == "__main__":
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
