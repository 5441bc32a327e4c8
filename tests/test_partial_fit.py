"""partial_fit on both estimators and the command that streams: scales, saving, resuming, refusals."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fathomgp
from fathomgp import DeepGPClassifier, DeepGPRegressor
from fathomgp.cli import app
from fathomgp.errors import DataError
from fathomgp.inference import Sequential

pytestmark = pytest.mark.usefixtures("flag_off")

SMALL = Sequential(num_particles=10, episodes=1, shallow_start=False, test_samples=10)


def wave(rng, rows=40):
    X = rng.uniform(0, 10, size=(rows, 1))
    return X, 100.0 + 5.0 * np.sin(X[:, 0]) + 0.2 * rng.normal(size=rows)


def regressor(**settings):
    return DeepGPRegressor(SMALL, num_inducing=15, random_state=0, verbose=False, **settings)


@pytest.mark.slow
def test_one_row_or_a_block_and_after_saving(rng, tmp_path):
    X, y = wave(rng)
    model = regressor().partial_fit(X[:20], y[:20])
    before = model.predict(X)
    model.save(tmp_path / "model")
    again = fathomgp.load(tmp_path / "model")
    for one in (model, again):
        one.partial_fit(X[20:21], y[20:21])
        one.partial_fit(X[21:40], y[21:40])
    assert np.array_equal(model.predict(X), again.predict(X))
    assert np.array_equal(model.log_density(X, y), again.log_density(X, y))
    assert np.mean((model.predict(X) - y) ** 2) < np.mean((before - y) ** 2)
    assert np.sqrt(np.mean((model.predict(X) - y) ** 2)) < 2.0
    # Learning on is not fitting again: the scales stay those of the first block.
    assert model.y_scaler_.shift[0] == pytest.approx(y[:20].mean())
    assert int(model.posterior_.state.seen) == 40


def test_missing_outputs_may_come_later(rng):
    X, y = wave(rng)
    Y = np.stack([y, -y], axis=1)
    model = regressor(depth=1, missing="mask").partial_fit(X[:20], Y[:20])
    gone = Y[20:30].copy()
    gone[:, 1] = np.nan
    model.partial_fit(X[20:30], gone)
    _, std = model.predict(X[20:30], return_std=True)
    assert np.all(std[:, 0] <= std[:, 1] * (1 + 1e-9))
    with pytest.raises(DataError, match="1 outputs, but the fit had 2"):
        model.partial_fit(X[:1], y[:1])


def test_labels(rng):
    X = rng.normal(size=(80, 2))
    y = np.where(X[:, 0] > 0.5, "c", np.where(X[:, 0] > -0.5, "b", "a"))
    first = y[:40] != "c"
    model = DeepGPClassifier(SMALL, depth=1, num_inducing=15, random_state=0, verbose=False)
    model.partial_fit(X[:40][first], y[:40][first], classes=["a", "b", "c"])
    model.partial_fit(X[40:], y[40:])
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert np.mean(model.predict(X) == y) > 0.6
    with pytest.raises(DataError, match="label d in row 0, which the fit did not see"):
        model.partial_fit(X[:1], ["d"])


def test_refusals(rng):
    X, y = wave(rng)
    assert not hasattr(DeepGPRegressor(), "partial_fit")
    with pytest.raises(AttributeError) as error:
        DeepGPRegressor(method="sgpr").partial_fit(X, y)
    assert "partial_fit needs method='sequential', but the method is 'sgpr'" in str(
        error.value.__cause__ or error.value
    )
    with pytest.raises(DataError, match="3 rows are too few for that: begin with 10 rows or more"):
        regressor().partial_fit(X[:3], y[:3])
    model = regressor(depth=1).partial_fit(X[:20], y[:20])
    before = model.predict(X)
    with pytest.raises(DataError, match="NaN"):
        model.partial_fit([[np.nan]], [1.0])
    with pytest.raises(DataError, match="NaN"):
        model.partial_fit([[1.0]], [np.nan])
    assert np.array_equal(before, model.predict(X))


def test_mixed_precision_stays_within_a_percent(rng):
    X, y = wave(rng, 60)
    models = [regressor(depth=1, precision=name).fit(X, y) for name in ("double", "mixed")]
    answers = [model.predict(X, return_std=True) for model in models]
    for double, mixed in zip(*answers, strict=True):
        assert np.allclose(double, mixed, rtol=0.01)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments, code=0, text=None):
    result = CliRunner().invoke(app, ["stream", *map(str, arguments)], input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def table(rng, tmp_path):
    X, y = wave(rng, 50)
    frame = pd.DataFrame({"time": X[:, 0], "level": y})
    frame.to_csv(tmp_path / "data.csv", index=False)
    return frame


def test_a_stream_predicts_before_it_learns_and_resumes(table, tmp_path):
    options = ("--target", "level", "--warm-up", 20, "--depth", 1, "--num-inducing", 15)
    run(tmp_path / "data.csv", *options, "-o", tmp_path / "whole.csv", "--model", tmp_path / "whole")
    whole = pd.read_csv(tmp_path / "whole.csv")
    assert list(whole.columns) == ["mean", "std", "log_density"]
    assert len(whole) == 50
    assert whole[:20].isna().all().all()
    assert whole[20:].notna().all().all()
    residual = (table.level[20:] - whole["mean"][20:]) / whole["std"][20:]
    expected = -0.5 * np.log(2 * np.pi) - np.log(whole["std"][20:]) - 0.5 * residual**2
    assert np.allclose(whole.log_density[20:], expected, atol=1e-6)

    # The same in two parts, the second from standard input, with a file of answers that ran ahead of the checkpoint.
    table[:35].to_csv(tmp_path / "half.csv", index=False)
    parts = ("-o", tmp_path / "parts.csv", "--model", tmp_path / "parts")
    run(tmp_path / "half.csv", *options, *parts)
    with open(tmp_path / "parts.csv", "a") as file:
        file.write("1.0,2.0,3.0\n")
    result = run("-", *options, *parts, "--block", 4, text=table.to_csv(index=False))
    assert "Going on after row 35" in result.stderr
    again = pd.read_csv(tmp_path / "parts.csv")
    assert np.allclose(again, whole, rtol=1e-9, equal_nan=True)


def test_the_stream_refuses_in_one_line(table, tmp_path):
    places = ("-o", tmp_path / "o.csv", "--model", tmp_path / "m")
    assert "There is no file" in run("nowhere.csv", "--target", "level", *places, code=2).stderr
    data = tmp_path / "data.csv"
    assert "10 rows or more" in run(data, "--target", "level", "--warm-up", 3, *places, code=2).stderr
    assert "has no target column 'levle'" in run(data, "--target", "levle", *places, code=2).stderr
    assert "is empty" in run("-", "--target", "level", *places, code=2, text="").stderr
