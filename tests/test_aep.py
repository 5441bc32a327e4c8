"""Approximate EP: the paper's energy and gradients, its limits, its stationarity, and moments against Monte Carlo."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from fathomgp import DeepGPRegressor, load
from fathomgp.data import ArraySource, nearly_noiseless
from fathomgp.errors import SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import AEP
from fathomgp.inference._propagation import match, push
from fathomgp.inference.aep import energy, energy_without_kl, log_z, mean_curvature, remove_share
from fathomgp.inference.dsvi import calm_start, elbo, initial_q, kl_divergence
from fathomgp.inference.sgpr import collapsed_elbo, optimal_q
from fathomgp.kernels import RBF, Matern32, expectations
from fathomgp.kernels.expectations import psi0, psi1, psi2
from fathomgp.likelihoods import Bernoulli, Gaussian, RobustMax, StudentT
from fathomgp.means import Linear, Zero
from fathomgp.model import DeepGP, Layer, Recipe, Whitened, build_model, condition_on, moments, prepare, project
from fathomgp.parameters import partition, real


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(12, 2))
    return x, np.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * rng.normal(size=(12, 1))


def shallow(z, noise=0.1) -> DeepGP:
    return DeepGP((Layer(RBF(0.9, 1.3), Zero(1), real(z), 1),), Gaussian(noise))


def narrow(z, noise=0.1) -> DeepGP:
    """Two layers through one hidden number, as in the paper's formulas."""
    inner = Layer(RBF(jnp.array([0.9, 1.4]), 0.8), Zero(1), real(z), 1)
    outer = Layer(RBF(1.1, 1.2), Zero(1), real(np.linspace(-1.5, 1.5, len(z))[:, None]), 1)
    return DeepGP((inner, outer), Gaussian(noise))


def random_q(model, rng, spread=0.3):
    def one(q):
        root = np.tril(spread * rng.normal(size=q.root.shape)) + np.eye(q.root.shape[1])
        return Whitened(jnp.asarray(rng.normal(size=q.mean.shape)), jnp.asarray(0.7 * root))

    return tuple(one(q) for q in initial_q(model))


# --- the paper's formulas, in its own unwhitened notation -------------------------------------------------------------


def from_factors(model, factors, num_data):
    """Whitened q of ``p(u) g(u)^N`` with factors g given by precision T1 and precision-mean t2."""
    q = []
    for layer, (T1, t2) in zip(model.layers, factors, strict=True):
        K = layer.kernel(layer.z.value)
        V = jnp.linalg.inv(jnp.linalg.inv(K) + num_data * T1)
        L = jnp.linalg.cholesky(K)
        S = jnp.linalg.solve(L, jnp.linalg.solve(L, V).T)
        mean = jnp.linalg.solve(L, V @ (num_data * t2))
        q.append(Whitened(mean[:, None], jnp.linalg.cholesky(0.5 * (S + S.T))[None]))
    return tuple(q)


def gaussian(K, T1, t2, count):
    """Mean and covariance of ``p(u) g(u)^count``."""
    V = jnp.linalg.inv(jnp.linalg.inv(K) + count * T1)
    return V @ (count * t2), V


def phi(m, V):
    return 0.5 * jnp.linalg.slogdet(V)[1] + 0.5 * m @ jnp.linalg.solve(V, m)  # (19)


def layer_moments(layer, m, V, mean, variance):
    """(1) - (7), with the psi statistics they need."""
    K = layer.kernel(layer.z.value)
    inverse = jnp.linalg.inv(K)
    A, B = inverse @ m, inverse @ (V + jnp.outer(m, m)) @ inverse - inverse
    first, second = (f(layer.kernel, layer.z.value, mean, variance) for f in (psi1, psi2))
    out = first @ A
    spread = psi0(layer.kernel, mean, variance) + jnp.einsum("ij,bji->b", B, second) - out**2
    return out, spread, first, second


def paper_objective(model, factors, x, y):
    """F of (18)."""
    N, total = len(x), 0.0
    mean, variance = x, jnp.zeros_like(x)
    for layer, (T1, t2) in zip(model.layers, factors, strict=True):
        K = layer.kernel(layer.z.value)
        zero = jnp.zeros(len(K))
        q, cavity = gaussian(K, T1, t2, N), gaussian(K, T1, t2, N - 1)
        total = total - (N - 1) * phi(*q) + N * phi(*cavity) - phi(zero, K)
        out, spread, _, _ = layer_moments(layer, *cavity, mean, variance)
        mean, variance = out[:, None], spread[:, None]
    v = variance[:, 0] + model.likelihood.variance.value
    return total + jnp.sum(-0.5 * jnp.log(2 * jnp.pi * v) - 0.5 * (y[:, 0] - mean[:, 0]) ** 2 / v)  # (14)


@pytest.fixture
def paper(data, rng):
    x, y = (jnp.asarray(part) for part in data)
    model = narrow(data[0][:4])
    factors = []
    for _ in model.layers:
        root = rng.normal(size=(4, 4))
        factors.append((jnp.asarray(0.2 * root @ root.T + 0.1 * np.eye(4)), jnp.asarray(0.3 * rng.normal(size=4))))
    return model, factors, x, y


def test_the_energy_is_the_papers(paper):
    model, factors, x, y = paper
    batch = ArraySource(np.asarray(x), np.asarray(y)).everything()
    ours = energy(model, from_factors(model, factors, len(x)), batch)
    assert float(ours) == pytest.approx(-float(paper_objective(model, factors, x, y)), rel=1e-5)


def test_gradients_are_those_of_sections_5_and_6(paper):
    model, factors, x, y = paper
    N = len(x)
    batch = ArraySource(np.asarray(x), np.asarray(y)).everything()
    ours = jax.jit(jax.grad(lambda factors: -energy(model, from_factors(model, factors, N), batch)))(factors)
    theirs = jax.jit(lambda factors: _section_6(model, factors, x, y))(factors)
    for (T1, t2), (their_T1, their_t2) in zip(ours, theirs, strict=True):
        assert np.allclose(0.5 * (T1 + T1.T), their_T1, rtol=1e-4, atol=1e-4 * np.abs(their_T1).max())
        assert np.allclose(t2, their_t2, rtol=1e-4, atol=1e-4 * np.abs(their_t2).max())


def _section_6(model, factors, x, y):
    (inner, outer), N = model.layers, len(x)
    Ks = [layer.kernel(layer.z.value) for layer in model.layers]
    cavities = [gaussian(K, *factor, N - 1) for K, factor in zip(Ks, factors, strict=True)]
    m1, v1, first1, second1 = layer_moments(inner, *cavities[0], x, jnp.zeros_like(x))

    def last(m1, v1):
        return layer_moments(outer, *cavities[1], m1[:, None], v1[:, None])

    m2, v2, first2, second2 = last(m1, v1)
    v = v2 + model.likelihood.variance.value
    dm2 = (y[:, 0] - m2) / v  # (15)
    dv2 = -0.5 / v + 0.5 * (y[:, 0] - m2) ** 2 / v**2  # (16)
    _, pull = jax.vjp(lambda m, v: last(m, v)[:2], m1, v1)  # (8), (9)
    dm1, dv1 = pull((dm2, dv2))  # (17)
    outputs = [(m1, dm1, dv1, first1, second1), (m2, dm2, dv2, first2, second2)]
    return [
        _one_layer_of_section_6(K, factor, cavity, N, *output)
        for K, factor, cavity, output in zip(Ks, factors, cavities, outputs, strict=True)
    ]


def _one_layer_of_section_6(K, factor, cavity, N, m, dm, dv, first, second):
    inverse, (mc, Vc), q = jnp.linalg.inv(K), cavity, gaussian(K, *factor, N)
    dA = (dm - 2 * m * dv) @ first  # (10), (12)
    dB = jnp.einsum("b,bij->ij", dv, second)  # (13)
    dmc = inverse @ dA + 2 * inverse @ dB @ inverse @ mc
    dVc = inverse @ dB @ inverse
    log_z_T1 = -(N - 1) * (Vc @ dVc @ Vc + 0.5 * (jnp.outer(Vc @ dmc, mc) + jnp.outer(mc, Vc @ dmc)))
    log_z_t2 = (N - 1) * Vc @ dmc
    moment = q[1] + jnp.outer(q[0], q[0]) - Vc - jnp.outer(mc, mc)  # eta = (u, -u u^T / 2)
    return 0.5 * N * (N - 1) * moment + log_z_T1, N * (N - 1) * (mc - q[0]) + log_z_t2


# --- one layer --------------------------------------------------------------------------------------------------------


def test_cavities_and_their_divergences(data, rng):
    q = random_q(narrow(data[0][:4]), rng)
    share = jnp.asarray(0.3)
    cavities, divergence = remove_share(q, share)
    expected = 0.0
    for layer, cavity in zip(q, cavities, strict=True):
        m, S = np.asarray(layer.mean[:, 0]), np.asarray(layer.root[0] @ layer.root[0].T)
        V = np.linalg.inv(0.7 * np.linalg.inv(S) + 0.3 * np.eye(len(S)))
        mean = V @ (0.7 * np.linalg.solve(S, m))
        assert np.allclose(cavity.mean[:, 0], mean)
        assert np.allclose(cavity.root[0] @ cavity.root[0].T, V)
        r = mean - m
        logs = np.linalg.slogdet(V)[1] - np.linalg.slogdet(S)[1]
        expected += 0.5 * (np.trace(np.linalg.solve(V, S)) - len(S) + r @ np.linalg.solve(V, r) + logs) / 0.3
    assert float(divergence) == pytest.approx(expected, rel=1e-9)


def test_alpha_towards_zero_is_the_variational_bound(data, rng, key):
    x, y = data
    model, batch = shallow(x[:5]), ArraySource(x, y).everything()
    for q, bound in (
        (random_q(model, rng), lambda q: elbo(model, q, batch, key=key)),
        ((optimal_q(model, batch),), lambda q: collapsed_elbo(model, batch)),
    ):
        limit = -float(bound(q))
        errors = [float(energy(model, q, batch, alpha=alpha)) - limit for alpha in (1e-3, 1e-4, 1e-5)]
        assert abs(errors[2]) < 1e-3 * max(1.0, abs(limit))
        assert errors[0] / errors[1] == pytest.approx(10.0, rel=0.1)
        assert errors[1] / errors[2] == pytest.approx(10.0, rel=0.1)


def test_at_the_minimum_average_tilted_moments_are_those_of_q(data):
    x, y = data
    model, batch = shallow(x[:3], noise=0.3), ArraySource(x, y).everything()
    lower = np.tril_indices(3)

    def unpack(point):
        root = jnp.zeros((3, 3)).at[lower].set(point[3:])
        return (Whitened(point[:3, None], root[None]),)

    objective = jax.jit(jax.value_and_grad(lambda point: energy(model, unpack(point), batch)))
    start = np.concatenate([np.zeros(3), np.eye(3)[lower] * 0.5])
    found = scipy.optimize.minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 2000})
    (q,) = unpack(jnp.asarray(found.x))
    ((cavity,), _), S = remove_share((q,), jnp.asarray(1.0 / len(x))), q.root[0] @ q.root[0].T
    whitener = prepare(model.layers[0])
    a = np.asarray(project(model.layers[0], whitener, jnp.asarray(x)))
    V, m = np.asarray(cavity.root[0] @ cavity.root[0].T), np.asarray(cavity.mean[:, 0])
    noise = 0.3 + 1.3 - np.sum(a**2, axis=0)
    firsts, seconds = [], []
    for n in range(len(x)):
        gain = V @ a[:, n] / (a[:, n] @ V @ a[:, n] + noise[n])
        mean = m + gain * (y[n, 0] - a[:, n] @ m)
        firsts.append(mean)
        seconds.append(V - np.outer(gain, a[:, n] @ V) + np.outer(mean, mean))
    assert np.allclose(np.mean(firsts, axis=0), q.mean[:, 0], atol=1e-6)
    assert np.allclose(np.mean(seconds, axis=0), S + q.mean @ q.mean.T, atol=1e-6)


# --- deep -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_moments_through_a_layer_are_those_of_monte_carlo(data, rng, full):
    x, _ = data
    weights = jnp.asarray(rng.normal(size=(2, 3)))
    layer = Layer(RBF(jnp.array([0.9, 1.6]), 1.1), Linear(weights), real(x[:4]), 3)
    q = Whitened(jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(0.4 * rng.normal(size=(3, 4, 4))))
    conditional = condition_on(layer, prepare(layer), q)
    mean, C = jnp.asarray([[0.4, -0.3]]), np.array([[0.3, 0.12], [0.12, 0.2]]) if full else np.diag([0.3, 0.2])
    spread = jnp.asarray(C if full else np.diag(C))[None]
    ours = jax.jit(lambda: push(layer, match(layer, conditional, True), mean, spread, True))()
    diagonal = jax.jit(lambda: push(layer, match(layer, conditional), mean, spread))()
    h = np.asarray(mean) + rng.multivariate_normal(np.zeros(2), C, size=200_000)
    means, variances = (np.asarray(part) for part in jax.jit(lambda h: moments(layer, conditional, h))(jnp.asarray(h)))
    error = 5.0 / np.sqrt(len(h))
    assert np.allclose(ours[0][0], means.mean(axis=0), atol=error * means.std())
    centred = means - means.mean(axis=0)
    expected = centred.T @ centred / len(h) + np.diag(variances.mean(axis=0))
    products = centred[:, :, None] * centred[:, None, :]
    assert np.allclose(ours[1][0], expected, atol=2 * error * products.std())
    assert np.allclose(diagonal[0], ours[0])
    assert np.allclose(diagonal[1][0], np.diag(ours[1][0]), atol=1e-9)


@pytest.mark.parametrize("full", [False, True])
def test_variances_at_nearly_certain_inputs_are_not_lost_to_rounding(rng, full):
    # As of a table without noise: rows are inducing points, and k(Z, Z) has a condition number of 1e10. Subtracting m^2
    # from psi0 + tr(B psi2) left an error of 1e-3 in a variance of 1e-8.
    x = rng.uniform(-1.0, 1.0, size=(40, 2))
    y = np.sin(3.0 * x[:, :1]) + x[:, 1:]
    model = DeepGP((Layer(RBF(2.0, 500.0), Zero(1), real(x), 1),), Gaussian(2e-6))
    layer, q = model.layers[0], optimal_q(model, ArraySource(x, y).everything())
    conditional, mean = condition_on(layer, prepare(layer), q), jnp.asarray(0.8 * x[:20])
    certain = moments(layer, conditional, mean)
    slopes = jax.vmap(jax.grad(lambda one: moments(layer, conditional, one[None])[0][0, 0]))(mean)
    C = 1e-8 * np.array([[1.0, 0.3], [0.3, 2.0]]) if full else 1e-8 * np.diag([1.0, 2.0])
    spread = jnp.broadcast_to(jnp.asarray(C if full else np.diag(C)), (20, *np.shape(C)[: 1 + full]))
    ours = jax.jit(lambda: push(layer, match(layer, conditional), mean, spread))()
    assert np.allclose(ours[0], certain[0], atol=1e-5)
    expected = certain[1][:, 0] + np.einsum("bd,de,be->b", slopes, C, slopes)
    assert np.allclose(ours[1][:, 0], expected, rtol=1e-2)


def test_log_z_of_correlated_outputs(rng):
    root = rng.normal(size=(1, 3, 3))
    V, noise = root @ np.swapaxes(root, 1, 2), np.array([0.1, 0.2, 0.3])
    mean, y = rng.normal(size=(2, 1, 3))
    observed = np.array([[True, False, True]])
    likelihood = Gaussian(noise)
    ours = log_z(likelihood, *(jnp.asarray(part) for part in (mean, V, y, observed)), 1.0)
    kept = np.ix_([0, 2], [0, 2])
    theirs = scipy.stats.multivariate_normal(mean[0, [0, 2]], (V[0] + np.diag(noise))[kept]).logpdf(y[0, [0, 2]])
    assert float(ours[0]) == pytest.approx(theirs, rel=1e-9)
    independent = V * np.eye(3)
    for alpha in (1.0, 0.3):
        whole = log_z(likelihood, *(jnp.asarray(p) for p in (mean, independent, y, observed)), alpha)
        diagonal = np.diagonal(independent, axis1=1, axis2=2)
        parts = log_z(likelihood, *(jnp.asarray(p) for p in (mean, diagonal, y, observed)), alpha)
        assert np.allclose(whole, parts)


def test_streamed_gradients_equal_plain_ones(data, rng, monkeypatch):
    x, y = data
    batch = ArraySource(x, y).everything()
    model = build_model(x, Gaussian(0.05), 1, depth=2, num_inducing=5, recipe=Recipe(variance=0.5))
    q = random_q(model, rng)
    learned, constant = partition(model)

    def plain(learned, q):
        model = eqx.combine(learned, constant)
        return energy(model, q, batch, alpha=0.5) - kl_divergence(q)

    value, gradient = jax.jit(jax.value_and_grad(plain, (0, 1)))(learned, q)
    monkeypatch.setattr(expectations, "_BLOCK_NUMBERS", 1)
    ours, _, streamed = jax.jit(lambda q: energy_without_kl(model, q, batch, alpha=0.5))(q)
    assert float(ours) == pytest.approx(float(value), rel=1e-9)
    for a, b in zip(jax.tree.leaves(streamed), jax.tree.leaves(gradient), strict=True):
        assert np.allclose(a, b, rtol=1e-6, atol=1e-7)


def rough(x):
    """Two outputs that no few inducing points explain without noise."""
    return np.stack([np.sin(3.0 * x[:, 0]) + np.cos(50.0 * x[:, 1]), x[:, 1] + np.sin(70.0 * x[:, 0])], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "targets", "settings", "model_settings"),
    [
        (Gaussian(0.1), rough, {"correlated": True}, {"depth": 3, "hidden_dim": 2}),
        (StudentT(), lambda x: x[:, :1], {"alpha": 0.7, "test_samples": 5}, {"kernel": Matern32(1.0)}),
        (RobustMax(3), lambda x: np.digitize(x[:, :1], [-0.7, 0.7]).astype(float), {}, {"skip_inputs": True}),
    ],
)
def test_every_likelihood_trains_and_predicts(data, key, likelihood, targets, settings, model_settings):
    x, _ = data
    y = targets(x)
    observed = np.ones(y.shape, bool)
    observed[::5, -1] = False
    source = ArraySource(x, np.where(observed, y, 0.0), observed)
    arguments = {"depth": 2, "num_inducing": 4, "recipe": Recipe(variance=0.5), **model_settings}
    model = build_model(x, likelihood, y.shape[1], **arguments)
    result = fit_model(AEP(**settings), model, source, key=key, max_iter=40, verbose=False)
    objective = result.history["objective"]
    assert np.mean(result.history["ok"]) > 0.9
    assert np.mean(objective[-5:]) < objective[0]
    answer = result.posterior.predict_y(jnp.asarray(x), key=key)
    assert len(answer.mixture.means) == settings.get("test_samples", 1)
    assert np.all(np.isfinite(answer.log_density(y)))


def test_natural_gradients_find_the_q_of_labels_before_adam_does(rng, key):
    x = rng.normal(size=(80, 2))
    source = ArraySource(x, (x[:, :1] > 0.0).astype(float))
    model = build_model(x, Bernoulli(), 1, depth=1, num_inducing=10)
    ends = [
        fit_model(AEP(natural=natural), model, source, key=key, max_iter=30, verbose=False).history["objective"][-1]
        for natural in (0.1, 0.0)
    ]
    assert ends[0] < ends[1] - 0.05


def test_the_estimator_predicts_without_chance_and_comes_back_from_a_file(data, tmp_path):
    x, y = data
    model = DeepGPRegressor("aep", num_inducing=6, max_iter=5, random_state=0).fit(x, y[:, 0])
    mean, std = model.predict(x, return_std=True)
    parts = np.concatenate([model.predict(row[None]) for row in x])
    assert np.allclose(mean, parts)
    assert np.all(std > 0)
    model.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict(x), mean)
    assert model.sample_y(x, 3, random_state=0).shape == (12, 3)


def test_the_curvature_in_the_mean_is_that_of_the_energy(data, rng):
    x, y = data
    batch, model = ArraySource(x, y).everything(), shallow(x[:4])
    (q,) = random_q(model, rng)
    ours = jax.jit(lambda: mean_curvature(model, (q,), batch, alpha=0.01))()[0]

    def whole(mean):
        return energy(model, (Whitened(mean[:, None], q.root),), batch, alpha=0.01)

    assert np.allclose(ours, jax.jit(jax.hessian(whole))(q.mean[:, 0]), rtol=0.02, atol=0.02 * float(jnp.max(ours)))


def test_next_to_no_noise_is_learned():
    # The error was 1.1 deviations of y, more than that of its mean: variances were rounding, and Adam undid the start.
    X, y, X_test, y_test = nearly_noiseless(60, num_test=200)
    model = DeepGPRegressor("aep", num_inducing=40, max_iter=100, random_state=0, verbose=False).fit(X, y)
    assert np.all(model.history_["clamped"] == 0.0)
    assert np.sqrt(np.mean((model.predict(X_test) - y_test) ** 2)) < 0.2 * np.std(y_test)


@pytest.mark.parametrize("noise", [0.1, 2e-6])
def test_inner_layers_start_as_sure_as_the_noise_asks(data, noise):
    x, y = data
    model = build_model(x, Gaussian(noise), 1, depth=3, num_inducing=8)
    q = initial_q(model, inner_root=0.01)
    last = optimal_q(DeepGP(model.layers[-1:], model.likelihood), ArraySource(x, y).everything())
    calm, inner = calm_start(model, q[:-1], last, 0.01)
    if noise > 0.01:
        assert all(np.array_equal(a.root, b.root) for a, b in zip(inner, q[:-1], strict=True))
        assert float(calm.layers[0].kernel.variance.value) == pytest.approx(0.1)
        return
    assert float(kl_divergence(inner)) == pytest.approx(0.0, abs=1e-9)
    layer, heights = model.layers[-1], [one.kernel.variance.value for one in calm.layers[:-1]]
    conditional, h = condition_on(layer, prepare(layer), last), layer.z.value
    slopes = jax.vmap(jax.grad(lambda one: moments(layer, conditional, one[None])[0][0, 0]))(h)
    assert float(sum(heights) * jnp.mean(jnp.sum(slopes**2, axis=1))) == pytest.approx(noise, rel=1e-3)


def test_settings_are_checked():
    with pytest.raises(SettingError, match="alpha is a power above 0 and up to 1, but it is 0"):
        AEP(alpha=0.0)
    with pytest.raises(SettingError, match="batch_size must be at least 1, but it is 0"):
        AEP(batch_size=0)
    with pytest.raises(SettingError, match="natural is a step size between 0 and 1, but it is 2"):
        AEP(natural=2.0)
    with pytest.raises(SettingError, match="no precision 'mixed'"):
        DeepGPRegressor("aep", precision="mixed").fit(np.zeros((4, 1)), np.zeros(4))
