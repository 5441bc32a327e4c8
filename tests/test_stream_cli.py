"""Streams on the command line: generate, convert, fit, predict, and their sentences."""

import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def trips(rng, tmp_path):
    directory = tmp_path / "trips"
    directory.mkdir()
    for number in range(3):
        X = rng.normal(size=(90 + number, 2))
        frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "seconds": 60.0 + 5.0 * X[:, 0] + rng.normal(size=len(X))})
        frame.to_parquet(directory / f"{number}.parquet", row_group_size=25, index=False)
    return directory


FAST = ("--depth", "1", "--num-inducing", "5", "--batch-size", "30", "--max-iter", "20")


def test_fit_and_predict_a_directory(run, trips, tmp_path):
    result = run("fit", trips, "--target", "seconds", "--out", tmp_path / "model", *FAST)
    assert "RMSE" in result.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "model" / "report.html").is_file()
    run("predict", tmp_path / "model", trips, "-o", tmp_path / "out")
    for number in range(3):
        rows = pd.read_parquet(trips / f"{number}.parquet")
        answers = pd.read_parquet(tmp_path / "out" / f"{number}.parquet")
        assert len(answers) == len(rows)
        assert np.corrcoef(answers["mean"], rows["a"])[0, 1] > 0.9  # rows keep their order
    again = run("predict", tmp_path / "model", trips, "-o", tmp_path / "out", code=2)
    assert "must be an empty or new directory" in again.stderr


def test_a_failed_prediction_leaves_nothing(run, trips, tmp_path):
    run("fit", trips, "--target", "seconds", "--out", tmp_path / "model", *FAST, "--quiet")
    pd.read_parquet(trips / "2.parquet").rename(columns={"b": "bb"}).to_parquet(trips / "2.parquet", index=False)
    result = run("predict", tmp_path / "model", trips, "-o", tmp_path / "out", code=2)
    assert "did you mean 'b'" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trips"]


def test_sentences(run, trips, tmp_path):
    out = ("--out", tmp_path / "model", *FAST)
    assert "did you mean 'seconds'" in run("fit", trips, "--target", "second", *out, code=2).stderr
    alone = run("fit", trips / "0.parquet", "--target", "seconds", "--distributed", *out, code=2)
    assert "--distributed needs a stream" in alone.stderr
    lonely = run("fit", trips, "--target", "seconds", "--coordinator", "localhost:1", *out, code=2)
    assert "give all" in lonely.stderr
    assert not (tmp_path / "model").exists()


def test_generate_and_convert(run, tmp_path):
    result = run("data", "generate", "taxi", "--rows", "200", "--out", tmp_path / "taxi")
    assert "The best reachable RMSE is the noise, 45 s." in result.stdout
    frame = pd.read_parquet(tmp_path / "taxi")
    assert frame.shape == (200, 10)
    frame.to_csv(tmp_path / "taxi.csv", index=False)
    run("data", "convert", tmp_path / "taxi.csv", "--out", tmp_path / "converted")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "converted"), frame)
    misspelt = run("data", "generate", "colider", "--rows", "9", "--out", tmp_path / "x", code=2)
    assert "did you mean 'collider'" in misspelt.stderr
