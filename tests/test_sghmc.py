"""SGHMC for deep GPs: gradients, the known posterior of one layer, calibration, every likelihood, resuming."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fathomgp import DeepGPRegressor
from fathomgp.data import ArraySource, Batch, nearly_noiseless
from fathomgp.errors import DivergenceError, FitWarning, SettingError
from fathomgp.estimators._settings import tuned_inference
from fathomgp.fitting import Checkpointing, fit_model
from fathomgp.inference import DSVI, SGHMC, _streaming, hamiltonian_sampler
from fathomgp.inference.sghmc import differentiable_factors, energy_and_gradient, log_likelihood, model_gradient
from fathomgp.kernels import Matern52
from fathomgp.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, RobustMax, Softmax, StudentT
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Informed, Layer, Recipe, build_model, prepare_all, project
from fathomgp.parameters import partition, real

QUICK = SGHMC(burn_in=6, sampling=6, draws=3, chains=2, batch_size=16, window=4)


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(30, 2))
    return x, np.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * rng.normal(size=(30, 1))


def shallow(z, noise=0.05) -> DeepGP:
    return DeepGP((Layer(Matern52(0.8, 1.3), Zero(1), real(z), 1),), Gaussian(noise))


def deep(x, likelihood=None, outputs=1, depth=2, **settings) -> DeepGP:
    likelihood = Gaussian(0.05) if likelihood is None else likelihood
    return build_model(x, likelihood, outputs, depth=depth, num_inducing=6, recipe=Recipe(variance=0.5), **settings)


def random_values(model, rng):
    return tuple(jnp.asarray(rng.normal(size=(layer.num_inducing, layer.width))) for layer in model.layers)


def fitc(model, x):
    """A and the diagonal of the covariance of y given v, in a model of one layer."""
    layer = model.layers[0]
    A = project(layer, prepare_all(model.layers)[0], jnp.asarray(x))
    return np.asarray(A), np.asarray(layer.kernel.diagonal(jnp.asarray(x)) - jnp.sum(A**2, 0)) + 0.05


@pytest.mark.slow
def test_gradients_streamed_in_blocks_equal_plain_ones(data, rng, key, monkeypatch):
    x, y = data
    model, batch = deep(x, depth=1), ArraySource(x, y).everything()
    v = random_values(model, rng)
    learned, constant = partition(model)
    rows = (batch.x, batch.y, batch.observed, batch.weight)

    def energy(v, learned):
        model = eqx.combine(learned, constant)
        value = log_likelihood(model, tuple(prepare_all(model.layers)), v, rows, [])
        return (0.5 * sum(jnp.sum(layer**2) for layer in v) - value) / 30.0

    value, (v_slope, model_slope) = jax.value_and_grad(energy, (0, 1))(v, learned)
    factors = differentiable_factors(model)
    for block in (1024, 7):
        monkeypatch.setattr(_streaming, "BLOCK", block)
        ours, gradient = energy_and_gradient(model, factors.whiteners, v, batch, key=key)
        assert float(ours) == pytest.approx(float(value), rel=1e-10)
        assert np.allclose(gradient[0], v_slope[0], rtol=1e-8)
        _, gradient = model_gradient(model, factors, v, batch, key=key)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(model_slope), strict=True):
            assert np.allclose(a, b, rtol=1e-6, atol=1e-10)


def test_batches_are_unbiased(data, rng, key):
    x, y = data
    source, model = ArraySource(x, y), deep(x, depth=1)
    v, whiteners = random_values(model, rng), tuple(prepare_all(model.layers))
    feed = source.feed(start=0, count=6, capacity=6, batch_size=5, seed=1)  # one epoch
    parts = [energy_and_gradient(model, whiteners, v, feed.batch(jnp.asarray(i)), key=key) for i in range(6)]
    whole = energy_and_gradient(model, whiteners, v, source.everything(), key=key)
    assert np.mean([part[0] for part in parts]) == pytest.approx(float(whole[0]), rel=1e-10)
    assert np.allclose(np.mean([part[1][0] for part in parts], axis=0), whole[1][0], rtol=1e-8)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _draws(model, x, y, key, count, spacing):
    """Thinned draws of v for many data sets (rows of y) at once, after a burn-in that adapts the sampler."""
    whiteners = tuple(prepare_all(model.layers))
    size, num_data = len(x), jnp.asarray(float(len(x)))

    def gradient(v, y):
        batch = Batch(x, y[:, None], jnp.ones((size, 1), bool), jnp.ones(size), jnp.arange(size), num_data)
        return energy_and_gradient(model, whiteners, v, batch, key=key)[1]

    def advance(carry, key, adapting):
        v, state = carry
        sampler = hamiltonian_sampler(num_data, step_size=0.1, friction=0.2, adapting=adapting)
        move, state = sampler.update(jax.vmap(gradient)(v, y), state, key=key)
        return jax.tree.map(jnp.add, v, move), state

    v = (jnp.zeros((len(y), *model.layers[0].z.shape[:1], 1)),)
    carry = (v, hamiltonian_sampler().init(v))
    burn_in, sampling = jax.random.split(key)
    carry = jax.lax.scan(lambda c, k: (advance(c, k, True), None), carry, jax.random.split(burn_in, 800))[0]

    def keep_one(carry, key):
        carry = jax.lax.scan(lambda c, k: (advance(c, k, False), None), carry, jax.random.split(key, spacing))[0]
        return carry, carry[0][0][..., 0]

    return jax.lax.scan(keep_one, carry, jax.random.split(sampling, count))[1]


def test_simulation_based_calibration_on_the_known_posterior_of_one_layer(key, rng):
    repeats, count = 300, 19
    x = rng.uniform(-2.0, 2.0, size=(10, 1))
    model = shallow(np.array([[-1.5], [0.0], [1.5]]))
    A, D = fitc(model, x)
    truth = rng.normal(size=(repeats, 3))
    y = truth @ A + np.sqrt(D) * rng.normal(size=(repeats, 10))
    draws = np.asarray(_draws(model, jnp.asarray(x), jnp.asarray(y), key, count, 120))
    for coordinate in range(3):
        ranks = np.sum(draws[:, :, coordinate] < truth[:, coordinate], axis=0)
        histogram = np.bincount(ranks, minlength=count + 1).reshape(10, 2).sum(axis=1)
        assert scipy.stats.chisquare(histogram).pvalue > 1e-3
    precision = np.eye(3) + (A / D) @ A.T
    mean = np.linalg.solve(precision, (A / D) @ y.T).T
    white = (draws - mean) @ np.linalg.cholesky(precision)
    size = count * repeats
    assert np.all(np.abs(white.mean(axis=(0, 1))) < 4.5 / np.sqrt(size))
    covariance = np.einsum("tri,trj->ij", white, white) / size
    assert np.all(np.abs(covariance - np.eye(3)) < 4.5 * np.sqrt(2.0 / size) + 0.01)


@pytest.mark.parametrize("energy", ["marginal", "bound"])
def test_the_whole_algorithm_finds_the_known_posterior(key, rng, energy):
    x = rng.uniform(-2.0, 2.0, size=(12, 1))
    y = np.sin(2 * x) + 0.2 * rng.normal(size=(12, 1))
    model = shallow(np.array([[-1.5], [0.0], [1.5]]))
    settings = {"step_size": 0.1, "friction": 0.2, "hyperparameters": "fixed", "energy": energy}
    inference = SGHMC(400, 2000, draws=20, chains=20, **settings)
    result = fit_model(inference, model, ArraySource(x, y), key=key, verbose=False)
    A, D = fitc(model, x)
    D = D if energy == "marginal" else np.full(12, 0.05)  # Titsias' optimal q sees the noise only
    precision = np.eye(3) + (A / D) @ A.T
    v = np.asarray(result.posterior.v[0])[..., 0].reshape(-1, 3)
    white = (v - np.linalg.solve(precision, (A / D) @ y[:, 0])) @ np.linalg.cholesky(precision)
    assert len(v) == 400
    assert np.all(np.abs(white.mean(axis=0)) < 4.5 / np.sqrt(400))
    assert np.all(np.abs(np.cov(white.T) - np.eye(3)) < 4.5 * np.sqrt(2.0 / 400) + 0.02)
    assert eqx.tree_equal(result.posterior.model, model)
    assert 0.9 < result.history["temperature"][-500:].mean() < 1.1


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Gaussian(0.1), 2),
        (HeteroscedasticGaussian(), 1),
        (StudentT(), 1),
        (Poisson(), 1),
        (Bernoulli(), 1),
        (RobustMax(3), 1),
        (Softmax(3), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_likelihood_has_an_energy_that_ignores_missing_outputs(data, rng, key, likelihood, outputs):
    x, _ = data
    y = (x[:, :outputs] > 0.0).astype(float)
    observed = rng.uniform(size=y.shape) < 0.7
    model = deep(x, likelihood, outputs, depth=1)
    v, whiteners = random_values(model, rng), tuple(prepare_all(model.layers))
    answer = eqx.filter_jit(energy_and_gradient)
    batches = [ArraySource(x, np.where(observed, y, other), observed).everything() for other in (0.0, 1.0)]
    (energy, gradient), (same, _) = (answer(model, whiteners, v, batch, key=key) for batch in batches)
    assert np.isfinite(energy)
    assert float(energy) == pytest.approx(float(same))
    assert np.all(np.isfinite(gradient[0]))


@pytest.mark.parametrize(
    ("hyperparameters", "phase"),
    [("moving-window", "sampling"), ("variational", "variational"), ("variational", "sampling")],
)
def test_an_interrupted_run_resumes_with_the_same_draws_bit_for_bit(data, key, tmp_path, hyperparameters, phase):
    x, y = data
    source, model = ArraySource(x, y), deep(x)
    inference = dataclasses.replace(QUICK, hyperparameters=hyperparameters)
    calm = fit_model(inference, model, source, key=key, verbose=False)

    def interrupt(event):
        if event["phase"] == phase and event["step"] >= 2:
            raise KeyboardInterrupt

    settings = {"key": key, "verbose": False, "checkpointing": Checkpointing(tmp_path, None, 2)}
    with pytest.warns(FitWarning, match="Stopped by the user"):
        stopped = fit_model(inference, model, source, callbacks=[interrupt], **settings)
    assert 0 < stopped.posterior.num_samples < calm.posterior.num_samples
    resumed = fit_model(inference, model, source, **settings)
    assert np.array_equal(resumed.history["objective"], calm.history["objective"])
    for ours, theirs in zip(jax.tree.leaves(resumed.posterior), jax.tree.leaves(calm.posterior), strict=True):
        assert np.array_equal(ours, theirs)
    answers_the_same_questions(calm.posterior, jnp.asarray(x), key)


def answers_the_same_questions(posterior, rows, key):
    predict = eqx.filter_jit(lambda rows: posterior.predict_f(rows, key=key))
    whole, parts = predict(rows), [predict(rows[i : i + 10]) for i in range(0, 30, 10)]
    assert whole.means.shape == (6, 30, 1)
    assert np.allclose(whole.means, np.concatenate([part.means for part in parts], axis=1), atol=1e-10)
    joint = eqx.filter_jit(lambda rows: posterior.predict_f(rows, key=key, full_cov=True))(rows[:4])
    assert joint.covariances.shape == (6, 4, 4, 1)
    inside, functions = eqx.filter_jit(
        lambda rows: (posterior.propagate(rows, key=key), posterior.sample_functions(key, 8)(rows))
    )(rows[:4])
    assert [layer.shape for layer in inside] == [(6, 4, 2), (6, 4, 1)]
    assert functions.shape == (8, 4, 1)


@pytest.mark.slow
def test_plain_mcem_alternates_and_naive_has_a_window_of_one(data, key):
    x, y = data
    inference = SGHMC(12, 4, draws=2, chains=1, batch_size=16, hyperparameters="mcem", mcem_draws=2, mcem_steps=3)
    phases = inference.plan(30, None)
    assert [phase.name for phase in phases] == ["expectation", "maximisation"] * 2 + ["sampling"]
    result = fit_model(inference, deep(x, depth=1), ArraySource(x, y), key=key, verbose=False)
    assert np.all(result.history["ok"])
    assert result.posterior.num_samples == 2
    naive = SGHMC(hyperparameters="naive")
    assert naive.init(deep(x), ArraySource(x, y), key=key).draws.values[1].shape == (1, 1)


def test_before_any_draw_the_posterior_is_where_the_chains_stand(data, key):
    x, y = data
    inference = dataclasses.replace(QUICK, hyperparameters="moving-window")
    state = inference.init(deep(x, depth=1), ArraySource(x, y), key=key)
    posterior = inference.posterior(state, None)
    assert posterior.energy.shape == (2, 1)
    assert np.array_equal(posterior.v[0][:, 0], state.v[0])


def test_max_iter_is_the_sum_of_the_phases():
    """Sweeps over the data, of one step each here, come on top."""
    assert [phase.steps for phase in SGHMC(200, 100).plan(10, 30)] == [10, 1, 3, 1, 3, 1, 4, 1, 10]
    steps = [phase.steps for phase in SGHMC(200, 100, hyperparameters="fixed").plan(10, 30)]
    assert steps == [1, 6, 1, 7, 1, 7, 1, 10]
    assert [phase.steps for phase in SGHMC(200, 100).plan(10, 1)] == [1]


def test_settings_are_checked():
    with pytest.raises(SettingError, match="chains must be at least 1, but it is 0"):
        SGHMC(chains=0)
    with pytest.raises(SettingError, match="step_size must be positive, but it is -1"):
        SGHMC(step_size=-1.0)
    with pytest.raises(SettingError, match="friction must lie above 0 and not above 1, but it is 2"):
        SGHMC(friction=2.0)
    with pytest.raises(SettingError, match="energy='free' is unknown: choose one of 'auto', 'bound', 'marginal'"):
        SGHMC(energy="free")
    with pytest.raises(
        SettingError, match="hyperparameters='em' is unknown: choose one of 'auto', 'variational', 'moving-"
    ):
        SGHMC(hyperparameters="em")


def test_ways_for_few_rows_depend_on_rows_alone():
    """Not on the size of a batch: ``batch_size >= N`` was another algorithm."""
    for batch_size in (16, 4096):
        inference = SGHMC(burn_in=400, batch_size=batch_size)
        names = {rows: [phase.name for phase in inference.plan(rows, None)] for rows in (1024, 1025)}
        assert set(names[1024]) == {"variational", "sweep", "expectation", "sampling"}
        assert set(names[1025]) == {"sweep", "burn-in", "sampling"}
    assert [phase.steps for phase in SGHMC(7, 5).plan(10, None)] == [4, 1, 1, 1, 1, 1, 1, 1, 5]


def test_chains_start_at_draws_of_the_variational_posterior(data, key):
    """The phase is DSVI itself, step by step; what follows has its hyperparameters, and v has the moments of q."""
    x, y = data
    source, model = ArraySource(x, y), deep(x)
    inference = SGHMC(8, 4, chains=400)
    variational, sweep = inference.plan(30, None)[:2]
    state = inference.enter(variational, inference.init(model, source, key=key), source, key=key)
    dsvi = DSVI(batch_size=1024)
    theirs = dsvi.init(model, source, key=jax.random.split(key)[0])
    theirs = dsvi.enter(variational, theirs, source, key=key)
    step, other = eqx.filter_jit(inference.step), eqx.filter_jit(dsvi.step)
    for i in range(variational.steps):
        state, info = step(variational, state, source.everything(), key=jax.random.fold_in(key, i))
        theirs, bound = other(variational, theirs, source.everything(), key=jax.random.fold_in(key, i))
        assert float(info.objective) == pytest.approx(float(bound.objective), rel=1e-10)
    state = inference.enter(sweep, state, source, key=key)
    assert state.variational is None
    for ours, other_leaf in zip(jax.tree.leaves(state.model), jax.tree.leaves(theirs.model), strict=True):
        # The optimiser, which tests go without (conftest.py), rounds both programs alike: then they agree bit for bit.
        assert np.allclose(ours, other_leaf, rtol=1e-7, atol=1e-9)
    for v, q in zip(state.v, theirs.q, strict=True):
        q = q.whitened() if isinstance(q, Informed) else q
        white = jnp.linalg.solve(q.root, jnp.moveaxis(v - q.mean[None], 0, 2).transpose(1, 0, 2))
        assert abs(float(jnp.mean(white))) < 4.5 / np.sqrt(white.size)
        assert float(jnp.mean(white**2)) == pytest.approx(1.0, abs=4.5 * np.sqrt(2.0 / white.size))


def noisy_sine(rng, num_data):
    """Many rows, little noise, few inducing points: what heated the chains before minibatches had a control variate."""
    x = rng.uniform(-2.0, 2.0, size=(num_data, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=x.shape)
    model = DeepGP((Layer(Matern52(0.8, 1.3), Zero(1), real(np.linspace(-2.0, 2.0, 12)[:, None]), 1),), Gaussian(0.01))
    A, D = fitc(model, x)
    D = D - 0.04  # fitc knows another noise
    precision = np.eye(12) + (A / D) @ A.T
    return x, y, model, np.linalg.solve(precision, (A / D) @ y[:, 0]), precision


def test_minibatches_sample_the_known_posterior(key, rng):
    """A failure of old: the temperature was 26, and every error bar five times too wide."""
    x, y, model, mean, precision = noisy_sine(rng, 20_000)
    inference = SGHMC(1200, 2000, draws=100, chains=4, batch_size=200, hyperparameters="fixed")
    result = fit_model(inference, model, ArraySource(x, y), key=key, verbose=False)
    white = (np.asarray(result.posterior.v[0])[..., 0].reshape(-1, 12) - mean) @ np.linalg.cholesky(precision)
    assert abs(np.mean(white**2) - 1.0) < 0.15
    sampling = result.history["phase"] == result.history["phase"].max()
    for temperature in ("temperature", "configurational"):
        assert abs(np.mean(result.history[temperature][sampling]) - 1.0) < 0.1


def test_energies_belong_to_their_draws(data, key):
    """In one layer and with all rows in a batch an energy has no noise, so that it can be found again."""
    x, y = data
    source, model = ArraySource(x, y), deep(x, depth=1)
    inference = SGHMC(20, 20, draws=5, chains=2, hyperparameters="fixed", energy="marginal")
    posterior = fit_model(inference, model, source, key=key, verbose=False).posterior
    for chain in range(2):
        for draw in range(5):
            v = tuple(leaf[chain, draw] for leaf in posterior.v)
            energy, _ = energy_and_gradient(model, posterior.whiteners, v, source.everything(), key=key)
            assert float(posterior.energy[chain, draw]) == pytest.approx(float(energy), rel=1e-9)


def test_a_sweep_sees_every_row_once(data, key):
    """Its last batch ends with rows of the next epoch; in one layer its metric is the posterior's covariance."""
    x, y = data
    source, model = ArraySource(x, y), shallow(x[:6, :1])
    source = ArraySource(x[:, :1], y)
    inference = SGHMC(20, 20, batch_size=8, hyperparameters="fixed", energy="marginal")
    sweep, expectation = inference.plan(30, None)[:2]
    state = inference.enter(sweep, inference.init(model, source, key=key), source, key=key)
    feed = source.feed(start=0, count=4, capacity=4, batch_size=8, seed=3)
    for i in range(sweep.steps):
        state, _ = inference.step(sweep, state, feed.batch(jnp.asarray(i)), key=jax.random.fold_in(key, i))
    state = inference.enter(expectation, state, source, key=key)
    A, D = fitc(model, x[:, :1])
    covariance = np.linalg.inv(np.eye(6) + (A / D) @ A.T)
    root = np.asarray(state.roots[0][0, 0])
    assert np.allclose(root @ root.T, covariance, rtol=1e-8, atol=1e-12)
    whole, gradient = energy_and_gradient(
        model, state.whiteners, tuple(leaf[0] for leaf in state.v), source.everything(), key=key
    )
    assert float(state.home.energy[0]) == pytest.approx(float(whole), rel=1e-9)  # v is 0, so the prior says nothing
    assert np.allclose(state.home.gradient[0][0], gradient[0], rtol=1e-8)


def test_warm_chains_are_told_and_hot_ones_refused(data, key):
    x, y = data
    inference = dataclasses.replace(QUICK, hyperparameters="fixed")
    state = inference.init(deep(x, depth=1), ArraySource(x, y), key=key)
    steps = 2000

    def sampled(kinetic, configurational, caution=1.0):
        heat = steps * jnp.asarray([kinetic, configurational])
        parts = {"heat": heat, "steps": jnp.asarray(steps, jnp.int32), "caution": jnp.asarray(caution)}
        return inference.posterior(dataclasses.replace(state, **parts), None)

    assert sampled(1.02, 0.97).doubts() == ()
    assert "error bars may be 1.41 times as wide" in sampled(1.5, 2.0).doubts()[0]
    with pytest.raises(DivergenceError, match="The chains ran away from the data"):
        sampled(1.0, 5.0)
    with pytest.raises(DivergenceError, match="with step sizes divided by 1024"):
        sampled(1.0, 1.0, caution=2.0**-10)


def test_a_step_that_climbs_too_far_is_no_step(data, key):
    """A divergence is seen while it is still finite; chains then go home, without momentum, and step more carefully."""
    x, y = data
    source, model = ArraySource(x, y), shallow(x[:6, :1], noise=1e-4)
    source = ArraySource(x[:, :1], y)
    inference = SGHMC(20, 20, step_size=1e4, hyperparameters="fixed", energy="bound")
    sweep, expectation = inference.plan(30, None)[:2]
    state = inference.enter(sweep, inference.init(model, source, key=key), source, key=key)
    state, _ = inference.step(sweep, state, source.everything(), key=key)
    state = inference.enter(expectation, state, source, key=key)
    state, first = inference.step(expectation, state, source.everything(), key=key)
    away, second = inference.step(expectation, state, source.everything(), key=jax.random.fold_in(key, 1))
    assert bool(first.ok)
    assert np.isfinite(second.objective)
    assert not bool(second.ok)
    home = inference.back_off(away)
    assert np.array_equal(home.v[0], state.home.v[0])
    assert float(home.caution) == 0.5
    assert not np.any(home.sampler.momentum[0])


def test_what_auto_came_to_is_told(data):
    x, y = data
    few = SGHMC().remarks(deep(x), ArraySource(x, y), ())
    told = "hyperparameters='variational', energy='bound', control_variate=False, step_size=0.1"
    assert few == (f"For 30 rows, SGHMC has chosen {told}: set them to choose others.",)
    settled = SGHMC(hyperparameters="fixed", energy="bound", control_variate=True, step_size=0.1)
    assert settled.remarks(deep(x), ArraySource(x, y), ()) == ()


def test_the_papers_settings_are_a_recipe():
    inference = tuned_inference("sghmc", "havasi2018", labels=False, num_data=5000)
    assert (inference.burn_in, inference.sampling, inference.draws, inference.batch_size) == (
        20_000,
        10_000,
        200,
        10_000,
    )
    assert (inference.metric, inference.control_variate, inference.hyperparameters) == ("scale", False, "moving-window")
    assert [phase.name for phase in inference.plan(5000, None)] == ["burn-in", "sampling"]


def test_chains_can_start_at_draws_of_the_prior(data, key):
    x, y = data
    inference = SGHMC(chains=50, hyperparameters="moving-window", start="prior")
    state = inference.init(deep(x), ArraySource(x, y), key=key)
    values = np.concatenate([np.ravel(leaf) for leaf in state.v])
    assert abs(values.mean()) < 4.5 / np.sqrt(values.size)
    assert values.var() == pytest.approx(1.0, abs=4.5 * np.sqrt(2.0 / values.size))


def test_next_to_no_noise_is_no_harm(key, rng):
    """A failure of old: beyond a curvature of some 2e7 the steps were unstable, and the ratio below was 3e13."""
    x = rng.uniform(-2.0, 2.0, size=(60, 1))
    y, noise = np.sin(2 * x), 1.1e-6
    model = shallow(np.linspace(-2.0, 2.0, 12)[:, None], noise)
    inference = SGHMC(400, 1600, draws=50, chains=8, hyperparameters="fixed", energy="bound")
    result = fit_model(inference, model, ArraySource(x, y), key=key, verbose=False)
    A, _ = fitc(model, x)
    precision = np.eye(12) + A @ A.T / noise
    v = np.asarray(result.posterior.v[0])[..., 0].reshape(-1, 12)
    white = (v - np.linalg.solve(precision, A @ y[:, 0] / noise)) @ np.linalg.cholesky(precision)
    assert abs(np.mean(white**2) - 1.0) < 0.2


@pytest.mark.slow
def test_a_noiseless_table(seed):
    """The log density of the test rows was -5 for a function that varies by one: as good as no fit at all."""
    X, y, X_test, y_test = nearly_noiseless(noise=0.0, seed=seed)
    model = DeepGPRegressor("sghmc", num_inducing=92, random_state=seed, verbose=False).fit(X, y)
    assert np.mean(model.log_density(X_test, y_test)) > 1.0
