"""Saves: killed, beside other writers and readers, on full disks; and append-only files whose writers are killed."""

import multiprocessing
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time

import numpy as np
from outcomes import Tally, ending

import fathomgp.estimators  # noqa: F401  (so that the processes to come have it)
from fathomgp.bench import ResultFile
from fathomgp.errors import FathomError, WriteError
from fathomgp.persistence import load_bundle, save_bundle

NAMES = ("kills of saves", "writers and readers at once", "full disks", "kills of append-only files")
_SIZE = 20_000
_COLUMNS = ("number", "text")


def content(number):
    return {"number": float(number), "array": np.full(_SIZE, float(number))}


def is_whole(found):
    return np.array_equal(found["array"], np.full(_SIZE, found["number"]))


def save_for_ever(directory, first, begin, rounds=10**9):
    """In a process of its own: save again and again."""
    begin.wait()
    for number in range(first, first + rounds):
        save_bundle(directory, "model", content(number))


def append_for_ever(path, pipe):
    """In a process of its own: append rows, and tell which ones the disk has."""
    results = ResultFile(path, _COLUMNS, ("number",))
    pipe.send(len(results.rows))
    for number in range(len(results.rows), 10**9):
        results.append({"number": number, "text": f"row {number}, with a comma\nand a line"})
        pipe.send(number + 1)


def context():
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["fathomgp.estimators", "fathomgp.bench"])
    return found


def stop(child):
    child.kill()  # SIGKILL, unless it has just ended
    child.join()


def kill_saves(tally, budget):
    """A save is killed at a random moment: what is there is whole, and at most one temporary file is left."""
    with tempfile.TemporaryDirectory() as place:
        save_bundle(place, "model", content(-1))
        while tally.done + tally.counts["cases"] < budget:
            rng = np.random.default_rng([1, tally.done + tally.counts["cases"]])
            begin = context().Event()
            child = context().Process(target=save_for_ever, args=(place, int(rng.integers(10**6)), begin))
            child.start()
            begin.set()
            child.join(0.1 + float(rng.exponential(0.2)))
            stop(child)
            tally.add(*_judge(place), "")
            if tally.counts["cases"] % 20 == 0:
                tally.write()
        tally.write()


def _judge(place):
    try:
        whole = is_whole(load_bundle(place, "model"))
    except FathomError as error:
        return "lost", str(error)
    left = os.listdir(place)
    return ("fine" if whole and len(left) <= 2 else "lost"), f"files: {left}"


def write_and_read_at_once(tally, budget):
    """Three writers, and a reader that loads all the time; at the end one of the last saves is there, and only it."""
    while tally.done < budget:
        with tempfile.TemporaryDirectory() as place:
            save_bundle(place, "model", content(-1))
            begin = context().Event()
            firsts = (1000, 2000, 3000)
            children = [context().Process(target=save_for_ever, args=(place, n, begin, 40)) for n in firsts]
            for child in children:
                child.start()
            begin.set()
            until, found = time.monotonic() + 300.0, []
            while any(child.is_alive() for child in children) and time.monotonic() < until:
                found.append(_judge(place)[0])
            hung = any(child.is_alive() for child in children)
            for child in children:
                stop(child)
            last = load_bundle(place, "model")["number"] if not hung else 39.0
            bad = found.count("lost") + (last % 1000 != 39.0) + (len(os.listdir(place)) != 1 and not hung)
            raw = any(child.exitcode not in (0, -signal.SIGKILL) for child in children)
            kind = "hung" if hung else "lost" if bad else "raw" if raw else "fine"
            tally.add(kind, f"{len(found)} loads", f"{bad} bad, files {os.listdir(place)}")
            tally.write()


def fill_disks(tally, budget):
    """The disk takes so many bytes and no more: the save says so, and the file before it stays."""
    whole, before = resource.getrlimit(resource.RLIMIT_FSIZE), content(1)
    while tally.done < budget:
        with tempfile.TemporaryDirectory() as place:
            path = save_bundle(place, "model", before)
            size = path.stat().st_size
            for cut in np.linspace(0, size - 1, min(200, budget - tally.done)).astype(int):
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(cut), whole[1]))
                try:
                    kind, said = ending(lambda place=place: save_bundle(place, "model", content(2)))
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, whole)
                stays = load_bundle(place, "model")["number"] == 1.0 and os.listdir(place) == [path.name]
                good = kind == "refused" and stays
                tally.add("fine" if good else "raw" if stays else "lost", f"{cut} of {size} bytes", f"{kind}: {said}")
        tally.write()


def kill_appends(tally, budget):
    """A writer of rows is killed: every row that it told of is there, whole, and the next writer goes on."""
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "rows.csv"
        while tally.done + tally.counts["cases"] < budget:
            rng = np.random.default_rng([2, tally.done + tally.counts["cases"]])
            here, there = context().Pipe(duplex=False)
            child = context().Process(target=append_for_ever, args=(path, there))
            child.start()
            there.close()
            child.join(0.1 + float(rng.exponential(0.3)))
            stop(child)
            told = 0
            try:
                while here.poll(0):
                    told = here.recv()
            except EOFError:
                pass
            rows = ResultFile(path, _COLUMNS, ("number",)).rows
            good = len(rows) >= told and [row["number"] for row in rows] == [str(n) for n in range(len(rows))]
            good = good and all(row["text"] == f"row {n}, with a comma\nand a line" for n, row in enumerate(rows))
            tally.add("fine" if good else "lost", f"{len(rows)} rows, {told} told", "rows are missing or torn")
            if tally.counts["cases"] % 20 == 0:
                tally.write()
        tally.write()


def run(budget, out):
    """Up to ``budget`` killed saves, and a share of it of the other cases, those in the file included."""
    shares = (1.0, 0.4, 2.0, 0.5)
    parts = (kill_saves, write_and_read_at_once, fill_disks, kill_appends)
    rows = []
    for name, share, part in zip(NAMES, shares, parts, strict=True):
        tally = Tally(name, out)
        part(tally, int(share * budget))
        rows += tally.rows
    return rows


assert issubclass(WriteError, FathomError)

if __name__ == "__main__":
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
