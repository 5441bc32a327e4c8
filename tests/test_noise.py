"""Noise from none to known: told instead of learned, for every method that can be told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fathomgp
from fathomgp import DeepGPRegressor
from fathomgp.errors import DataError, DataWarning, SettingError

METHODS = [
    "exact",
    "sgpr",
    "dsvi",
    *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("sghmc", "aep", "stride")),
]


@pytest.fixture
def data(rng):
    X = rng.uniform(-2.0, 2.0, size=(24, 1))
    return X, 3.0 + 5.0 * np.sin(2.0 * X[:, 0]) + 0.5 * rng.normal(size=24)


def regressor(method="exact", **settings):
    settings = {"num_inducing": 8, "max_iter": 5, "random_state": 0, "verbose": False} | settings
    return DeepGPRegressor(method, **settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", [0.25, "none"])
def test_the_noise_that_was_told_is_the_noise_of_the_answer(data, method, noise):
    X, y = data
    y = np.sin(X[:, 0]) if noise == "none" else y
    model = regressor(method, noise=noise).fit(X, y)
    predictive = model.predict_distribution(X[:5])
    added = predictive.variance() - predictive.latent_std() ** 2
    assert np.all(np.isfinite(predictive.std()))
    if noise == "none":
        assert np.all(added <= 1.001e-6 * np.var(y))
    else:
        assert np.allclose(added, noise, rtol=1e-6)


def test_told_noise_gives_the_closed_form(data):
    X, y = data
    model = regressor(noise=0.25, max_iter=20).fit(X, y)
    new = np.linspace(-2.5, 2.5, 7)[:, None]
    mean, covariance = closed_form(model, X, y, new, np.full(len(y), 0.25))
    answer = model.predict_distribution(new)
    assert np.allclose(answer.latent_mean(), mean, atol=1e-8)
    assert np.allclose(answer.latent_std() ** 2, np.diag(covariance), atol=1e-8)
    assert np.allclose(
        model.predict(new, return_std=True, latent=True), (mean, np.sqrt(np.diag(covariance))), atol=1e-8
    )
    for latent, added in ((True, 0.0), (False, 0.25)):
        joint = model.predict(new, return_cov=True, latent=latent)
        assert np.allclose(joint[0], mean, atol=1e-8)
        assert np.allclose(joint[1], covariance + added * np.eye(len(new)), atol=1e-8)


def test_the_function_below_counts_is_a_log_rate(data):
    X, _ = data
    model = regressor("dsvi", likelihood="poisson", depth=1).fit(X, np.arange(len(X)) % 5)
    mean, std = model.predict(X[:3], return_std=True, latent=True)
    assert np.allclose(model.predict(X[:3]), np.exp(mean + 0.5 * std**2))
    assert model.predict(X[:3], return_cov=True, latent=True)[1].shape == (3, 3)


def closed_form(model, X, y, new, noise):
    """Mean and covariance of f at new rows, in the units of y, by plain NumPy at the fitted hyperparameters."""
    kernel, scale = model.model_.layers[0].kernel, model.y_scaler_.scale[0]
    a, b = (np.asarray(model.x_scaler_.transform(x)) for x in (X, new))
    with jax.enable_x64(True):
        pairs = [[jnp.asarray(one) for one in pair] for pair in ((a, a), (b, a), (b, b))]
        K, cross, prior = (np.asarray(kernel(*pair)) * scale**2 for pair in pairs)
    K = K + np.diag(noise) + 1e-10 * np.mean(np.diag(K) + noise) * np.eye(len(a))
    shift = model.y_scaler_.shift[0]
    return shift + cross @ np.linalg.solve(K, y - shift), prior - cross @ np.linalg.solve(K, cross.T)


def test_without_noise_the_answer_goes_through_the_data(data):
    X, _ = data
    y = 3.0 + 5.0 * np.sin(2.0 * X[:, 0])
    model = regressor(noise="none", max_iter=50).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.allclose(mean, y, atol=1e-3)
    assert np.all(std < 1e-2)


def test_rows_that_contradict_each_other_have_noise(data):
    X, y = data
    twice, again = np.concatenate([X, X[3:4]]), np.append(y, y[3] + 1.0)
    with pytest.raises(DataError, match="rows 3 and 24 have the same inputs and different y"):
        regressor(noise="none").fit(twice, again)
    regressor(noise="none").fit(twice, np.append(y, y[3]))


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        (-1.0, "must be positive and finite, but it is -1.0"),
        (np.nan, "must be positive and finite, but it is nan"),
        (np.inf, "must be positive and finite, but it is inf"),
        (0, "noise='none' stands for no noise"),
        ("nothing", "noise must be 'learn', 'none' or one number"),
        (True, "noise must be 'learn', 'none' or one number"),
        ([0.1, 0.2], "fit\\(X, y, noise_variance=...\\)"),
    ],
)
def test_noise_that_is_none_is_refused(data, noise, sentence):
    with pytest.raises(SettingError, match=sentence):
        regressor(noise=noise).fit(*data)


@pytest.mark.parametrize("method", ["decoupled", "meanfield", "sequential"])
def test_methods_that_learn_their_noise_say_so(data, method):
    with pytest.raises(SettingError, match=f"method='{method}' learns its noise"):
        regressor(method, noise=0.1).fit(*data)


def test_other_likelihoods_have_no_variance_to_tell(data):
    with pytest.raises(SettingError, match="Gaussian noise, but the likelihood is StudentT"):
        regressor("dsvi", likelihood="student_t", noise=0.1).fit(*data)


def test_noise_below_what_factorises_is_raised_with_a_word(data):
    with pytest.warns(DataWarning, match="the least that factorises"):
        model = regressor(noise=1e-30).fit(*data)
    assert any("the least that factorises" in sentence for sentence in model.messages_)


def test_told_noise_is_saved(data, tmp_path):
    X, y = data
    model = regressor(noise=0.25).fit(X, y)
    model.save(tmp_path / "model")
    again = fathomgp.load(tmp_path / "model")
    assert again.noise == 0.25
    assert np.array_equal(again.predict(X, return_std=True)[1], model.predict(X, return_std=True)[1])
