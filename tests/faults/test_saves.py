"""Saves that meet other saves, readers, SIGKILL and full disks."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import toy
from fathomgp.errors import FitWarning, ModelFileError, SettingError, WriteError
from fathomgp.fitting import Checkpointing, fit_model
from fathomgp.persistence import load_bundle, save_bundle

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}


def start_writer(directory, seed, rounds):
    """A writer that waits for a line on its standard input."""
    command = [sys.executable, str(HERE / "writer.py"), str(directory), str(seed), str(rounds)]
    child = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def go(child):
    child.stdin.write("\n")
    child.stdin.close()
    child.stdout.close()


def check_whole(content):
    assert np.array_equal(content["array"], np.full(2000, content["number"]))


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def test_writers_and_readers_at_once_see_whole_models_only(tmp_path):
    save_bundle(tmp_path, "model", {"number": 0.0, "array": np.zeros(2000)})
    children = [start_writer(tmp_path, seed, 60) for seed in (1, 2, 3)]
    for child in children:
        go(child)
    loads = 0
    while any(child.poll() is None for child in children):
        check_whole(load_bundle(tmp_path, "model"))
        loads += 1
    assert [child.wait() for child in children] == [0, 0, 0]
    assert loads > 10
    last = load_bundle(tmp_path, "model")
    check_whole(last)
    assert last["number"] % 1000.0 == 59.0
    assert files(tmp_path) == ["model.safetensors"]


def test_killed_saves_leave_a_whole_model_and_one_temporary_file_at_most(tmp_path, rng):
    save_bundle(tmp_path, "model", {"number": 0.0, "array": np.zeros(2000)})
    for seed in (1, 2, 3):
        child = start_writer(tmp_path, seed, 10**6)
        go(child)
        time.sleep(0.2 + 0.02 * rng.random())
        child.kill()
        assert child.wait() == -signal.SIGKILL
        check_whole(load_bundle(tmp_path, "model"))
        assert len(files(tmp_path)) <= 2
    save_bundle(tmp_path, "model", {"number": 1.0})
    assert files(tmp_path) == ["model.safetensors"]


def fit_walk(key, **settings):
    return fit_model(toy.Walk(), toy.tiny_model(), toy.tiny_source(), key=key, verbose=False, **settings)


def full_disk(monkeypatch, name):
    def refuse(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_told_in_a_sentence_and_leaves_the_old_file(tmp_path, monkeypatch, call):
    save_bundle(tmp_path, "model", {"number": 1.0})
    full_disk(monkeypatch, call)
    with pytest.raises(WriteError, match=r"cannot be written \(No space left on device\): make room"):
        save_bundle(tmp_path, "model", {"number": 2.0})
    monkeypatch.undo()
    assert load_bundle(tmp_path, "model") == {"number": 1.0}
    assert files(tmp_path) == ["model.safetensors"]


def test_a_full_disk_during_a_fit_costs_a_checkpoint_and_not_the_fit(tmp_path, monkeypatch, key):
    settings = Checkpointing(tmp_path, every_seconds=None, every_steps=8)
    calm = fit_walk(key)
    full_disk(monkeypatch, "fsync")
    with pytest.warns(FitWarning, match="The fit goes on, but a checkpoint was lost: .*No space left") as caught:
        result = fit_walk(key, checkpointing=settings)
    assert len(caught) == 1
    assert np.array_equal(result.posterior.state.position, calm.posterior.state.position)
    assert len(result.messages) == len(calm.messages) + 1


def test_a_place_that_takes_no_files_is_refused_before_the_fit(tmp_path, key):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingError, match=r"checkpoint .*file cannot be written"):
        fit_walk(key, checkpointing=Checkpointing(tmp_path / "file"))
    with pytest.raises(WriteError, match="cannot be written"):
        save_bundle(tmp_path / "file", "model", {})


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".model.safetensors.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(WriteError):
        save_bundle(tmp_path, "model", {})
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_checkpoint_of_the_first_format_is_refused_in_words(tmp_path, key):
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"written by an older version of fathomgp \(format 1"):
        fit_walk(key, checkpointing=Checkpointing(tmp_path))
