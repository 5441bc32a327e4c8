import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from fathomgp import bench
from fathomgp.bench import _uci
from fathomgp.cli import app
from fathomgp.data import Dataset
from fathomgp.errors import DataError, SettingError


@pytest.fixture
def boston(monkeypatch, rng):
    """A small stand-in for a UCI set, under a name for which there are published numbers."""
    X = rng.normal(size=(40, 2))
    Y = (np.sin(X[:, :1]) + 0.1 * rng.normal(size=(40, 1))) * 5.0
    test_idx = np.stack([rng.permutation(40)[:4] for _ in range(3)]).astype(np.int32)
    dataset = Dataset("boston", X, Y, "real", test_idx, None, None, "a stand-in", "nowhere")
    monkeypatch.setattr(_uci, "load_dataset", lambda name: dataset)
    return dataset


def run_uci(out, *arguments, code=0):
    arguments = ["bench", "uci", "--datasets", "boston", "--out", str(out), "--max-iter", "3", *arguments]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_second_run_goes_on_where_the_first_stopped(boston, tmp_path, flag_off):
    out = tmp_path / "results" / "uci.csv"
    first = run_uci(out, "--splits", "2")
    rows = rows_of(out)
    assert [(row["split"], row["method"]) for row in rows] == [("0", "exact"), ("1", "exact")]
    assert all(np.isfinite(float(row[name])) for row in rows for name in _uci.SCORES)
    assert (rows[0]["n"], rows[0]["d"], rows[0]["depth"]) == ("40", "2", "1")
    assert "SGP 500 (published)" in first.stdout
    assert "-2.40 ± 0.07" in first.stdout
    assert "2.73 ± 0.12" in first.stdout
    second = run_uci(out, "--splits", "0,1")
    assert rows_of(out) == rows
    assert "split 0" not in second.stdout
    third = run_uci(out, "--splits", "2", "--max-iter", "2")
    assert len(rows_of(out)) == 4
    assert "Average rank" in third.stdout
    assert (tmp_path / "results" / "uci_ranks.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_fit_does_not_stop_the_others(boston, tmp_path, flag_off, monkeypatch):
    def fail(job, dataset):
        if job.split == 0:
            raise DataError("The first split is broken.")
        return job.key | dict.fromkeys(("n", "d", *_uci.SCORES), 1.0) | {"version": "0"}

    monkeypatch.setattr(_uci, "run_job", fail)
    result = run_uci(tmp_path / "uci.csv", "--splits", "2", code=2)
    assert "Note: boston, split 0, exact max_iter=3: The first split is broken." in result.stderr
    assert "Error: 1 of 2 fits failed" in result.stderr
    assert len(rows_of(tmp_path / "uci.csv")) == 1


def test_results_of_another_version_are_mentioned(boston, tmp_path, flag_off):
    out = tmp_path / "uci.csv"
    run_uci(out, "--splits", "1")
    out.write_text(out.read_text().replace(rows_of(out)[0]["version"] + "\n", "0.0.1\n"))
    assert "holds results of version 0.0.1" in run_uci(out, "--splits", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--methods", "exat"], "There is no benchmark method 'exat': did you mean 'exact'"),
        (["--splits", "7,"], "boston has the splits 0 to 2, but split 7 was asked for"),
        (["--methods", ","], "--methods names nothing"),
    ],
)
def test_bad_requests_are_one_sentence(boston, tmp_path, flag_off, arguments, sentence):
    assert sentence in run_uci(tmp_path / "uci.csv", *arguments, code=2).stderr


def test_sets_without_a_real_target_are_refused(boston):
    unlabelled = Dataset("frey", boston.X, None, "none", None, None, None, "", "")
    with pytest.raises(DataError, match="frey has no real-valued target"):
        _uci.run_job(bench.Job("frey", 0, "exact", {"method": "exact"}), unlabelled)


def test_configure_puts_in_only_what_a_method_has():
    assert bench.configure("exact", depth=3, num_inducing=7, hidden_dim=2) == {"method": "exact"}
    assert bench.configure("aep", hidden_dim=2) == bench.configure("aep") | {"hidden_dim": 2}
    assert bench.configure("sgpr", num_inducing=7, max_iter=2) == {"method": "sgpr", "num_inducing": 7, "max_iter": 2}
    with pytest.raises(SettingError, match="choose from linear, exact"):
        bench.configure("neural network")


def test_labels_name_what_is_unusual():
    assert bench.label("exact", bench.configure("exact")) == "exact"
    assert bench.label("sgpr", bench.configure("sgpr", num_inducing=500)) == "sgpr num_inducing=500"
    assert bench.label("dsvi", {"depth": 3}) == "dsvi 3"


def test_half_a_row_is_dropped_and_written_again(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("a,b\n1,2\n3,")
    results = bench.ResultFile(path, ("a", "b"), ("a",))
    assert results.rows == [{"a": "1", "b": "2"}]
    assert results.find({"a": 3}) is None
    results.append({"a": 3, "b": 4.5})
    assert path.read_text() == "a,b\n1,2\n3,4.5\n"
    assert bench.ResultFile(path, ("a", "b"), ("a",)).find({"a": 3}) == {"a": "3", "b": "4.5"}


@pytest.mark.parametrize("content", ["", "a,b"])
def test_a_file_without_a_whole_line_begins_anew(tmp_path, content):
    path = tmp_path / "r.csv"
    path.write_text(content)
    bench.ResultFile(path, ("a", "b"), ("a",)).append({"a": 1, "b": 2})
    assert path.read_text() == "a,b\n1,2\n"


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "r.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match="has other columns than this benchmark writes"):
        bench.ResultFile(tmp_path / "r.csv", ("a", "b"), ("a",))


def make_row(dataset, split, method, loglik):
    return {"dataset": dataset, "split": str(split), "method": method, "settings": "{}", "loglik": str(loglik)}


def test_means_and_standard_errors():
    rows = [make_row("d", split, "m", value) for split, value in enumerate((1.0, 2.0, 6.0))]
    score = bench.mean_scores(rows, "loglik")["d", "m"]
    assert score.mean == pytest.approx(3.0)
    assert score.error == pytest.approx(np.std([1, 2, 6], ddof=1) / np.sqrt(3))
    assert score.splits == 3


def test_ranks_count_complete_splits_only_and_share_ties():
    rows = [make_row("d", 0, "good", 2.0), make_row("d", 0, "bad", 1.0)]
    rows += [make_row("e", 0, "good", 1.0), make_row("e", 0, "bad", 1.0), make_row("e", 1, "bad", 9.0)]
    ranks, pairs = bench.average_ranks(rows)
    assert (ranks, pairs) == ({"good": 1.25, "bad": 1.75}, 2)
    assert bench.average_ranks([]) == ({}, 0)


def test_published_numbers_leave_out_the_illegible():
    assert bench.published_scores("loglik")["boston", "SGP"][:2] == (-2.47, 0.05)
    assert ("boston", "SGP") not in bench.published_scores("rmse")
    assert len({name for name, _ in bench.published_scores("loglik")}) == 8
    assert bench.published_classifiers()["sonar", "DGP D-2-1"] == (-0.30, 0.03, 0)
