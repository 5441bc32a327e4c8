"""Sequential inference: the online GP is the exact GP, stays positive definite, and deep layers learn what data say."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import Sequential, _particles, dynamical_prior, with_heteroscedastic_noise
from fathomgp.inference._online import absorb, absorb_mixture, conditionals, empty, forget, project, refresh
from fathomgp.inference._particles import (
    Datum,
    balanced_normal,
    change_of_noise,
    draw_guided,
    draw_noise,
    effective_sample_size,
    follow,
    guide,
    resample_and_move,
    site,
    systematic_resample,
)
from fathomgp.inference._sequential_recipes import log_linear_noise, principal_components
from fathomgp.inference._sequential_start import start_layers
from fathomgp.inference.exact import condition, log_evidence
from fathomgp.inference.sequential import SequentialState, predictive_density
from fathomgp.kernels import RBF, Matern32
from fathomgp.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from fathomgp.means import Linear, Zero
from fathomgp.model import DeepGP, Layer, build_model
from fathomgp.parameters import positive, real


def online(budget, inputs=2, outputs=1, noise=0.05, mean=None) -> DeepGP:
    z = real(np.zeros((budget, inputs)))
    return DeepGP((Layer(Matern32(0.9, 1.4), mean or Zero(outputs), z, outputs),), Gaussian(noise))


def stream(model, *, shared=True, **settings):
    """An algorithm, its empty state, and a compiled function that learns a block."""
    algorithm = Sequential(active="empty", **settings)
    gps = start_layers(model, shared=shared, delta=algorithm.delta)
    state = SequentialState(model, gps, jnp.asarray(0, jnp.int32), None)

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
    _, state, learn = stream(model)
    state, rows = learn(state, x, y, jnp.ones(y.shape, bool), key)
    (gp,) = state.gps
    active = np.asarray(gp.active)
    assert active.sum() == budget
    assert np.all(np.asarray(rows.learned) == 1.0)
    Q, Sigma = (np.asarray(part)[np.ix_(active, active)] for part in (gp.root.T @ gp.root, gp.covariance[0]))
    K = np.asarray(layer.kernel(gp.x))[np.ix_(active, active)]
    K = K + gp.delta * np.diag(np.diag(K))
    assert np.linalg.eigvalsh(Q)[0] > 0.0
    assert np.linalg.eigvalsh(Sigma)[0] > 0.0
    assert np.linalg.eigvalsh(K - Sigma)[0] > -1e-9  # data never make the function less certain
    assert np.allclose(Q @ K, np.eye(budget), atol=1e-6)
    free = ~active
    for leaf in (gp.x[free], gp.mean[free], gp.root[free], gp.root[:, free], gp.covariance[0][free]):
        assert np.all(np.asarray(leaf) == 0.0)
    # The first half of the stream has taught it the function.
    assert float(jnp.mean(rows.log_density[5000:])) > float(jnp.mean(rows.log_density[:50]))


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_crowded_inputs_keep_their_variances(rng, key, delta):
    x = jnp.asarray(np.sort(rng.uniform(-1, 1, size=(60, 1)), axis=0))
    y = jnp.asarray(rng.normal(size=(60, 1)))
    model = DeepGP((Layer(RBF(1.0, 1.5), Zero(1), real(np.zeros((60, 1))), 1),), Gaussian(0.3))
    algorithm, state, learn = stream(model, delta=delta)
    state, _ = learn(state, x, y, jnp.ones(y.shape, bool), key)
    new = jnp.linspace(-3, 3, 50)[:, None]
    ours = algorithm.posterior(state, None).predict_f(new, key=key)
    theirs = condition(model, ArraySource(np.asarray(x), np.asarray(y)).everything()).predict_f(new, key=key)
    assert np.all(np.asarray(ours.variances) <= 1.5 + 1e-9)
    assert np.allclose(ours.means, theirs.means, atol=0.02)
    assert np.allclose(np.sqrt(ours.variances), np.sqrt(theirs.variances), rtol=0.01)


def test_an_outlier_is_learned_as_exactly_as_any_row(data, key):
    x, y = data
    y = y.at[7].set(jnp.asarray([30.0, -8.0]))
    model = online(len(x), outputs=2)
    algorithm, state, learn = stream(model, delta=0.0)
    state, _ = learn(state, x, y, jnp.ones(y.shape, bool), key)
    new = x[5:9] + 0.05
    ours = algorithm.posterior(state, None).predict_f(new, key=key)
    theirs = condition(model, ArraySource(np.asarray(x), np.asarray(y)).everything(), shared=True)
    theirs = theirs.predict_f(new, key=key)
    assert np.allclose(ours.means, theirs.means, atol=1e-5)
    assert np.allclose(ours.variances, theirs.variances, atol=1e-6)


def test_forgetting_is_a_function_that_drifts(data, key):
    """Rows n and m have covariance k(x_n, x_m) sqrt(f)^|n - m|: each is predicted and learned after the drift."""
    x, y = data
    x, y, factor = x[:12], y[:12, :1], 0.8
    model = online(len(x))
    kernel, noise = model.layers[0].kernel, 0.05
    _, state, learn = stream(model, delta=0.0, forgetting=factor)
    state, rows = learn(state, x, y, jnp.ones(y.shape, bool), key)
    lag = np.abs(np.arange(12)[:, None] - np.arange(12))
    K = np.asarray(kernel(x)) * factor ** (0.5 * lag) + noise * np.eye(12)
    L = np.linalg.cholesky(K)
    residual = np.linalg.solve(L, np.asarray(y))[:, 0]
    densities = -0.5 * residual**2 - np.log(np.diag(L)) - 0.5 * np.log(2 * np.pi)
    assert np.allclose(rows.log_density, densities, atol=1e-8)
    # At the last row, without another drift.
    cross = np.asarray(kernel(x, x)) * (factor ** (0.5 * lag[-1]))[:, None]
    at = project(state.gps[0], model.layers[0], x)
    assert np.allclose(at.mean, cross.T @ np.linalg.solve(K, np.asarray(y)), atol=1e-8)
    expected = np.asarray(kernel.diagonal(x)) - np.sum(cross * np.linalg.solve(K, cross), axis=0)
    assert np.allclose(at.variance[:, 0], expected, atol=1e-8)


def test_deletion_takes_the_member_that_the_others_predict_best(data, key):
    x, y = data
    budget = 6
    model = online(budget)
    _, state, learn = stream(model)
    state, _ = learn(state, x[:budget], y[:budget, :1], jnp.ones((budget, 1), bool), key)
    before = state.gps[0]
    at = project(before, model.layers[0], x[budget : budget + 1])
    datum = Datum(x[budget : budget + 1], y[budget : budget + 1, :1], jnp.ones((1, 1), bool))
    slope, curvature = site(model.likelihood, at.mean, at.variance, datum)
    after = absorb(before, at, x[budget : budget + 1], slope[0], curvature[0])
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
    old = state.gps[0]
    assert np.allclose(fresh.root.T @ fresh.root, old.root.T @ old.root, rtol=1e-6, atol=1e-6)
    assert len(conditionals(state.gps, model.layers)[1]) == 1
    assert empty(model.layers[0], 2, 7, shared=True).x.shape == (8, 2)


@pytest.mark.slow
def test_one_layer_is_calibrated(key):
    """Functions drawn from the prior, outputs that go missing: where the truth lies in its posterior is uniform."""
    model = online(30, inputs=1, outputs=2, noise=0.2)
    algorithm, state, _ = stream(model, shared=False)
    kernel, probe = model.layers[0].kernel, jnp.asarray([[0.3]])

    @jax.jit
    @jax.vmap
    def place(key):
        """Of f(probe) in its posterior, as a probability."""
        x_key, f_key, y_key, mask_key, learn_key = jax.random.split(key, 5)
        x = jax.random.uniform(x_key, (30, 1), minval=-2.0, maxval=2.0)
        root = jnp.linalg.cholesky(kernel(jnp.concatenate([x, probe])) + 1e-10 * jnp.eye(31))
        f = root @ jax.random.normal(f_key, (31, 2))
        y = f[:-1] + 0.2**0.5 * jax.random.normal(y_key, (30, 2))
        observed = jax.random.bernoulli(mask_key, 0.7, (30, 2))
        learned, _ = algorithm.learn(state, (x, y, observed), jnp.ones(30, bool), key=learn_key)
        at = project(learned.gps[0], model.layers[0], probe)
        return jax.scipy.stats.norm.cdf((f[-1] - at.mean[0]) / jnp.sqrt(at.variance[0]))

    places = np.asarray(place(jax.random.split(key, 300))).ravel()
    counts = np.histogram(places, bins=20, range=(0.0, 1.0))[0]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


# --- sites ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "target"),
    [
        (Gaussian(0.3), 0.7),
        (Bernoulli(), 1.0),
        (Poisson(), 2.0),
        (HeteroscedasticGaussian(-1.0), 0.4),
    ],
)
def test_slopes_and_curvatures_are_derivatives_of_log_z(likelihood, target):
    latents = likelihood.num_latents(1)
    model = DeepGP((Layer(RBF(1.0, 0.8), Zero(latents), real(np.zeros((4, 1))), latents),), likelihood)
    (gp,) = start_layers(model, shared=False)
    datum = Datum(jnp.zeros((1, 1)), jnp.full((1, 1), target), jnp.ones((1, 1), bool))
    at = project(gp, model.layers[0], datum.x)
    variance = jnp.broadcast_to(at.variance, at.mean.shape)
    slope, curvature = site(likelihood, at.mean, variance, datum)
    log_z = lambda mean: likelihood.log_z(mean[None], variance, datum.y)[0, 0]  # noqa: E731
    assert np.allclose(slope, jax.grad(log_z)(at.mean[0]), atol=1e-8)
    second = jnp.diagonal(jax.hessian(log_z)(at.mean[0]))
    assert np.allclose(curvature, second, atol=1e-5)


@pytest.mark.parametrize("target", [0.3, 2.5, 12.0])
def test_under_heavy_tails_the_function_gets_the_moments_of_its_posterior(target, key):
    likelihood = StudentT(3.0, 0.3)
    model = DeepGP((Layer(RBF(1.0, 0.8), Zero(1), real(np.zeros((4, 1))), 1),), likelihood)
    _, state, learn = stream(model)
    state, _ = learn(state, jnp.zeros((1, 1)), jnp.full((1, 1), target), jnp.ones((1, 1), bool), key)
    at = project(state.gps[0], model.layers[0], jnp.zeros((1, 1)))
    f = np.linspace(-8.0, 15.0, 20_001)
    log_weights = np.asarray(likelihood.log_prob(jnp.asarray(f[:, None]), jnp.full((len(f), 1), target)))[:, 0]
    weights = np.exp(log_weights - f**2 / 1.6 - np.max(log_weights - f**2 / 1.6))
    weights /= weights.sum()
    mean = weights @ f
    assert float(at.mean[0, 0]) == pytest.approx(mean, abs=1e-4)
    assert float(at.variance[0, 0]) == pytest.approx(weights @ (f - mean) ** 2, abs=1e-4)


def test_shares_that_add_up_to_one_are_the_whole_datum():
    slope, curvature, variance = (jnp.asarray([[a]]) for a in (1.3, -0.7, 0.9))
    mean, left = 0.0, variance
    for share in (0.2, 0.5, 0.3):
        # The same Gaussian site each time, seen from where the function has come to.
        precision, shift = -curvature / (1 + curvature * variance), slope / (1 + curvature * variance)
        now = -precision / (1 + precision * left)
        push = (shift - precision * mean) / (1 + precision * left)
        s, c = _particles.share_of_datum(push, now, left, jnp.asarray([[share]]))
        mean, left = mean + left * s, left + left**2 * c
    assert np.allclose(mean, variance * slope)
    assert np.allclose(left, variance + variance**2 * curvature)


# --- particles --------------------------------------------------------------------------------------------------------


def test_particles(key, rng):
    draws = balanced_normal(key, (50, 3), jnp.float64)
    assert np.allclose(jnp.mean(draws, axis=0), 0.0, atol=1e-12)
    assert np.allclose(draws.T @ draws / 50, np.eye(3), atol=1e-12)
    few = balanced_normal(key, (5, 3), jnp.float64)
    assert np.allclose(jnp.mean(few**2, axis=0), 1.0)
    assert float(effective_sample_size(jnp.zeros(20) - 1e4)) == pytest.approx(20.0)
    assert float(effective_sample_size(jnp.where(jnp.arange(20) == 3, 0.0, -1e6))) == pytest.approx(1.0)
    weights = rng.dirichlet(np.ones(10))
    chosen = np.asarray(systematic_resample(key, jnp.log(jnp.asarray(weights))))
    counts = np.bincount(chosen, minlength=10)
    assert np.all(np.abs(counts - 10 * weights) < 1.0)


@functools.cache
def two_layers() -> tuple[np.ndarray, DeepGP, tuple]:
    """A deep model whose layers have learned something, so that particles spread."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30, 2))
    model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=12, hidden_dim=2)
    algorithm = Sequential(num_particles=20)
    state = SequentialState(model, start_layers(model, shared=True), jnp.asarray(0, jnp.int32), None)
    y = jnp.asarray(np.sin(2 * x[:10, :1]) + 0.1 * rng.normal(size=(10, 1)))
    rows = (jnp.asarray(x[:10]), y, jnp.ones(y.shape, bool))
    learn = eqx.filter_jit(lambda state: algorithm.learn(state, rows, jnp.ones(10, bool), key=jax.random.key(3))[0])
    return x, model, learn(state).gps


def test_guided_particles_estimate_the_same_density_with_less_noise(key):
    x, model, gps = two_layers()
    datum = Datum(jnp.asarray(x[20:21]), jnp.asarray([[1.5]]), jnp.ones((1, 1), bool))

    @jax.jit
    def both(key):
        plain = follow(model, gps, datum, draw_noise(model, 100, key)).log_likelihood
        noise, log_ratio = draw_guided(model, guide(model, gps, datum), 100, key)
        guided = follow(model, gps, datum, noise).log_likelihood + log_ratio
        return plain, guided

    plain, guided = jax.vmap(both)(jax.random.split(key, 300))
    densities = [np.exp(np.asarray(w)).mean(axis=1) for w in (plain, guided)]
    error = 5 * np.hypot(*(d.std() / np.sqrt(300) for d in densities))
    assert abs(densities[0].mean() - densities[1].mean()) < error + 1e-3 * densities[0].mean()
    sizes = [float(jnp.mean(jax.vmap(effective_sample_size)(w))) for w in (plain, guided)]
    assert sizes[1] > sizes[0]


@pytest.mark.slow
def test_moving_particles_leaves_their_posterior_as_it_is(key):
    x, model, gps = two_layers()
    datum = Datum(jnp.asarray(x[20:21]), jnp.asarray([[0.8]]), jnp.ones((1, 1), bool))

    @jax.jit
    def before_and_after(key):
        paths = follow(model, gps, datum, [jax.random.normal(key, (40_000, 2))])
        moved = resample_and_move(model, gps, datum, paths, paths.log_likelihood, jax.random.fold_in(key, 1))
        return jax.nn.softmax(paths.log_likelihood), paths.noise[0], moved.noise[0]

    weights, noise, moved = before_and_after(key)
    for power in (1, 2):
        assert np.allclose(jnp.mean(moved**power, axis=0), weights @ noise**power, atol=0.06)


def test_equal_weights_teach_a_layer_nothing(key):
    noise = balanced_normal(key, (40, 3), jnp.float64)
    for variance in ([0.7], [0.7, 0.2, 1.0]):
        slope, curvature = change_of_noise(jnp.full((1, 40), 1 / 40), noise, jnp.asarray(variance))
        assert np.allclose(slope, 0.0, atol=1e-12)
        assert np.allclose(curvature, 0.0, atol=1e-12)


def test_a_step_that_is_cut_leaves_the_layer_in_doubt(key):
    noise = jnp.asarray([[5.0, 1.0]]) + 0.1 * balanced_normal(key, (40, 2), jnp.float64)
    slope, curvature = change_of_noise(jnp.full((1, 40), 1 / 40), noise, jnp.ones(2))
    assert np.allclose(slope, [3.0, 1.0])
    assert np.allclose(curvature, [0.0, 0.01 - 1.0])


@pytest.fixture(scope="module")
def one_row() -> tuple[DeepGP, SequentialState, jax.Array, float]:
    """Two inner functions of which the last layer sees the first alone, two outputs, and the one row x = 0."""
    z = real(np.zeros((4, 1)))
    first = Layer(RBF(1.0, 0.7), Zero(2), z, 2)
    last = Layer(RBF(jnp.asarray([0.8, 1e4]), 1.2), Zero(2), real(np.zeros((4, 2))), 2)
    model, y = DeepGP((first, last), Gaussian(0.1)), jnp.asarray([[1.8, 0.2]])
    method = Sequential(num_particles=4000, shallow_start=False, inner_scale=1.0)
    source = ArraySource(np.zeros((1, 1)), np.asarray(y))
    state = method.init(model, source, key=jax.random.key(0))
    rows = (jnp.zeros((1, 1)), y, jnp.ones((1, 2), bool))
    learn = eqx.filter_jit(lambda state: method.learn(state, rows, jnp.ones(1, bool), key=jax.random.key(1))[0])
    return model, learn(state), y, 0.1


def test_each_output_has_the_variance_that_the_particles_give_it(one_row):
    """Quadrature over the inner function: the outputs' residuals differ, and so do their variances."""
    _, state, y, noise = one_row
    last = state.gps[-1]
    centre = float(last.x[0, 0])
    h = np.linspace(-5.0, 5.0, 4001)
    k = 1.2 * np.exp(-0.5 * ((h - centre) / 0.8) ** 2)
    # Without data no place explains y better than another, so h keeps its prior N(0, 0.7).
    weights = np.exp(-0.5 * h**2 / 0.7)
    weights /= weights.sum()
    means = k[:, None] * np.asarray(y) / (1.2 + noise)
    variances = 1.2 + 1e-6 * 1.2 - k**2 / (1.2 + noise)
    mean = weights @ means
    variance = weights @ (variances[:, None] + means**2) - mean**2
    assert np.allclose(last.mean[0], mean, atol=0.01)
    assert np.allclose(last.covariance[:, 0, 0], variance, atol=0.02)
    assert variance[0] > 1.3 * variance[1]


def test_an_inner_function_that_nothing_depends_on_keeps_its_prior(one_row):
    model, state, _, _ = one_row
    rows = (jnp.full((3, 1), 0.1), jnp.asarray([[1.7, 0.3], [-1.0, 0.5], [1.8, 0.1]]), jnp.ones((3, 2), bool))
    method = Sequential(num_particles=1000)
    learn = eqx.filter_jit(lambda state: method.learn(state, rows, jnp.ones(3, bool), key=jax.random.key(2))[0])
    first = learn(state).gps[0]
    variance = np.asarray(project(first, model.layers[0], jnp.full((1, 1), 0.1)).variance[0])
    assert variance[0] < 0.6
    assert variance[1] == pytest.approx(0.7, abs=0.02)


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture
def curve(rng):
    x = rng.uniform(-2, 2, size=(80, 1))
    return x, np.where(x > 0, 1.0, -1.0) + 0.1 * rng.normal(size=x.shape)


@pytest.fixture
def fitted(curve, key):
    x, y = curve
    model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=20)
    algorithm = Sequential(num_particles=30, batch_size=16, shallow_start=False)
    return fit_model(algorithm, model, ArraySource(x, y), key=key, verbose=False)


@pytest.mark.slow
def test_a_deep_fit_learns_and_streams_on(fitted, curve, key):
    result = fitted
    x, y = curve
    posterior = result.posterior
    assert int(posterior.state.seen) == len(x)
    assert result.history["refused"].sum() == 0
    answer = posterior.predict_f(jnp.asarray(x), key=key)
    assert np.sqrt(np.mean((np.asarray(answer.mean()) - y) ** 2)) < 0.5
    # Degeneracy: 20 standard deviations out, then not a number, then as before.
    rows = np.concatenate([x[:12], x[:4]])
    targets = np.concatenate([y[:12], y[:4]])
    targets[3], targets[7] = 20.0, -20.0
    rows[5], targets[9] = np.nan, np.inf
    observed = np.ones(targets.shape, bool)
    observed[11] = False
    after, info = posterior.learn(rows, targets, observed, key=key, predict=True)
    learned = np.asarray(info.learned)
    assert learned.tolist() == [1.0] * 5 + [0.0] + [1.0] * 3 + [0.0, 1.0, 0.0] + [1.0] * 4
    fine = learned == 1.0
    assert np.all(np.isfinite(info.log_density[fine]))
    assert np.all(np.isfinite(info.mean[fine]))
    assert np.all(info.variance[fine] > 0)
    assert np.all(info.particles[fine] >= 1.0 - 1e-9)
    for leaf in jax.tree.leaves(after.state.gps):
        assert np.all(np.isfinite(leaf))
    later = after.predict_f(jnp.asarray(x), key=key)
    assert np.sqrt(np.mean((np.asarray(later.mean()) - y) ** 2)) < 1.0
    # Where blocks begin changes nothing, up to rounding at the scale of each array: Q holds entries of 1e7.
    x, y, observed = x[:4] + 0.01, y[:4], np.ones((4, 1), bool)
    whole, info = posterior.learn(x, y, observed, key=key, predict=True)
    parts, first = posterior.learn(x[:1], y[:1], observed[:1], key=key, predict=True)
    parts, rest = parts.learn(x[1:], y[1:], observed[1:], key=key, predict=True)
    assert np.allclose(np.concatenate([first.log_density, rest.log_density]), info.log_density, rtol=1e-9)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(parts.state), strict=True):
        assert np.allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, np.max(np.abs(b))))


def test_the_gradient_for_hyperparameters_is_that_of_the_density(rng, key):
    x, model, gps = two_layers()
    rows = (jnp.asarray(x[20:24]), jnp.asarray(rng.normal(size=(4, 1))), jnp.ones((4, 1), bool))

    def value(shift):
        moved = eqx.tree_at(lambda m: m.layers[0].kernel.lengthscale.raw, model, replace_fn=lambda raw: raw + shift)
        return jnp.sum(predictive_density(moved, gps, rows, key=key, num_samples=5))

    value = jax.jit(value)
    slope = jax.grad(value)(jnp.zeros(2))
    for d in range(2):
        step = 1e-5 * jnp.eye(2)[d]
        assert float(slope[d]) == pytest.approx(float(value(step) - value(-step)) / 2e-5, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"episodes": 0},
        {"active": "full"},
        {"forgetting": 1.5},
        {"delta": -1.0},
        {"threshold": 2.0},
        {"start_rows": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        Sequential(**settings)


def test_a_fit_tells_how_many_rows_hyperparameters_start_from(curve, key):
    x, y = curve
    model = build_model(x, Gaussian(0.1), 1, num_inducing=5)
    method = Sequential(start_rows=30, episodes=1, batch_size=40)
    seen = fit_model(method, model, ArraySource(x, y), key=key, verbose=False)
    assert any("start from a shallow GP on 30 of the 80 rows (start_rows" in message for message in seen.messages)
    assert Sequential().remarks(model, ArraySource(x, y), ()) == ()


def test_layers_without_inducing_inputs_are_refused(curve):
    model = build_model(curve[0], Gaussian(0.1), 1)
    with pytest.raises(SettingError, match="set num_inducing"):
        start_layers(model, shared=True)


def test_outputs_of_the_dynamical_prior_have_the_covariance_of_the_data(rng, key):
    """Else known outputs say too much about missing ones: plain PCA leaves the noise of a row's own scores out."""
    y = rng.normal(size=(200, 2)) @ rng.normal(size=(2, 3)) + rng.normal(size=(200, 3))
    y = (y - y.mean(axis=0)) / y.std(axis=0)
    model = dynamical_prior(rng.normal(size=(200, 1)), y, latent_dim=2, num_inducing=20, decoder="linear", key=key)
    weights = np.asarray(model.layers[-1].mean.weights.value)
    covariance = weights.T @ weights + np.eye(3) * float(model.likelihood.variance.value)
    assert np.allclose(covariance, y.T @ y / len(y), atol=0.05)


def test_a_mixture_of_one_particle_is_a_datum(rng):
    layer, gp = _online(rng)
    x, slope, curvature = jnp.asarray(rng.normal(size=(1, 2))), jnp.asarray([0.7]), jnp.asarray([-0.4])
    plain = absorb(gp, project(gp, layer, x), x, slope, curvature)
    mixed = absorb_mixture(gp, layer, x, x, jnp.ones(1), slope[None], curvature[None])
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(mixed), strict=True):
        assert np.allclose(a, b, atol=1e-5)


def test_a_mixture_has_the_moments_of_its_particles(rng):
    layer, gp = _online(rng)
    particles, weights = jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray([0.2, 0.5, 0.3])
    slope, curvature = jnp.asarray(rng.normal(size=(3, 1))), -jnp.asarray(rng.uniform(0.1, 0.5, size=(3, 1)))
    # An input that is active already: nothing joins, and the slots of all answers agree.
    x = gp.x[:1]
    parts = [
        absorb_mixture(gp, layer, x, particles[i : i + 1], jnp.ones(1), slope[i : i + 1], curvature[i : i + 1])
        for i in range(3)
    ]
    mixed = absorb_mixture(gp, layer, x, particles, weights, slope, curvature)
    mean = sum(w * part.mean for w, part in zip(weights, parts, strict=True))
    second = sum(w * (part.covariance[0] + part.mean @ part.mean.T) for w, part in zip(weights, parts, strict=True))
    assert np.allclose(mixed.mean, mean, atol=1e-10)
    assert np.allclose(mixed.covariance[0], second - mean @ mean.T, atol=1e-10)


def _online(rng):
    """A layer of one output over two inputs, and an online GP that has seen five rows."""
    layer = Layer(RBF(jnp.ones(2), 1.0), Zero(1), real(jnp.zeros((8, 2))), 1)
    gp = empty(layer, 2, 8, shared=True)
    for x in jnp.asarray(rng.normal(size=(5, 1, 2))):
        gp = absorb(gp, project(gp, layer, x), x, jnp.asarray([0.3]), jnp.asarray([-0.5]))
    return layer, gp


@pytest.mark.parametrize("between", [None, 0.2])
def test_known_outputs_count_once_when_their_row_has_been_learned(key, between):
    """A latent function of x seen through two weights, as the layers learn it and in closed form."""
    noise = None if between is None else positive(between)
    first = Layer(RBF(0.8), Zero(1), real(jnp.zeros((8, 1))), 1, noise)
    weights = np.array([[1.0, 0.5]])
    last = Layer(RBF(1.0, 1e-8), Linear(jnp.asarray(weights)), real(jnp.zeros((8, 1))), 2)
    _, state, learn = stream(DeepGP((first, last), Gaussian(0.3)), shared=False, num_particles=200)
    x = np.array([[0.0], [0.5], [-0.7]])
    y, observed = (
        np.array([[0.7, 0.0], [0.2, -0.4], [0.0, 0.9]]),
        np.array([[True, False], [True, True], [False, True]]),
    )
    state, _ = learn(state, jnp.asarray(x), jnp.asarray(y), jnp.asarray(observed), key)
    posterior = Sequential(num_particles=200).posterior(state, None)

    rows = np.concatenate([x, [[0.3]]]), np.concatenate([y, [[-0.5, 0.0]]]), np.concatenate([observed, [[True, False]]])
    learned = jnp.asarray([True, True, True, False])
    answer = posterior.fill_in(*map(jnp.asarray, rows), learned=learned, key=key)
    for row in range(4):  # a learned row is not told of the new one
        told = [0, 1, 2] if row < 3 else [0, 1, 2, 3]
        mean, variance = seen_through(weights[0], between or 0.0, *(part[told] for part in rows), row)
        np.testing.assert_allclose(np.asarray(answer.mean())[row], mean, atol=0.02)
        np.testing.assert_allclose(np.sqrt(np.asarray(answer.variance())[row]), np.sqrt(variance), rtol=0.03)


def seen_through(weights, between, x, y, observed, row):
    """Mean and variance of ``w h`` at a row, given outputs ``w h + e`` with h = f(x) + white noise."""
    K = np.asarray(RBF(0.8)(jnp.asarray(x))) + between * np.eye(len(x))
    covariance = np.kron(K, np.outer(weights, weights))
    seen = observed.ravel()
    at = [2 * row, 2 * row + 1]
    gain = covariance[at][:, seen] @ np.linalg.inv(covariance[np.ix_(seen, seen)] + 0.3 * np.eye(seen.sum()))
    return gain @ y.ravel()[seen], np.diag(covariance[np.ix_(at, at)] - gain @ covariance[seen][:, at])


@pytest.mark.slow
def test_the_dynamical_prior_fills_in_what_is_missing(rng, key):
    time = np.linspace(-2, 2, 60)[:, None]
    latent = np.concatenate([np.sin(3 * time), np.cos(2 * time)], axis=1)
    y = latent @ rng.normal(size=(2, 5)) + 0.02 * rng.normal(size=(60, 5))
    y = (y - y.mean(axis=0)) / y.std(axis=0)
    observed = np.ones(y.shape, bool)
    observed[20:35, 0] = False
    scores, components = principal_components(np.where(observed, y, 0.0), observed, 2)
    assert np.sqrt(np.mean((scores @ components - y)[~observed] ** 2)) < 0.2
    model = dynamical_prior(time, np.where(observed, y, 0.0), observed, latent_dim=2, num_inducing=20, key=key)
    source = ArraySource(time, np.where(observed, y, 0.0), observed)
    method = Sequential(num_particles=30, episodes=1, shallow_start=False, inner_scale=1.0, batch_size=32)
    posterior = fit_model(method, model, source, key=key, verbose=False).posterior
    answer = np.asarray(posterior.predict_f(jnp.asarray(time), key=key).mean())
    assert np.sqrt(np.mean((answer - y)[~observed] ** 2)) < 0.4
    # One row at a time: what the other four outputs say.
    rows = (jnp.asarray(part) for part in (time, np.where(observed, y, np.nan), observed))
    filled = np.asarray(posterior.fill_in(*rows, learned=True, key=key).mean())
    assert np.sqrt(np.mean((filled - y)[~observed] ** 2)) < 0.2
    varying = with_heteroscedastic_noise(model)
    assert varying.layers[-1].width == 10
    assert np.allclose(varying.layers[-1].mean(jnp.asarray(scores))[:, :5], scores @ components, atol=0.02)
    with pytest.raises(SettingError, match="latent_dim must lie between 1 and the 5 outputs"):
        dynamical_prior(time, y, latent_dim=6, key=key)


def test_noise_that_varies_is_found_where_there_is_nothing_else_to_find(rng, key):
    x = rng.uniform(-1.5, 1.5, size=(300, 1))
    noise = np.exp(1.2 * np.sin(2.0 * x))
    y = noise * rng.normal(size=x.shape)
    model = build_model(x, HeteroscedasticGaussian(), 1, num_inducing=20)
    fitted = fit_model(Sequential(episodes=1), model, ArraySource(x, y), key=key, verbose=False).posterior
    grid = jnp.asarray([[-0.8], [0.8]])  # deviations of 0.30 and 3.3
    mixture = fitted.predict_f(grid, key=key)
    _, variance = fitted.model.likelihood.predict_moments(mixture.means[0], mixture.variances[0])
    quiet, loud = np.sqrt(np.asarray(variance)[:, 0])
    assert loud > 4.0 * quiet


@pytest.mark.parametrize("episodes", [1, 5])
def test_a_log_noise_counts_every_row_once(rng, key, episodes):
    """Rows at one input: quadrature over the two latents there."""
    y = 0.5 + np.exp(0.5 * 0.7) * rng.normal(size=(25, 1))
    x = np.zeros(y.shape)
    likelihood = HeteroscedasticGaussian()
    model = DeepGP((Layer(RBF(1.0, 1.0), Zero(2), real(np.zeros((3, 1))), 2),), likelihood)
    method = Sequential(episodes=episodes, shallow_start=False, learning_rate=1e-12)
    (gp,) = fit_model(method, model, ArraySource(x, y), key=key, verbose=False).posterior.state.gps
    f, g = np.meshgrid(np.linspace(-4, 4, 401), np.linspace(-4, 4, 401), indexing="ij")
    log_density = -0.5 * (f**2 + g**2)
    for value in y[:, 0]:
        log_density = log_density - 0.5 * (g + (value - f) ** 2 * np.exp(-g))
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = np.sum(weights * g)
    sd = np.sqrt(np.sum(weights * (g - mean) ** 2))
    at = project(gp, model.layers[0], jnp.zeros((1, 1)))
    assert np.sqrt(at.variance[0, 1]) == pytest.approx(sd, rel=0.15)
    assert at.mean[0, 1] == pytest.approx(mean, abs=sd)


def test_noise_that_grows_with_the_scores_is_found(rng):
    """Also where scores took a share of the noise along, or all of it, and where nothing was observed."""
    scores, components = rng.normal(size=(3000, 2)), np.zeros((2, 4))
    components[1, 0], components[0, 3] = 1.0, 0.0
    components[0, :3] = (0.0, 0.6, 0.8)
    slopes, levels = np.array([[0.0, 0.8, -0.4], [0.0, 0.0, 0.3]]), np.array([0.0, -2.0, -1.0])
    left = np.array([0.0, 0.64, 0.36])
    residuals = np.sqrt(left) * np.exp(0.5 * (scores @ slopes + levels)) * rng.normal(size=(3000, 3))
    residuals = np.concatenate([residuals, np.full((3000, 1), np.nan)], axis=1)
    observed = rng.uniform(size=residuals.shape) < 0.8
    observed[:, 3] = False
    found, around = log_linear_noise(scores, components, np.where(observed, residuals, np.nan), observed, noise=0.5)
    assert np.allclose(found[:, 1:3], slopes[:, 1:], atol=0.25)
    assert np.allclose(around[1:3], levels[1:], atol=0.25)
    assert np.allclose(around[[0, 3]], np.log(0.5))
    assert np.allclose(found[:, [0, 3]], 0.0)


@pytest.mark.parametrize(("function", "log_noise"), [(1e-6, 1e-6), (1e-3, 0.1), (1e-2, 0.3)])
def test_the_guide_finds_the_datum_whatever_the_noise_does(rng, monkeypatch, function, log_noise):
    """One score, twenty outputs whose noise grows with it: particles must go to the outputs, not to more noise."""
    weights = jnp.concatenate([jnp.asarray(rng.normal(size=(1, 20))), jnp.full((1, 20), 1.0)], axis=1)
    z = real(jnp.zeros((2, 1)))
    first = Layer(RBF(1.0, 1.0), Zero(1), z, 1)
    last = Layer(RBF(1.0, 1.0), Linear(weights), z, 40)
    model = DeepGP((first, last), HeteroscedasticGaussian(jnp.full(20, -5.0)))
    gps = start_layers(model, shared=False)
    variance = jnp.concatenate([jnp.full((1, 20), function), jnp.full((1, 20), log_noise)], axis=1)
    plain = _particles.project_layer

    def with_variance(model, gps, level, x, h):
        at = plain(model, gps, level, x, h)
        return at if level == 0 else eqx.tree_at(lambda at: at.variance, at, jnp.repeat(variance, len(h), axis=0))

    monkeypatch.setattr(_particles, "project_layer", with_variance)
    for h in (-1.5, 1.5):
        spread = np.sqrt(function + np.exp(h - 5.0))
        y = h * weights[:, :20] + spread * rng.normal(size=(1, 20))
        found = guide(model, gps, Datum(jnp.zeros((1, 1)), y, jnp.ones(y.shape, bool)))
        assert abs(float(found.centre[0]) - h) < 6.0 * float(found.inverse_root[0, 0])
