"""What commands do to files: no input is overwritten, outputs are whole or absent, bad files end in one line."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import fathomgp
from fathomgp._outputs import check_writable, refuse_inputs, replacing
from fathomgp.bench import ResultFile
from fathomgp.cli._files import TableWriter
from fathomgp.cli._fit import _hold_out
from fathomgp.errors import DataError, SettingError

STREAM = ("--target", "b", "--warm-up", "20", "--depth", "1", "--num-inducing", "5")
EXACT = ("--method", "exact", "--max-iter", "2", "--quiet")


@pytest.fixture
def table(rng, tmp_path):
    X = rng.normal(size=60)
    path = tmp_path / "d.csv"
    pd.DataFrame({"a": X, "b": np.sin(X) + 0.1 * rng.normal(size=60)}).to_csv(path, index=False)
    return path


# --- no output is an input --------------------------------------------------------------------------------------------


def test_a_stream_never_empties_its_input(run, table, tmp_path):
    before = table.read_bytes()
    os.link(table, tmp_path / "hard.csv")
    os.symlink(table, tmp_path / "soft.csv")
    for out in (table, tmp_path / "hard.csv", tmp_path / "soft.csv", tmp_path / "." / "d.csv"):
        result = run("stream", table, *STREAM, "-o", out, "--model", tmp_path / "m", code=2)
        assert "would overwrite the data" in result.stderr
        assert table.read_bytes() == before


def test_hard_links_of_the_data_are_not_overwritten_by_predictions(run, table, tmp_path):
    run("fit", table, "--target", "b", "--out", tmp_path / "m", *EXACT)
    os.link(table, tmp_path / "hard.csv")
    before = table.read_bytes()
    result = run("predict", tmp_path / "m", table, "-o", tmp_path / "hard.csv", code=2)
    assert "would overwrite the data" in result.stderr
    assert (tmp_path / "hard.csv").read_bytes() == before


def test_standard_input_is_an_input_too(table):
    with table.open() as file, pytest.raises(SettingError, match="would overwrite the data"):
        refuse_inputs("-o", table, [file.fileno()])


def test_outputs_are_whole_or_absent(tmp_path):
    target, link = tmp_path / "t", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with contextlib.suppress(RuntimeError), replacing(link) as part:
        part.write_text("half")
        raise RuntimeError
    with replacing(target):
        pass
    assert target.read_text() == "old"
    with replacing(link) as part:
        part.write_text("new")
    assert (target.read_text(), link.is_symlink()) == ("new", True)
    assert sorted(os.listdir(tmp_path)) == ["link", "t"]
    with pytest.raises(SettingError, match="is no regular file"), replacing("/dev/null"):
        pass


def test_labels_do_not_become_formulas(tmp_path, capsys):
    labels = ["=1+1", "+x", "-x", "@x", "\tx", "-1", "+2.5", "-", "plain", "a=b", ""]
    frame = pd.DataFrame({"label": labels, "=p": 1.0, "p_=1+1": -1.0})
    for suffix in ("csv", "parquet"):
        with TableWriter(tmp_path / f"o.{suffix}") as writer:
            writer.write(frame)
            writer.write(frame)
    found = pd.read_csv(tmp_path / "o.csv", keep_default_na=False)
    assert found.label.tolist() == ["'=1+1", "'+x", "'-x", "'@x", "'\tx", "-1", "+2.5", "'-", "plain", "a=b", ""] * 2
    assert found.columns.tolist() == ["label", "'=p", "p_=1+1"]
    assert capsys.readouterr().err.count("got an apostrophe in front") == 1
    assert pd.read_parquet(tmp_path / "o.parquet").label.tolist() == labels * 2


def test_a_file_that_is_no_result_file_is_not_cut(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n3,4")
    with pytest.raises(DataError, match="has other columns"):
        ResultFile(path, ("x", "y"), ("x",))
    assert path.read_text() == "a,b\n1,2\n3,4"
    path.write_bytes("a,b\nä,2".encode("latin-1"))
    with pytest.raises(DataError, match="has other columns"):
        ResultFile(path, ("x", "y"), ("x",))


def test_a_figure_does_not_replace_the_results_beside_it(run, tmp_path):
    (tmp_path / "r.png").write_text("mine")
    for command in (("multimodal",), ("mcem",), ("convergence",), ("gaussianity", "--datasets", "yacht")):
        result = run("bench", *command, "--out", tmp_path / "r.png", code=2)
        assert "which is no .csv file" in result.stderr
    assert (tmp_path / "r.png").read_text() == "mine"


def test_a_fit_replaces_a_model_only_when_told_to(run, table, tmp_path):
    command = ("fit", table, "--target", "b", "--out", tmp_path / "m", *EXACT)
    run(*command)
    assert "holds a model already: name" in run(*command, "--random-state", "5", code=2).stderr
    assert fathomgp.load(tmp_path / "m").random_state == 0
    run(*command, "--random-state", "5", "--force")
    assert fathomgp.load(tmp_path / "m").random_state == 5


# --- streams ----------------------------------------------------------------------------------------------------------


def test_answers_that_were_lost_are_not_passed_over(run, table, tmp_path):
    half, out = tmp_path / "half.csv", tmp_path / "o.csv"
    half.write_text("".join(table.read_text().splitlines(keepends=True)[:41]))
    places = ("-o", out, "--model", tmp_path / "m")
    run("stream", half, *STREAM, *places)
    kept = out.read_text()
    for content, count in ((None, "0"), (kept[: len(kept) // 2], "1[0-9]|2[0-9]"), (kept[:-5], "39")):
        if content is None:
            out.unlink()
        else:
            out.write_text(content)
        message = run("stream", table, *STREAM, *places, code=2).stderr
        assert pd.Series([message]).str.contains(rf"holds (?:{count}) answers, but the model has met 40 rows").all()
        assert (out.read_text() if out.exists() else None) == content
    out.write_text("something else\n")
    assert "holds no answers of this stream" in run("stream", table, *STREAM, *places, code=2).stderr
    out.write_text(kept + "1,2,3\n1,")
    run("stream", table, *STREAM, *places)
    assert out.read_text().startswith(kept)
    assert len(out.read_text().splitlines()) == 61
    assert "1,2,3" not in out.read_text()


def test_an_interrupt_between_learning_and_writing_loses_no_answer(run, table, tmp_path, monkeypatch):
    from fathomgp.cli._stream import _Session

    places = ("-o", tmp_path / "o.csv", "--model", tmp_path / "m", "--block", "10")
    write = _Session._write

    def interrupted(self, answers):
        if self.rows > 40:
            raise KeyboardInterrupt
        write(self, answers)

    monkeypatch.setattr(_Session, "_write", interrupted)
    run("stream", table, *STREAM, *places, code=130)
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 41
    monkeypatch.undo()
    assert "Going on after row 40" in run("stream", table, *STREAM, *places).stderr
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 61


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a,b\n" + b"1,2,3\n" * 30, "Line 2 of d.csv has 3 fields"),
        (b"a,b\n" + b"1,2\n" * 10 + b"1," * 500_000 + b"1\n", "Line 12 of d.csv has 500,001 fields"),
        ("a,b\n1,ä\n".encode("latin-1"), "not in UTF-8 (byte 0xe4 in line 2)"),
        ("a,b\n1,2\n".encode("utf-16"), "is in UTF-16"),
        (b"\x1f\x8babc", "is compressed with gzip"),
        (b"", "is empty"),
    ],
)
def test_streams_refuse_what_is_no_table(run, tmp_path, content, sentence):
    (tmp_path / "d.csv").write_bytes(content)
    places = ("-o", tmp_path / "o.csv", "--model", tmp_path / "m")
    assert sentence in run("stream", tmp_path / "d.csv", *STREAM, *places, code=2).stderr
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize("options", [("--block", "-3"), ("--block", "0"), ("--random-state", "-1"), ("-o", "o.txt")])
def test_streams_refuse_bad_settings(run, table, tmp_path, options):
    places = () if "-o" in options else ("-o", tmp_path / "o.csv")
    result = run("stream", table, *STREAM, *places, "--model", tmp_path / "m", *options, code=2)
    assert options[0] in result.stderr
    assert options[1] in result.stderr


# --- what a fit finds out before its work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--random-state", "-1"), "--random-state must be a whole number from 0 to"),
        (("--checkpoint", "d.csv/below"), "cannot be written"),
        (("--out", "d.csv/below"), "cannot be written"),
    ],
)
def test_a_fit_checks_its_places_up_front(run, table, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    out = () if "--out" in arguments else ("--out", "m")
    assert sentence in run("fit", "d.csv", "--target", "b", *out, *EXACT, *arguments, code=2).stderr
    assert sorted(os.listdir(tmp_path)) == ["d.csv"]


def test_cells_are_named_before_rows_are_split(run, tmp_path):
    """Whichever rows train: a hole in any is refused at once, by the line of the file."""
    lines = [f"{i},{i}\n" for i in range(40)]
    for line in (5, 17, 38):
        content = [*lines]
        content[line - 2] = f",{line}\n"
        (tmp_path / "d.csv").write_text("a,b\n" + "".join(content))
        result = run("fit", tmp_path / "d.csv", "--target", "b", "--out", tmp_path / "m", *EXACT, code=2)
        assert f"Column 'a' of d.csv contains NaN (first in line {line})" in result.stderr
        assert not (tmp_path / "m").exists()


def test_a_label_of_test_rows_alone_goes_to_the_training_rows():
    y = pd.Series(["a", "b"] * 20)
    test = _hold_out(y, 0.2, 0, labels=True)[1]
    y[test[0]] = "c"
    train, rest = _hold_out(y, 0.2, 0, labels=True)
    assert test[0] in train
    assert sorted([*train, *rest]) == list(range(40))


def test_a_directory_is_found_unwritable_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "deep", "The checkpoint")
    with pytest.raises(SettingError, match=r"The checkpoint .* cannot be written \(not a directory\)"):
        check_writable(tmp_path / "file" / "below", "The checkpoint")
    assert os.listdir(tmp_path) == ["file"]


CHILD = """
import sys
import fathomgp.cli
from fathomgp.fitting import _loop

class Telling(_loop.Reporter):
    def update(self, event):
        print("ready", flush=True)
        super().update(event)

_loop.Reporter = Telling
fathomgp.cli.main()
"""


@pytest.mark.slow
def test_a_request_to_end_keeps_the_fit(table, tmp_path):
    command = [sys.executable, "-c", CHILD, "fit", str(table), "--target", "b", "--out", str(tmp_path / "m")]
    options = ["--method", "dsvi", "--num-inducing", "5", "--depth", "2", "--max-iter", "100000000"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert "Stopped by the user after" in errors
    assert process.returncode == 0
    assert fathomgp.load(tmp_path / "m").n_iter_ > 0
