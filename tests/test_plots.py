import math

import numpy as np
import pytest
from scipy import stats

from fathomgp import plots
from fathomgp.errors import DataError, SettingError


class Normal:
    """The smallest answer that the pictures accept."""

    def __init__(self, mean, std):
        self._mean, self._std = np.asarray(mean, float), np.asarray(std, float)

    def mean(self):
        return self._mean

    def std(self):
        return self._std

    def interval(self, level):
        reach = stats.norm.ppf(0.5 + level / 2) * self._std
        return self._mean - reach, self._mean + reach


@pytest.fixture
def held_out(rng):
    std = np.exp(0.3 * rng.normal(size=400))
    mean = 3.0 * rng.normal(size=400)
    return mean + std * rng.normal(size=400), Normal(mean, std)


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def test_every_picture_draws_without_pyplot_and_saves(held_out, tmp_path):
    import matplotlib
    import matplotlib.pyplot as plt

    settings = dict(matplotlib.rcParams)
    y, answer = held_out
    drawn = [
        plots.plot_calibration(answer, y),
        plots.plot_predicted_vs_observed(y, answer),
        plots.plot_residuals(y, answer),
        plots.plot_history({"step": [1, 2, 3], "objective": [3.0, 2.0, 1.5]}),
        plots.plot_layers([0.0, 2.0, 1.0], [np.ones((4, 3, 2)), np.zeros((4, 3, 1))])[1],
        plots.critical_difference({"a": 1.2, "b": 2.1, "c": 2.7}, 10),
    ]
    for number, ax in enumerate(drawn):
        ax.figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 1000
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == settings


def test_plot_1d_shows_all_it_was_given(rng):
    x = rng.uniform(size=30)
    answer = Normal(np.sin(x), np.full(30, 0.1))
    ax = plots.plot_1d(
        x, answer, data=(x[:5], x[:5]), truth=np.sin(x), inducing=x[:4, None], samples=rng.normal(size=(3, 30))
    )
    assert labels(ax) == ["95 %", "50 %", "truth", "mean", "data", "inducing"]
    (mean,) = [line for line in ax.lines if line.get_label() == "mean"]
    assert np.all(np.diff(mean.get_xdata()) >= 0)
    assert np.allclose(mean.get_ydata(), np.sin(np.sort(x)))


def test_an_axis_that_is_given_is_used():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plots.plot_1d([0.0, 1.0], Normal([0.0, 1.0], [1.0, 1.0]), ax=ax) is ax


def test_plot_2d_draws_mean_and_std(rng):
    x = rng.uniform(size=(60, 2))
    panels = plots.plot_2d(x, Normal(x[:, 0], 0.1 + x[:, 1]), data=x[:9], inducing=x[:4])
    assert [ax.get_title() for ax in panels] == ["mean", "standard deviation"]
    assert all(len(ax.lines) == 2 for ax in panels)
    with pytest.raises(DataError, match=r"needs x of shape \(N, 2\), but it is \(60, 1\)"):
        plots.plot_2d(x[:, :1], Normal(x[:, 0], x[:, 1]))


def test_coverage_counts_observed_rows_only():
    answer = Normal(np.zeros(4), np.ones(4))
    _, covered, margin = plots.calibration(answer, [0.0, 0.5, 10.0, np.nan], [0.5, 0.95])
    assert np.allclose(covered, 2 / 3)
    assert np.allclose(margin, 1.96 * np.sqrt(np.array([0.25, 0.0475]) / 3))
    with pytest.raises(DataError, match="all of them are missing"):
        plots.calibration(answer, np.full(4, np.nan), [0.5])


def test_an_honest_answer_is_found_calibrated(held_out):
    y, answer = held_out
    levels, covered, margin = plots.calibration(answer, y, np.linspace(0.1, 0.9, 9))
    assert np.all(np.abs(covered - levels) < 3 * margin)  # six standard errors: any seed


def test_shapes_that_cannot_be_drawn_are_refused():
    with pytest.raises(DataError, match=r"mean must hold one number a row .* its shape is \(3, 2\)"):
        plots.plot_predicted_vs_observed(np.zeros(3), Normal(np.zeros((3, 2)), np.ones((3, 2))))
    with pytest.raises(DataError, match="history lacks \\['objective'\\]"):
        plots.plot_history({"step": [1]})
    with pytest.raises(DataError, match="no finite objective"):
        plots.plot_history({"step": [1], "objective": [math.nan]})


def test_the_history_is_not_squashed_by_its_first_steps():
    objective = np.concatenate([[-1e9], np.linspace(-10.0, 0.0, 99)])
    low, high = plots.bulk_range(objective)
    assert -25 < low < -9
    assert 0 < high < 2
    low, high = plots.bulk_range(np.array([5.0]))
    assert low < 5 < high


# Demsar (2006), table 5a: critical values of the two-tailed Nemenyi test.
@pytest.mark.parametrize(
    ("alpha", "methods", "value"),
    [(0.05, 2, 1.960), (0.05, 5, 2.728), (0.05, 10, 3.164), (0.1, 2, 1.645), (0.1, 5, 2.459), (0.1, 10, 2.920)],
)
def test_critical_values_are_the_published_ones(alpha, methods, value):
    difference = plots.nemenyi_critical_difference(methods, 7, alpha)
    assert difference / math.sqrt(methods * (methods + 1) / 42) == pytest.approx(value, abs=1e-3)


def test_bars_join_the_longest_runs_within_the_critical_difference():
    assert plots._indistinguishable([1.0, 1.5, 2.4, 4.0], 1.0) == [(0, 1), (1, 2)]
    assert plots._indistinguishable([1.0, 1.1, 1.2], 1.0) == [(0, 2)]
    assert plots._indistinguishable([1.0, 3.0], 1.0) == []


def test_the_diagram_names_every_method_and_turns_the_axis():
    ranks = {"linear": 3.9, "exact": 2.6, "DGP 2": 1.8, "DGP 3": 1.7}
    ax = plots.critical_difference(ranks, 10)
    texts = " ".join(text.get_text() for text in ax.texts)
    assert all(f"{name} ({rank:.2f})" in texts for name, rank in ranks.items())
    assert f"CD = {plots.nemenyi_critical_difference(4, 10):.2f}" in texts
    assert ax.xaxis_inverted()


def test_impossible_ranks_are_refused():
    with pytest.raises(SettingError, match="2 or more methods"):
        plots.critical_difference({"alone": 1.0}, 5)
    with pytest.raises(SettingError, match="alpha must lie between 0 and 1, but it is 5"):
        plots.critical_difference({"a": 1.0, "b": 2.0}, 5, alpha=5.0)
    with pytest.raises(DataError, match="lie between 1 and 2"):
        plots.critical_difference({"a": 0.5, "b": 2.5}, 5)
