"""The collapsed bound and its birth and death scores, against brute force."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fathomgp.linalg import _scores, birth_scores, collapsed_bound, death_scores, sparse_bound

N, M, NOISE = 40, 7, 0.2


@pytest.fixture(params=[(1, "float64"), (3, "float64"), (3, "float32")], ids=str)
def problem(request, rng):
    """A random Matern-like kernel, data, and inducing indices that are distinct data points."""
    P, dtype = request.param
    x = rng.uniform(-2, 2, size=(N, 2))
    distance = np.linalg.norm(x[:, None] - x[None, :], axis=-1) / rng.uniform(0.5, 2.0)
    K = rng.uniform(0.5, 2.0) * (1 + distance) * np.exp(-distance)
    Y = np.sin(2 * x[:, :1]) + 0.3 * rng.normal(size=(N, P))
    inducing = rng.choice(N, size=M, replace=False)
    return jnp.asarray(K, dtype), jnp.asarray(Y, dtype), inducing


@functools.partial(jax.jit, static_argnames="jitter")
def bound_of(K, Y, slots, active, jitter=1e-13):
    """The bound with inducing points at data indices ``slots``; inactive slots may hold anything."""
    Kmm, Kmn = K[slots][:, slots], K[slots]
    return sparse_bound(Kmm, Kmn, jnp.diagonal(K), Y, NOISE, active=active, jitter=jitter)


@functools.partial(jax.jit, static_argnames="chunk")
def births_of(bound, K, chunk=None):
    return birth_scores(bound, jnp.arange(N), lambda rows, columns: K[rows][:, columns], chunk=chunk)


def brute_force(K, Y, inducing, noise=NOISE):
    K, Y = np.asarray(K, np.float64), np.asarray(Y, np.float64)
    Kmn = K[inducing]
    Q = Kmn.T @ np.linalg.solve(K[np.ix_(inducing, inducing)], Kmn) if len(inducing) else np.zeros_like(K)
    density = stats.multivariate_normal(cov=Q + noise * np.eye(len(K))).logpdf(Y.T).sum()
    return density - 0.5 * Y.shape[1] * np.trace(K - Q) / noise


def padded(inducing, size=M + 4):
    slots = np.concatenate([inducing, np.zeros(size - len(inducing), inducing.dtype)])
    return jnp.asarray(slots), jnp.arange(size) < len(inducing)


def tolerance(dtype, double=1e-8):
    return {"rtol": 5e-3, "atol": 5e-2} if dtype == np.float32 else {"rtol": 0.0, "atol": double}


def test_bound_equals_brute_force(problem):
    K, Y, inducing = problem
    expected = brute_force(K, Y, inducing)
    slots, active = padded(inducing, size=M)
    np.testing.assert_allclose(bound_of(K, Y, slots, active).value, expected, **tolerance(K.dtype))
    slots, active = padded(inducing)
    masked = bound_of(K, Y, slots, active)
    np.testing.assert_allclose(masked.value, expected, **tolerance(K.dtype))
    assert masked.value.dtype == K.dtype


def test_inactive_slots_leave_the_jitter_alone(problem):
    K, Y, inducing = problem
    slots, active = padded(inducing)
    alone, masked = bound_of(K, Y, slots[:M], active[:M]), bound_of(K, Y, slots, active)
    np.testing.assert_allclose(masked.factor.jitter, alone.factor.jitter, rtol=1e-5)


def test_no_active_slot_is_white_noise(problem):
    K, Y, inducing = problem
    bound = bound_of(K, Y, jnp.asarray(inducing), jnp.zeros(M, bool))
    np.testing.assert_allclose(bound.value, brute_force(K, Y, inducing[:0]), **tolerance(K.dtype))


@pytest.mark.parametrize("masked", [True, False])
def test_births_equal_brute_force(problem, masked):
    K, Y, inducing = problem
    slots, active = padded(inducing, size=M + 4 if masked else M)
    bound = bound_of(K, Y, slots, active)
    candidates = np.setdiff1d(np.arange(N), inducing)
    scores = births_of(bound, K)[candidates]
    now = brute_force(K, Y, inducing)
    expected = [brute_force(K, Y, np.append(inducing, j)) - now for j in candidates]
    np.testing.assert_allclose(scores, expected, **tolerance(K.dtype))


def test_births_do_not_depend_on_the_blocks_of_rows(problem, monkeypatch):
    K, Y, inducing = problem
    bound = bound_of(K, Y, *padded(inducing))
    whole = births_of(bound, K)
    monkeypatch.setattr(_scores, "_ENTRIES", 9 * N)  # five blocks of eight rows
    np.testing.assert_allclose(births_of.__wrapped__(bound, K), whole, **tolerance(K.dtype))


def test_births_do_not_depend_on_the_chunk_and_repeat_no_point(problem):
    K, Y, inducing = problem
    bound = bound_of(K, Y, *padded(inducing))
    scores = [births_of(bound, K, chunk) for chunk in (None, 13)]
    np.testing.assert_allclose(scores[0], scores[1], **tolerance(K.dtype))
    assert scores[0].shape == (N,)
    np.testing.assert_allclose(scores[0][inducing], 0.0, atol=tolerance(K.dtype)["atol"])


def test_births_carry_the_jitter(rng):
    x = rng.uniform(size=N)
    K, Y = jnp.asarray(np.exp(-np.abs(x[:, None] - x[None, :]))), jnp.asarray(rng.normal(size=(N, 1)))
    bound, grown = (bound_of(K, Y, *padded(np.arange(count)), jitter=1e-3) for count in (M, M + 1))
    score = births_of(bound, K)[M]
    np.testing.assert_allclose(score, grown.value - bound.value, atol=1e-8)


@pytest.mark.parametrize("masked", [True, False])
def test_deaths_equal_brute_force(problem, masked):
    K, Y, inducing = problem
    slots, active = padded(inducing, size=M + 4 if masked else M)
    scores = jax.jit(death_scores)(bound_of(K, Y, slots, active))
    now = brute_force(K, Y, inducing)
    expected = [brute_force(K, Y, np.delete(inducing, i)) - now for i in range(M)]
    np.testing.assert_allclose(scores[:M], expected, **tolerance(K.dtype))
    np.testing.assert_array_equal(scores[M:], -np.inf)


def test_a_birth_undoes_a_death(problem):
    K, Y, inducing = problem
    slots, active = padded(inducing, size=M)
    death = jax.jit(death_scores)(bound_of(K, Y, slots, active))[2]
    without = bound_of(K, Y, slots, active.at[2].set(False))
    birth = births_of(without, K)[slots[2]]
    np.testing.assert_allclose(birth, -death, **tolerance(K.dtype))


def test_the_bound_is_tight_at_the_data(rng):
    x = np.linspace(0, 1, 12)
    K = jnp.asarray(np.exp(-np.abs(x[:, None] - x[None, :])))
    y = jnp.asarray(rng.normal(size=12))
    value = eqx.filter_jit(collapsed_bound)(K, K, jnp.diagonal(K), y, NOISE, jitter=1e-13)
    exact = stats.multivariate_normal(cov=np.asarray(K) + NOISE * np.eye(12)).logpdf(np.asarray(y))
    np.testing.assert_allclose(value, exact, atol=1e-8)


def test_derivative_of_the_bound(rng):
    x, z = np.linspace(0, 1, 15), jnp.asarray([0.1, 0.45, 0.8])
    y = jnp.asarray(rng.normal(size=15))
    kernel = lambda a, b: jnp.exp(-0.5 * (a[:, None] - b[None, :]) ** 2 / 0.09)  # noqa: E731

    @jax.jit
    def f(z, s2):
        return collapsed_bound(kernel(z, z), kernel(z, jnp.asarray(x)), jnp.ones(15), y, s2)

    s2, step, direction = jnp.asarray(0.3), 1e-6, jnp.asarray([1.0, -0.5, 0.3])
    dz, ds2 = jax.grad(f, argnums=(0, 1))(z, s2)
    along = (f(z + step * direction, s2) - f(z - step * direction, s2)) / (2 * step)
    np.testing.assert_allclose(dz @ direction, along, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ds2, (f(z, s2 + step) - f(z, s2 - step)) / (2 * step), rtol=1e-4, atol=1e-5)
