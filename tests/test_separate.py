"""Layers whose outputs have kernels and inducing inputs of their own."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPRegressor, load
from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import AEP, DSVI, SGHMC
from fathomgp.inference.dsvi import elbo, initial_q, streamed_loss
from fathomgp.likelihoods import Gaussian
from fathomgp.model import (
    RECIPES,
    DeepGP,
    Layer,
    Whitened,
    build_model,
    condition_on,
    joint_moments,
    moments,
    prepare,
    sample_path,
    separate_outputs,
)
from fathomgp.parameters import real

SHARED = dataclasses.replace(RECIPES["default"], max_separate=0)


@pytest.fixture
def rows(rng):
    return rng.normal(size=(40, 3))


def shared_and_separate(x):
    shared = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=8).layers[0]
    return shared, separate_outputs(shared, jnp.tile(shared.z.value[None], (shared.width, 1, 1)))


def test_equal_outputs_are_a_shared_layer(rows, rng):
    layers = shared_and_separate(rows)
    root = np.tril(rng.normal(size=(3, 8, 8)))
    q, x = Whitened(jnp.asarray(rng.normal(size=(8, 3))), jnp.asarray(root)), jnp.asarray(rows)
    answers = []
    for layer in layers:
        conditional = condition_on(layer, prepare(layer), q)
        answers.append((*moments(layer, conditional, x), *joint_moments(layer, conditional, x)))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_a_path_has_the_moments_of_the_layer(rows, rng, key):
    _, layer = shared_and_separate(rows)
    q = Whitened(jnp.asarray(rng.normal(size=(8, 3))), jnp.tile(0.3 * jnp.eye(8)[None], (3, 1, 1)))
    conditional, x = condition_on(layer, prepare(layer), q), jnp.asarray(rows[:5])
    draw = jax.jit(jax.vmap(lambda one: sample_path(layer, conditional, x, key=one)))
    paths = draw(jax.random.split(key, 2000))
    mean, variance = moments(layer, conditional, x)
    error = jnp.sqrt(variance / 2000)
    assert np.all(np.abs(paths.mean(0) - mean) < 5 * error)
    np.testing.assert_allclose(paths.var(0), variance, rtol=0.25)
    # The same key is the same function, beside whichever rows.
    np.testing.assert_allclose(draw(jax.random.split(key, 2000))[0], paths[0])


def test_streamed_gradients_are_the_bound_s(rows, rng, key):
    model = build_model(rows, Gaussian(0.1), 1, depth=2, num_inducing=8, separate=True)
    assert model.layers[0].z.shape == (3, 8, 3)
    assert not model.layers[1].separate
    q, batch = initial_q(model, inner_root=0.5), ArraySource(rows, np.sin(rows[:, :1])).everything()
    loss, (hyper, _) = streamed_loss(model, q, batch, key=key, num_samples=1)
    expected, plain = eqx.filter_value_and_grad(lambda m: elbo(m, q, batch, key=key))(model)
    assert jnp.isfinite(loss.data)
    assert jnp.isfinite(expected)
    np.testing.assert_allclose(-hyper.layers[0].z.raw, plain.layers[0].z.raw, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        -hyper.layers[0].kernel.lengthscale.raw, plain.layers[0].kernel.lengthscale.raw, rtol=1e-7, atol=1e-9
    )


@pytest.mark.slow
def test_prior_draws_and_sghmc(rows, key):
    model = build_model(rows, Gaussian(0.1), 1, depth=2, num_inducing=8, separate=True)
    hidden, last = model.sample_prior(jnp.asarray(rows), key=key, num_samples=2)
    assert hidden.shape == (2, 40, 3)
    assert last.shape == (2, 40, 1)
    source = ArraySource(rows, np.sin(rows[:, :1]))
    fitted = fit_model(SGHMC(burn_in=4, sampling=4, draws=2), model, source, key=key, verbose=False)
    mixture = fitted.posterior.predict_f(jnp.asarray(rows), key=key)
    assert np.all(np.isfinite(mixture.means))


def test_estimator_saves_and_loads(rows, tmp_path):
    y = np.sin(rows[:, 0])
    model = DeepGPRegressor(num_inducing=8, max_iter=5, random_state=0).fit(rows, y)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.model_.layers[0].separate
    np.testing.assert_array_equal(model.predict(rows), again.predict(rows))
    assert model.sample_y(rows[:4], n_samples=2).shape == (4, 2)


def test_other_algorithms_refuse(rows, key):
    model = build_model(rows, Gaussian(0.1), 1, depth=2, num_inducing=8, separate=True)
    source = ArraySource(rows, np.sin(rows[:, :1]))
    with pytest.raises(SettingError, match="AEP cannot work with outputs that have kernels of their own"):
        fit_model(AEP(), model, source, key=key, verbose=False)


def test_methods_that_share_get_a_shared_layer(rows):
    y = np.sin(rows[:, 0])
    model = DeepGPRegressor("aep", num_inducing=8, max_iter=2, random_state=0).fit(rows, y)
    assert not model.model_.layers[0].separate
    model = DeepGPRegressor(num_inducing=8, max_iter=2, recipe=SHARED, random_state=0).fit(rows, y)
    assert not model.model_.layers[0].separate


def test_bad_inducing_inputs_are_named(rows):
    shared, _ = shared_and_separate(rows)
    with pytest.raises(SettingError, match=r"\(M, D\) or \(3, M, D\), but their shape is \(2, 8, 3\)"):
        Layer(shared.kernel, shared.mean, real(np.zeros((2, 8, 3))), 3)


def test_a_natural_step_still_learns(rows):
    y = np.sin(2 * rows[:, 0])
    model = DeepGPRegressor(DSVI(steps=60), num_inducing=10, random_state=0).fit(rows, y)
    objective = np.asarray(model.history_["objective"])
    assert objective[-10:].mean() < objective[:10].mean()
    assert isinstance(model.model_, DeepGP)
