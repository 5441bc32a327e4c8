"""Threads, forked and spawned processes, and two processes of one fit of which one is killed or never comes."""

import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings

import numpy as np
from outcomes import Tally

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fathomgp import DeepGPRegressor, load
from fathomgp.errors import ForkedProcessError

NAMES = ("threads", "fork and spawn", "two processes, one killed", "two processes, one missing")
_HERE = pathlib.Path(__file__).resolve().parent
_METHODS = ("exact", "sgpr", "dsvi")
_CHUNKS = 18


def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2))
    return X, np.sin(X[:, 0])


def fitted(method, seed):
    X, y = rows()
    return DeepGPRegressor(method, num_inducing=5, max_iter=5, random_state=seed, verbose=False).fit(X, y)


def in_threads(tally, budget):
    """Fits, predictions, saves and loads in four threads at once give what they give one after another."""
    X, _ = rows()
    alone = {(method, seed): fitted(method, seed).predict(X) for method in _METHODS for seed in (0, 1)}
    while tally.done < budget:
        with tempfile.TemporaryDirectory() as place:
            jobs = [(_METHODS[(tally.done + i) % 3], i % 2) for i in range(4)]
            found = {}

            def work(number, jobs=jobs, place=place, found=found):
                try:
                    model = fitted(*jobs[number])
                    model.save(f"{place}/{number}")
                    both = model.predict(X), load(f"{place}/{number}").predict(X)
                    found[number] = all(np.array_equal(one, alone[jobs[number]]) for one in both)
                except Exception as error:
                    found[number] = error

            threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(900.0)
            for number, job in enumerate(jobs):
                answer = found.get(number)
                kind = "fine" if answer is True else "hung" if answer is None else "lost" if answer is False else "raw"
                tally.add(kind, job, repr(answer))
        tally.write()


def answer(model, X, pipe):
    try:
        pipe.send(model.predict(X))
    except ForkedProcessError:
        pipe.send("refused")
    except BaseException as error:
        pipe.send(repr(error))


def in_children(tally, budget):
    """A forked process refuses in words, a spawned one answers as its parent does."""
    X, _ = rows()
    models = [fitted(method, 0) for method in _METHODS]
    while tally.done < budget:
        number = tally.done
        way, model = ("fork", "spawn")[number % 2], models[number // 2 % len(models)]
        context = multiprocessing.get_context(way)
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(model, X, there))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child.start()
        found = here.recv() if here.poll(300.0) else None
        child.kill()
        child.join()
        if found is None:
            kind = "hung"
        elif way == "fork":
            kind = "fine" if isinstance(found, str) and found == "refused" else "raw"
        else:
            kind = "raw" if isinstance(found, str) else "fine" if np.array_equal(found, model.predict(X)) else "lost"
        tally.add(kind, f"{way} {model.method}", repr(found)[:300])
        tally.write()


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start_two(trips, directory, kill):
    """Two processes of one fit; ``kill`` holds for each the chunk at which it dies, 0 for none."""
    port = free_port()
    directory.mkdir(exist_ok=True)
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_HERE.parent), os.environ.get("PYTHONPATH", "")])}
    children = []
    for rank in (0, 1):
        words = (rank, 2, port, trips, directory / "checkpoint", directory / "out.npz", kill[rank], "walk")
        command = [sys.executable, str(_HERE.parent / "distributed_child.py"), *map(str, words)]
        children.append(subprocess.Popen(command, env=places, stderr=subprocess.PIPE, text=True))
    return children


def finish(children):
    """Exit codes and what was said; ``None`` for one that hangs."""
    said = []
    for child in children:
        try:
            said.append(child.communicate(timeout=300)[1])
        except subprocess.TimeoutExpired:
            said.append(None)
    for child in children:
        child.kill()
        child.wait()
    return [child.returncode for child in children], said


def arrays(directory):
    with np.load(directory / "out.npz") as found:
        return [found[name].tobytes() for name in found.files]


def kill_one_of_two(tally, budget):
    """One of two processes is killed: the other ends by itself in words, and both, started again, lose nothing."""
    import pandas as pd

    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        rng = np.random.default_rng(0)
        frame = pd.DataFrame({"a": rng.normal(size=400), "b": rng.normal(size=400)}).assign(y=lambda t: np.sin(t.a))
        trips = place / "trips.parquet"
        frame.astype(np.float32).to_parquet(trips, row_group_size=30, index=False)
        codes, said = finish(start_two(trips, place / "calm", (0, 0)))
        while tally.done < budget:
            rng = np.random.default_rng([4, tally.done])
            victim, chunk = tally.done % 2, int(rng.integers(2, _CHUNKS))
            directory = place / f"lost{tally.done}"
            codes, said = finish(start_two(trips, directory, [chunk * (rank == victim) for rank in (0, 1)]))
            kind, words = "fine", str(said[1 - victim])
            if said[1 - victim] is None:
                kind = "hung"
            elif (codes[victim] == -signal.SIGKILL and codes[1 - victim] == -signal.SIGABRT) or (
                codes[victim] == -signal.SIGKILL and "lost another process" not in words
            ):
                kind = "raw"
            if kind == "fine":
                codes, said = finish(start_two(trips, directory, (0, 0)))
                words = str(said)
                kind = "raw" if codes != [0, 0] else "fine" if arrays(directory) == arrays(place / "calm") else "lost"
            tally.add(kind, f"rank {victim} at chunk {chunk}", words[-3000:])
            tally.write()


def leave_one_out(tally, budget):
    """One of two processes never comes: the other says so and ends."""
    code = (
        "import sys; from fathomgp.errors import FathomError; from fathomgp.fitting import start_distributed\n"
        "try: start_distributed(f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), patience=3.0)\n"
        "except FathomError as error: sys.exit(f'Error: {error}')"
    )
    while tally.done < budget:
        rank = tally.done % 2
        words = [sys.executable, "-c", code, str(free_port()), str(rank)]
        child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        (status,), (said,) = finish([child])
        good = status == 1 and said.startswith("Error: ") and len(said.splitlines()) == 1
        tally.add("hung" if said is None else "fine" if good else "raw", f"rank {rank}", str(said)[-2000:])
        tally.write()


def run(budget, out):
    """Up to ``budget`` threads, and a quarter as many cases of each of the others, those in the file included."""
    parts = (in_threads, in_children, kill_one_of_two, leave_one_out)
    rows = []
    for name, part, cases in zip(NAMES, parts, (budget, budget // 4, budget // 4, budget // 4), strict=True):
        tally = Tally(name, out)
        part(tally, cases)
        rows += tally.rows
    return rows


if __name__ == "__main__":
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
