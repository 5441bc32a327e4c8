"""Woodbury algebra and pivoted Cholesky, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fathomgp.errors import SettingError
from fathomgp.linalg import low_rank_plus_diagonal, pivoted_cholesky, sparse_evidence


def rbf(x, lengthscale=0.3):
    return jnp.exp(-0.5 * ((x[:, None] - x[None, :]) / lengthscale) ** 2)


@pytest.mark.parametrize("vector", [True, False])
def test_low_rank_plus_diagonal_equals_dense(rng, dtype, vector):
    V, Y = (jnp.asarray(rng.normal(size=shape), dtype) for shape in [(4, 15), (15, 3)])
    diagonal = jnp.asarray(rng.uniform(0.5, 2.0, size=15), dtype) if vector else 0.7
    dense = np.asarray(V, np.float64).T @ np.asarray(V, np.float64) + np.diag(np.broadcast_to(diagonal, 15))
    A = jax.jit(low_rank_plus_diagonal)(V, diagonal)
    assert bool(A.factor.ok)
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-10}
    solution = np.linalg.solve(dense, np.asarray(Y, np.float64))
    np.testing.assert_allclose(A.solve(Y), solution, **tolerance)
    np.testing.assert_allclose(A.log_determinant(), np.linalg.slogdet(dense)[1], **tolerance)
    np.testing.assert_allclose(A.quadratic_form(Y), np.sum(np.asarray(Y) * solution, axis=0), **tolerance)
    assert A.solve(Y).dtype == dtype


@settings(max_examples=4)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 3), st.integers(0, 5))
def test_sparse_evidence_is_a_gaussian_density(M, N, P, seed):
    rng = np.random.default_rng(seed)
    V, Y = rng.normal(size=(M, N)), rng.normal(size=(N, P))
    expected = stats.multivariate_normal(cov=V.T @ V + 0.3 * np.eye(N)).logpdf(Y.T).sum()
    np.testing.assert_allclose(jax.jit(sparse_evidence)(jnp.asarray(V), jnp.asarray(Y), 0.3), expected, rtol=1e-10)


def test_derivative_of_the_sparse_evidence(rng):
    V, Y, W = (jnp.asarray(rng.normal(size=shape)) for shape in [(4, 9), (9, 2), (4, 9)])
    f = jax.jit(lambda V, s2: sparse_evidence(V, Y, s2))
    s2, step = jnp.asarray(0.4), 1e-6
    dV, ds2 = jax.jit(jax.grad(f, argnums=(0, 1)))(V, s2)
    np.testing.assert_allclose(jnp.sum(dV * W), (f(V + step * W, s2) - f(V - step * W, s2)) / (2 * step), rtol=1e-5)
    np.testing.assert_allclose(ds2, (f(V, s2 + step) - f(V, s2 - step)) / (2 * step), rtol=1e-5)


def test_a_full_rank_pivoted_factor_is_exact(rng, dtype):
    X = rng.normal(size=(12, 12))
    K = jnp.asarray(X @ X.T, dtype)
    result = pivoted_cholesky(jnp.diagonal(K), lambda i: K[:, i], rank=12)
    np.testing.assert_allclose(result.factor @ result.factor.T, K, atol=1e-4 if dtype == np.float32 else 1e-11)
    assert result.factor.dtype == dtype
    assert len(set(result.pivots.tolist()) - {-1}) == int(result.rank_used)


def test_pivoted_factor_is_greedy_and_exact_on_its_pivots(rng):
    x = jnp.asarray(np.sort(rng.uniform(size=60)))
    K = rbf(x)
    compiled = jax.jit(lambda x: pivoted_cholesky(jnp.ones(60), lambda i: rbf(x)[:, i], rank=6))
    result = compiled(x)
    pivots = np.asarray(result.pivots)
    np.testing.assert_allclose((result.factor @ result.factor.T)[:, pivots], K[:, pivots], atol=1e-7)
    nystroem = K[:, pivots] @ np.linalg.solve(K[np.ix_(pivots, pivots)], K[pivots])
    np.testing.assert_allclose(result.factor @ result.factor.T, nystroem, atol=1e-5)
    np.testing.assert_allclose(result.residual_diagonal, 1.0 - jnp.sum(result.factor**2, axis=1), atol=1e-12)
    assert len(set(pivots.tolist())) == 6


def test_pivoted_factor_stops_at_the_tolerance(rng):
    x = jnp.asarray(rng.uniform(size=50))
    K = rbf(x)
    result = pivoted_cholesky(jnp.ones(50), lambda i: K[:, i], rank=30, tol=1e-3)
    used = int(result.rank_used)
    assert 2 <= used < 30
    assert float(jnp.max(result.residual_diagonal)) <= 1e-3
    np.testing.assert_array_equal(result.factor[:, used:], 0.0)
    assert result.pivots[used:].tolist() == [-1] * (30 - used)
    shorter = pivoted_cholesky(jnp.ones(50), lambda i: K[:, i], rank=used - 1, tol=1e-3)
    assert float(jnp.max(shorter.residual_diagonal)) > 1e-3


def test_pivoted_factor_of_low_rank_leaves_rounding_alone(rng, dtype):
    X = rng.normal(size=(20, 3))
    K = jnp.asarray(X @ X.T, dtype)
    result = pivoted_cholesky(jnp.diagonal(K), lambda i: K[:, i], rank=8)
    assert bool(jnp.all(jnp.isfinite(result.factor)))
    np.testing.assert_allclose(result.factor @ result.factor.T, K, atol=1e-3 if dtype == np.float32 else 1e-9)


def test_pivoted_factor_has_derivatives(rng):
    x = jnp.asarray(rng.uniform(size=15))
    f = jax.jit(lambda l: jnp.sum(pivoted_cholesky(jnp.ones(15), lambda i: rbf(x, l)[:, i], rank=4).factor ** 2))
    l, step = jnp.asarray(0.5), 1e-6
    np.testing.assert_allclose(jax.grad(f)(l), (f(l + step) - f(l - step)) / (2 * step), rtol=1e-4, atol=1e-5)


def test_pivoted_cholesky_refuses_rank_zero():
    with pytest.raises(SettingError, match="rank must be at least 1, but it is 0"):
        pivoted_cholesky(jnp.ones(3), lambda i: jnp.ones(3), rank=0)
