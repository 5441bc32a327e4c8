"""Samplers: a known posterior stays what it is, a far start finds it, and impossible points are never entered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fathomgp.inference._mcmc import SAMPLERS, adapted, chain_keys

S, DIM = 3000, 3
#: Two tests a statistic and sampler: a false alarm once in some ten thousand runs.
LIMIT = 4.5


def skewed(w):
    """A likelihood under which the first variable is squeezed and the third is bent, with a known normaliser."""
    return -0.5 * ((w[:, 0] - 1.0) / 0.3) ** 2 - jnp.exp(w[:, 2]) + 2.0 * w[:, 2]


@functools.partial(jax.jit, static_argnames=("name", "steps", "target"))
def run(name, white, size, key, steps, target=skewed):
    sampler = SAMPLERS[name]

    def step(chains, i):
        keys = chain_keys(jax.random.fold_in(key, i), jnp.arange(len(white)))
        chains, moves = sampler.move(target, chains, jnp.full(len(white), size), keys=keys)
        return chains, (jnp.mean(moves.acceptance), moves.nonfinite)

    return jax.lax.scan(step, sampler.begin(target, white), jnp.arange(steps))


def exact_draws(rng):
    """Independent draws of the posterior: a Gaussian, the prior, and the third by inversion on a fine grid."""
    variance = 1.0 / (1.0 + 1.0 / 0.09)
    first = variance / 0.09 + np.sqrt(variance) * rng.normal(size=S)
    grid = np.linspace(-4.0, 4.0, 20_001)
    density = np.exp(-0.5 * grid**2 - np.exp(grid) + 2.0 * grid)
    third = np.interp(rng.uniform(size=S), np.cumsum(density) / density.sum(), grid)
    return np.stack([first, rng.normal(size=S), third], axis=1)


SIZES = {"pcn": 0.5, "slice": 0.5, "mala": 0.4}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_posterior_is_invariant_and_found(name, rng, key):
    truth = exact_draws(rng)
    far = 0.1 * rng.normal(size=(S, DIM)) - 1.0
    for start, steps in ((truth, 3), (far, 150)):
        chains, _ = run(name, jnp.asarray(start), jnp.asarray(SIZES[name]), key, steps)
        fresh = exact_draws(rng)
        for column in range(DIM):
            for power in (1, 2):
                a, b = np.asarray(chains.white)[:, column] ** power, fresh[:, column] ** power
                error = np.hypot(stats.sem(a), stats.sem(b))
                assert abs(a.mean() - b.mean()) < LIMIT * error, (name, column, power)
        assert np.allclose(chains.value, skewed(chains.white))


def hole(w):
    return jnp.where(w[:, 0] > 0.0, jnp.zeros(len(w), w.dtype), jnp.nan)


@pytest.mark.parametrize("name", SAMPLERS)
def test_impossible_points_are_rejected_and_counted(name, rng, key):
    start = jnp.asarray(np.abs(rng.normal(size=(200, 2))))
    chains, (_, nonfinite) = run(name, start, jnp.asarray(0.9), key, 20, hole)
    assert np.all(chains.white[:, 0] > 0.0)
    assert np.all(np.isfinite(chains.value))
    assert int(jnp.sum(nonfinite)) > 0


def narrow(w):
    return -0.5 * jnp.sum(((w - 1.0) / 0.1) ** 2, axis=1)


def test_adaptation_reaches_its_goal(rng, key):
    white = jnp.asarray(rng.normal(size=(100, DIM)))
    for name in ("pcn", "mala"):
        sampler = SAMPLERS[name]

        @jax.jit
        def tune(chains, log_size, sampler=sampler):
            def step(carry, i):
                chains, log_size = carry
                keys = jax.random.split(jax.random.fold_in(key, i), len(white))
                chains, moves = sampler.move(narrow, chains, jnp.exp(log_size), keys=keys)
                return (chains, adapted(log_size, moves.acceptance, sampler.goal, i)), jnp.mean(moves.acceptance)

            return jax.lax.scan(step, (chains, log_size), jnp.arange(400))[1]

        acceptance = tune(sampler.begin(narrow, white), jnp.full(len(white), jnp.log(0.01)))
        assert abs(np.mean(acceptance[-100:]) - sampler.goal) < 0.1


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_chain_does_not_depend_on_its_companions(name, rng, key):
    """So that cores can share chains."""
    white, sizes = jnp.asarray(rng.normal(size=(6, DIM))), jnp.linspace(0.1, 0.6, 6)
    sampler, keys = SAMPLERS[name], chain_keys(key, jnp.arange(6))
    together, _ = sampler.move(skewed, sampler.begin(skewed, white), sizes, keys=keys)
    for part in (slice(0, 2), slice(2, 6)):
        alone, _ = sampler.move(skewed, sampler.begin(skewed, white[part]), sizes[part], keys=keys[part])
        assert np.allclose(alone.white, together.white[part], rtol=1e-12)
