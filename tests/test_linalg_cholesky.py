"""Safe Cholesky, explicit inverses, products and the exact marginal likelihood."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fathomgp.errors import JitterWarning, NonFiniteError, NotPositiveDefiniteError, SettingError
from fathomgp.linalg import (
    JitterPolicy,
    check_factor,
    default_policy,
    gaussian_log_marginal,
    gram_of_lower,
    inverse_lower,
    logdet_lower,
    product,
    safe_cholesky,
    safe_inverse_factor,
    transposed_product,
)


def spd(rng, *shape, dtype=np.float64):
    X = rng.normal(size=shape)
    return jnp.asarray(X @ np.swapaxes(X, -1, -2) / shape[-1] + np.eye(shape[-1]), dtype)


def rank_deficient(rng, size, rank, dtype=np.float64):
    X = rng.normal(size=(size, rank))
    return jnp.asarray(X @ X.T, dtype)


def symmetric_difference(f, K, direction, step=1e-5):
    return (f(K + step * direction) - f(K - step * direction)) / (2 * step)


def test_factor_reproduces_the_matrix(rng, dtype):
    K = spd(rng, 3, 20, 20, dtype=dtype)
    factor = jax.jit(safe_cholesky)(K)
    tolerance = 100 * float(jnp.finfo(dtype).eps) + default_policy(dtype).first * 10
    rebuilt = factor.lower @ jnp.swapaxes(factor.lower, -1, -2)
    np.testing.assert_allclose(rebuilt, K, atol=tolerance)
    assert factor.lower.dtype == dtype
    assert factor.jitter.shape == (3,)
    assert bool(jnp.all(factor.ok & factor.finite_input & ~factor.report.raised))
    np.testing.assert_array_equal(factor.lower, jnp.tril(factor.lower))
    check_factor(factor)


def test_first_jitter_is_relative_to_the_mean_diagonal(rng):
    K = 7.0 * spd(rng, 5, 5)
    scale = float(jnp.mean(jnp.diagonal(K)))
    np.testing.assert_allclose(safe_cholesky(K).jitter, 1e-10 * scale)
    np.testing.assert_allclose(safe_cholesky(K, jitter=1e-13).jitter, 1e-13 * scale)
    exact = safe_cholesky(K, jitter=0.0)
    assert exact.jitter == 0.0
    np.testing.assert_allclose(exact.lower, np.linalg.cholesky(np.asarray(K)), rtol=1e-12, atol=1e-12)


def test_ladder_of_a_policy():
    policy = JitterPolicy(first=1e-6, largest=1e-3)
    np.testing.assert_allclose(policy.ladder(), (1e-6, 1e-5, 1e-4, 1e-3))
    np.testing.assert_allclose(policy.ladder(0.0), (0.0, 1e-6, 1e-5, 1e-4, 1e-3))
    np.testing.assert_allclose(policy.ladder(5e-5), (5e-5, 1e-4, 1e-3))
    assert policy.ladder(1.0) == (1.0,)


@pytest.mark.parametrize("jitter", [-1e-6, float("nan"), float("inf")])
def test_a_senseless_jitter_is_refused(jitter):
    with pytest.raises(SettingError, match="jitter must be a finite number and at least 0, but it is"):
        safe_cholesky(jnp.eye(2), jitter=jitter)


def test_jitter_rises_only_as_far_as_needed(rng, dtype):
    K = rank_deficient(rng, 30, 5, dtype)
    K = K - 3.0 * default_policy(dtype).first * jnp.mean(jnp.diagonal(K)) * jnp.eye(30, dtype=dtype)
    factor = jax.jit(safe_cholesky)(K)
    assert bool(factor.ok)
    assert bool(factor.report.raised)
    relative = float(factor.jitter / jnp.mean(jnp.diagonal(K)))
    ladder = default_policy(dtype).ladder()
    rung = int(np.argmin(np.abs(np.log(ladder) - np.log(relative))))
    np.testing.assert_allclose(relative, ladder[rung], rtol=1e-4)
    below = safe_cholesky(K, policy=JitterPolicy(ladder[rung - 1], ladder[rung - 1]))
    assert not bool(below.ok)
    with pytest.warns(JitterWarning, match=r"^K_mm is nearly singular: a jitter of [\d.e-]+ was added to its diagonal"):
        check_factor(factor, "K_mm")


def test_a_batch_keeps_its_good_matrices(rng):
    good, indefinite = spd(rng, 4, 4), jnp.diag(jnp.array([1.0, 1.0, 1.0, -1.0]))
    K = jnp.stack([good, jnp.ones((4, 4)), indefinite, good.at[2, 1].set(jnp.nan), good])
    factor = jax.jit(safe_cholesky)(K)
    assert factor.ok.tolist() == [True, True, False, False, True]
    assert factor.finite_input.tolist() == [True, True, True, False, True]
    alone = safe_cholesky(good)
    for i in (0, 4):
        np.testing.assert_allclose(factor.lower[i], alone.lower, rtol=1e-14)
        np.testing.assert_allclose(factor.jitter[i], alone.jitter)
    mapped = jax.jit(jax.vmap(safe_cholesky))(K)
    np.testing.assert_array_equal(mapped.report.ok, factor.ok)
    np.testing.assert_array_equal(mapped.report.raised, factor.report.raised)
    np.testing.assert_allclose(mapped.lower[:2], factor.lower[:2])
    gradient = jax.jit(jax.grad(lambda K: jnp.sum(safe_cholesky(K).lower[jnp.array([0, 4])])))(K)
    assert bool(jnp.all(jnp.isfinite(gradient[jnp.array([0, 4])])))


def test_nan_is_told_apart_from_not_positive_definite(dtype):
    bad = jnp.eye(3, dtype=dtype)
    with pytest.raises(NonFiniteError, match=r"^Kzz holds NaN or infinity: look for non-finite inputs"):
        check_factor(safe_cholesky(bad.at[1, 0].set(jnp.nan)), "Kzz")
    with pytest.raises(NonFiniteError, match="infinity"):
        check_factor(safe_cholesky(bad.at[1, 1].set(jnp.inf)).report)
    with pytest.raises(NotPositiveDefiniteError, match=r"Kzz is not positive definite, even with a jitter of"):
        check_factor(safe_cholesky(bad.at[1, 1].set(-1.0)), "Kzz")
    with pytest.raises(NotPositiveDefiniteError, match=r"\(1 of 2 matrices\)"):
        check_factor(safe_cholesky(jnp.stack([bad, -bad])))


def test_a_zero_matrix_gets_an_absolute_jitter(dtype):
    factor = safe_cholesky(jnp.zeros((2, 2), dtype))
    assert bool(factor.ok)
    np.testing.assert_allclose(factor.jitter, default_policy(dtype).first, rtol=1e-6)


@pytest.mark.parametrize("size", [5, 70])
def test_derivative_of_the_factor(rng, size):
    K, W = spd(rng, size, size), jnp.asarray(rng.normal(size=(size, size)))
    direction = jnp.asarray(rng.normal(size=(size, size)))
    direction = direction + direction.T

    @jax.jit
    def f(K):
        return jnp.sum(W * safe_cholesky(K).lower)

    gradient = jax.jit(jax.grad(f))(K)
    np.testing.assert_allclose(gradient, gradient.T, atol=1e-12)
    expected = symmetric_difference(f, K, direction)
    np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(jax.jvp(f, (K,), (direction,))[1], expected, rtol=1e-6, atol=1e-7)
    reference = jax.jit(jax.grad(lambda K: jnp.sum(W * jnp.linalg.cholesky(K))))(K)
    np.testing.assert_allclose(gradient, reference, rtol=1e-6, atol=1e-8)


def test_batched_and_second_derivatives(rng):
    K, W = spd(rng, 2, 4, 4), jnp.asarray(rng.normal(size=(4, 4)))
    ours = lambda K: jnp.sum(W * safe_cholesky(K, jitter=0.0).lower)  # noqa: E731
    plain = lambda K: jnp.sum(W * jnp.linalg.cholesky(K))  # noqa: E731
    batched = jax.jit(jax.grad(lambda K: jnp.sum(jax.vmap(ours)(K))))(K)
    np.testing.assert_allclose(batched, jax.jit(jax.vmap(jax.grad(plain)))(K), rtol=1e-9, atol=1e-10)
    hessians = [jax.jit(jax.hessian(f))(K[0]) for f in (ours, plain)]
    np.testing.assert_allclose(*hessians, rtol=1e-8, atol=1e-9)


@settings(max_examples=6)
@given(st.integers(1, 40), st.sampled_from([(), (1,), (2, 3)]), st.integers(0, 10))
def test_inverse_of_any_shape(size, batch, seed):
    rng = np.random.default_rng(seed)
    L = np.tril(rng.normal(size=(*batch, size, size))) / size + np.eye(size)
    inverse = inverse_lower(jnp.asarray(L))
    np.testing.assert_allclose(inverse, np.linalg.inv(L), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [33, 300])
def test_inverse_by_blocks(rng, dtype, size):
    L = jnp.linalg.cholesky(spd(rng, size, size, dtype=dtype))
    inverse = jax.jit(inverse_lower)(L)
    tolerance = 200 * float(jnp.finfo(dtype).eps)
    assert inverse.dtype == dtype
    np.testing.assert_allclose(inverse @ L, np.eye(size), atol=tolerance)
    np.testing.assert_array_equal(inverse, jnp.tril(inverse))
    precision = jax.jit(gram_of_lower)(inverse)
    np.testing.assert_allclose(precision, inverse.T @ inverse, atol=tolerance)


def test_inverse_reads_the_lower_triangle_only(rng):
    L = jnp.linalg.cholesky(spd(rng, 40, 40))
    noisy = L + jnp.triu(jnp.ones_like(L), 1)
    np.testing.assert_array_equal(inverse_lower(noisy), inverse_lower(L))
    gradient = jax.grad(lambda L: jnp.sum(inverse_lower(L)))(noisy)
    np.testing.assert_array_equal(jnp.triu(gradient, 1), 0.0)


def test_derivative_of_the_inverse(rng):
    L = jnp.linalg.cholesky(spd(rng, 3, 40, 40))
    W, direction = (jnp.asarray(np.tril(rng.normal(size=L.shape))) for _ in range(2))
    f = jax.jit(lambda L: jnp.sum(W * inverse_lower(L)))
    expected = symmetric_difference(f, L, direction)
    np.testing.assert_allclose(jnp.sum(jax.jit(jax.grad(f))(L) * direction), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(f, (L,), (direction,))[1], expected, rtol=1e-6)


def test_log_determinant(rng, dtype):
    K = spd(rng, 2, 6, 6, dtype=dtype)
    expected = np.linalg.slogdet(np.asarray(K, np.float64))[1]
    np.testing.assert_allclose(logdet_lower(jnp.linalg.cholesky(K)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_and_their_derivatives(rng, dtype, batch):
    A, B = (jnp.asarray(rng.normal(size=(*batch, *shape)), dtype) for shape in [(4, 5), (5, 6)])
    fast = jax.value_and_grad(lambda A, B: jnp.sum(product(A, B) ** 2), argnums=(0, 1))
    plain = jax.value_and_grad(lambda A, B: jnp.sum((A @ B) ** 2), argnums=(0, 1))
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-4)  # noqa: E731
    jax.tree.map(same, fast(A, B), plain(A, B))
    At = jnp.swapaxes(A, -1, -2)
    turned = jax.value_and_grad(lambda A, B: jnp.sum(transposed_product(A, B) ** 2), argnums=(0, 1))
    jax.tree.map(same, turned(At, B)[0], plain(A, B)[0])
    jax.tree.map(same, jnp.swapaxes(turned(At, B)[1][0], -1, -2), plain(A, B)[1][0])
    tangent = jax.jvp(product, (A, B), (A, B))[1]
    same(tangent, 2 * A @ B)


def test_log_marginal_is_the_gaussian_density(rng):
    K, Y = spd(rng, 12, 12), jnp.asarray(rng.normal(size=(12, 3)))
    value, factor = eqx.filter_jit(gaussian_log_marginal)(K, Y, jitter=0.0)
    expected = stats.multivariate_normal(cov=np.asarray(K)).logpdf(np.asarray(Y).T).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert bool(factor.ok)


@pytest.mark.parametrize("size", [9, 300])
def test_log_marginal_derivatives(rng, size):
    K, Y = spd(rng, size, size), jnp.asarray(rng.normal(size=(size, 2)))

    def plain(K, Y):
        lower = jnp.linalg.cholesky(K)
        whitened = jax.scipy.linalg.solve_triangular(lower, Y, lower=True)
        return -0.5 * jnp.sum(whitened**2) - 2 * jnp.sum(jnp.log(jnp.diagonal(lower)))

    ours = lambda K, Y: gaussian_log_marginal(K, Y, jitter=0.0)[0]  # noqa: E731
    dK, dY = jax.jit(jax.grad(ours, argnums=(0, 1)))(K, Y)
    np.testing.assert_array_equal(dK, dK.T)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(K, Y)
    np.testing.assert_allclose(dK, expected[0], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(dY, expected[1], rtol=1e-8, atol=1e-9)


def test_log_marginal_second_derivatives_and_vmap(rng):
    K, Y = spd(rng, 3, 4, 4), jnp.asarray(rng.normal(size=(4, 1)))
    f = lambda t: gaussian_log_marginal(K[0] + t**2 * jnp.eye(4), t * Y)[0]  # noqa: E731
    t, step = jnp.asarray(1.3), 1e-5
    slope = jax.jit(jax.grad(f))
    expected = (slope(t + step) - slope(t - step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(slope))(t), expected, rtol=1e-5, atol=1e-6)
    values, factors = jax.jit(jax.vmap(lambda K: gaussian_log_marginal(K, Y)))(K)
    np.testing.assert_allclose(values[1], gaussian_log_marginal(K[1], Y)[0], rtol=1e-12)
    assert factors.ok.shape == (3,)


def test_log_marginal_in_single_precision(rng):
    K, Y = spd(rng, 40, 40), jnp.asarray(rng.normal(size=(40, 1)))
    double, single = (gaussian_log_marginal(K.astype(d), Y.astype(d))[0] for d in (jnp.float64, jnp.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, double, rtol=1e-4)


def test_log_marginal_reports_a_bad_matrix():
    value, factor = gaussian_log_marginal(-jnp.eye(3), jnp.ones((3, 1)))
    assert bool(jnp.isnan(value))
    with pytest.raises(NotPositiveDefiniteError):
        check_factor(factor, "K")


def test_the_inverse_factor_and_its_derivatives(rng):
    K, W = spd(rng, 2, 6, 6), jnp.asarray(rng.normal(size=(2, 6, 6)))
    through = lambda K: inverse_lower(safe_cholesky(K).lower)  # noqa: E731
    inverse, report = jax.jit(safe_inverse_factor)(K)
    np.testing.assert_allclose(inverse, through(K), rtol=1e-10)
    assert report.ok.shape == (2,)
    direct = lambda K: safe_inverse_factor(K)[0]  # noqa: E731
    ours, plain = (jax.jit(jax.grad(lambda K, f=f: jnp.sum(W * f(K)))) for f in (direct, through))
    np.testing.assert_allclose(ours(K), plain(K), rtol=1e-8, atol=1e-10)
    one = lambda f: jax.jit(jax.hessian(lambda K: jnp.sum(W[0] * f(K))))(K[0])  # noqa: E731
    np.testing.assert_allclose(one(direct), one(through), rtol=1e-7, atol=1e-8)
