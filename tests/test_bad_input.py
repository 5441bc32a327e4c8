"""Settings and data that nobody should pass: a sentence each, never an error from below."""

import datetime

import jax
import numpy as np
import pandas as pd
import polars
import pytest

from fathomgp import DeepGPClassifier, DeepGPRegressor
from fathomgp.data import check_seed, k_fold, random_split, read_inputs, read_labels, read_targets
from fathomgp.errors import DataError, SettingError
from fathomgp.estimators import GPLVM
from fathomgp.inference import AEP, DSVI, EP, SGHMC, SGPR, Exact, Sequential
from fathomgp.kernels import RBF, ArcCosine, Convolution, Matern32, Polynomial, Squashed
from fathomgp.likelihoods import Gaussian, RobustMax, Softmax

pytestmark = [pytest.mark.usefixtures("as_given"), pytest.mark.filterwarnings("ignore")]
X = np.random.default_rng(0).normal(size=(12, 2))
y = X[:, 0]
HUGE = 10**400


class Thing:
    """An object of no use, of equal name in every worker of the suite."""

    def __repr__(self):
        return "thing"


@pytest.mark.parametrize("estimator", [DeepGPRegressor, DeepGPClassifier, GPLVM])
@pytest.mark.parametrize(
    "seed", [-1, 2**32, HUGE, "x", "", 1.5, float("nan"), (), [], {}, np.random.default_rng(0), True]
)
def test_seeds(estimator, seed):
    with pytest.raises(SettingError, match=r"random_state must be a whole number from 0 to 4294967295, but it is"):
        estimator(random_state=seed, max_iter=1, verbose=False).fit(X, y > 0)


def test_a_key_of_jax_is_no_seed():
    with pytest.raises(SettingError, match="random_state must be a whole number"):
        DeepGPRegressor(random_state=jax.random.key(0), verbose=False).fit(X, y)


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 2**31},
        {"depth": HUGE},
        {"depth": float("nan")},
        {"depth": []},
        {"num_inducing": HUGE},
        {"max_iter": HUGE},
        {"hidden_dim": float("nan")},
        {"hidden_dim": {}},
        {"hidden_dim": 2**31},
        {"kernel": float("nan")},
        {"kernel": []},
        {"kernel": np.array([1, 2])},
        {"kernel": Thing()},
        {"likelihood": []},
        {"likelihood": float("nan")},
        {"recipe": {}},
        {"recipe": np.array([])},
        {"architecture": []},
        {"missing": []},
        {"precision": float("nan")},
        {"method": ()},
        {"checkpoint": float("nan")},
        {"checkpoint": []},
        {"checkpoint": "a" * 1000},
        {"callbacks": 5},
        {"callbacks": ["x"]},
        {"early_stopping": np.array([])},
        {"verbose": np.array([1, 2])},
    ],
    ids=str,
)
def test_settings(settings):
    with pytest.raises(SettingError, match=next(iter(settings)) if "kernel" not in settings else "kernel"):
        DeepGPRegressor(**{"method": "dsvi"} | settings).fit(X, y)


@pytest.mark.parametrize(
    "build",
    [
        lambda: SGHMC(batch_size="0"),
        lambda: SGHMC(learning_rate=float("nan")),
        lambda: EP(sweeps="all"),
        lambda: EP(alpha=np.array(["a"])),
        lambda: AEP(alpha=None),
        lambda: AEP(learning_rate="fast"),
        lambda: DSVI(steps=HUGE),
        lambda: DSVI(steps=True),
        lambda: SGPR(rounds=[]),
        lambda: Exact(restarts=slice(3)),
        lambda: Exact(restarts=1.5),
        lambda: Sequential(budget={}),
        lambda: RBF(lengthscale="wide"),
        lambda: RBF(variance=HUGE),
        lambda: Matern32(active_dims=3),
        lambda: Matern32(active_dims="ab"),
        lambda: Matern32(active_dims=[2**70]),
        lambda: ArcCosine(variance=datetime.date(2020, 1, 1)),
        lambda: Polynomial(degree="two"),
        lambda: Polynomial(degree=HUGE),
        lambda: ArcCosine(order=np.array([1, 2])),
        lambda: Squashed("rbf"),
        lambda: Convolution(1e300),
        lambda: Convolution(RBF(), shortest=None),
        lambda: Gaussian([]) and Gaussian("loud"),
        lambda: Softmax("three"),
        lambda: Softmax(3, num_points=[2]),
        lambda: RobustMax(3, epsilon=pd.NA),
    ],
)
def test_objects_check_the_types_of_their_settings(build):
    with pytest.raises(SettingError, match=r" but (it|they) (is|has|are) "):
        build()


def test_numbers_of_every_type_pass():
    assert SGHMC(batch_size=np.int64(3), learning_rate=np.float32(0.5)).batch_size == 3
    assert SGHMC(learning_rate=1).learning_rate == 1
    assert Exact(restarts=None).restarts is None
    assert Softmax(np.int64(3)).num_points == Softmax(3).num_points


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([[HUGE, 1]] * 3, "holds a number beyond all floats in row 0"),
        (jax.random.split(jax.random.key(0), 3), "cannot be read as numbers"),
        ([jax.random.key(0)] * 3, "cannot be read as numbers|no number"),
        (polars.DataFrame({"a": [[1], [2], [3]]}), "no number|object"),
        (pd.DataFrame({"a": pd.period_range("2020", periods=3)}), "no number"),
        (np.array([["1", "x"], ["2", "3"]]), r"Column 0 of X holds text \('1' in row 0\)"),
        (np.array([["1", "x"], ["y", "3"]]), r"Column 0 of X holds text \('y' in row 1\)"),
    ],
)
def test_inputs(data, sentence):
    with pytest.raises(DataError, match=sentence):
        read_inputs(data)


def test_the_first_cell_that_is_no_number_is_named():
    with pytest.raises(DataError, match=r"holds text \('x' in row 2\)"):
        read_inputs(pd.DataFrame({"a": ["1", "2", "x", "y"]}))
    with pytest.raises(DataError, match=r"holds text \('1' in row 0\)"):
        read_inputs(pd.DataFrame({"a": ["1", "2"]}))


def test_whole_numbers_of_128_bits_and_decimals_of_polars_are_numbers():
    table = polars.DataFrame({"a": [1, 2, None]})
    for dtype in (polars.Int128, polars.Decimal(10, 2)):
        values, _ = read_inputs(table.select(polars.col("a").fill_null(3).cast(dtype)))
        assert values.tolist() == [[1.0], [2.0], [3.0]]
        assert read_targets(table["a"].cast(dtype), missing="mask").observed.ravel().tolist() == [True, True, False]


@pytest.mark.parametrize(
    "labels",
    [
        [["a"], ["b", "c"]],
        [[["a"]], [["b"]]],
        [Thing(), Thing()],
        [{}, {}],
        pd.Series([[1], [2]]),
        [jax.random.key(0)] * 2,
        "ab",
        3,
        {},
        [[]],
    ],
    ids=str,
)
def test_labels(labels):
    with pytest.raises(DataError, match=r"^y |^Unknown label type"):
        read_labels(labels)


def test_labels_of_polars():
    targets, classes = read_labels(polars.Series([2, 1, None], dtype=polars.Int128), missing="mask")
    assert classes.tolist() == [1, 2]
    assert targets.observed.ravel().tolist() == [True, True, False]


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return DeepGPRegressor("exact", max_iter=1, random_state=0, verbose=False).fit(X, y)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.predict_quantiles(X, []),
        lambda m: m.predict_quantiles(X, "half"),
        lambda m: m.predict_quantiles(X, None),
        lambda m: m.predict_quantiles(X, [[0.5]]),
        lambda m: m.predict_distribution(X).interval("wide"),
        lambda m: m.predict_distribution(X).interval(None),
        lambda m: m.predict_distribution(X).interval([0.5]),
        lambda m: m.predict_distribution(X).sample(1.5),
        lambda m: m.predict_distribution(X).sample(2, random_state="x"),
        lambda m: m.sample_y(X, HUGE),
        lambda m: m.sample_y(X, 1, random_state=-1),
        lambda m: m.predict(X, return_std=np.array([])),
        lambda m: m.log_density(X, ["a"] * 12),
        lambda m: m.score(X, ["a"] * 12),
        lambda m: m.score(X, X),
        lambda m: m.score(X, y[:5]),
        lambda m: m.predict(X, return_cov=np.array([1, 2])),
        lambda m: m.predict_distribution(X).crps("x"),
        lambda m: m.predict_distribution(X).cdf(HUGE),
    ],
)
def test_questions(model, ask):
    with pytest.raises((SettingError, DataError)):
        ask(model)


def test_counts_of_numpy_are_counts(model):
    three = np.int64(3)
    assert model.sample_y(X, three).shape == (12, 3)
    assert model.predict_distribution(X).sample(three, random_state=three).shape == (3, 12)


def test_splits_and_their_seeds():
    assert check_seed(np.int64(3)) == 3
    for call in (lambda: random_split(5, 0.5, -1), lambda: k_fold(5, 2, 2**40)):
        with pytest.raises(SettingError, match="seed must be a whole number"):
            call()
