"""The comparison of answers before and after a change."""

import numpy as np
import pytest

import unchanged


def test_differences_are_relative_and_by_method():
    before = {"dsvi/sine/mean": np.array([100.0, 0.0]), "dsvi/sine/std": np.array([1.0, np.nan]), "aep/a/b": np.ones(2)}
    after = {name: value.copy() for name, value in before.items()}
    after["dsvi/sine/mean"][1] = 1e-3
    worst = unchanged.differences(before, after)
    assert worst["dsvi"] == (pytest.approx(1e-5), "dsvi/sine/mean")
    assert worst["aep"][0] == 0.0
    after["dsvi/sine/std"][1] = 1.0  # was not finite
    assert unchanged.differences(before, after)["dsvi"][0] == np.inf
    after["aep/a/b"] = np.ones(3)
    assert unchanged.differences(before, after)["aep"][0] == np.inf


def test_files_are_compared_and_gaps_are_told(tmp_path, capsys):
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    np.savez(one, **{"dsvi/sine/mean": np.ones(2), "aep/sine/mean": np.ones(2)})
    np.savez(two, **{"dsvi/sine/mean": np.ones(2) + 1e-9})
    assert unchanged.compare(one, one)
    assert not unchanged.compare(one, two)
    assert "only in the first file: aep/sine/mean" in capsys.readouterr().out
