"""Noise from none to known: told instead of learned, for every method that can be told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.base import clone
from sklearn.model_selection import cross_validate

import fathomgp
from fathomgp import DeepGPRegressor
from fathomgp.data import ArraySource
from fathomgp.errors import DataError, DataWarning, SettingError
from fathomgp.inference.dsvi import elbo, initial_q, shallow_start, streamed_loss
from fathomgp.inference.exact import condition, log_evidence
from fathomgp.inference.sgpr import collapsed_elbo, optimal_posterior, optimal_q
from fathomgp.kernels import Matern52
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import freeze, real

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


# --- known variances of every row -------------------------------------------------------------------------------------


def rows_with_noise(rng, shared):
    x, y = rng.uniform(-2.0, 2.0, size=(20, 1)), rng.normal(size=(20, 2))
    noise = rng.uniform(0.05, 2.0, size=(20, 1 if shared else 2))
    return x, y, np.broadcast_to(noise, (20, 2)), np.linspace(-2.0, 2.0, 5)[:, None]


def one_layer(z=None):
    # The model's own noise would be seen if it were used.
    return DeepGP((Layer(Matern52(0.8, 1.3), Zero(2), None if z is None else real(z), 2),), freeze(Gaussian(77.0)))


@pytest.mark.parametrize("shared", [True, False])
def test_exact_with_known_noise_equals_the_closed_form(rng, key, shared):
    x, y, noise, new = rows_with_noise(rng, shared)
    model, batch = one_layer(), ArraySource(x, y, noise=noise).everything()
    answer = condition(model, batch, shared=shared).predict_f(jnp.asarray(new), key=key)
    K, cross, prior = grams(model, x, new)
    evidence = 0.0
    for p in range(2):
        covariance = K + np.diag(noise[:, p])
        assert np.allclose(answer.means[0][:, p], cross @ np.linalg.solve(covariance, y[:, p]), atol=1e-8)
        variance = np.diag(prior - cross @ np.linalg.solve(covariance, cross.T))
        assert np.allclose(answer.variances[0][:, p], variance, atol=1e-8)
        evidence += scipy.stats.multivariate_normal(np.zeros(20), covariance).logpdf(y[:, p])
    assert float(log_evidence(model, batch, shared=shared)) == pytest.approx(evidence, abs=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_sgpr_with_known_noise_equals_the_closed_form(rng, key, shared):
    x, y, noise, new = rows_with_noise(rng, shared)
    z = np.linspace(-2.0, 2.0, 6)[:, None]
    model, batch = one_layer(z), ArraySource(x, y, noise=noise).everything()
    answer = optimal_posterior(model, batch, shared=shared).predict_f(jnp.asarray(new), key=key)
    Kmm, Knm, Knn = grams(model, z, x)
    Ksm, Kss = grams(model, z, new)[1:]
    Kmm = Kmm + 1e-10 * np.mean(np.diag(Kmm)) * np.eye(6)
    bound = 0.0
    for p in range(2):
        weighted = Knm.T / noise[:, p]
        precision = Kmm + weighted @ Knm
        assert np.allclose(answer.means[0][:, p], Ksm @ np.linalg.solve(precision, weighted @ y[:, p]), atol=1e-8)
        variance = Kss - Ksm @ (np.linalg.inv(Kmm) - np.linalg.inv(precision)) @ Ksm.T
        assert np.allclose(answer.variances[0][:, p], np.diag(variance), atol=1e-8)
        Q = Knm @ np.linalg.solve(Kmm, Knm.T)
        bound += scipy.stats.multivariate_normal(np.zeros(20), Q + np.diag(noise[:, p])).logpdf(y[:, p])
        bound -= 0.5 * np.sum(np.diag(Knn - Q) / noise[:, p])
    assert float(collapsed_elbo(model, batch, shared=shared)) == pytest.approx(bound, abs=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_bound_reads_the_noise_of_their_rows(rng, key, depth):
    """Known noise of one size is the likelihood's own; where it differs, every row has its own figure."""
    x, y, noise, _ = rows_with_noise(rng, shared=False)
    inner = [Layer(Matern52(0.8, 1.3), Zero(2), real(x[:5]), 2)] if depth == 2 else []
    last = Layer(Matern52(0.8, 1.3), Zero(2), real(np.tile(x[:5], (1, len(inner) + 1))), 2)

    def figures(own, known):
        model = DeepGP((*inner, last), Gaussian(own))
        batch = ArraySource(x, y, noise=known).everything()
        q = initial_q(model, inner_root=0.1)
        return float(elbo(model, q, batch, key=key)), float(
            streamed_loss(model, q, batch, key=key, num_samples=1)[0].data
        )

    assert np.allclose(figures(77.0, np.full((20, 2), 0.3)), figures(0.3, None))
    # A sum over rows: its change in one row's noise does not depend on another row's.
    first, other = noise.copy(), noise.copy()
    first[0] *= 2.0
    other[1] *= 3.0
    both = np.where(first != noise, first, other)
    changes = [np.subtract(figures(77.0, changed), figures(77.0, noise)) for changed in (first, other, both)]
    assert np.all(np.abs(changes[0]) > 1e-6)
    assert np.allclose(changes[0] + changes[1], changes[2])


def test_the_shallow_start_with_known_noise_is_optimal(rng, key):
    x, y, noise, _ = rows_with_noise(rng, shared=False)
    source = ArraySource(x, y, noise=noise)
    model, q = shallow_start(one_layer(np.linspace(-2.0, 2.0, 6)[:, None]), source, key=key)
    assert float(model.likelihood.variance.value) == pytest.approx(77.0)
    best = optimal_q(model, source.everything())
    assert np.allclose(q.mean, best.mean, atol=1e-6)
    assert np.allclose(q.root, best.root, atol=1e-6)


def grams(model, a, b):
    """k(a, a), k(b, a) and k(b, b)."""
    kernel, a, b = model.layers[0].kernel, jnp.asarray(a), jnp.asarray(b)
    return np.asarray(kernel(a)), np.asarray(kernel(b, a)), np.asarray(kernel(b))


@pytest.mark.parametrize(
    "method", ["exact", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("sgpr", "dsvi"))]
)
def test_new_rows_take_noise_of_their_own(data, rng, method, tmp_path):
    X, y = data
    noise = rng.uniform(0.1, 2.0, size=len(y))
    model = regressor(method).fit(X, y, noise_variance=noise)
    new, told = X[:5], np.array([0.1, 0.5, 1.0, 2.0, 4.0])
    f, f_std = model.predict(new, return_std=True, latent=True)
    mean, std = model.predict(new, return_std=True, noise_variance=told)
    assert np.allclose(mean, f)
    assert np.allclose(std, np.sqrt(f_std**2 + told))
    assert np.allclose(model.predict(new), f)
    joint = model.predict(new, return_cov=True, noise_variance=told)[1]
    assert np.allclose(joint - model.predict(new, return_cov=True, latent=True)[1], np.diag(told), atol=1e-8)
    density = scipy.stats.norm(mean, std).logpdf(y[:5])
    close = 0.02 if method == "dsvi" else 1e-8  # a mixture is nearly, not quite, a Gaussian
    assert np.allclose(model.log_density(new, y[:5], noise_variance=told), density, atol=close)
    upper = mean + 1.2815515655446004 * std
    assert np.allclose(model.predict_quantiles(new, 0.9, noise_variance=told), upper, atol=close)
    draws = model.sample_y(new, 4000, noise_variance=told)
    assert np.allclose(draws.std(axis=1), std, rtol=0.1)
    assert np.allclose(model.predict_distribution(new, noise_variance=told).sample(4000, 0).std(axis=0), std, rtol=0.1)
    model.save(tmp_path / "model")
    again = fathomgp.load(tmp_path / "model")
    assert np.array_equal(again.predict(new, return_std=True, noise_variance=told)[1], std)
    for ask in (
        lambda: again.predict(new, return_std=True),
        lambda: again.predict(new, return_cov=True),
        lambda: again.predict_distribution(new),
        lambda: again.predict_quantiles(new, 0.5),
        lambda: again.sample_y(new),
        lambda: again.log_density(new, y[:5]),
    ):
        with pytest.raises(SettingError, match=r"noise of these rows is not known.*latent=True"):
            ask()


def test_the_estimator_with_known_noise_equals_the_closed_form(data, rng):
    X, y = data
    noise, new = rng.uniform(0.1, 2.0, size=len(y)), np.linspace(-2.5, 2.5, 7)[:, None]
    model = regressor(max_iter=20).fit(X, y, noise_variance=noise)
    mean, covariance = closed_form(model, X, y, new, noise)
    answer = model.predict(new, return_cov=True, latent=True)
    assert np.allclose(answer[0], mean, atol=1e-8)
    assert np.allclose(answer[1], covariance, atol=1e-8)


def test_known_noise_of_several_outputs_some_missing(data, rng):
    X, y = data
    Y, noise = np.stack([y, -y], axis=1), rng.uniform(0.1, 2.0, size=(len(y), 2))
    Y[3, 1] = noise[3, 1] = np.nan
    model = regressor(missing="mask").fit(X, Y, noise_variance=noise)
    std = model.predict(X[:4], return_std=True, noise_variance=np.ones((4, 2)))[1]
    latent = model.predict(X[:4], return_std=True, latent=True)[1]
    assert np.allclose(std**2 - latent**2, 1.0)


def test_folds_slice_the_noise(data):
    X, y = data
    noise = np.linspace(0.1, 2.0, len(y))
    result = cross_validate(
        regressor(), X, y, cv=3, params={"noise_variance": noise}, return_estimator=True, return_indices=True
    )
    assert np.all(np.isfinite(result["test_score"]))
    rows = result["indices"]["train"][0]
    own = clone(regressor()).fit(X[rows], y[rows], noise_variance=noise[rows])
    assert np.array_equal(result["estimator"][0].predict(X), own.predict(X))


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        (np.ones(5), r"noise_variance has the shape \(5,\), but there are 24 rows and 1 outputs"),
        (np.ones((24, 2)), r"noise_variance has the shape \(24, 2\)"),
        (0.5, r"noise_variance has the shape \(\)"),
        (np.r_[np.ones(23), -1.0], "positive and finite, but it is -1 in row 23"),
        (np.r_[0.0, np.ones(23)], "positive and finite, but it is 0 in row 0"),
        (np.r_[np.nan, np.ones(23)], "positive and finite, but it is nan in row 0"),
        ("much", "noise_variance must hold numbers"),
    ],
)
def test_variances_that_are_none_are_refused(data, noise, sentence):
    with pytest.raises(DataError, match=sentence):
        regressor().fit(*data, noise_variance=noise)


def test_known_noise_where_it_cannot_be_used(data):
    X, y = data
    ones = np.ones(len(y))
    with pytest.raises(SettingError, match="both tell the noise"):
        regressor(noise=0.1).fit(X, y, noise_variance=ones)
    with pytest.raises(SettingError, match="method='stride' knows no noise variances of rows"):
        regressor("stride").fit(X, y, noise_variance=ones)
    with pytest.raises(SettingError, match="Gaussian noise, but the likelihood is Poisson"):
        regressor("dsvi", likelihood="poisson").fit(X, ones, noise_variance=ones)
    with pytest.raises(SettingError, match="for a fit that was told it"):
        regressor().fit(X, y).predict(X, return_std=True, noise_variance=ones)
