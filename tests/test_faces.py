"""A fitted model in JAX: its answers are the estimator's, its derivatives are finite differences, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPClassifier, DeepGPRegressor
from fathomgp.compilation import count_compilations, double_program
from fathomgp.distribution import Distribution
from fathomgp.errors import DataError, SettingError
from fathomgp.likelihoods import Gaussian, HeteroscedasticGaussian, StudentT
from fathomgp.predictive import Mixture, Predictive

_SLOW = pytest.mark.slow
METHODS = (
    "exact",
    "dsvi",
    *(pytest.param(n, marks=_SLOW) for n in ("sgpr", "decoupled", "sghmc", "aep", "meanfield", "stride", "sequential")),
)
UNITS = np.array([10.0, 1.0])


def fitted(method, seed, **settings):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1.0, 1.0, (24, 2)) * UNITS + [50.0, 0.0]
    y = 100.0 + 5.0 * np.sin(0.3 * X[:, 0]) + X[:, 1] + 0.2 * rng.normal(size=24)
    settings = {"num_inducing": 6, "max_iter": 4, "random_state": 0, "verbose": False} | settings
    return DeepGPRegressor(method=method, **settings).fit(X, y), X, y


def differences(function, x, step=2e-3):
    """Differences of fourth order of a function of rows, at one row, a step of the unit of each column."""
    moves = np.array([1.0, -1.0, 2.0, -2.0])[:, None, None] * step * np.diag(UNITS)[None]
    values = np.asarray(function((x + moves).reshape(-1, 2))).reshape(4, 2)
    return (8.0 * (values[0] - values[1]) - (values[2] - values[3])) / (12.0 * step * UNITS)


@pytest.mark.filterwarnings("ignore::fathomgp.errors.FathomWarning")
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_a_quantile_is_its_finite_difference(method, seed, flag_off):
    model, X, _ = fitted(method, seed)
    f = model.to_jax()
    with jax.enable_x64(True):
        slope = jax.jit(jax.vmap(jax.value_and_grad(lambda x: f(x).quantile(0.9))))
        value, given = map(np.asarray, slope(jnp.asarray(X[:2])))
    np.testing.assert_allclose(value, model.predict_quantiles(X[:2], 0.9), rtol=1e-9)
    wanted = differences(lambda rows: model.predict_quantiles(rows, 0.9), X[0])
    np.testing.assert_allclose(given[0] * UNITS, wanted * UNITS, rtol=1e-6, atol=1e-6 * np.std(X[:, 0]))
    low_value, low = slope(jnp.asarray(X[:2], jnp.float32))  # with the flag off
    assert low.dtype == low_value.dtype == jnp.float32
    np.testing.assert_allclose(low, given, rtol=1e-4, atol=1e-5)


def test_answers_are_those_of_the_estimator_in_both_modes(seed, flag_off):
    model, X, y = fitted("exact", seed)
    f, wanted = model.to_jax(), model.predict_distribution(X[:5])
    for flag in (True, False):
        with jax.enable_x64(flag):
            dist, tolerance = f(X[:5]), 1e-8 if flag else 1e-4
            assert dist.mean().dtype == (jnp.float64 if flag else jnp.float32)
            for name in ("mean", "variance", "std"):
                np.testing.assert_allclose(getattr(dist, name)(), getattr(wanted, name)(), rtol=tolerance)
            np.testing.assert_allclose(dist.quantile(0.1), wanted.quantile(0.1), rtol=tolerance)
            np.testing.assert_allclose(dist.cdf(y[:5]), wanted.cdf(y[:5]), rtol=1e-3, atol=tolerance)
            np.testing.assert_allclose(dist.log_prob(y[:5]), wanted.log_density(y[:5]), atol=50 * tolerance)
            assert dist.sample(jax.random.key(seed), 3).shape == (3, 5)
            with count_compilations() as count:
                f(X[5:10]).mean()
            assert count.programs == 0
            # Several questions about one answer: their cotangents meet in the user's mode.
            both = jax.grad(lambda x, f=f: (d := f(x)).mean() + d.std())(jnp.asarray(X[0]))
            apart = [jax.grad(lambda x, f=f, n=n: getattr(f(x), n)())(jnp.asarray(X[0])) for n in ("mean", "std")]
            np.testing.assert_allclose(both, apart[0] + apart[1], rtol=1e-5)


@pytest.mark.parametrize(
    "likelihood", [Gaussian(0.2), StudentT(4.0, 0.3), pytest.param(HeteroscedasticGaussian(-1.0), marks=_SLOW)]
)
def test_implicit_derivatives_of_a_mixtures_quantiles(likelihood, rng):
    latents = likelihood.num_latents(1)
    means, variances = rng.normal(size=(3, 4, latents)), rng.uniform(0.1, 0.5, (3, 4, latents))
    shift, scale = np.array([10.0]), np.array([2.0])

    def quantile(means, q):
        mixture = Mixture(jnp.zeros(3), means, jnp.asarray(variances))
        parts = (likelihood, jnp.asarray(shift), jnp.asarray(scale), True, False, np.dtype(float))
        return Distribution(mixture, *parts).quantile(q)

    move = rng.normal(size=means.shape)
    tangent = jax.jvp(quantile, (jnp.asarray(means), jnp.asarray(0.8)), (jnp.asarray(move), jnp.asarray(0.1)))[1]
    pulled = jax.grad(lambda m: jnp.sum(quantile(m, 0.8)))(jnp.asarray(means))

    def numpy_quantile(step, q):
        mixture = Mixture(np.zeros(3), means + step * move, variances)
        return Predictive(mixture, likelihood, shift, scale, squeeze=True).quantile(q)

    wanted = (numpy_quantile(1e-5, 0.8 + 1e-6) - numpy_quantile(-1e-5, 0.8 - 1e-6)) / 2e-5
    np.testing.assert_allclose(tangent, wanted, rtol=1e-6, atol=1e-6)
    wanted = (numpy_quantile(1e-5, 0.8) - numpy_quantile(-1e-5, 0.8)) / 2e-5
    np.testing.assert_allclose(jnp.sum(pulled * move), wanted.sum(), rtol=1e-6, atol=1e-6)


def test_labels_have_probabilities(seed, flag_off):
    X = np.random.default_rng(seed).uniform(-1.0, 1.0, (20, 2))
    settings = {"depth": 1, "num_inducing": 5, "max_iter": 3, "random_state": 0, "verbose": False}
    model = DeepGPClassifier(**settings).fit(X, X[:, 0] > 0)
    f = model.to_jax()
    np.testing.assert_allclose(f(X[:3]).probabilities(), model.predict_proba(X[:3]), rtol=1e-5)
    given = jax.jit(jax.grad(lambda x: f(x).probabilities()[1]))(jnp.asarray(X[0]))
    wanted = differences(lambda rows: model.predict_proba(X[0] + (rows - X[0]) / UNITS)[:, 1], X[0]) * UNITS
    np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5)
    assert f(X[:3]).quantile(0.5).shape == (3,)


def test_transposes_stay_in_float64(flag_off):
    """With a scope alone a cotangent is float32 on its way back: it loses what float64 kept on its way forth."""

    @double_program
    def lift(x):
        return (1e-12 * x.astype(jnp.float64), x.astype(jnp.float64))

    @double_program
    def lower(small, large):
        return ((large + 1.0 + small) - (large + 1.0)).astype(jnp.float32)

    slope = jax.jit(jax.grad(lambda x: lower(*lift(x))))(jnp.float32(3.0))
    assert slope.dtype == jnp.float32
    np.testing.assert_allclose(slope, 1e-12, rtol=1e-6)
    assert jax.hessian(lambda x: lower(*lift(x)))(jnp.float32(3.0)).dtype == jnp.float32


def test_wrong_shapes_and_levels_are_refused(seed, as_given):
    f = fitted("exact", seed, max_iter=1)[0].to_jax()
    with pytest.raises(DataError, match=r"x must be one row of shape \(2,\) or rows \(N, 2\), but it is \(3,\)"):
        f(np.zeros(3))
    with pytest.raises(SettingError, match="q must be one number between 0 and 1"):
        f(np.zeros(2)).quantile(1.0)
    with pytest.raises(SettingError, match=r"probabilities\(\) is for labels, but the likelihood is Gaussian"):
        f(np.zeros(2)).probabilities()
    with pytest.raises(DataError, match=r"y has the shape \(3,\), but the prediction has \(2,\)"):
        f(np.zeros((2, 2))).cdf(np.zeros(3))


@pytest.mark.parametrize("method", ["exact", pytest.param("sgpr", marks=_SLOW), pytest.param("dsvi", marks=_SLOW)])
def test_one_layers_slopes_are_those_of_its_mean_and_of_its_draws(method, seed, flag_off):
    model, X, _ = fitted(method, seed, depth=1, kernel="matern52")
    mean, std = model.predict_gradient(X[:2])
    wanted = differences(model.predict, X[0])
    np.testing.assert_allclose(mean[0] * UNITS, wanted * UNITS, rtol=1e-5, atol=1e-5)
    # The variance of a difference over a small step, noise taken out; nearly that of the derivative.
    step = 1e-2
    for column, unit in enumerate(UNITS):
        move = step * unit * np.eye(2)[column]
        covariance = model.predict(np.stack([X[0] + move, X[0] - move]), return_cov=True)[1]
        noise = model.predict_distribution(X[:1])
        noise = (noise.variance() - noise.latent_std() ** 2)[0]
        variance = (covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1] - 2 * noise) / (2 * step * unit) ** 2
        np.testing.assert_allclose(std[0, column], np.sqrt(variance), rtol=1e-2)


def test_paths_are_whole_functions_with_the_posteriors_moments(seed, flag_off):
    model, X, _ = fitted("exact", seed)
    paths = model.sample_paths(400, random_state=seed)
    with jax.enable_x64(True):
        values = np.asarray(paths(X[:4]))
        np.testing.assert_allclose(paths(X[1]), values[:, 1], rtol=1e-9)
        slopes = np.asarray(jax.jit(lambda x: jax.jvp(paths, (x,), (jnp.asarray([1.0, 0.0]),))[1])(jnp.asarray(X[0])))
    latent = model.predict_distribution(X[:4])
    std = latent.latent_std()
    assert np.all(np.abs(values.mean(axis=0) - latent.latent_mean()) < 5.0 * std / np.sqrt(400))
    np.testing.assert_allclose(values.std(axis=0), std, rtol=0.25)
    mean, deviation = model.predict_gradient(X[:1])
    assert abs(slopes.mean() - mean[0, 0]) < 5.0 * deviation[0, 0] / np.sqrt(400)
    np.testing.assert_allclose(slopes.std(), deviation[0, 0], rtol=0.25)


@_SLOW
def test_deep_slopes_are_those_of_sample_paths(seed, flag_off):
    model, X, _ = fitted("dsvi", seed)
    mean, std = model.predict_gradient(X[:2])
    paths = model.sample_paths(400, random_state=seed + 1)
    wanted = differences(lambda rows: np.asarray(paths(rows), np.float64).mean(axis=0), X[0], step=0.05)
    assert np.all(np.abs(mean[0] - wanted) < 5.0 * std[0] * np.sqrt(1 / 200 + 1 / 400) + 1e-3)


def test_what_has_no_derivative_is_refused(seed, as_given):
    model, X, _ = fitted("exact", seed, max_iter=1, kernel="matern12")
    with pytest.raises(SettingError, match="Functions of the kernel Matern12 have no derivative"):
        model.predict_gradient(X)
