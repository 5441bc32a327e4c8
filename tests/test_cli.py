import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import fathomgp
from fathomgp import demo
from fathomgp.cli import keep_programs
from fathomgp.cli._files import ColumnMatcher, TableWriter
from fathomgp.cli._fit import _hold_out, _looks_like_labels
from fathomgp.cli._parse import one_or_each, quantiles, splits
from fathomgp.cli._scores import named_scores
from fathomgp.data import read_blocks
from fathomgp.errors import DataError, SettingError
from fathomgp.metrics import evaluate

FAST = ("--method", "exact", "--max-iter", "3", "--quiet")


@pytest.fixture
def refuse(run):
    """Run a command that must fail with one line; give the sentence."""

    def invoke(*arguments):
        result = run(*arguments, code=2)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("Note: ")]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("Error: ")
        return lines[0]

    return invoke


@pytest.fixture
def table(rng):
    X = rng.normal(size=(40, 2))
    y = 50.0 + 10.0 * np.sin(X[:, 0]) + 0.1 * rng.normal(size=40)
    return pd.DataFrame({"height": X[:, 0], "width": X[:, 1], "price": y})


@pytest.fixture
def csv(table, tmp_path):
    table.to_csv(tmp_path / "data.csv", index=False)
    return tmp_path / "data.csv"


@pytest.fixture
def model(run, fitted, table, tmp_path_factory):
    """A model of price given height and width, fitted once a session."""
    if not fitted:
        folder = tmp_path_factory.mktemp("fitted")
        table.to_csv(folder / "data.csv", index=False)
        run("fit", folder / "data.csv", "--target", "price", "--out", folder / "model", *FAST)
        fitted.append(folder / "model")
    return fitted[0]


@pytest.fixture(scope="module")
def fitted():
    return []


# --- fit --------------------------------------------------------------------------------------------------------------


def test_fit_writes_a_model_a_report_and_a_summary(run, csv, tmp_path):
    result = run("fit", csv, "--target", "price", "--out", tmp_path / "model", "--method", "exact", "--max-iter", "20")
    for words in ("36 rows (4 held out)", "method", "exact", "noise std", "RMSE", "log density", "report.html"):
        assert words in result.stdout
    assert "price from data.csv" in (tmp_path / "model" / "report.html").read_text()
    estimator = fathomgp.load(tmp_path / "model")
    assert list(estimator.feature_names_in_) == ["height", "width"]
    assert estimator.target_names_ == ["price"]


def test_fit_to_every_row_has_no_scores(run, csv, tmp_path):
    result = run("fit", csv, "--target", "price", "--out", tmp_path / "m", "--test-fraction", "0", "--max-iter", "3")
    assert "all 40 rows" in result.stdout
    assert "RMSE" not in result.stdout


def test_quiet_says_nothing(run, csv, tmp_path):
    assert run("fit", csv, "--target", "price", "--out", tmp_path / "m", *FAST).output == ""


def test_few_rows_are_all_fitted(capsys):
    train, test = _hold_out(pd.Series(range(6)), 0.1, 0, labels=False)
    assert (len(train), len(test)) == (6, 0)
    assert "Note: 6 rows are too few" in capsys.readouterr().err


def test_flags_reach_the_estimator_and_its_warnings_become_notes(run, csv, tmp_path):
    flags = ["--method", "sgpr", "--num-inducing", "50", "--kernel", "matern52", "--random-state", "3"]
    result = run("fit", csv, "--target", "price", "--out", tmp_path / "m", *FAST, *flags)
    assert "Note: num_inducing is 50 but there are 36 rows" in result.stderr
    params = fathomgp.load(tmp_path / "m").get_params()
    chosen = {name: params[name] for name in ("method", "num_inducing", "kernel", "random_state", "max_iter")}
    assert chosen == {"method": "sgpr", "num_inducing": 50, "kernel": "matern52", "random_state": 3, "max_iter": 3}


def test_labels_are_classified(run, refuse, table, tmp_path):
    table["kind"] = np.where(table.pop("price") > 50.0, "dear", "cheap")
    path, model, out = tmp_path / "kinds.csv", tmp_path / "m", tmp_path / "p.csv"
    table.to_csv(path, index=False)
    flags = ["--depth", "1", "--num-inducing", "8", "--max-iter", "40"]
    result = run("fit", path, "--target", "kind", "--out", model, *flags)
    assert "accuracy" in result.stdout
    assert "predict_proba" in (model / "report.html").read_text()
    run("predict", model, path, "-o", out)
    answer = pd.read_csv(out)
    assert list(answer.columns) == ["label", "p_cheap", "p_dear"]
    assert np.allclose(answer.p_cheap + answer.p_dear, 1.0)
    assert np.mean(answer.label == table.kind) > 0.7
    scores = run("evaluate", model, path).stdout
    assert "Brier" in scores
    assert "AUC" in scores
    refused = refuse("fit", path, "--target", "kind", "--task", "regression", "--out", tmp_path / "r")
    assert "holds text" in refused
    assert "choose regression or classification" in refuse(
        "fit", path, "--target", "kind", "--task", "x", "--out", tmp_path / "r"
    )


def test_text_and_yes_or_no_look_like_labels():
    for values, expected in ((["a", "b"], True), ([True, False], True), ([1, 2], False), (["1.5", "2,5"], False)):
        assert _looks_like_labels(pd.Series(values)) is expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "prize"], "has no target column 'prize': did you mean 'price'"),
        (["--target", "price", "--method", "exakt"], "method='exakt' is unknown.*Did you mean 'exact'"),
        (["--target", "price", "--kernel", "rbff"], "rbff"),
        (["--target", "price", "--precision", "half"], "precision='half' is unknown"),
        (["--target", "price", "--max-iter", "0"], "max_iter must be a whole number of at least 1"),
        (["--target", "price", "--num-inducing", "-1"], "num_inducing must be a whole number of at least 1"),
        (["--target", "price", "--hidden-dim", "wide"], "--hidden-dim holds 'wide'"),
        (["--target", "price", "--test-fraction", "1"], "--test-fraction must be at least 0 and below 1"),
        (["--target", "height,width,price"], "has no column beside the target"),
    ],
)
def test_fit_refuses_bad_settings(refuse, csv, tmp_path, arguments, sentence):
    message = refuse("fit", csv, *arguments, "--out", tmp_path / "m")
    assert pd.Series([message]).str.contains(sentence).all(), message
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no file"),
        ("", "is empty"),
        ("height,price\n", "no rows"),
        ("height,price\n1,2\ntall,3\n", "'height' of data.csv holds text"),
        ("height,price\n1,2\n,3\n2,4\n", "'height' of data.csv contains NaN (first in line 3)"),
        ("height,price\n1,2\n3,\n2,4\n", "y contains NaN (first in line 3)"),
        ("height,price\n1,2\n", "at least 2 are needed"),
        ('height,price\n1,2\n"3,4\n', "cannot be read"),
    ],
)
def test_fit_refuses_bad_tables(refuse, tmp_path, content, sentence):
    path = tmp_path / "data.csv"
    if content is not None:
        path.write_text(content)
    assert sentence in refuse("fit", path, "--target", "price", "--out", tmp_path / "m", *FAST)


def test_fit_refuses_a_file_as_its_directory(refuse, csv):
    assert "which is a file" in refuse("fit", csv, "--target", "price", "--out", csv)


# --- predict and evaluate ---------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_model(run, model, csv, table, tmp_path):
    out = tmp_path / "new" / "predictions.csv"
    result = run("predict", model, csv, "-o", out, "--quantiles", "0.1,0.9")
    assert "Note: Not an input of the model, so left out: price." in result.stderr
    found = pd.read_csv(out)
    assert list(found.columns) == ["mean", "std", "q0.1", "q0.9"]
    mean, std = fathomgp.load(model).predict(table[["height", "width"]], return_std=True)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(found["std"], std, rtol=1e-12)
    np.testing.assert_allclose(found["q0.9"], mean + 1.2815515655446004 * std, rtol=1e-6)


def test_parquet_in_and_out_agrees_with_csv(run, model, csv, table, tmp_path):
    table.to_parquet(tmp_path / "data.parquet")
    run("predict", model, tmp_path / "data.parquet", "-o", tmp_path / "p.parquet")
    run("predict", model, csv, "-o", tmp_path / "p.csv")
    found = pd.read_parquet(tmp_path / "p.parquet"), pd.read_csv(tmp_path / "p.csv")
    pd.testing.assert_frame_equal(*found, rtol=1e-12)


def test_blocks_agree_with_the_whole(run, model, csv, tmp_path, monkeypatch):
    run("predict", model, csv, "-o", tmp_path / "whole.csv")
    monkeypatch.setattr("fathomgp.cli._predict.BLOCK_ROWS", 16)
    run("predict", model, csv, "-o", tmp_path / "blocks.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "whole.csv"), pd.read_csv(tmp_path / "blocks.csv"), rtol=1e-12)


def test_several_targets_prefix_their_columns(run, table, tmp_path):
    table.assign(cost=table["price"] * 2).to_csv(tmp_path / "two.csv", index=False)
    fitted = run("fit", tmp_path / "two.csv", "--target", "price,cost", "--out", tmp_path / "m", "--max-iter", "3")
    assert "noise std cost" in fitted.stdout
    run("predict", tmp_path / "m", tmp_path / "two.csv", "-o", tmp_path / "p.csv", "--quantiles", "0.5")
    names = ["price_mean", "price_std", "price_q0.5", "cost_mean", "cost_std", "cost_q0.5"]
    assert list(pd.read_csv(tmp_path / "p.csv").columns) == names
    result = run("evaluate", tmp_path / "m", tmp_path / "two.csv")
    assert "price" in result.stdout
    assert "cost" in result.stdout


def test_evaluate_shows_every_score(run, model, csv):
    result = run("evaluate", model, csv, "--target", "price")
    for name in ("RMSE", "MAE", "log density", "CRPS", "SMSE", "50 %", "90 %", "95 %"):
        assert name in result.stdout


def test_scores_agree_with_the_metrics(run, model, table):
    y = table["price"].to_numpy(copy=True)
    y[:3] = np.nan
    answer = fathomgp.load(model).predict_distribution(table[["height", "width"]])
    (scores,) = named_scores(answer, y)
    expected = evaluate(answer, y)
    names = {"RMSE": "rmse", "MAE": "mae", "SMSE": "smse", "CRPS": "crps", "coverage 95 %": "coverage_95"}
    for shown, name in ({"log density": "log_density"} | names).items():
        assert scores[shown] == pytest.approx(expected[name], rel=1e-12)
    with pytest.raises(DataError, match="no measured value"):
        named_scores(answer, np.full(len(y), np.nan))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (["width", "height"], "same order"),
        (["height"], "missing: - width"),
        (["height", "widht"], "did you mean 'width'"),
    ],
)
def test_predict_refuses_other_columns(refuse, model, table, tmp_path, columns, sentence):
    renamed = table.rename(columns={"width": "widht"}) if "widht" in columns else table
    renamed[columns].to_csv(tmp_path / "new.csv", index=False)
    assert sentence in refuse("predict", model, tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv"]


def test_predict_refuses_text_and_leaves_nothing(refuse, model, tmp_path, monkeypatch):
    monkeypatch.setattr("fathomgp.cli._predict.BLOCK_ROWS", 2)
    (tmp_path / "new.csv").write_text("height,width\n1,2\n1,2\nx,2\n")
    message = refuse("predict", model, tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert "holds text ('x' in line 4)" in message
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "p.xlsx"], "unknown type '.xlsx'"),
        (["-o", "p.csv", "--quantiles", "0.5,1"], "between 0 and 1, but 1 does not"),
        (["-o", "p.csv", "--quantiles", "half"], "--quantiles holds 'half'"),
    ],
)
def test_predict_refuses_bad_settings(refuse, model, csv, arguments, sentence):
    assert sentence in refuse("predict", model, csv, *arguments)


def test_predict_never_overwrites_its_data(refuse, model, csv):
    assert "would overwrite the data" in refuse("predict", model, csv, "-o", csv)


def test_damaged_models_are_refused(refuse, model, csv, tmp_path):
    assert "does not exist" in refuse("predict", tmp_path / "nowhere", csv, "-o", tmp_path / "p.csv")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_text("{")
    assert "damaged" in refuse("predict", tmp_path / "broken", csv, "-o", tmp_path / "p.csv")
    (tmp_path / "broken" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-5])
    assert "damaged" in refuse("evaluate", tmp_path / "broken", csv)


def test_evaluate_refuses_an_unknown_target(refuse, model, csv):
    assert "has no target column 'pric'" in refuse("evaluate", model, csv, "--target", "pric")


# --- demo and data ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_writes_its_page(run, tmp_path, monkeypatch):
    monkeypatch.delitem(demo.METHODS, "sparse GP")  # every method and data set costs a compilation
    result = run("demo", "--out", tmp_path / "demo", "--max-iter", "2")
    page = (tmp_path / "demo" / "report.html").read_text()
    for words in ("A function with jumps", "Diabetes", "exact GP"):
        assert words in page
    assert str(tmp_path / "demo" / "report.html") in result.stdout


def test_data_lists_and_names_its_places(run, refuse, monkeypatch, tmp_path):
    monkeypatch.setenv("FATHOMGP_DATA", str(tmp_path))
    monkeypatch.setenv("FATHOMGP_CACHE", str(tmp_path / "cache"))
    assert "yacht" in run("data", "list").stdout
    assert run("data", "path").stdout.split() == [str(tmp_path), str(tmp_path / "cache")]
    assert "did you mean 'yacht'" in refuse("data", "fetch", "yaht")


@pytest.mark.data
def test_fetch_finds_what_is_here(run):
    assert "yacht: 308 rows, 6 inputs" in run("data", "fetch", "yacht").stdout


def test_version_and_help(run):
    assert run("--version").stdout.strip() == f"fathomgp {fathomgp.__version__}"
    for command in ("fit", "predict", "evaluate", "demo", "data", "bench"):
        assert command in run("--help").stdout


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_lists_of_values():
    assert (splits("3"), splits("0,4"), splits("2,")) == ([0, 1, 2], [0, 4], [2])
    assert (splits("0-2"), splits("1-2,4"), splits("2-2")) == ([0, 1, 2], [1, 2, 4], [2])
    assert quantiles("0.05, 0.5") == [0.05, 0.5]
    assert (one_or_each("5", "--x", int), one_or_each("5,3", "--x", int), one_or_each(None, "--x", int)) == (
        5,
        [5, 3],
        None,
    )
    for bad in ("", "0", "-1", "a"):
        with pytest.raises(SettingError, match="--splits"):
            splits(bad)


def test_the_command_keeps_compiled_programs_unless_told_where(tmp_path, monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("FATHOMGP_CACHE", str(tmp_path))
    keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert not (tmp_path / "compiled").exists()


def test_jax_is_not_imported_before_it_is_told_where():
    code = "import sys, fathomgp.cli; assert 'jax' not in sys.modules; fathomgp.cli.app"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_empty_tables_are_refused_when_read(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n")
    pd.DataFrame({"x": []}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    for name, sentence in (("a.csv", "no rows"), ("a.parquet", "no rows"), ("b.parquet", "cannot be read")):
        with pytest.raises(DataError, match=sentence):
            list(read_blocks(tmp_path / name))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("old")
    writer = TableWriter(path).__enter__()
    writer.write(pd.DataFrame({"a": [1.0]}))
    writer.__exit__(RuntimeError, RuntimeError(), None)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["p.csv"]


def test_models_without_names_take_columns_by_position(table):
    class Nameless:
        target_names_ = None

    np.testing.assert_array_equal(ColumnMatcher(Nameless(), print)(table), table.to_numpy())
