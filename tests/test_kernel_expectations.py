"""Psi statistics: against dense quadrature, Monte Carlo and finite differences; streams equal the whole."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fathomgp.kernels import RBF, Constant, Linear, Matern52, White, expectations
from fathomgp.kernels._exponential import exponential
from fathomgp.kernels.expectations import contraction, covariance_sum, covariance_trace, psi0, psi1, psi2
from fathomgp.parameters import partition

M = 5


def kernels(D):
    ard = jnp.linspace(0.7, 1.4, D)
    return {
        "rbf": RBF(ard, 1.3),
        "linear": Linear(ard, 0.4),
        "sum": RBF(ard, 1.3) + Linear(0.5 * ard) + Constant(0.3) + White(0.2),
        "two rbf": RBF(ard, 1.3) + RBF(2.5, 0.6, active_dims=(D - 1,)) + Linear(0.8, active_dims=(0,)),
    }


@pytest.fixture
def inputs(rng):
    def draw(D, rows=3, full=False):
        z, mean = jnp.asarray(rng.normal(size=(M, D))), jnp.asarray(rng.normal(size=(rows, D)))
        if full:
            root = rng.normal(size=(rows, D, D)) / np.sqrt(D)
            return z, mean, jnp.asarray(0.5 * root @ np.swapaxes(root, 1, 2) + 0.05 * np.eye(D))
        return z, mean, jnp.asarray(rng.uniform(0.01, 0.8, size=(rows, D)))

    return draw


@jax.jit
def statistics(kernel, z, mean, variance):
    return psi0(kernel, mean, variance), psi1(kernel, z, mean, variance), psi2(kernel, z, mean, variance)


def by_quadrature(kernel, z, mean, variance, nodes=50):
    D = z.shape[1]
    roots, weights = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[roots] * D), axis=-1).reshape(-1, D)
    weights = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * D), axis=-1), axis=-1).reshape(-1)
    factors = np.linalg.cholesky(variance) if variance.ndim == 3 else np.sqrt(variance)[:, :, None] * np.eye(D)
    return _averages(kernel, z, mean, factors, grid, weights)


def _averages(kernel, z, mean, factors, points, weights):
    answers = []
    for mu, factor in zip(mean, factors, strict=True):
        x = jnp.asarray(np.asarray(mu) + points @ np.asarray(factor).T)
        k, diagonal = np.asarray(kernel.gram(x, z)), np.asarray(kernel.diagonal(x))
        answers.append((weights @ diagonal, weights @ k, (k * weights[:, None]).T @ k))
    return [np.stack(parts) for parts in zip(*answers, strict=True)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("name", "D"), [("rbf", 1), ("rbf", 2), ("sum", 1), ("two rbf", 2)])
def test_closed_forms_equal_dense_quadrature(inputs, name, D, full):
    z, mean, variance = inputs(D, full=full)
    kernel = kernels(D)[name]
    ours = statistics(kernel, z, mean, variance)
    for a, b in zip(ours, by_quadrature(kernel, z, mean, variance), strict=True):
        assert np.allclose(a, b, rtol=0, atol=1e-8)


def test_eight_inputs_agree_with_monte_carlo(inputs, rng):
    z, mean, variance = inputs(8, rows=1)
    kernel = kernels(8)["sum"]
    x = jnp.asarray(np.asarray(mean) + rng.normal(size=(1_000_000, 8)) * np.sqrt(variance[0]))
    k = np.asarray(kernel.gram(x, z))
    products = k[:, :, None] * k[:, None, :]
    _, first, second = statistics(kernel, z, mean, variance)
    # Four standard errors for one figure; a little more because there are thirty of them.
    for ours, draws in ((first[0], k), (second[0], products)):
        assert np.all(np.abs(ours - draws.mean(axis=0)) < 4.5 * draws.std(axis=0) / 1e3)


@pytest.mark.parametrize(("D", "accuracy"), [(1, 1e-6), (2, 1e-5), (4, 3e-3)])
def test_any_other_kernel_by_numerical_integration(inputs, rng, D, accuracy):
    z, mean, variance = inputs(D)
    kernel = RBF(1.3) * Constant(1.0) if D < 3 else Matern52(2.0)
    ours = statistics(kernel, z, mean, variance)
    if D < 3:
        exact = statistics(RBF(1.3), z, mean, variance)
    else:
        points = rng.normal(size=(200_000, D))
        factors = np.sqrt(variance)[:, :, None] * np.eye(D)
        exact = _averages(kernel, z, mean, factors, points, np.full(len(points), 1.0 / len(points)))
    for a, b in zip(ours, exact, strict=True):
        assert np.allclose(a, b, atol=accuracy)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["two rbf"])
def test_gradients_equal_finite_differences(inputs, rng, name, full):
    z, mean, variance = inputs(2, full=full)
    weights = jnp.asarray(rng.normal(size=(M, M)))
    learned, constant = partition(kernels(2)[name])

    def figure(learned, z, mean, variance):
        variance = 0.5 * (variance + jnp.swapaxes(variance, 1, 2)) if full else variance
        a, b, c = statistics(eqx.combine(learned, constant), z, mean, variance)
        return jnp.sum(a) + jnp.sum(jnp.sin(b)) + jnp.sum(weights[None] * c)

    check_grads(figure, (learned, z, mean, variance), order=1, modes=["rev"], eps=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two rbf", "matern"])
def test_streamed_contractions_equal_the_whole(inputs, rng, name, monkeypatch):
    z, mean, variance = inputs(2, rows=19)
    kernel = Matern52(1.2) if name == "matern" else kernels(2)[name]
    weights = jnp.asarray(rng.normal(size=(2, M, M)))
    weights = weights + jnp.swapaxes(weights, 1, 2)
    rows = jnp.asarray(rng.uniform(size=(19, 3)))
    _, first, second = statistics(kernel, z, mean, variance)
    whole = np.asarray(second - first[:, :, None] * first[:, None, :])
    gradients = []
    for numbers in (1 << 19, 1):  # one block, blocks of 8 rows
        monkeypatch.setattr(expectations, "_BLOCK_NUMBERS", numbers)

        @jax.jit
        def contractions(mean, variance):
            trace, trace_pull = jax.vjp(
                lambda m, v: covariance_trace(contraction(kernel, z, weights), m, v), mean, variance
            )
            total, sum_pull = jax.vjp(lambda m, v: covariance_sum(kernel, z, m, v, rows), mean, variance)
            return trace, total, (*trace_pull(jnp.ones_like(trace)), *sum_pull(jnp.ones_like(total)))

        trace, total, gradient = contractions(mean, variance)
        assert np.allclose(trace, np.einsum("kmn,bmn->bk", weights, whole), atol=1e-10)
        assert np.allclose(total, np.einsum("bk,bmn->kmn", rows, whole), atol=1e-10)
        gradients.append(gradient)
    for one, other in zip(*gradients, strict=True):
        assert np.allclose(one, other, atol=1e-9)


def test_certain_inputs_give_the_kernel_itself(inputs, dtype):
    z, mean, _ = (part.astype(dtype) for part in inputs(3))
    for kernel in (RBF(1.1), Matern52(1.1)):
        zeroth, first, second = statistics(kernel, z, mean, jnp.zeros_like(mean))
        k = kernel.gram(mean, z)
        assert first.dtype == dtype
        assert np.allclose(zeroth, kernel.diagonal(mean), atol=1e-5)
        assert np.allclose(first, k, atol=1e-5)
        assert np.allclose(second, k[:, :, None] * k[:, None, :], atol=1e-5)


def test_the_fast_exponential_is_the_exponential(rng, dtype):
    x = jnp.asarray(np.concatenate([rng.uniform(-80, 80, 10_000), rng.uniform(-1, 1, 10_000), [0.0]]), dtype)
    accuracy = 4 * float(jnp.finfo(dtype).eps)
    assert np.allclose(jax.jit(exponential)(x), np.exp(np.asarray(x)), rtol=accuracy, atol=0)
    assert np.allclose(jax.jvp(exponential, (x,), (x,))[1], x * jnp.exp(x), rtol=2 * accuracy, atol=0)
    assert float(exponential(jnp.asarray(-1e9, dtype))) < 1e-30


def test_pairs_have_the_gradients_of_plain_gathers(rng):
    x = jnp.asarray(rng.normal(size=(M, 2)))
    i, j = np.triu_indices(M)
    weights = jnp.asarray(rng.normal(size=(len(i), 2)))
    check_grads(
        lambda x: jnp.sum(weights * jnp.sin(expectations._take_pairs(jnp.asarray(x))[0])), (x,), 1, modes=["rev"]
    )
    check_grads(
        lambda x: jnp.sum(weights * jnp.sin(expectations._take_pairs(jnp.asarray(x))[1])), (x,), 1, modes=["rev"]
    )
    packed = jnp.asarray(rng.normal(size=(2, len(i))))
    check_grads(lambda p: jnp.sum(jnp.sin(expectations._unpack(jnp.asarray(p)))), (packed,), 1, modes=["rev"])
    symmetric = expectations._unpack(packed)
    assert np.allclose(np.asarray(expectations._pack(symmetric)) / np.where(i == j, 1.0, 2.0), packed)


def test_covariances_of_nearly_certain_inputs_lose_no_figures(inputs):
    # With inputs this certain, psi2 and psi1^T psi1 agree in all figures but the last five.
    z, mean, variance = inputs(2)
    variance = 1e-11 * variance
    kernel = RBF(jnp.asarray([0.7, 1.4]), 1.3) + RBF(2.5, 0.6, active_dims=(1,))
    ours = jax.jit(covariance_sum)(kernel, z, mean, variance, jnp.eye(3))
    slopes = jax.vmap(jax.jacfwd(lambda x: kernel.gram(x[None], z)[0]))(mean)
    delta_method = jnp.einsum("bmd,bd,bnd->bmn", slopes, variance, slopes)
    assert np.allclose(ours, delta_method, rtol=1e-8, atol=1e-9 * float(jnp.max(delta_method)))


def test_covariances_of_very_uncertain_inputs_do_not_overflow():
    z, mean = jnp.asarray([[-40.0], [40.0]]), jnp.zeros((1, 1))
    kernel, variance = RBF(1.0), jnp.full((1, 1), 1e4)
    ours = covariance_sum(kernel, z, mean, variance, jnp.ones((1, 1)))[0]
    first = psi1(kernel, z, mean, variance)[0]
    assert np.allclose(ours[0, 1], -first[0] * first[1], rtol=1e-12)
    assert np.allclose(ours[0, 0], psi1(RBF(np.sqrt(0.5)), z, mean, variance)[0, 0] - first[0] ** 2, rtol=1e-12)
