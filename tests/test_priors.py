"""Priors: the densities, which parameter has which, and that fits climb evidence and prior together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from jax.flatten_util import ravel_pytree

from fathomgp import DeepGPRegressor, load
from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.inference.dsvi import elbo, initial_q, streamed_loss
from fathomgp.inference.exact import log_evidence
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model, weak_priors
from fathomgp.parameters import freeze, partition, positive, real
from fathomgp.priors import (
    FlatTowardsZero,
    LogNormal,
    Normal,
    lengthscale_prior,
    log_prior,
    log_prior_and_gradient,
    with_priors,
    without_priors,
)


def _data(n=30, columns=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, columns))
    return X, np.sin(2.0 * X[:, 0]) + 0.2 * rng.normal(size=n)


@pytest.mark.parametrize("lower", [0.0, 0.3])
def test_a_log_normal_is_scipys_with_the_slope_of_the_unconstrained_coordinate(lower):
    parameter = positive(jnp.array([0.7, 2.0]), lower=lower)
    found = LogNormal(0.4, 1.3).log_density(parameter)
    value, step = np.array([0.7, 2.0]), 1e-6
    slope = (np.log(lower + (value - lower) * np.exp(step)) - np.log(value)) / step
    expected = scipy.stats.norm(0.4, 1.3).logpdf(np.log(value)) + np.log(slope)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_other_densities():
    expected = scipy.stats.norm([0.5, -1.0], 0.7).logpdf([1.0, 2.0])
    np.testing.assert_allclose(Normal((0.5, -1.0), 0.7).log_density(real(jnp.array([1.0, 2.0]))), expected)
    tiny, large = (float(FlatTowardsZero(0.5).log_density(positive(value))) for value in (1e-8, 1.0))
    assert tiny == pytest.approx(0.0, abs=1e-7)
    assert large == pytest.approx(-2.0)


def test_lengthscales_grow_with_the_square_root_of_the_columns():
    few, many = (np.exp(lengthscale_prior(columns).location) for columns in (3, 300))
    assert many / few == pytest.approx(10.0)


def test_only_learned_parameters_count_and_own_priors_stay():
    kernel = with_priors(RBF(lengthscale=jnp.ones(3), variance=2.0), {"lengthscale": LogNormal(0.0, 1.0)})
    assert float(log_prior(kernel)) == pytest.approx(3 * scipy.stats.norm.logpdf(0.0))
    assert log_prior(freeze(kernel)) == 0.0
    assert log_prior(without_priors(kernel)) == 0.0
    again = with_priors(kernel, {"lengthscale": LogNormal(5.0, 1.0)})
    assert again.lengthscale.prior == LogNormal(0.0, 1.0)


def test_weak_priors_are_the_default_and_papers_have_none():
    X, _ = _data()
    weak, paper, without = (
        build_model(X, Gaussian(0.1), 1, num_inducing=5, **settings)
        for settings in ({}, {"recipe": "salimbeni2017"}, {"priors": None})
    )
    deep = build_model(X, Gaussian(0.1), 1, depth=2, num_inducing=5)
    assert log_prior(deep) == 0.0
    assert float(log_prior(weak_priors(deep, [2, 2]))) < 0.0
    assert float(log_prior(weak)) < 0.0
    assert log_prior(paper) == log_prior(without) == 0.0
    assert weak.layers[0].kernel.lengthscale.prior == lengthscale_prior(2)
    assert weak.likelihood.variance.prior == FlatTowardsZero(1.0)
    given = build_model(X, Gaussian(0.1), 1, depth=2, num_inducing=5, priors={"noise": LogNormal(-2.0, 1.0)})
    assert given.likelihood.variance.prior == LogNormal(-2.0, 1.0)
    assert given.layers[0].kernel.variance.prior is None


@pytest.mark.parametrize(
    ("priors", "message"),
    [
        ({"lenghtscale": LogNormal()}, "priors names 'lenghtscale'.*Did you mean 'lengthscale'"),
        ({"noise": 0.1}, "The prior of 'noise' must be a prior such as LogNormal"),
        ("strong", "priors must be 'weak', None, or a mapping of priors, but it is 'strong'"),
        (3, "priors must be 'weak', None, or a mapping"),
    ],
)
def test_bad_priors_are_refused_by_name(priors, message, flag_off):
    X, y = _data()
    with pytest.raises(SettingError, match=message):
        DeepGPRegressor("exact", priors=priors).fit(X, y)
    with pytest.raises(SettingError, match="scale must be a positive number"):
        LogNormal(0.0, -1.0)


def test_the_exact_fit_is_the_brute_force_maximum_of_evidence_and_prior(flag_off):
    X, y = _data(n=12)
    beliefs = {"lengthscale": LogNormal(1.0, 0.3), "variance": LogNormal(0.0, 1.0), "noise": LogNormal(-3.0, 0.5)}
    model = DeepGPRegressor("exact", priors=beliefs, random_state=0).fit(X, y)
    with jax.enable_x64(True):
        source = ArraySource(
            np.asarray(model.x_scaler_.transform(X)), np.asarray(model.y_scaler_.transform(y[:, None]))
        )
        learned, constant = partition(model.model_)
        point, unravel = ravel_pytree(learned)
        batch = source.everything()

        @jax.jit
        @jax.value_and_grad
        def loss(point):
            import equinox as eqx

            fitted = eqx.combine(unravel(point), constant)
            return -log_evidence(fitted, batch) - log_prior(fitted)

        ends = [
            scipy.optimize.minimize(lambda p: tuple(map(np.asarray, loss(p))), start, jac=True, tol=1e-12)
            for start in (np.zeros(len(point)), np.asarray(point))
        ]
        best = min(ends, key=lambda end: end.fun)
        assert float(loss(point)[0]) == pytest.approx(best.fun, abs=1e-5)


def test_a_streamed_gradient_is_that_of_the_bound_and_the_priors(key):
    X, y = _data(columns=2)
    model = weak_priors(build_model(X, Gaussian(0.1), 1, depth=2, num_inducing=4), [2, 2])
    q = initial_q(model, inner_root=0.1)
    batch = ArraySource(X, y[:, None]).everything()
    learned, constant = partition(model)

    def plain(learned):
        import equinox as eqx

        model = eqx.combine(learned, constant)
        return -elbo(model, q, batch, key=key) - log_prior(model)

    expected = jax.grad(plain)(learned)
    _, (gradient, _) = streamed_loss(model, q, batch, key=key, num_samples=1)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
    value, slope = log_prior_and_gradient(learned, jnp.float64)
    assert float(value) == pytest.approx(float(log_prior(model)))
    assert len(jax.tree.leaves(slope)) == len(jax.tree.leaves(learned))


def test_priors_are_saved_with_the_model(tmp_path, flag_off):
    X, y = _data(n=15)
    beliefs = {"lengthscale": LogNormal(0.5, 1.0)}
    model = DeepGPRegressor("exact", priors=beliefs, max_iter=3, random_state=0).fit(X, y)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.priors == beliefs
    assert again.model_.layers[0].kernel.lengthscale.prior == LogNormal(0.5, 1.0)
    assert dataclasses.asdict(again.priors["lengthscale"]) == {"location": 0.5, "scale": 1.0}
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_wide_tables_are_not_fitted_to_perfection(flag_off):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 80))
    y = X[:, 0] + 0.1 * rng.normal(size=40)
    density = {
        priors: DeepGPRegressor("exact", priors=priors, max_iter=60, random_state=0)
        .fit(X[:25], y[:25])
        .log_density(X[25:], y[25:])
        .mean()
        for priors in ("weak", None)
    }
    assert density["weak"] > density[None] + 1.0
