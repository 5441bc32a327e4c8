"""Damaged and hostile model files: refused with a sentence, nothing executed, no memory that the file does not fill.

Blind damage: cut, flipped, inserted, removed, overwritten bytes. Hostile files: the description or the arrays changed
at random and the file sealed again, as someone would who knows the format; some such files are sound, and those must
then answer, or refuse to, in words.
"""

import copy
import os
import pathlib
import random
import resource
import sys
import tempfile

import numpy as np
from outcomes import Tally, ending

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from tampering import read_description, write_description

NAMES = ("blind damage", "files sealed again")
#: What no reader of a model has any business with. Compiled programs may be kept in JAX's cache.
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
    "exec",
)
_MOST_MEMORY = 1 << 20  # kilobytes that a file may cost beyond what was held before
_seen = []


def _listen(event, arguments):
    if _listening and event in _FORBIDDEN:
        _seen.append(f"{event} {arguments!r:.200}")
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if _listening and writes and not str(arguments[0]).startswith(os.environ.get("JAX_COMPILATION_CACHE_DIR", "?")):
        _seen.append(f"{event} {arguments!r:.200}")


_listening = []

#: Values to put in the place of others.
ODD = (
    None, True, False, 0, 1, -1, 7, 10**12, 10**40, "", "x", "x" * 300, "content", "../../etc/passwd", "__class__",
    [], [[]], [1], [None], {}, {"is": "tuple", "items": []}, {"is": "float", "hex": "nan"},
    {"is": "float", "hex": "0x1p99999"}, {"is": "float", "hex": "zz"}, {"is": "dtype", "name": "O"},
    {"is": "dtype", "name": "float32"}, {"is": "strings", "items": ["a"], "shape": [1], "kind": "U"},
    {"is": "strings", "items": ["a"], "shape": [10**9], "kind": "<U500000000"},
    {"is": "strings", "items": [], "shape": [0, 10**18], "kind": "O"}, {"is": "numpy", "at": "nowhere"},
    {"is": "key", "at": "content.fitted.x_scaler_.shift"}, {"is": "object", "tag": "os.system", "fields": {}},
    {"is": "object", "tag": "kernel/rbf", "fields": {}}, {"is": "object", "tag": "mean/zero", "fields": {}},
    {"is": "object", "tag": "method/dsvi", "fields": {}}, {"is": "pickle", "bytes": "gASVJAAAAAAA"}, {"is": []},
    {"is": "dict", "items": {"a": 1}}, {"is": "float", "hex": "0x1.8p+1"},
)  # fmt: skip


def models(place):
    """Small fitted models of several kinds."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 2))
    y = np.sin(X[:, 0])
    few = {"max_iter": 2, "num_inducing": 4, "random_state": 0, "verbose": False}
    for name, model in {
        "exact": DeepGPRegressor("exact", kernel="matern32", **few).fit(X, y),
        "dsvi": DeepGPRegressor("dsvi", depth=2, **few).fit(X, y),
        "classes": DeepGPClassifier("dsvi", depth=1, **few).fit(X, np.where(y > 0, "up", "down")),
        "sequential": DeepGPRegressor("sequential", depth=1, **few).fit(X, y),
    }.items():
        model.save(pathlib.Path(place) / name)
    return [pathlib.Path(place) / name / "model.safetensors" for name in ("exact", "dsvi", "classes", "sequential")]


def blind(data, rng):
    at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 4000))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
    if kind == 3:
        return data[:at] + data[at + rng.randint(1, 9) :]
    if kind == 4:
        return data[:at] + rng.randbytes(16) + data[at + 16 :]
    if kind == 5:
        other = rng.randrange(len(data))
        return data[:at] + data[other : other + 64] + data[at + 64 :]
    return data + rng.randbytes(rng.randint(1, 99))


def nodes(tree, found=None):
    """Every place in a description: (parent, key)."""
    found = [] if found is None else found
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found.append((tree, key))
        nodes(value, found)
    return found


def change(description, rng):
    """Change a description in one to three places."""
    for _ in range(rng.randint(1, 3)):
        places = nodes(description)
        parent, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            del parent[key]
        elif kind == 1:
            parent[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 2:
            other, name = rng.choice(places)
            parent[key] = copy.deepcopy(other[name])
        elif kind == 3 and isinstance(parent, dict):
            parent[rng.choice(("predict", "__class__", "checkpoint", "x", "is", "posterior_", "_seed"))] = rng.choice(
                ODD
            )
        elif kind == 4:
            for _ in range(rng.choice((1, 50, 150, 900))):
                parent[key] = [parent[key]]
        elif kind == 5 and isinstance(parent[key], (int, str)):
            parent[key] = rng.choice((str(parent[key]) + "x", 10**9, -3, str(parent[key])[:-1]))
        elif kind == 6 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(rng.choice(ODD)))


def change_arrays(arrays, rng):
    """Other shapes, types or numbers in one array, or one more or less."""
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    kind = rng.randrange(8)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays["more"] = np.zeros(3)
    elif kind == 2:
        arrays[name] = array.astype(rng.choice((np.float32, np.int64, np.uint8, np.float16, bool)))
    elif kind == 3:
        arrays[name] = array[None]
    elif kind == 4 and array.ndim:
        arrays[name] = array[:-1]
    elif kind == 5:
        arrays[name] = np.full_like(
            array, rng.choice((0, 1)) if array.dtype.kind != "f" else rng.choice((np.nan, np.inf, -1e300, 0))
        )
    elif kind == 6:
        arrays[name] = np.zeros((0, *array.shape), array.dtype)
    else:
        arrays[name] = np.concatenate([np.atleast_1d(array)] * 3)


def hostile(whole, path, rng):
    """Write a file that was changed by someone who knows the format."""
    from safetensors.numpy import load as load_arrays

    path.write_bytes(whole)
    description, arrays = read_description(path), dict(load_arrays(whole))
    try:
        if rng.random() < 0.7:
            change(description, rng)
        if rng.random() < 0.5:
            change_arrays(arrays, rng)
        write_description(path, description, arrays, summaries=rng.random() < 0.8)
    except (AssertionError, ValueError, TypeError, RecursionError):  # nothing that could be sealed
        path.write_bytes(whole[: len(whole) // 2])


def attempt(tally, case, call):
    """How a call ended, with what it tried to execute and what memory it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _seen.clear()
    _listening.append(True)
    try:
        kind, said = ending(call, seconds=120)
    finally:
        _listening.clear()
    if _seen:
        kind, said = "executed", "; ".join(_seen)
    elif resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > _MOST_MEMORY:
        kind, said = "raw", "more than a gigabyte was taken"
    return kind, said


def damage_blindly(tally, budget, paths, place):
    whole = [path.read_bytes() for path in paths]
    while tally.done < budget:
        rng = random.Random(tally.done)
        for number in range(min(1000, budget - tally.done)):
            which = number % len(paths)
            data = blind(whole[which], rng)
            (place / "model.safetensors").write_bytes(data)
            kind, said = attempt(tally, number, lambda: load(place))
            if kind == "fine" and data != whole[which]:
                kind, said = "lost", "damage was not noticed"
            tally.add(kind, f"{paths[which].parent.name} number {tally.done + number}", said)
        tally.write()


def seal_again(tally, budget, paths, place):
    whole = [path.read_bytes() for path in paths]
    X = np.zeros((3, 2))
    while tally.done < budget:
        rng = random.Random(-1 - tally.done)
        for number in range(min(250, budget - tally.done)):
            which = number % len(paths)
            hostile(whole[which], place / "model.safetensors", rng)
            found = []
            kind, said = attempt(tally, number, lambda found=found: found.append(load(place)))
            if kind == "fine" and rng.random() < 0.2:
                kind, said = attempt(tally, number, lambda found=found: found[0].predict(X))
            tally.add(kind, f"{paths[which].parent.name} number {tally.done + number}", said)
        tally.write()


def run(budget, out):
    """Up to ``budget`` blind damages and half as many files sealed again, those in the file included."""
    sys.addaudithook(_listen)
    rows = []
    with tempfile.TemporaryDirectory() as here:
        paths, place = models(here), pathlib.Path(here) / "victim"
        place.mkdir()
        for name, part, cases in zip(NAMES, (damage_blindly, seal_again), (budget, budget // 2), strict=True):
            tally = Tally(name, out)
            part(tally, cases, paths, place)
            rows += tally.rows
    return rows


if __name__ == "__main__":
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
