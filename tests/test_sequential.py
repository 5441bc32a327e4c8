"""Sequential inference: the online GP is the exact GP, stays positive definite, and deep layers learn what data say."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import Sequential
from fathomgp.inference._online import absorb, conditionals, empty, forget, project, refresh
from fathomgp.inference._particles import balanced_normal, effective_sample_size, systematic_resample
from fathomgp.inference.exact import condition
from fathomgp.inference.sequential import SequentialState, predictive_density, site, start_layers
from fathomgp.kernels import RBF, Matern32
from fathomgp.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, Softmax
from fathomgp.means import Linear, Zero
from fathomgp.model import DeepGP, Layer, build_model
from fathomgp.parameters import real


def online(budget, inputs=2, outputs=1, noise=0.05, mean=None) -> DeepGP:
    z = real(np.zeros((budget, inputs)))
    return DeepGP((Layer(Matern32(0.9, 1.4), mean or Zero(outputs), z, outputs),), Gaussian(noise))


def stream(model, *, shared=True, **settings):
    """An algorithm, its empty state, and a compiled function that learns a block."""
    algorithm = Sequential(active="empty", **settings)
    gps = start_layers(model, shared=shared)
    state = SequentialState(model, gps, jnp.asarray(0, jnp.int32), jnp.asarray(True), None)

    @eqx.filter_jit
    def learn(state, x, y, observed, key):
        return algorithm.learn(state, (x, y, observed), jnp.ones(len(x), bool), key=key)

    return algorithm, state, learn


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(40, 2))
    y = np.stack([np.sin(2 * x[:, 0]) * x[:, 1], x[:, 0] ** 2], axis=1)
    return jnp.asarray(x), jnp.asarray(y + 0.1 * rng.normal(size=y.shape))


# --- the online GP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delta", "tolerance"), [(0.0, 1e-6), (1e-6, 1e-4)])
def test_a_budget_for_all_points_gives_the_exact_gp_in_any_order(data, rng, key, delta, tolerance):
    x, y = data
    weights = Linear(0.1 * rng.normal(size=(2, 2)), np.array([0.3, -0.2]))
    model = online(len(x), outputs=2, mean=weights)
    algorithm, state, learn = stream(model, delta=delta)
    exact = condition(model, ArraySource(np.asarray(x), np.asarray(y)).everything(), shared=True)
    new = jnp.asarray(rng.uniform(-2, 2, size=(9, 2)))
    theirs = exact.predict_f(new, key=key)
    for _ in range(3):
        order = rng.permutation(len(x))
        learned, rows = learn(state, x[order], y[order], jnp.ones(y.shape, bool), key)
        ours = algorithm.posterior(learned, None).predict_f(new, key=key)
        assert np.allclose(ours.means, theirs.means, atol=tolerance)
        assert np.allclose(ours.variances, theirs.variances, atol=tolerance)
        assert np.all(np.asarray(rows.learned) == 1.0)


def test_the_prequential_densities_add_up_to_the_evidence(data, key):
    from fathomgp.inference.exact import log_evidence

    x, y = data
    model = online(len(x), outputs=2)
    _, state, learn = stream(model, delta=0.0)
    _, rows = learn(state, x, y, jnp.ones(y.shape, bool), key)
    evidence = log_evidence(model, ArraySource(np.asarray(x), np.asarray(y)).everything(), shared=True)
    assert float(jnp.sum(rows.log_density)) == pytest.approx(float(evidence), abs=1e-6)


def test_missing_outputs_have_posteriors_of_their_own(data, rng, key):
    x, y = data
    observed = rng.random(y.shape) < 0.6
    model = online(len(x), outputs=2)
    algorithm, state, learn = stream(model, delta=0.0, shared=False)
    source = ArraySource(np.asarray(x), np.where(observed, y, 0.0), observed)
    theirs = condition(model, source.everything()).predict_f(x[:5] + 0.1, key=key)
    # What is not observed may hold anything at all.
    learned, _ = learn(state, x, jnp.where(observed, y, jnp.nan), jnp.asarray(observed), key)
    ours = algorithm.posterior(learned, None).predict_f(x[:5] + 0.1, key=key)
    assert np.allclose(ours.means, theirs.means, atol=1e-6)
    assert np.allclose(ours.variances, theirs.variances, atol=1e-6)


def test_ten_thousand_updates_leave_both_matrices_positive_definite(rng, key):
    count, budget = 10_000, 15
    x = jnp.asarray(rng.normal(size=(count, 2)))
    y = jnp.asarray(np.sin(3 * x[:, :1]) + 0.05 * rng.normal(size=(count, 1)))
    model = online(budget, noise=0.01)
    layer = model.layers[0]
    algorithm, state, learn = stream(model)
    state, rows = learn(state, x, y, jnp.ones(y.shape, bool), key)
    (gp,) = state.gps
    active = np.asarray(gp.active)
    assert active.sum() == budget
    assert np.all(np.asarray(rows.learned) == 1.0)
    Q, Sigma = np.asarray(gp.inverse)[np.ix_(active, active)], np.asarray(gp.covariance[0])[np.ix_(active, active)]
    K = np.asarray(layer.kernel(gp.x))[np.ix_(active, active)]
    assert np.linalg.eigvalsh(Q)[0] > 0.0
    assert np.linalg.eigvalsh(Sigma)[0] > 0.0
    assert np.linalg.eigvalsh(K - Sigma)[0] > -1e-9  # data never make the function less certain
    assert np.allclose(Q @ K, np.eye(budget), atol=1e-6)
    assert np.allclose(gp.weights, gp.inverse @ gp.mean, rtol=1e-5, atol=1e-5)
    free = ~active
    for leaf in (gp.x[free], gp.mean[free], gp.weights[free], gp.inverse[free], gp.covariance[0][free]):
        assert np.all(np.asarray(leaf) == 0.0)
    # The first half of the stream has taught it the function.
    assert float(jnp.mean(rows.log_density[5000:])) > float(jnp.mean(rows.log_density[:50]))


def test_deletion_takes_the_member_that_the_others_predict_best(data, key):
    x, y = data
    budget = 6
    model = online(budget)
    algorithm, state, learn = stream(model)
    state, _ = learn(state, x[:budget], y[:budget, :1], jnp.ones((budget, 1), bool), key)
    before = state.gps[0]
    at = project(before, model.layers[0], x[budget : budget + 1])
    slope, curvature = site(model.likelihood, at, y[budget : budget + 1, :1], jnp.ones((1, 1), bool))
    after = absorb(before, at, x[budget : budget + 1], slope, curvature, jnp.asarray(1e-6))
    # By hand, with all seven: the squared leave-one-out error of each.
    seven = np.concatenate([np.asarray(before.x)[np.asarray(before.active)], np.asarray(x[budget : budget + 1])])
    posterior = condition(model, ArraySource(np.asarray(x[: budget + 1]), np.asarray(y[: budget + 1, :1])).everything())
    mu = np.asarray(posterior.predict_f(jnp.asarray(seven), key=key).means[0])
    Q = np.linalg.inv(np.asarray(model.layers[0].kernel(jnp.asarray(seven))))
    victim = np.argmin(((Q @ mu)[:, 0] / np.diag(Q)) ** 2)
    left = np.asarray(after.x)[np.asarray(after.active)]
    assert len(left) == budget
    assert not np.any(np.all(np.isclose(left, seven[victim]), axis=1))


def test_forgetting_everything_returns_to_the_prior(data, key):
    x, y = data
    model = online(10)
    layer = model.layers[0]
    _, state, learn = stream(model)
    state, _ = learn(state, x, y[:, :1], jnp.ones((len(x), 1), bool), key)
    gone = forget(state.gps[0], layer, 1e-14)
    at = project(gone, layer, x[:4])
    assert np.allclose(at.mean, 0.0, atol=1e-5)
    assert np.allclose(at.variance[:, 0], layer.kernel.diagonal(x[:4]), atol=1e-6)
    half = forget(state.gps[0], layer, 0.5)
    old = project(state.gps[0], layer, x[:4])
    expected = 0.5 * np.asarray(old.variance[:, 0]) + 0.5 * np.asarray(layer.kernel.diagonal(x[:4]))
    assert np.allclose(project(half, layer, x[:4]).variance[:, 0], expected, atol=1e-8)


def test_conditionals_say_the_same_as_the_online_gp(data, key):
    x, y = data
    model = online(7, outputs=2)
    algorithm, state, learn = stream(model)
    state, _ = learn(state, x, y, jnp.ones(y.shape, bool), key)
    at = project(state.gps[0], model.layers[0], x[:6])
    answer = algorithm.posterior(state, None).predict_f(x[:6], key=key)
    assert np.allclose(answer.means[0], at.mean, atol=1e-7)
    assert np.allclose(answer.variances[0], np.broadcast_to(at.variance, (6, 2)), atol=1e-7)
    fresh = refresh(state.gps, model.layers)[0]
    assert np.allclose(fresh.inverse, state.gps[0].inverse, rtol=1e-6, atol=1e-6)
    assert len(conditionals(state.gps, model.layers)[1]) == 1
    assert empty(model.layers[0], 2, 7, shared=True).x.shape == (8, 2)


# --- sites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "target"),
    [(Gaussian(0.3), 0.7), (Bernoulli(), 1.0), (Poisson(), 2.0), (HeteroscedasticGaussian(-1.0), 0.4), (Softmax(3), 2.0)],
)
def test_slopes_and_curvatures_are_derivatives_of_log_z(likelihood, target):
    latents = likelihood.num_latents(1)
    model = DeepGP((Layer(RBF(1.0, 0.8), Zero(latents), real(np.zeros((4, 1))), latents),), likelihood)
    (gp,) = start_layers(model, shared=False)
    x, y, observed = jnp.zeros((1, 1)), jnp.full((1, 1), target), jnp.ones((1, 1), bool)
    at = project(gp, model.layers[0], x)
    slope, curvature = site(likelihood, at, y, observed)
    variance = jnp.broadcast_to(at.variance, at.mean.shape)
    log_z = lambda mean: likelihood.log_z(mean[None], variance, y)[0, 0]  # noqa: E731
    assert np.allclose(slope, jax.grad(log_z)(at.mean[0]), atol=1e-8)
    second = jnp.diagonal(jax.hessian(log_z)(at.mean[0]))
    assert np.allclose(curvature, jnp.minimum(second, 0.0), atol=0.02 if isinstance(likelihood, Softmax) else 1e-5)


# --- particles --------------------------------------------------------------------------------------------------------


def test_particles(key, rng):
    draws = balanced_normal(key, (50, 3), jnp.float64)
    assert np.allclose(jnp.mean(draws, axis=0), 0.0, atol=1e-12)
    assert np.allclose(jnp.mean(draws**2, axis=0), 1.0)
    assert float(effective_sample_size(jnp.zeros(20) - 1e4)) == pytest.approx(20.0)
    assert float(effective_sample_size(jnp.where(jnp.arange(20) == 3, 0.0, -1e6))) == pytest.approx(1.0)
    weights = rng.dirichlet(np.ones(10))
    chosen = np.asarray(systematic_resample(key, jnp.log(jnp.asarray(weights))))
    counts = np.bincount(chosen, minlength=10)
    assert np.all(np.abs(counts - 10 * weights) < 1.0)
