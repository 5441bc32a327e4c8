"""Fits to streams: the same as fits to arrays, resumed in mid-epoch bit for bit, shared among devices."""

import numpy as np
import pandas as pd
import pytest

import toy
from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from fathomgp.data import ParquetSource, Standardizer
from fathomgp.errors import DataError, SettingError
from fathomgp.fitting import Checkpointing, fit_model

SETTINGS = {"depth": 1, "num_inducing": 8, "batch_size": 50, "random_state": 0, "verbose": False}


@pytest.fixture
def table(rng):
    X = rng.normal(size=(600, 2))
    y = 40.0 + 10.0 * np.sin(2.0 * X[:, 0]) + rng.normal(size=600)
    return pd.DataFrame({"a": X[:, 0], "b": 7.0 + X[:, 1], "y": y, "label": (y > 40.0).astype(int)})


@pytest.fixture
def trips(table, tmp_path):
    directory = tmp_path / "trips"
    directory.mkdir()
    table.drop(columns="label").to_parquet(directory / "a.parquet", row_group_size=40, index=False)
    return directory


def test_a_stream_learns_what_an_array_teaches(trips, table, tmp_path, flag_off):
    model = DeepGPRegressor("dsvi", max_iter=150, **SETTINGS).fit(ParquetSource(trips, "y"))
    mean, std = model.predict(table[["a", "b"]], return_std=True)
    assert np.sqrt(np.mean((mean - table["y"]) ** 2)) < 2.0
    assert 0.5 < std.mean() < 3.0
    assert list(model.feature_names_in_) == ["a", "b"]
    assert model.target_names_ == ["y"]
    model.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict(table[["a", "b"]]), mean)


def test_labels_of_a_stream(table, tmp_path, flag_off):
    table.assign(label=2 * table["label"] - 1).drop(columns="y").to_parquet(tmp_path / "a.parquet", index=False)
    model = DeepGPClassifier(max_iter=60, **SETTINGS).fit(ParquetSource(tmp_path, "label"))
    assert model.classes_.tolist() == [-1, 1]
    assert np.mean(model.predict(table[["a", "b"]]) == 2 * table["label"] - 1) > 0.9
    with pytest.raises(DataError, match=r"holds no labels of two or more classes"):
        DeepGPClassifier(max_iter=5, **SETTINGS).fit(ParquetSource(stretch(table, tmp_path), "y"))


def stretch(table, directory):
    path = directory / "more.parquet"
    pd.concat([table.drop(columns="label")] * 2).assign(y=np.arange(1200.0)).to_parquet(path, index=False)
    return path


def test_what_a_stream_cannot_do(trips):
    stream = ParquetSource(trips, "y")
    with pytest.raises(SettingError, match=r"method='exact' needs all rows in memory"):
        DeepGPRegressor("exact").fit(stream)
    with pytest.raises(SettingError, match=r"A stream holds its own target"):
        DeepGPRegressor("dsvi").fit(stream, np.zeros(600))


def test_resumed_in_mid_epoch_equals_undisturbed_bit_for_bit(trips, tmp_path, key):
    class StopError(Exception):
        pass

    def run(directory, stop_after=None):
        source = ParquetSource(trips, "y", buffer_rows=120)
        source = source.standardized(Standardizer.identity(2), Standardizer.identity(1), np.float64)
        if stop_after is not None:
            feed, calls = source.feed, []

            def failing(**request):
                calls.append(request)
                if len(calls) > stop_after:
                    raise StopError
                return feed(**request)

            source.feed = failing
        settings = Checkpointing(directory, every_seconds=None, every_steps=3)
        inference = toy.Walk(batch_size=35, phases=2)
        return fit_model(inference, toy.tiny_model(), source, key=key, checkpointing=settings, verbose=False)

    calm = run(tmp_path / "calm")
    for stop in (3, 9, 20):
        with pytest.raises(StopError):
            run(tmp_path / f"stopped{stop}", stop)
        resumed = run(tmp_path / f"stopped{stop}")
        assert np.array_equal(np.asarray(calm.posterior.state.position), np.asarray(resumed.posterior.state.position))
        assert np.array_equal(calm.history["objective"], resumed.history["objective"])
