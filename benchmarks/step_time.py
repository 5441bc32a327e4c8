"""One training step of the doubly stochastic deep GP, fathomgp beside its peers, in one sitting.

    python benchmarks/step_time.py [--cases SGP,DGP2] [--peers gpytorch] [--rounds 5] [--precision mixed]
    python benchmarks/step_time.py --memory     # peak memory of a step with 10,000 and 100,000 rows

Peers get virtual environments of their own under .peers, made on first use. Both libraries are asked in turn, several
rounds, and the ratio of a round is what counts: the machine's moods fall on both. The last column is the share of the
fastest GEMM rate measured here (either library's) that fathomgp's matrix products reach.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
WORKERS = HERE / "workers"
PEERS = HERE.parent / ".peers"
RESULTS = HERE.parent / "results" / "step_time.csv"
sys.path.insert(0, str(WORKERS))
from cases import CASES, step_flops  # noqa: E402

PACKAGES = {
    "gpytorch": ["torch==2.13.0", "gpytorch", "numpy"],
    "gpflux": ["tensorflow-cpu", "tf-keras", "gpflow", "gpflux", "numpy"],
}
#: What the project promises: GPyTorch's time over ours.
PROMISES = {
    case: 1.0 if case == "SGP500" else 4.0 if "1k" in case else 3.0 if "wide" in case else 2.5 for case in CASES
}


class Worker:
    """A library in its own process, answering one request at a time."""

    def __init__(self, python, script, *arguments):
        command = [str(python), str(WORKERS / script), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )

    def ask(self, request):
        """The answer to one line."""
        self.process.stdin.write(request + "\n")
        while True:  # some peers print banners
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.process.args[1]} stopped: run it by hand to see why.")
            if line.startswith("{"):
                return json.loads(line)


def peer_python(peer):
    """The interpreter of a peer's environment, which is made if it is not there."""
    home = PEERS / peer
    python = home / "bin" / "python"
    if not python.exists():
        print(f"Installing {peer} into {home} ...", flush=True)
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[peer]], check=True)
    return python


def our_worker(precision):
    return Worker(os.environ.get("FATHOMGP_PYTHON", sys.executable), "fathomgp_step.py", precision)


def compare_memory(precision):
    """Peak memory of a process that makes steps of DGP2-wide, with ten times the rows and without."""
    small, large = (our_worker(precision).ask(case)["peak_mib"] for case in ("DGP2-wide", "DGP2-wide-100k"))
    print(
        f"10,000 rows a step: {small:.0f} MiB; 100,000 rows: {large:.0f} MiB; ratio {large / small:.2f} (promised 1.3)"
    )


def compare(case, ours, peers, rounds):
    """Medians over rounds of our time, the peers' times and the ratios within a round."""
    mine, theirs = [], {name: [] for name in peers}
    for _ in range(rounds):
        mine.append(ours.ask(case)["ms"])
        for name, worker in peers.items():
            theirs[name].append(worker.ask(case)["ms"])
    ratios = {
        name: statistics.median(t / m for t, m in zip(times, mine, strict=True)) for name, times in theirs.items()
    }
    return statistics.median(mine), {name: statistics.median(times) for name, times in theirs.items()}, ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default="gpytorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="mixed", choices=("mixed", "double"))
    parser.add_argument("--memory", action="store_true", help="compare peak memory of small and large batches instead")
    options = parser.parse_args()
    if options.memory:
        return compare_memory(options.precision)
    ours = our_worker(options.precision)
    peers = {name: Worker(peer_python(name), f"{name}_step.py") for name in options.peers.split(",")}
    peak = max(worker.ask("peak")["gflops"] for worker in (ours, *peers.values()))
    print(f"GEMM peak here: {peak:.0f} GFLOP/s (float32). Precision of fathomgp: {options.precision}.")
    print(
        f"{'case':14}{'fathomgp ms':>12}" + "".join(f"{name + ' ms':>14}{'ratio':>8}" for name in peers) + "   of peak"
    )
    RESULTS.parent.mkdir(exist_ok=True)
    rows, kept = [], True
    for case in options.cases.split(","):
        mine, theirs, ratios = compare(case, ours, peers, options.rounds)
        share = 1e-6 * step_flops(case) / mine / peak
        ratio = ratios.get("gpytorch", float("inf"))
        mark = "" if ratio >= PROMISES[case] else f"  (promised {PROMISES[case]:.1f}x)"
        kept &= ratio >= PROMISES[case]
        cells = "".join(f"{theirs[name]:14.1f}{ratios[name]:7.2f}x" for name in peers)
        print(f"{case:14}{mine:12.1f}{cells}{share:10.0%}{mark}", flush=True)
        for name in peers:
            rows.append([case, options.precision, name, round(mine, 2), round(theirs[name], 2), round(ratios[name], 3)])
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows([["case", "precision", "peer", "fathomgp_ms", "peer_ms", "ratio"], *rows])
    print("All ratios hold." if kept else "Some ratios fall short.")


if __name__ == "__main__":
    main()
