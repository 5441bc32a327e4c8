"""The ladder: textbook formulas = exact GP = collapsed sparse GP with Z at X; bounds lie below; masks drop rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fathomgp.data import ArraySource, Standardizer, load_dataset
from fathomgp.errors import FitWarning, SettingError
from fathomgp.fitting import Checkpointing, fit_model
from fathomgp.inference import SGPR, Exact
from fathomgp.inference.exact import condition, log_evidence
from fathomgp.inference.sgpr import collapsed_elbo, greedy_inducing, optimal_posterior
from fathomgp.kernels import RBF, Matern52
from fathomgp.likelihoods import Gaussian, StudentT
from fathomgp.linalg import _cholesky
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer, build_model
from fathomgp.parameters import real


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(40, 2))
    y = np.stack([np.sin(2 * x[:, 0]) + x[:, 1], np.cos(x[:, 1])], axis=1) + 0.1 * rng.normal(size=(40, 2))
    return x, y


def shallow(outputs=2, z=None, noise=0.05, lengthscale=0.8) -> DeepGP:
    z = None if z is None else real(z)
    return DeepGP((Layer(Matern52(lengthscale, 1.3), Zero(outputs), z, outputs),), Gaussian(noise))


def textbook(model, x, y, new):
    """Mean, variance and log evidence by plain NumPy."""
    kernel, noise = model.layers[0].kernel, float(model.likelihood.variance.value)
    covariance = np.asarray(kernel(jnp.asarray(x))) + noise * np.eye(len(x))
    cross = np.asarray(kernel(jnp.asarray(new), jnp.asarray(x)))
    mean = cross @ np.linalg.solve(covariance, y)
    prior = np.asarray(kernel.diagonal(jnp.asarray(new)))
    variance = prior - np.sum(cross * np.linalg.solve(covariance, cross.T).T, axis=1)
    evidence = sum(scipy.stats.multivariate_normal(np.zeros(len(x)), covariance).logpdf(column) for column in y.T)
    return mean, variance, evidence


@pytest.mark.parametrize("shared", [True, False])
def test_exact_equals_the_textbook(data, rng, key, shared):
    x, y = data
    new = rng.uniform(-2.5, 2.5, size=(7, 2))
    model, batch = shallow(), ArraySource(x, y).everything()
    mean, variance, evidence = textbook(model, x, y, new)
    answer = condition(model, batch, shared=shared).predict_f(jnp.asarray(new), key=key)
    assert np.allclose(answer.means[0], mean, atol=1e-8)
    assert np.allclose(answer.variances[0], variance[:, None], atol=1e-8)
    assert float(log_evidence(model, batch, shared=shared)) == pytest.approx(evidence, abs=1e-6)


def test_full_covariance_agrees_with_variances_and_samples(data, key):
    x, y = data
    posterior = condition(shallow(), ArraySource(x, y).everything(), shared=True)
    new = jnp.asarray(np.linspace(-2, 2, 12).reshape(6, 2))
    joint = posterior.predict_f(new, key=key, full_cov=True)
    assert np.allclose(joint.variances, posterior.predict_f(new, key=key).variances, atol=1e-10)
    draws = np.asarray(posterior.sample_functions(key, 4000)(new))
    error = 4.0 * np.sqrt(np.asarray(joint.variances[0]) / 4000)
    assert np.all(np.abs(draws.mean(0) - joint.means[0]) < error + 1e-6)
    sample_covariance = np.cov(draws[:, :, 0].T)
    assert np.allclose(sample_covariance, joint.covariances[0, :, :, 0], atol=0.15 * float(np.max(joint.variances)))


def test_missing_outputs_are_left_out(data, rng, key):
    x, y = data
    observed = rng.uniform(size=y.shape) < 0.7
    new = jnp.asarray(rng.uniform(-2, 2, size=(5, 2)))
    model = shallow()
    batch = ArraySource(x, np.where(observed, y, 0.0), observed).everything()
    answer = condition(model, batch).predict_f(new, key=key)
    total = 0.0
    for output in range(2):
        rows = observed[:, output]
        mean, variance, evidence = textbook(shallow(1), x[rows], y[rows, output : output + 1], np.asarray(new))
        assert np.allclose(answer.means[0, :, output], mean[:, 0], atol=1e-8)
        assert np.allclose(answer.variances[0, :, output], variance, atol=1e-8)
        total += evidence
    assert float(log_evidence(model, batch)) == pytest.approx(total, abs=1e-6)


def no_jitter(monkeypatch):
    monkeypatch.setattr(_cholesky, "default_policy", lambda dtype: _cholesky.JitterPolicy(1e-13, 1e-4))


def test_sgpr_with_inducing_points_at_the_data_is_the_exact_gp(data, rng, key, monkeypatch):
    no_jitter(monkeypatch)
    x, y = data
    batch = ArraySource(x, y).everything()
    exact, sparse = shallow(), shallow(z=x)
    assert float(collapsed_elbo(sparse, batch)) == pytest.approx(float(log_evidence(exact, batch)), abs=1e-6)
    new = jnp.asarray(rng.uniform(-2, 2, size=(9, 2)))
    ours = optimal_posterior(sparse, batch, shared=True).predict_f(new, key=key)
    theirs = condition(exact, batch, shared=True).predict_f(new, key=key)
    assert np.allclose(ours.means, theirs.means, atol=1e-6)
    assert np.allclose(ours.variances, theirs.variances, atol=1e-6)


def test_default_jitter_costs_no_more_than_it_must(data):
    x, y = data
    batch = ArraySource(x, y).everything()
    sparse = shallow(z=x)
    jitter = 1e-10 * 1.3
    gap = float(log_evidence(shallow(), batch)) - float(collapsed_elbo(sparse, batch))
    assert abs(gap) <= len(x) * jitter / 0.05 * y.shape[1] + 1e-8


def test_the_bound_lies_below_the_evidence(data, rng):
    x, y = data
    batch = ArraySource(x, y).everything()
    evidence = float(log_evidence(shallow(), batch))
    for count in (1, 5, 20):
        z = x[rng.choice(len(x), count, replace=False)]
        assert float(collapsed_elbo(shallow(z=z), batch)) < evidence


@pytest.mark.slow
def test_blocks_change_nothing(data, monkeypatch):
    from fathomgp.inference import sgpr

    x, y = data
    batch = ArraySource(x, y).everything()
    model = shallow(z=x[:7])
    value, gradient = eqx.filter_value_and_grad(collapsed_elbo)(model, batch)
    monkeypatch.setattr(sgpr, "_BLOCK", 12)
    blocked, blocked_gradient = eqx.filter_value_and_grad(collapsed_elbo)(model, batch)
    assert float(blocked) == pytest.approx(float(value), abs=1e-9)
    for ours, theirs in zip(jax.tree.leaves(blocked_gradient), jax.tree.leaves(gradient), strict=True):
        assert np.allclose(ours, theirs, atol=1e-8)


def test_sgpr_masks_are_rows_left_out(data, rng):
    x, y = data
    rows = rng.uniform(size=len(x)) < 0.6
    observed = np.stack([rows, np.ones(len(x), bool)], axis=1)
    model = shallow(z=x[:9])
    masked = collapsed_elbo(model, ArraySource(x, np.where(observed, y, 0.0), observed).everything())
    apart = sum(
        float(collapsed_elbo(shallow(1, z=x[:9]), ArraySource(x[keep], y[keep, p : p + 1]).everything()))
        for p, keep in enumerate((rows, np.ones(len(x), bool)))
    )
    assert float(masked) == pytest.approx(apart, abs=1e-7)


def test_fitting_finds_the_noise_and_a_better_evidence(rng, key):
    x = np.linspace(-2, 2, 60)[:, None]
    y = np.sin(3 * x) + 0.1 * rng.normal(size=x.shape)
    source = ArraySource(x, y)
    start = build_model(x, Gaussian(0.5), 1)
    result = fit_model(Exact(restarts=1), start, source, key=key, verbose=False)
    noise = float(result.posterior.likelihood.variance.value)
    assert 0.005 < noise < 0.02
    assert float(log_evidence(result.posterior.model, source.everything())) > float(
        log_evidence(start, source.everything())
    )
    sparse = fit_model(SGPR(), build_model(x, Gaussian(0.5), 1, num_inducing=15), source, key=key, verbose=False)
    assert float(sparse.posterior.likelihood.variance.value) == pytest.approx(noise, rel=0.3)


@pytest.mark.slow
@pytest.mark.data
def test_greedy_beats_random_subsets_and_gradients_beat_greedy(rng, key):
    dataset = load_dataset("energy")
    x = Standardizer.fit(dataset.X).transform(dataset.X)
    y = Standardizer.fit(dataset.Y).transform(dataset.Y)
    source = ArraySource(x, y)
    batch = source.everything()
    model = build_model(x, Gaussian(0.01), 1, num_inducing=50)
    bound = eqx.filter_jit(lambda z: collapsed_elbo(with_inducing(model, z), batch, shared=True))
    greedy = greedy_inducing(model, source, 50, key=key)
    best_random = max(float(bound(jnp.asarray(x[rng.choice(len(x), 50, replace=False)]))) for _ in range(20))
    assert float(bound(greedy)) > best_random
    fixed = eqx.tree_at(lambda m: (m.layers[0].kernel, m.likelihood), model, replace_fn=frozen)
    result = fit_model(SGPR(), with_inducing(fixed, greedy), source, key=key, max_iter=60, verbose=False)
    moved = result.posterior.model
    assert float(moved.likelihood.variance.value) == pytest.approx(float(model.likelihood.variance.value))
    assert float(collapsed_elbo(moved, batch, shared=True)) > float(bound(greedy))


def frozen(node):
    from fathomgp.parameters import freeze

    return freeze(node)


def with_inducing(model, z):
    return eqx.tree_at(lambda m: m.layers[0].z, model, real(z))


def test_greedy_phases_choose_rows_of_the_data(data, key):
    x, y = data
    model = build_model(x, Gaussian(0.1), 2, num_inducing=6)
    result = fit_model(SGPR("greedy", rounds=2), model, ArraySource(x, y), key=key, max_iter=5, verbose=False)
    z = np.asarray(result.posterior.model.layers[0].z.value)
    assert all(np.any(np.all(np.isclose(row, x), axis=1)) for row in z)


def test_what_cannot_be_collapsed_is_refused(data, key):
    x, y = data
    source = ArraySource(x, y)
    deep = build_model(x, Gaussian(0.1), 2, depth=2, num_inducing=5)
    with pytest.raises(SettingError, match=r"method='exact' fits one layer, but depth is 2"):
        Exact().init(deep, source, key=key)
    robust = DeepGP((Layer(RBF(), Zero(2), real(x[:4]), 2),), StudentT())
    with pytest.raises(SettingError, match=r"method='sgpr' needs Gaussian noise, but the likelihood is StudentT"):
        SGPR().init(robust, source, key=key)
    with pytest.raises(SettingError, match="set num_inducing"):
        SGPR().init(shallow(), source, key=key)
    with pytest.raises(SettingError, match="inducing must be 'gradient'"):
        SGPR("random")


@pytest.mark.parametrize("inference", [Exact(restarts=2), SGPR("greedy", rounds=2)])
def test_an_interrupted_search_resumes_bit_for_bit(data, key, tmp_path, inference):
    x, y = data
    source, model = ArraySource(x, y), build_model(x, Gaussian(0.1), 2, num_inducing=6)
    calm = fit_model(inference, model, source, key=key, max_iter=8, verbose=False)
    seen = []

    def interrupt(event):
        seen.append(event)
        if len(seen) == 4:
            raise KeyboardInterrupt

    settings = {"key": key, "max_iter": 8, "verbose": False, "checkpointing": Checkpointing(tmp_path, None, 3)}
    with pytest.warns(FitWarning, match="Stopped by the user"):
        fit_model(inference, model, source, callbacks=[interrupt], **settings)
    resumed = fit_model(inference, model, source, **settings)
    assert np.array_equal(resumed.history["objective"], calm.history["objective"])
    for ours, theirs in zip(jax.tree.leaves(resumed.posterior), jax.tree.leaves(calm.posterior), strict=True):
        assert np.array_equal(ours, theirs)
