"""The analyses of the SGHMC paper as commands: they write tables and figures, and go on where they stopped."""

import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from fathomgp.bench import _gaussianity, _multimodal, _watching
from fathomgp.cli import app
from fathomgp.data import Dataset
from fathomgp.inference import DSVI, SGHMC


@pytest.fixture
def stand_in(monkeypatch, rng):
    X = rng.normal(size=(40, 2))
    Y = np.sin(X[:, :1]) + 0.1 * rng.normal(size=(40, 1))
    test_idx = rng.permutation(40)[None, :4].astype(np.int32)
    dataset = Dataset("boston", X, Y, "real", test_idx, None, None, "a stand-in", "nowhere")
    for module in (_gaussianity, _watching):
        monkeypatch.setattr(module, "load_dataset", lambda name: dataset)
    return dataset


def run(out, *arguments):
    result = CliRunner().invoke(app, ["bench", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with open(out, newline="") as file:
        return result.stdout, list(csv.DictReader(file))


@pytest.mark.slow
def test_multimodal(tmp_path, monkeypatch, flag_off):
    quick = {
        "sghmc": SGHMC(6, 6, draws=3, chains=2, hyperparameters="fixed"),
        "dsvi": DSVI(steps=3, shallow_start=False, test_samples=4),
    }
    monkeypatch.setattr(_multimodal, "METHODS", quick)
    out = tmp_path / "modes.csv"
    text, rows = run(out, "multimodal", "--seeds", "1")
    assert [row["method"] for row in rows] == ["sghmc", "dsvi"]
    assert all(float(row["mode_a"]) + float(row["mode_b"]) == pytest.approx(1.0) for row in rows)
    assert "both modes" in text
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
    assert [len(row["crossings"].split()) for row in rows] == [2, 0]
    assert _multimodal.crossings(np.array([[True, True, False, True], [False] * 4])) == [2, 0]


@pytest.mark.slow
def test_gaussianity(stand_in, tmp_path, monkeypatch, flag_off):
    monkeypatch.setattr(_gaussianity, "kurtosis_p_values", lambda draws: np.array([0.5, 1e-7]))
    monkeypatch.setattr(_gaussianity, "coordinate_r_hat", lambda draws: np.array([1.0, 1.3]))
    out = tmp_path / "normal.csv"
    arguments = ["gaussianity", "--datasets", "boston", "--burn-in", "3", "--sampling", "40", "--chains", "2"]
    text, rows = run(out, *arguments, "--num-inducing", "5")
    assert [(row["depth"], row["below_threshold"], row["apart"]) for row in rows] == [("1", "1", "1"), ("2", "1", "1")]
    assert "threshold 1e-5" in text
    _, again = run(out, *arguments, "--num-inducing", "5")
    assert again == rows


@pytest.mark.slow
@pytest.mark.parametrize(("command", "runs"), [("mcem", 3), ("convergence", 2)])
def test_watched_fits(stand_in, tmp_path, flag_off, command, runs):
    out = tmp_path / "watched.csv"
    extra = ["--batch-size", "20"] if command == "convergence" else []
    arguments = [command, "--dataset", "boston", "--burn-in", "4", "--sampling", "2", *extra]
    text, rows = run(out, *arguments)
    assert len({row["run"] for row in rows}) == runs
    assert all(np.isfinite(float(row["loglik"])) for row in rows)
    assert "where the runs ended" in text
    assert (tmp_path / "watched.png").read_bytes().startswith(b"\x89PNG")
