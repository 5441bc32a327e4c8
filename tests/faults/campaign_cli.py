# ruff: noqa: E501 (tables of odd values)
"""Commands on damaged files and with options that nobody should pass.

Whatever happens, a command ends well or with one line on stderr, takes no row that does not fit its header, changes no
input, leaves no half-written file and puts no formula into a file. Most commands run in this process and stop where a fit would begin; some are real processes.
"""

import contextlib
import csv
import gzip
import hashlib
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
from outcomes import Hung, Tally, time_limit

NAME = "commands on damaged files"
_PART = 100
#: One command in so many is a process of its own: starting one takes seconds.
_PROCESS_EVERY = 100
#: On a crowded machine an honest command took two minutes.
_SECONDS = 900


class Enough(Exception):  # noqa: N818
    """The fit was reached."""


def reach(*arguments, **settings):
    """In place of ``fit_model``."""
    raise Enough


# --- what is damaged --------------------------------------------------------------------------------------------------


def make_files(place, *, few):
    """Tables and models that are whole; damaged copies are made of these. With ``few`` only the cheapest model."""
    from typer.testing import CliRunner

    from fathomgp.cli import app

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"height": rng.normal(size=30), "width": rng.normal(size=30)})
    frame["price"] = np.sin(frame.height) + 0.1 * rng.normal(size=30)
    frame["kind"] = np.where(frame.height > 0.0, "=1+1", "b")
    frame[["height", "width", "price"]].to_csv(place / "data.csv", index=False)
    frame[["height", "width", "kind"]].to_csv(place / "kinds.csv", index=False)
    frame[["height", "width", "price"]].to_parquet(place / "data.parquet")
    (place / "many").mkdir()
    for part in range(2):
        frame[["height", "width", "price"]].to_parquet(place / "many" / f"{part}.parquet")
    small = ["--depth", "1", "--num-inducing", "5", "--quiet"]
    commands = (
        ["fit", "data.csv", "--target", "price", "--out", "model", "--method", "exact", "--max-iter", "2", "--quiet"],
        ["fit", "kinds.csv", "--target", "kind", "--out", "labels", "--method", "dsvi", "--max-iter", "2", *small],
        ["fit", "data.csv", "--target", "price", "--out", "online", "--method", "sequential", *small],
    )
    for arguments in commands[:1] if few else commands:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def damage(content, choose):
    """Bytes that were a table."""
    lines = content.split(b"\n")
    line = choose.randrange(len(lines))
    fields = lines[line].split(b",")
    field = choose.randrange(len(fields))
    odd = (b"", b"x", b"nan", b"inf", b"1e999", b"9" * 400, b'"', b'""', b"1,5", b"-", b"\x00", b"\xe4", b"\xff\xfe", b"True",
           b"=1+1", b"1 000", b"0x10", b"1_0", b"\xef\xbb\xbf", "１".encode(), b"\r", b"'", b"2020-01-01", b"1e308")  # fmt: skip

    def with_field(value):
        return b"\n".join(
            [*lines[:line], b",".join([*fields[:field], value, *fields[field + 1 :]]), *lines[line + 1 :]]
        )

    def flipped():
        changed = bytearray(content)
        for _ in range(choose.randrange(1, 6)):
            changed[choose.randrange(len(changed))] = choose.randrange(256)
        return bytes(changed)

    def as_text():
        return content.decode("utf-8", "replace")

    kinds = (
        lambda: content,
        lambda: with_field(choose.choice(odd)),
        lambda: with_field(choose.choice(odd)),
        flipped,
        lambda: content[: choose.randrange(len(content))],
        lambda: content[choose.randrange(len(content)) :],
        lambda: b"\n".join([*lines[:line], lines[line] + b",1", *lines[line + 1 :]]),
        lambda: b"\n".join([*lines[:line], b",".join(fields[:-1]), *lines[line + 1 :]]),
        lambda: b"\n".join([*lines[:line], *lines[line + 1 :]]),
        lambda: b"\n".join([*lines[: line + 1], *lines[line:]]),
        lambda: b"\n".join([*lines[:line], b"", b"  ", *lines[line:]]),
        lambda: content.replace(b",", b";").replace(b".", b","),
        lambda: content.replace(b",", choose.choice((b"\t", b" ", b"|", b",,"))),
        lambda: content.replace(b"\n", choose.choice((b"\r", b"\r\n", b"\n\n", b"\x00"))),
        lambda: gzip.compress(content),
        lambda: as_text().encode(choose.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig"))),
        lambda: as_text().replace("e", "é").encode("latin-1", "replace"),
        lambda: b"",
        lambda: lines[0],
        lambda: lines[0] + b"\n",
        lambda: bytes(choose.randrange(256) for _ in range(200)),
        lambda: b'"' + content,
        lambda: lines[0] + b"\n" + b"1," * choose.choice((10, 50_000)) + b"1\n",
    )
    return choose.choice(kinds)()


OPTIONS = {
    "fit": {
        "--target": ("price", "kind", "", ",", "prise", "height", "price,width", "=1+1", "height,width,price", "\ud800"),
        "--task": ("regression", "classification", "", "x"),
        "--method": ("exact", "dsvi", "sgpr", "x", ""),
        "--depth": ("1", "0", "-1", "99999999999", "1.5", "nan"),
        "--num-inducing": ("5", "0", "-3", "x"),
        "--hidden-dim": ("2", "2,2", "", ",", "x", "-1", "9" * 30),
        "--kernel": ("rbf", "rbf,rbf", "", ",", "x"),
        "--likelihood": ("gaussian", "softmax", "poisson", "x", ""),
        "--max-iter": ("1", "0", "-1", "9" * 30),
        "--batch-size": ("5", "0", "-1"),
        "--precision": ("double", "half", ""),
        "--missing": ("error", "mask", "x"),
        "--recipe": ("default", "x", ""),
        "--checkpoint": ("checkpoint", "data.csv", "data.csv/below", "", "/dev/null/x", "a\x01b"),
        "--random-state": ("0", "-1", "9" * 30, "x", str(2**32)),
        "--test-fraction": ("0", "0.5", "1", "-1", "nan", "inf", "x"),
        "--out": ("new", "model", "data.csv", "data.csv/below", "", ".", "/dev/null", "many", "x" * 300),
    },
    "predict": {
        "-o": ("p.csv", "p.parquet", "data.csv", "hard.csv", "soft.csv", "p.txt", "", ".", "many", "new/p.csv", "model/p.csv",
               "/dev/null", "x" * 300 + ".csv", "data.csv/p.csv", "many/0.parquet"),
        "--quantiles": ("0.5", "", ",", "0", "1", "nan", "x", "0.1,0.1,0.9", "-1", "1e-300"),
    },
    "evaluate": {"--target": ("price", "kind", "height", "x", "", ",", "price,width")},
    "stream": {
        "--target": ("price", "kind", "x", "", "price,width"),
        "-o": ("s.csv", "data.csv", "hard.csv", "soft.csv", "s.txt", "", ".", "/dev/null", "data.csv/s.csv", "model/model.json"),
        "--model": ("copy", "model", "labels", "data.csv", "", "new"),
        "--warm-up": ("12", "3", "-1", "x"),
        "--block": ("1", "0", "-3", "x"),
        "--forgetting": ("1", "0", "2", "nan", "-1"),
        "--random-state": ("0", "-1"),
        "--num-inducing": ("5", "0", "-1"),
    },
    "convert": {"--out": ("new", "many", "data.csv", "", ".", "/dev/null")},
    "generate": {"--rows": ("5", "0", "-1", "x"), "--out": ("new", "many", "data.csv", ""), "--seed": ("0", "-1", "9" * 30)},
}  # fmt: skip
REQUIRED = {"fit": ("--target", "--out"), "predict": ("-o",), "stream": ("--target", "-o", "--model"), "convert": ("--out",),
            "generate": ("--rows", "--out"), "evaluate": ()}  # fmt: skip
COMMANDS = ("fit", "fit", "predict", "predict", "predict", "evaluate", "stream", "stream", "convert", "generate")
TABLES = (
    "data.csv",
    "data.csv",
    "data.csv",
    "kinds.csv",
    "data.parquet",
    "many",
    "many/0.parquet",
    "nowhere.csv",
    "",
    ".",
    "m*",
)


def make_command(choose):
    """Arguments; mostly one of them is not as it should be."""
    name = choose.choice(COMMANDS)
    options = OPTIONS[name]
    chosen = {option: options[option][0] for option in REQUIRED[name]}
    for option in choose.sample(sorted(options), min(len(options), choose.choice((0, 0, 1, 1, 2, 3)))):
        chosen[option] = choose.choice(options[option])
    model = choose.choice(("model", "model", "model", "labels", "online", "nowhere", "data.csv", ""))
    table = choose.choice(TABLES) if choose.random() < 0.5 else "data.csv"
    start = {
        "fit": ["fit", table],
        "predict": ["predict", model, table],
        "evaluate": ["evaluate", model, table],
        "stream": ["stream", table],
        "convert": ["data", "convert", table],
        "generate": ["data", "generate", choose.choice(("taxi", "collider", "x", ""))],
    }[name]
    extra = ["--method", "exact", "--max-iter", "1"] if name == "fit" and "--method" not in chosen else []
    return [*start, *extra, *(part for pair in chosen.items() for part in pair)]


def damaged_copy(whole, place, choose):
    """A copy of the whole files in which something is damaged, with links to the data."""
    shutil.copytree(whole, place)
    shutil.copytree(place / ("online" if (place / "online").exists() else "model"), place / "copy")
    victims = ("data.csv",) * 6 + ("kinds.csv", "data.parquet", "many/1.parquet")
    victim = place / choose.choice(victims)
    victim.write_bytes(damage(victim.read_bytes(), choose))
    if choose.random() < 0.1:
        files = sorted(path for path in (place / "model").iterdir() if path.is_file())
        victim = choose.choice(files)
        victim.write_bytes(damage(victim.read_bytes(), choose)) if choose.random() < 0.7 else victim.unlink()
    os.link(place / "data.csv", place / "hard.csv")
    os.symlink(place / "data.csv", place / "soft.csv")


# --- what happened ----------------------------------------------------------------------------------------------------


def digests(place):
    """What no command may change: every file that is there before."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.relative_to(place).parts[0] not in ("copy", "new", "checkpoint"):
            found[str(path.relative_to(place))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def judge(arguments, code, errors, before, place, free):
    """How a command ended, and what was seen of it."""
    after = digests(place)
    changed = [name for name, digest in before.items() if after.get(name) != digest and name not in free]
    left = [name for name in after if name.endswith((".part", ".tmp"))]
    if changed or left:
        return "lost", f"changed: {changed}, left: {left}"
    if any(_holds_formula(place / name) for name in after if name not in before and name.endswith(".csv")):
        return "executed", "a formula in an output"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("Note: ")]
    if code == 0 and any(_is_ragged(place / word) for word in arguments if word.endswith(".csv") and word in before):
        return "lost", "rows that do not fit the header were taken"
    if code == 0:
        return ("fine", "") if not any("Traceback" in line for line in lines) else ("raw", errors)
    if code == 2 and ((len(lines) == 1 and lines[0].startswith("Error: ")) or "Usage: " in errors):
        return "refused", errors
    return "raw", f"exit code {code}\n{errors}"


def replaceable(arguments, place):
    """Outputs that exist and are no inputs under any name: these may be replaced."""
    outputs, inputs = set(), []
    for before, word in itertools.pairwise(["", *arguments]):
        if before in ("-o", "--out"):
            outputs.add(word)
        elif _is_file(place / word):
            inputs.append(place / word)
    files = {name for name in outputs if _is_file(place / name)}
    return {name for name in files if not any(os.path.samefile(place / name, file) for file in inputs)}


def _is_file(path):
    with contextlib.suppress(OSError, ValueError):  # names that no file can have
        return path.is_file()
    return False


def _is_ragged(path):
    """Whether rows have more or fewer fields than the header."""
    rows = [
        row
        for row in csv.reader(path.read_text("utf-8-sig", "replace").splitlines(keepends=True))
        if "".join(row).strip()
    ]
    return len({len(row) for row in rows}) > 1


def _holds_formula(path):
    return any(
        cell[:1] in ("=", "@") for line in path.read_text("utf-8", "replace").splitlines() for cell in line.split(",")
    )


def run_here(arguments):
    """The command in this process: its exit code and stderr."""
    from typer.testing import CliRunner

    from fathomgp.cli import app

    with mock.patch("fathomgp.estimators._base.fit_model", reach):
        result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, Enough):
        return 0, ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        import traceback

        return 1, "".join(traceback.format_exception(result.exception)[-8:])
    return result.exit_code, result.stderr


def run_process(arguments):
    """The command as a user starts it."""
    finished = subprocess.run(
        [sys.executable, "-m", "fathomgp", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_SECONDS,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    return finished.returncode, finished.stderr


def attempt(number, whole, place):
    """Command number so and so: how it ended."""
    choose = random.Random(number)
    damaged_copy(whole, place, choose)
    arguments = make_command(choose)
    before, free = digests(place), replaceable(arguments, place)
    alone = number % _PROCESS_EVERY == _PROCESS_EVERY - 1 and not any("\ud800" in word for word in arguments)
    with contextlib.chdir(place):
        try:
            if alone:
                quick = ["--max-iter", "1"] if arguments[0] == "fit" and "--max-iter" not in arguments else []
                code, errors = run_process([*arguments, *quick])
            else:
                with time_limit(_SECONDS):
                    code, errors = run_here(arguments)
        except (Hung, subprocess.TimeoutExpired):
            return "hung", arguments, ""
    kind, said = judge(arguments, code, errors, before, place, free)
    return kind, arguments, said


def run(budget, out):
    """Up to ``budget`` commands in all, those in the file included."""
    tally = Tally(NAME, out)
    if tally.done >= budget:
        return tally.rows
    with tempfile.TemporaryDirectory() as room:
        whole = pathlib.Path(room) / "whole"
        whole.mkdir()
        with contextlib.chdir(whole):
            make_files(whole, few=budget <= _PART)
        while (first := tally.done) < budget:
            for number in range(first, min(first + _PART, budget)):
                place = pathlib.Path(room) / str(number)
                kind, arguments, said = attempt(number, whole, place)
                tally.add(kind, f"{number}: {arguments}", said)
                shutil.rmtree(place, ignore_errors=True)
            tally.write()
    return tally.rows


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
