import numpy as np
import pytest
from scipy import stats

from fathomgp import metrics
from fathomgp.errors import DataError
from fathomgp.likelihoods import Gaussian
from fathomgp.predictive import Mixture, Predictive


@pytest.fixture
def case(rng):
    """2000 targets from the answer itself, with one missing."""
    mean, variance = rng.normal(size=(1, 2000, 1)), rng.uniform(0.1, 0.5, size=(1, 2000, 1))
    answer = Predictive(Mixture(np.zeros(1), mean, variance), Gaussian(0.2), np.zeros(1), np.ones(1), True)
    y = answer.sample(1, rng)[0]
    y[3] = np.nan
    return y, answer


def test_points(rng):
    y, m = rng.normal(size=(20, 2)), rng.normal(size=(20, 2))
    assert np.isclose(metrics.rmse(y, m), np.sqrt(np.mean((y - m) ** 2)))
    assert np.isclose(metrics.mae(y, m), np.mean(np.abs(y - m)))
    assert np.isclose(metrics.smse(y, np.tile(y.mean(0), (20, 1))), 1.0)
    assert np.isclose(metrics.rmse(y[:, 0], m[:, :1]), metrics.rmse(y[:, 0], m[:, 0]))
    with pytest.raises(DataError, match=r"shape \(20, 2\), but the prediction has \(20,\)"):
        metrics.rmse(y, m[:, 0])


def test_distributions(case):
    y, answer = case
    seen = ~np.isnan(y)
    log_density = stats.norm.logpdf(y, answer.mean(), answer.std())[seen]
    assert np.isclose(metrics.nlpd(y, answer), -log_density.mean())
    assert np.isclose(metrics.mean_log_density(y, answer), log_density.mean())
    trivial = -stats.norm.logpdf(y[seen], y[seen].mean(), y[seen].std()).mean()
    assert np.isclose(metrics.msll(y, answer, y), -log_density.mean() - trivial)
    assert np.isclose(metrics.crps(y, answer), np.nanmean(answer.crps(y)))
    error = 5 * np.sqrt(0.25 / 2000)
    assert abs(metrics.coverage(y, answer, 0.9) - 0.9) < error
    assert metrics.calibration_error(y, answer) < error
    scores = metrics.evaluate(answer, y)
    assert set(scores) == {"rmse", "mae", "smse", "log_density", "crps", "coverage_95"}
    assert all(type(score) is float and np.isfinite(score) for score in scores.values())


def test_labels(rng):
    table = rng.dirichlet(np.ones(3), size=50)
    y = rng.integers(3, size=50)
    assert np.isclose(metrics.accuracy(y, table), np.mean(table.argmax(1) == y))
    assert np.isclose(metrics.error_rate(y, table.argmax(1)), 1 - metrics.accuracy(y, table))
    assert np.isclose(metrics.log_loss(y, table), -np.mean(np.log(table[np.arange(50), y])))
    assert np.isclose(metrics.brier(y, table), np.mean(np.sum((table - np.eye(3)[y]) ** 2, axis=1)))
    assert metrics.auc(y, np.eye(3)[y]) == 1.0
    binary = np.array([0, 0, 1, 1])
    assert metrics.auc(binary, np.array([[0.9, 0.1], [0.6, 0.4], [0.65, 0.35], [0.2, 0.8]])) == 0.75
