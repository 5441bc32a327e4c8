"""DeepGPRegressor as users meet it: flags untouched, NumPy in and out, scikit-learn contract, one-line errors."""

import pickle
import subprocess
import sys
import textwrap
import warnings

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

from fathomgp import DeepGPRegressor, load
from fathomgp.errors import DataError, DataWarning, FathomWarning, ModelFileError, SettingError
from fathomgp.fitting import Checkpointing
from fathomgp.inference import DSVI, SGPR, Exact
from fathomgp.kernels import RBF, Linear
from fathomgp.likelihoods import Gaussian
from fathomgp.model import Recipe
from fathomgp.parameters import freeze

QUICK = Exact(restarts=0)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(60, 2))
    return X, 100.0 + 20.0 * np.sin(2 * X[:, 0]) + X[:, 1] + rng.normal(size=60)


@pytest.fixture(scope="module")
def fitted(table):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return DeepGPRegressor(QUICK, random_state=0).fit(*table)


pytestmark = pytest.mark.usefixtures("flag_off")


def test_answers_are_numpy_in_the_units_of_y(fitted, table):
    X, y = table
    mean, std = fitted.predict(X, return_std=True)
    assert mean.dtype == std.dtype == np.float64
    assert mean.shape == std.shape == (60,)
    assert fitted.score(X, y) > 0.95
    assert 0.5 < np.mean(std) < 2.0  # the noise has a standard deviation of 1
    lower, upper = fitted.predict_quantiles(X, [0.05, 0.95])
    assert np.mean((lower < y) & (y < upper)) > 0.8
    assert fitted.predict_quantiles(X, 0.5).shape == (60,)
    assert fitted.log_density(X, y).shape == (60,)
    assert np.allclose(fitted.predict_distribution(X).mean(), mean)


def test_covariance_and_samples_agree(fitted, table):
    X = table[0][:4]
    mean, covariance = fitted.predict(X, return_cov=True)
    assert np.allclose(mean, fitted.predict(X))
    assert np.allclose(np.sqrt(np.diag(covariance)), fitted.predict(X, return_std=True)[1])
    draws = fitted.sample_y(X, 3000, random_state=1)
    assert draws.shape == (4, 3000)
    assert np.allclose(draws.mean(axis=1), mean, atol=4 * np.sqrt(covariance.max() / 3000))
    assert np.allclose(np.cov(draws), covariance, atol=0.2 * covariance.max())
    assert not np.array_equal(draws, fitted.sample_y(X, 3000, random_state=2))
    with pytest.raises(SettingError, match="exclude each other"):
        fitted.predict(X, return_std=True, return_cov=True)


def test_same_seed_same_fit_and_batches_change_nothing(fitted, table):
    X, y = table
    again = DeepGPRegressor(QUICK, random_state=0).fit(X, y)
    assert np.array_equal(again.predict(X), fitted.predict(X))
    one_by_one = np.concatenate([fitted.predict(row[None]) for row in X[:5]])
    assert np.allclose(one_by_one, fitted.predict(X)[:5], rtol=1e-12)


def test_several_outputs_and_missing_values(table):
    X, y = table
    Y = np.stack([y, -y], axis=1)
    Y[::7, 0] = np.nan
    with pytest.raises(DataError, match=r"contains NaN .* missing='mask'"):
        DeepGPRegressor(QUICK).fit(X, Y)
    model = DeepGPRegressor(QUICK, missing="mask", random_state=0).fit(X, Y)
    assert model.predict(X).shape == (60, 2)
    assert np.corrcoef(model.predict(X)[:, 0], -model.predict(X)[:, 1])[0, 1] > 0.99
    assert model.log_density(X, Y).shape == (60,)
    assert model.sample_y(X[:3], 5).shape == (3, 2, 5)
    assert model.predict(X[:3], return_cov=True)[1].shape == (3, 3, 2)
    assert model.predict_quantiles(X, [0.1, 0.9]).shape == (2, 60, 2)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames_remember_their_columns(table, frame):
    X, y = table
    named = frame({"speed": X[:, 0], "depth": X[:, 1]})
    model = DeepGPRegressor(QUICK, max_iter=3, random_state=0).fit(named, y)
    assert list(model.feature_names_in_) == ["speed", "depth"]
    assert model.predict(named).shape == (60,)
    with pytest.raises(DataError, match="order"):
        model.predict(named[["depth", "speed"]])
    with pytest.raises(DataError, match="did you mean 'depth'"):
        model.predict(frame({"speed": X[:, 0], "depht": X[:, 1]}))


def test_save_load_predict_in_a_fresh_process_is_bit_identical(fitted, table, tmp_path):
    X, _ = table
    fitted.save(tmp_path / "model")
    np.save(tmp_path / "X.npy", X)
    code = textwrap.dedent(
        """
        import sys, numpy as np
        from fathomgp import load
        model = load(sys.argv[1] + "/model")
        mean, std = model.predict(np.load(sys.argv[1] + "/X.npy"), return_std=True)
        np.save(sys.argv[1] + "/answer.npy", np.stack([mean, std]))
        """
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    assert np.array_equal(np.load(tmp_path / "answer.npy"), np.stack(fitted.predict(X, return_std=True)))


def test_loaded_models_keep_everything(fitted, table, tmp_path):
    fitted.save(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded.method, Exact)
    assert loaded.get_params()["random_state"] == 0
    assert np.array_equal(loaded.history_["objective"], fitted.history_["objective"])
    assert loaded.n_features_in_ == 2
    with pytest.raises(DataError, match="is expecting 2 features"):
        loaded.predict(np.zeros((3, 5)))
    next(tmp_path.glob("*.safetensors")).write_bytes(b"not arrays")
    with pytest.raises(ModelFileError, match="is damaged"):
        load(tmp_path)


def test_pickles_keep_double_precision(fitted, table):
    X, _ = table
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))


def test_checkpoints_resume(table, tmp_path, monkeypatch):
    X, y = table
    often = lambda directory: Checkpointing(directory, every_seconds=None, every_steps=2)  # noqa: E731
    monkeypatch.setattr("fathomgp.estimators._base.Checkpointing", often)
    plain = DeepGPRegressor(QUICK, random_state=0, max_iter=8).fit(X, y)

    def interrupt(event):
        if event["step"] >= 3:
            raise KeyboardInterrupt

    settings = {"random_state": 0, "max_iter": 8, "checkpoint": tmp_path}
    with pytest.warns(FathomWarning, match="Stopped by the user"):
        DeepGPRegressor(QUICK, callbacks=[interrupt], **settings).fit(X, y)
    assert (tmp_path / "checkpoint.safetensors").is_file()
    resumed = DeepGPRegressor(QUICK, **settings).fit(X, y)
    assert np.array_equal(resumed.predict(X), plain.predict(X))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "exakt"}, r"method='exakt' is unknown: .* Did you mean 'exact'\?"),
        ({"kernel": "rbff"}, "rbff"),
        ({"precision": "half"}, "precision='half' is unknown"),
        ({"architecture": "tower"}, "architecture='tower' is unknown"),
        ({"likelihood": "gausian"}, "gausian"),
        ({"likelihood": "bernoulli"}, "use DeepGPClassifier"),
        ({"missing": "drop"}, "missing='drop' is unknown"),
        ({"depth": 0}, "depth must be a whole number of at least 1, but it is 0"),
        ({"depth": 2}, "method='exact' fits one layer"),
        ({"num_inducing": -3}, "num_inducing must be a whole number of at least 1, but it is -3"),
        ({"max_iter": 1.5}, "max_iter must be a whole number of at least 1, but it is 1.5"),
        ({"batch_size": 10}, "sees all rows at every step: leave batch_size=None"),
        ({"recipe": "nobody2000"}, "There is no recipe 'nobody2000'"),
    ],
)
def test_settings_are_refused_in_a_sentence(table, settings, message):
    with pytest.raises(SettingError, match=message):
        DeepGPRegressor(**{"method": "exact", **settings}).fit(*table)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([[1.0], [np.nan]], [1.0, 2.0], "contains NaN"),
        ([[1.0], [np.inf]], [1.0, 2.0], "contains inf"),
        ([[1.0], [2.0]], [1.0, np.nan], "contains NaN"),
        ([["a"], ["b"]], [1.0, 2.0], "holds text"),
        ([[1.0]], [1.0], "at least 2"),
        ([1.0, 2.0], [1.0, 2.0], r"reshape\(-1, 1\)"),
        ([[1.0], [2.0]], [1.0, 2.0, 3.0], "X has 2 rows but y has 3"),
    ],
)
def test_data_are_refused_in_a_sentence(X, y, message):
    with pytest.raises(DataError, match=message):
        DeepGPRegressor().fit(X, y)


def test_unfitted_models_say_so():
    with pytest.raises(NotFittedError, match="not fitted yet"):
        DeepGPRegressor().predict([[1.0]])


def test_odd_but_usable_data_fit():
    with pytest.warns(DataWarning, match="is constant"):
        flat = DeepGPRegressor(QUICK, max_iter=5).fit([[0.0], [1.0], [2.0]], [5.0, 5.0, 5.0])
    assert np.allclose(flat.predict([[0.5]]), 5.0)
    X = np.repeat([[0.0], [1.0], [2.0]], 6, axis=0)
    twins = DeepGPRegressor(QUICK, max_iter=20).fit(X, np.repeat([0.0, 1.0, 0.0], 6))
    assert np.all(np.isfinite(twins.predict(X)))
    with pytest.warns(DataWarning, match="num_inducing is 100 but there are 20 rows: 20 are used"):
        capped = DeepGPRegressor("sgpr", max_iter=5).fit(np.linspace(0, 1, 20)[:, None], np.linspace(0, 1, 20))
    assert capped.model_.layers[0].num_inducing == 20


def test_kernels_may_be_objects_and_messages_are_kept(table):
    model = DeepGPRegressor(SGPR(), num_inducing=15, kernel=RBF(1.0) + Linear(), max_iter=10, random_state=0).fit(
        *table
    )
    assert model.score(*table) > 0.5
    assert model.messages_ == []
    assert model.n_iter_ == 10
    assert len(model.history_["objective"]) == 10


@pytest.mark.parametrize("method", ["exact", "sgpr"])
def test_single_precision_is_close(table, method):
    X, y = table
    settings = {"random_state": 0, "num_inducing": 20, "max_iter": 30}
    exact = DeepGPRegressor(method, **settings).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FathomWarning)  # float32 may need more jitter, and says so
        single = DeepGPRegressor(method, precision="single", **settings).fit(X, y)
    assert single.predict(X).dtype == np.float64
    assert np.allclose(single.predict(X), exact.predict(X), atol=0.1 * np.std(y))
    with pytest.raises(SettingError, match="has no precision 'mixed'"):
        DeepGPRegressor(method, precision="mixed").fit(X, y)


def test_deep_models_fit_save_and_load(table, tmp_path):
    X, y = table
    settings = {"num_inducing": 10, "max_iter": 20, "kernel": RBF(), "random_state": 0}
    model = DeepGPRegressor(DSVI(test_samples=6), batch_size=32, precision="mixed", **settings).fit(X, y)
    assert model.model_.depth == 2
    assert model.score(X, y) > 0.0
    model.save(tmp_path)
    assert np.array_equal(load(tmp_path).predict(X), model.predict(X))
    assert np.allclose(model.predict(X[:3]), model.predict(X)[:3], rtol=1e-5)
    with pytest.warns(DataWarning, match="batch_size is 5000 but there are 60 rows"):
        DeepGPRegressor(DSVI(test_samples=2), batch_size=5000, **{**settings, "max_iter": 1}).fit(X, y)


def test_a_failed_refit_changes_nothing(table):
    X, y = table
    model = DeepGPRegressor(QUICK, max_iter=5, random_state=0).fit(X, y)
    before = model.predict(X)
    with pytest.raises(SettingError, match="fits one layer"):
        model.set_params(depth=2).fit(1e3 * X, y)
    assert np.array_equal(model.predict(X), before)


def test_given_hyperparameters_are_kept(table):
    kernel, noise = freeze(RBF(0.7)), freeze(Gaussian(0.1))
    model = DeepGPRegressor("exact", kernel=kernel, likelihood=noise, recipe=Recipe(), random_state=0).fit(*table)
    with jax.enable_x64(True):
        assert float(model.model_.layers[0].kernel.lengthscale.value) == pytest.approx(0.7)


def test_import_changes_no_setting():
    code = (
        "import jax; before = dict(jax.config.values); import fathomgp; assert dict(jax.config.values) == before; "
        "import jax.numpy as jnp; assert jnp.zeros(1).dtype == jnp.float32; print(fathomgp.__version__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.slow
def test_a_million_rows_stay_below_a_gibibyte():
    code = textwrap.dedent(
        """
        import resource, numpy as np
        from fathomgp import DeepGPRegressor
        from fathomgp.inference import Exact
        X = np.linspace(0, 1, 50)[:, None]
        model = DeepGPRegressor(Exact(restarts=0), max_iter=3, random_state=0).fit(X, np.sin(9 * X[:, 0]))
        many = np.random.default_rng(0).uniform(size=(1_000_000, 1))
        model.predict(many[:5000], return_std=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        mean, std = model.predict(many, return_std=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1024**2, f"{grown} KiB"
        assert np.allclose(model.predict(many[:100]), mean[:100], rtol=1e-12)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# Quick settings: the checks fit dozens of tiny tables, and what they test does not depend on a good optimum.
CHECKED = DeepGPRegressor(Exact(restarts=0), max_iter=5)

#: scikit-learn's checks that do not hold, each with the reason. None so far.
EXPECTED_FAILURES: dict[str, str] = {}


@parametrize_with_checks([CHECKED], expected_failed_checks=lambda estimator: EXPECTED_FAILURES)
def test_scikit_learn_contract(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FathomWarning)
        check(estimator)
