"""Functions drawn as a whole: the moments of the prior and of the posterior, and the same value in every call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.inference import dsvi
from fathomgp.inference.dsvi import initial_q
from fathomgp.kernels import (
    RBF,
    Constant,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    White,
    has_features,
    prior_function,
)
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer, Recipe, Whitened, build_model
from fathomgp.parameters import real

DRAWS = 4000
KERNELS = [
    RBF(jnp.array([0.7, 1.5]), 1.3),
    Matern12(1.2),
    Matern32(0.9, 0.5),
    Matern52(1.1),
    RationalQuadratic(0.8, 1.2, 0.7),
    Linear(jnp.array([0.5, 2.0]), 0.3),
    RBF(0.6, 0.8, active_dims=(1,)) + Linear(0.4),
    RBF(0.9) * Matern32(1.4, 2.0, active_dims=(0,)) * Constant(0.5),
]


def check_moments(draws, mean, covariance):
    """Within five standard errors: those of a mean, and of a product of two Gaussians (with a margin for features)."""
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5.0 * sd / np.sqrt(len(draws)))
    error = np.sqrt((covariance**2 + np.outer(sd, sd) ** 2) / len(draws))
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5.5 * error)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_prior_functions_have_the_kernels_covariance(kernel, key, rng):
    x = jnp.asarray(rng.normal(size=(4, 2)))
    assert has_features(kernel)

    def draw(one):
        return prior_function(kernel, 2, key=one, width=1, like=x, num_features=64)(x)[:, 0]

    draws = jax.jit(lambda keys: jax.lax.map(draw, keys, batch_size=100))(jax.random.split(key, DRAWS))
    check_moments(np.asarray(draws), np.zeros(4), np.asarray(kernel(x)))


def test_some_kernels_have_no_features():
    assert not has_features(White(0.1))
    assert not has_features(RBF() + White(0.1))
    assert not has_features(Linear() * RBF())
    assert not has_features(Periodic())


@pytest.fixture
def posterior(rng):
    """A shallow posterior with an arbitrary q."""
    layer = Layer(Matern52(0.8, 1.3), Zero(2), real(rng.uniform(-1.5, 1.5, size=(6, 2))), 2)
    model = DeepGP((layer,), Gaussian(0.1))
    root = np.tril(0.2 * rng.normal(size=(2, 6, 6))) + 0.3 * np.eye(6)[None]
    q = (Whitened(jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(root)),)
    return dsvi._posterior(model, q, 1)[0]


def test_posterior_functions_have_the_posteriors_moments(posterior, key, rng):
    x = jnp.asarray(rng.normal(size=(5, 2)))
    draws = np.asarray(jax.jit(lambda x: posterior.sample_functions(key, 800)(x))(x))
    answer = posterior.predict_f(x, key=key, full_cov=True)
    for output in range(2):
        check_moments(
            draws[:, :, output], np.asarray(answer.means[0, :, output]), np.asarray(answer.covariances[0, :, :, output])
        )


def deep_posterior(x, recipe):
    model = build_model(np.asarray(x), Gaussian(0.1), 1, depth=2, num_inducing=5, recipe=recipe)
    return dsvi._posterior(model, initial_q(model, inner_root=0.5), 500)[0]


def test_a_function_has_one_value_at_an_input(key, rng):
    x = jnp.asarray(rng.normal(size=(7, 2)))
    functions = jax.jit(deep_posterior(x, Recipe(variance=0.5)).sample_functions(key, 3))
    whole = functions(x)
    assert np.allclose(functions(x[2:5]), whole[:, 2:5], atol=1e-10)
    assert np.array_equal(functions(x), whole)
    assert not np.allclose(whole[0], whole[1])


def test_deep_functions_have_the_posteriors_moments(key, rng):
    x = jnp.asarray(rng.normal(size=(4, 2)))
    posterior = deep_posterior(x, Recipe(variance=0.5))
    draws = np.asarray(jax.jit(lambda x: posterior.sample_functions(key, 500)(x))(x))[:, :, 0]
    answer = jax.jit(lambda x: posterior.predict_f(x, key=key, full_cov=True))(x)
    within = np.asarray(answer.covariances)[..., 0].mean(axis=0)
    covariance = within + np.cov(np.asarray(answer.means)[:, :, 0].T)
    check_moments(draws / np.sqrt(2.0), np.asarray(answer.mean())[:, 0] / np.sqrt(2.0), covariance / 2.0)


def test_noise_between_layers_falls_back_to_joint_draws(key, rng):
    x = jnp.asarray(rng.normal(size=(4, 2)))
    draws = deep_posterior(x, Recipe(variance=0.5, layer_noise=0.1)).sample_functions(key, 2)(x)
    assert draws.shape == (2, 4, 1)


def test_prior_draws_of_a_model_have_the_kernels_moments(key, rng):
    x = jnp.asarray(rng.normal(size=(4, 2)))
    model = DeepGP((Layer(RBF(0.8, 1.3), Zero(1), None, 1),), Gaussian(0.1))
    (draws,) = model.sample_prior(x, key=key, num_samples=DRAWS)
    check_moments(np.asarray(draws)[:, :, 0], np.zeros(4), np.asarray(model.layers[0].kernel(x)))
