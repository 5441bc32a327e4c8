"""The sampler alone: closed-form stationary variances, known moments, momentum descent without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import digamma, polygamma

from fathomgp.inference import hamiltonian_sampler, langevin_sampler
from fathomgp.inference._hamiltonian import kinetic_temperature

NOISE_FREE = {"step_size": 0.3, "friction": 0.1, "temperature": 0.0, "adapting": False}


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def run(gradient, v, state, key, steps, settings, keep_path=True):
    """Where v ends under ``gradient(v, key)``, with its path."""
    sampler = hamiltonian_sampler(**dict(settings))

    def step(carry, key):
        v, state = carry
        noise_key, step_key = jax.random.split(key)
        move, state = sampler.update(gradient(v, noise_key), state, key=step_key)
        return (v + move, state), v + move if keep_path else None

    return jax.lax.scan(step, (v, state), jax.random.split(key, steps))


def settings(**kwargs):
    return tuple(sorted(kwargs.items()))


def final(gradient, key, *, count, steps, **kwargs):
    """Where ``count`` independent coordinates stand after so many steps with step sizes h = eps^2."""
    v = jnp.zeros(count)
    return run(gradient, v, hamiltonian_sampler().init(v), key, steps, settings(adapting=False, **kwargs), False)[0]


def test_stationary_variance_on_a_unit_gaussian_is_the_closed_form(key):
    h, a, count = 0.5, 0.3, 20_000
    v, state = final(lambda v, key: v, key, count=count, steps=150, step_size=h**0.5, friction=a)
    expected = 1.0 / (1.0 - h / (2.0 * (2.0 - a)))
    assert abs(np.var(v) - expected) < 4.0 * expected * np.sqrt(2.0 / count)
    # With v and p in equilibrium, E[p^2] = 2 h var(v) / (2 - a).
    assert float(kinetic_temperature(state, 1.0, h**0.5, a)) == pytest.approx(expected, rel=0.05)


def test_minibatch_noise_heats_the_chain_in_proportion_to_the_step_size(key):
    a, noise, count = 0.2, 2.0, 10_000
    biases = []
    for h in (0.2, 0.05, 0.0125):
        gradient = lambda v, key: v + noise * jax.random.normal(key, v.shape, v.dtype)  # noqa: E731
        v, _ = final(gradient, key, count=count, steps=300, step_size=h**0.5, friction=a)
        expected = (1.0 + h * noise**2 / (2.0 * a)) / (1.0 - h / (2.0 * (2.0 - a)))
        assert abs(np.var(v) - expected) < 4.0 * expected * np.sqrt(2.0 / count)
        biases.append(np.var(v) - 1.0)
    assert biases[0] > 2.0 * biases[1] > 4.0 * biases[2]


def correlated(v, key):
    """Two coordinates of unit variance with correlation 0.8; v is (chains, 2)."""
    precision = jnp.asarray([[1.0, -0.8], [-0.8, 1.0]]) / (1.0 - 0.8**2)
    return v @ precision


def skewed(v, key):
    """The logarithm of a gamma variable of shape 2 in the first coordinate, 5 in the second."""
    return jnp.exp(v) - jnp.asarray([2.0, 5.0])[None, :]


@pytest.mark.parametrize(
    ("gradient", "mean", "covariance"),
    [
        (correlated, np.zeros(2), np.array([[1.0, 0.8], [0.8, 1.0]])),
        (skewed, digamma([2.0, 5.0]), np.diag(polygamma(1, [2.0, 5.0]))),
    ],
)
def test_moments_of_correlated_and_skewed_targets(key, gradient, mean, covariance):
    chains, steps, segments = 8, 16_000, 5
    v = jnp.zeros((chains, 2))
    common = {"step_size": 0.15, "friction": 0.1}
    burn_in, sampling = jax.random.split(key)
    (v, state), _ = run(gradient, v, hamiltonian_sampler().init(v), burn_in, 2000, settings(**common))
    _, path = run(gradient, v, state, sampling, steps, settings(adapting=False, **common))
    parts = np.asarray(path).reshape(segments, steps // segments, chains, 2) - mean
    products = parts[..., :, None] * parts[..., None, :]
    for figures, expected in ((parts, np.zeros(2)), (products, covariance)):
        means = figures.mean(axis=1).reshape(segments * chains, -1)
        error = means.std(axis=0, ddof=1) / np.sqrt(segments * chains)
        assert np.all(np.abs(means.mean(axis=0) - expected.ravel()) < 4.0 * error)


def test_without_noise_it_is_momentum_descent(key, rng):
    start = jnp.asarray(rng.normal(size=5))
    scales = jnp.arange(1.0, 6.0)
    gradient = lambda v, key: scales * v  # noqa: E731
    ours, _ = run(gradient, start, hamiltonian_sampler().init(start), key, 30, settings(**NOISE_FREE))[0]
    descent = optax.sgd(NOISE_FREE["step_size"] ** 2, momentum=1.0 - NOISE_FREE["friction"])
    theirs, state = start, descent.init(start)
    for _ in range(30):
        update, state = descent.update(scales * theirs, state)
        theirs = theirs + update
    assert np.allclose(ours, theirs, rtol=1e-10)


def test_langevin_forgets_its_momentum(key, rng):
    gradient, v = jnp.asarray(rng.normal(size=4)), jnp.zeros(4)
    sampler = langevin_sampler(10.0, step_size=0.2, adapting=False)
    state = sampler.init(v)
    _, moved = sampler.update(gradient, state, key=jax.random.fold_in(key, 1))
    fresh, _ = sampler.update(gradient, state, key=key)
    again, _ = sampler.update(gradient, moved, key=key)
    assert np.array_equal(fresh, again)
    h = 0.2**2 / 10.0
    noise = jax.random.normal(jax.random.split(key, 1)[0], (4,))
    assert np.allclose(fresh, -h * 10.0 * gradient + jnp.sqrt(2.0 * h) * noise)


def test_adaptation_takes_everything_from_the_old_averages(key, rng, dtype):
    gradients = rng.normal(size=(4, 3)).astype(dtype)
    sampler = hamiltonian_sampler(7.0)
    state = sampler.init(jnp.zeros(3, dtype))
    tau, g, V = (np.ones(3, dtype) for _ in range(3))
    for G in gradients:
        _, state = sampler.update(jnp.asarray(G), state, key=key)
        r = 1 / (tau + 1)
        tau, g, V = 1 + tau * (1 - g**2 / (V + 1e-16)), (1 - r) * g + r * G, (1 - r) * V + r * G**2
        for ours, theirs in zip((state.tau, state.g, state.V), (tau, g, V), strict=True):
            assert ours.dtype == dtype
            assert np.allclose(ours, theirs, rtol=1e-5)
