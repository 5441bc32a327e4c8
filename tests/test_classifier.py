"""DeepGPClassifier as users meet it: any labels in, probabilities out, scikit-learn contract, one-line errors."""

import pickle
import warnings

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from fathomgp.data import read_labels
from fathomgp.errors import DataError, DataWarning, FathomWarning, SettingError
from fathomgp.estimators._settings import tuned_inference, tuning_remarks
from fathomgp.fitting import Checkpointing
from fathomgp.inference import AEP, DSVI
from fathomgp.likelihoods import Bernoulli, Gaussian, Poisson, RobustMax, Softmax

QUICK = {"num_inducing": 12, "max_iter": 60, "random_state": 0}

pytestmark = pytest.mark.usefixtures("flag_off")


@pytest.fixture(scope="module")
def moons():
    """Two classes that no line separates."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(64, 2))
    return X, np.where(X[:, 1] > np.sin(2.0 * X[:, 0]), "above", "below")


@pytest.fixture(scope="module")
def fitted(moons):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return DeepGPClassifier(DSVI(test_samples=8), **QUICK).fit(*moons)


def test_two_classes(fitted, moons):
    X, y = moons
    assert fitted.model_.depth == 2
    assert fitted.classes_.tolist() == ["above", "below"]
    assert fitted.score(X, y) > 0.9
    table = fitted.predict_proba(X)
    assert table.shape == (64, 2)
    assert np.allclose(table.sum(axis=1), 1.0, atol=1e-12)
    assert np.array_equal(fitted.predict(X), fitted.classes_[table.argmax(axis=1)])
    assert np.allclose(np.exp(fitted.predict_log_proba(X)), table)
    scores = fitted.log_density(X, y)
    assert np.allclose(scores, np.log(np.where(y == "below", table[:, 1], table[:, 0])), atol=1e-8)
    assert np.allclose(fitted.predict_proba(X[:3]), table[:3], atol=1e-12)


def test_answers_and_draws(fitted, moons):
    X = moons[0][:5]
    assert np.allclose(fitted.predict_distribution(X).mean(), fitted.predict_proba(X)[:, 1])
    draws = fitted.sample_y(X, 50, random_state=1)
    assert draws.shape == (5, 50)
    assert set(draws.ravel()) <= {"above", "below"}
    assert np.array_equal(draws, fitted.sample_y(X, 50, random_state=1))


def test_missing_labels_at_score_time_count_nothing(fitted, moons):
    X, y = moons
    partly = y.astype(object)
    partly[::2] = None
    scores = fitted.log_density(X, partly)
    assert np.all(scores[::2] == 0.0)
    assert np.allclose(scores[1::2], fitted.log_density(X, y)[1::2])


@pytest.mark.parametrize("likelihood", ["auto", "robustmax"])
def test_three_classes(likelihood):
    X = np.random.default_rng(1).uniform(-2.0, 2.0, size=(64, 2))
    y = 10 * np.digitize(X[:, 0], [-0.7, 0.7])
    model = DeepGPClassifier(depth=1, likelihood=likelihood, **QUICK).fit(X, y)
    assert model.classes_.tolist() == [0, 10, 20]
    assert model.score(X, y) > 0.9
    table = model.predict_proba(X)
    assert table.shape == (64, 3)
    assert np.allclose(table.sum(axis=1), 1.0, atol=1e-12)
    assert isinstance(model.model_.likelihood, Softmax if likelihood == "auto" else RobustMax)


def test_masked_labels_are_not_learned_from(moons):
    X, y = moons
    partly = y.astype(object)
    partly[::4] = None
    with pytest.raises(DataError, match=r"y contains NaN \(first in row 0\).*missing='mask'"):
        DeepGPClassifier().fit(X, partly)
    model = DeepGPClassifier(depth=1, missing="mask", **QUICK).fit(X, partly)
    partly[::4] = np.nan
    again = DeepGPClassifier(depth=1, missing="mask", **QUICK).fit(X, partly)
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))
    assert model.score(X, y) > 0.8


def test_save_load_and_pickle_are_bit_identical(fitted, moons, tmp_path):
    X, y = moons
    fitted.save(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, DeepGPClassifier)
    assert loaded.classes_.tolist() == ["above", "below"]
    assert np.array_equal(loaded.predict_proba(X), fitted.predict_proba(X))
    assert np.array_equal(loaded.log_density(X, y), fitted.log_density(X, y))
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(X), fitted.predict_proba(X))


def test_checkpoints_resume(moons, tmp_path, monkeypatch):
    X, y = moons
    often = lambda directory: Checkpointing(directory, every_seconds=None, every_steps=2)  # noqa: E731
    monkeypatch.setattr("fathomgp.estimators._base.Checkpointing", often)
    settings = {"depth": 1, "num_inducing": 5, "batch_size": 16, "max_iter": 8, "random_state": 0}
    plain = DeepGPClassifier(**settings).fit(X, y)

    def interrupt(event):
        if event["step"] >= 3:
            raise KeyboardInterrupt

    with pytest.warns(FathomWarning, match="Stopped by the user"):
        DeepGPClassifier(callbacks=[interrupt], checkpoint=tmp_path, **settings).fit(X, y)
    resumed = DeepGPClassifier(checkpoint=tmp_path, **settings).fit(X, y)
    assert np.array_equal(resumed.predict_proba(X), plain.predict_proba(X))


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([True, False, True], [False, True]),
        ([3, -1, 3], [-1, 3]),
        ([2.0, 1.0, 2.0], [1.0, 2.0]),
        (np.array(["b", "a", "b"], dtype=object), ["a", "b"]),
        (pd.Series(["b", "a", "b"], dtype="category", name="kind"), ["a", "b"]),
        (pd.Series([2, 1, 2], dtype="Int64"), [1, 2]),
        (pl.Series(["b", "a", "b"]), ["a", "b"]),
        (pd.DataFrame({"kind": ["b", "a", "b"]}), ["a", "b"]),
    ],
)
def test_labels_of_any_type_are_numbered(y, classes):
    targets, found = read_labels(y, num_rows=3)
    assert found.tolist() == classes
    assert targets.Y[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_missing_labels_of_any_type_are_masked():
    for y in (
        ["b", None, "a"],
        [1.0, np.nan, 0.0],
        pd.Series([1, None, 0], dtype="Int64"),
        pl.Series([True, None, False]),
    ):
        targets, classes = read_labels(y, missing="mask")
        assert targets.observed[:, 0].tolist() == [True, False, True]
        assert targets.Y[:, 0].tolist() == [1.0, 0.0, 0.0]
        assert len(classes) == 2


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0.5, 1.0, 2.0, 1.0], r"Unknown label type: y is continuous \(0.5 in row 0\).*use DeepGPRegressor"),
        ([0.0, np.inf, 0.0, 1.0], r"continuous \(inf in row 1\)"),
        (["a", "a", "a", "a"], r"a single class \(a\), but at least 2 classes are needed"),
        ([1, 1, 1, 1], r"a single class \(1\)"),
        ([0, 1, 0], "X has 4 rows but y has 3"),
        (["a", 1, "a", "b"], r"y mixes text with other labels \(1 in row 1\): make all labels text"),
        ([[0, 1], [1, 0], [0, 1], [1, 1]], r"y has the shape \(4, 2\), but one label a row is needed"),
        ([1j, 2j, 1j, 2j], "Unknown label type: y has the dtype complex128"),
        ([], "y is empty"),
        (None, "requires y to be passed, but the target y is None"),
    ],
)
def test_labels_are_refused_in_a_sentence(y, message):
    y = np.array(y, dtype=object) if y == ["a", 1, "a", "b"] else y
    with pytest.raises(DataError, match=message):
        DeepGPClassifier().fit(np.arange(4.0)[:, None], y)


def test_unseen_classes_are_refused(fitted, moons):
    X, y = moons
    y = y.copy()
    y[3] = "besid"
    with pytest.raises(
        DataError, match="label besid in row 3, which the fit did not see: its classes are above, below"
    ):
        fitted.log_density(X, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "exact"}, "method='exact' needs Gaussian noise and cannot classify: choose 'dsvi'"),
        ({"method": "sgpr"}, "cannot classify"),
        ({"method": "dsvy"}, "Did you mean 'dsvi'"),
        ({"depth": 0}, "depth must be a whole number of at least 1, but it is 0"),
        ({"hidden_dim": 0}, "hidden_dim must be a whole number of at least 1, but it is 0"),
        ({"hidden_dim": [2, 2]}, "hidden_dim has 2 entries, but 1 layers"),
        ({"likelihood": "gaussian"}, "likelihood='gaussian' is unknown: choose one of 'auto', 'bernoulli'"),
        ({"likelihood": Gaussian(0.1)}, "is for numbers, not for labels: use DeepGPRegressor"),
        ({"likelihood": RobustMax(4)}, "is for 4 classes, but y has 2"),
        ({"missing": "drop"}, "missing='drop' is unknown"),
    ],
)
def test_settings_are_refused_in_a_sentence(moons, settings, message):
    with pytest.raises(SettingError, match=message):
        DeepGPClassifier(**settings).fit(*moons)


def test_bernoulli_is_for_two():
    with pytest.raises(SettingError, match="likelihood='bernoulli' is for 2 classes, but y has 3: choose 'auto'"):
        DeepGPClassifier(likelihood="bernoulli").fit([[0.0], [1.0], [2.0]], [0, 1, 2])
    assert isinstance(DeepGPClassifier(likelihood="bernoulli")._likelihood(2), Bernoulli)


def test_batches_are_capped(moons):
    with pytest.warns(DataWarning, match="batch_size is 5000 but there are 64 rows: every step sees all of them"):
        DeepGPClassifier(depth=1, num_inducing=5, max_iter=1, batch_size=5000).fit(*moons)


def test_the_regressor_points_at_the_classifier(moons):
    X, y = moons
    with pytest.raises(DataError, match="y holds text"):
        DeepGPRegressor("exact").fit(X, y)
    with pytest.raises(DataError, match=r"y has the value -1 in row 0"):
        DeepGPRegressor("dsvi", likelihood=Poisson()).fit(X, np.r_[-1.0, np.ones(63)])


def test_settings_for_labels():
    assert tuned_inference("dsvi", "default", labels=True, num_data=300) == DSVI(inner_root=0.1, steps=500)
    assert tuned_inference("dsvi", "default", labels=True, num_data=10**5) == DSVI(inner_root=0.1)
    # Small batches of few rows are minibatches all the same.
    assert tuned_inference("dsvi", "default", labels=True, num_data=300, batch_size=50) == DSVI(inner_root=0.1)
    assert tuned_inference("aep", "default", labels=True, num_data=10**5) == AEP(inner_root=0.1, alpha=0.1)
    mine = DSVI()
    assert tuned_inference(mine, "default", labels=True, num_data=300) is mine
    # What was chosen is told.
    told = tuning_remarks("dsvi", "default", tuned_inference("dsvi", "default", labels=True, num_data=300))
    assert told[0].startswith("For labels, method='dsvi' means DSVI(steps=500, inner_root=0.1): pass such")
    assert tuning_remarks("dsvi", "default", DSVI()) == tuning_remarks(mine, "default", DSVI(steps=3)) == ()
    paper = tuned_inference("dsvi", "salimbeni2017", labels=False, num_data=300)
    assert tuning_remarks("dsvi", "salimbeni2017", paper)[0].startswith("For recipe='salimbeni2017', method='dsvi'")


def test_unfitted_models_say_so():
    with pytest.raises(NotFittedError, match="not fitted yet"):
        DeepGPClassifier().predict([[1.0]])


# Quick settings: the checks fit dozens of tiny tables, and what they test does not depend on a good optimum.
CHECKED = DeepGPClassifier(DSVI(test_samples=2, natural=0.5), depth=1, num_inducing=10, max_iter=10)

#: scikit-learn's checks that do not hold, each with the reason. None so far.
EXPECTED_FAILURES: dict[str, str] = {}


@parametrize_with_checks([CHECKED], expected_failed_checks=lambda estimator: EXPECTED_FAILURES)
def test_scikit_learn_contract(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FathomWarning)
        check(estimator)
