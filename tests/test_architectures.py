"""Architectures: each contains the stationary kernel, each is a covariance, and a row's answer depends on no other."""

import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.errors import SettingError
from fathomgp.kernels import RBF, Convolution, Matern12, Matern32, RationalQuadratic
from fathomgp.likelihoods import Gaussian
from fathomgp.model import ARCHITECTURES, Composition, DeepGP, Injective, build_model, find_architecture


@pytest.mark.parametrize(
    "base", [RBF(0.7, 1.5), Matern12(0.9), Matern32(jnp.array([0.5, 2.0])), RationalQuadratic(0.8)]
)
def test_convolution_is_the_base_at_unit_length_and_positive_for_any(base, rng):
    x = jnp.asarray(rng.normal(size=(40, 2)))
    kernel = Convolution(base)
    ones, rough = jnp.ones((40, 1)), jnp.asarray(rng.normal(size=(40, 1)) * 3.0)
    assert np.allclose(kernel(jnp.concatenate([x, ones], axis=1)), base(x), atol=1e-12)
    longer = kernel(jnp.concatenate([x, 2.0 * ones], axis=1))
    assert np.allclose(longer, base(0.5 * x), atol=1e-12)
    K = np.asarray(kernel(jnp.concatenate([x, rough], axis=1)))
    assert np.linalg.eigvalsh(K).min() > -1e-10
    assert np.allclose(np.diagonal(K), base.diagonal(x))


def test_the_printed_formula_is_not_a_covariance(rng):
    """Why the kernel differs from the paper's page: its argument 2 r / (h + h') has negative eigenvalues."""
    x, h = np.sort(rng.uniform(0, 3, 40)), np.clip(rng.normal(size=40), 0.1, 10) ** 2
    mean = 0.5 * (h[:, None] + h[None, :])
    phi = np.sqrt(np.sqrt(h[:, None] * h[None, :]) / mean)
    printed = phi * np.exp(-0.5 * (np.abs(x[:, None] - x[None, :]) / mean) ** 2)
    assert np.linalg.eigvalsh(printed).min() < -1e-3


def test_injective_is_the_integral_and_monotone(rng):
    architecture = Injective()
    grid = jnp.linspace(-1.0, 2.0, 400)[:, None]
    u = 1.0 + 0.8 * jnp.sin(5 * grid)
    g = architecture.inputs(grid, u, (grid, u))[:, 0]
    assert np.all(np.diff(g) > 0.0)
    slope = np.maximum(np.asarray(u[:, 0]), 0.3) ** 2
    expected = np.concatenate([[0.0], np.cumsum(0.5 * (slope[1:] + slope[:-1]) * np.diff(grid[:, 0]))])
    assert np.allclose(g, expected, atol=1e-12)
    new = jnp.asarray(rng.uniform(-1.5, 2.5, size=(30, 1)))
    h = 1.0 + 0.8 * jnp.sin(5 * new)
    whole = architecture.inputs(new, h, (grid, u))
    alone = jnp.concatenate([architecture.inputs(new[i : i + 1], h[i : i + 1], (grid, u)) for i in range(3)])
    assert np.allclose(whole[:3], alone, atol=1e-12)
    inside = np.asarray(new[:, 0] > -1.0) & np.asarray(new[:, 0] < 2.0)
    assert np.allclose(whole[inside, 0], np.interp(new[inside, 0], grid[:, 0], expected), atol=0.05)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_untrained_hidden_layers_leave_the_kernel_stationary(name, rng, key):
    x = rng.normal(size=(20, 1))
    model = build_model(x, Gaussian(), 1, depth=3, num_inducing=5, kernel="matern32", architecture=name)
    h, rows = jnp.asarray(x), jnp.asarray(x)
    for level, layer in enumerate(model.layers[:-1]):
        h = layer.mean(model.layer_input(level, rows, h))
    covariance = model.layers[-1].kernel(model.layer_input(2, rows, h))
    shallow = build_model(x, Gaussian(), 1, kernel="matern32").layers[0].kernel
    assert np.allclose(covariance, shallow(rows), atol=1e-10)
    draws = model.sample_prior(rows, key=key)
    assert [draw.shape for draw in draws] == [(1, 20, 1)] * 3


def test_bad_requests_are_sentences(rng):
    x = rng.normal(size=(10, 2))
    with pytest.raises(SettingError, match="warps one input by a monotone map, but there are 2"):
        build_model(x, Gaussian(), 1, depth=2, architecture="injective")
    with pytest.raises(SettingError, match="hidden layers with one output, but hidden_dim asks for 3"):
        build_model(x, Gaussian(), 1, depth=2, hidden_dim=3, architecture="convolution")
    with pytest.raises(SettingError, match="Did you mean 'convolution'"):
        find_architecture("convolutional")
    with pytest.raises(SettingError, match="needs a stationary kernel"):
        build_model(x, Gaussian(), 1, depth=2, kernel="linear", architecture="convolution")
    with pytest.raises(SettingError, match="below longest"):
        Convolution(RBF(), 2.0, 1.0)
    with pytest.raises(SettingError, match="smallest must be positive"):
        Injective(0.0)
    layers = build_model(x, Gaussian(), 1, depth=2, architecture="convolution").layers
    with pytest.raises(SettingError, match="skip_inputs belongs to the composition"):
        DeepGP(layers, Gaussian(), True, find_architecture("convolution"))
    assert isinstance(find_architecture(Composition()), Composition)
