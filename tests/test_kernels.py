"""Kernels against other implementations, their definitions, and bad arguments."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.gaussian_process import kernels as sk

from fathomgp.errors import SettingError
from fathomgp.kernels import (
    KERNELS,
    RBF,
    ArcCosine,
    Constant,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    NeuralNetwork,
    Periodic,
    Polynomial,
    Product,
    RationalQuadratic,
    Sum,
    White,
    kernel_from_name,
    squared_distance,
)
from fathomgp.kernels._algebra import flattened
from fathomgp.parameters import freeze, positive, real

ARD = np.array([0.5, 1.3, 2.0, 0.8, 1.1])
WIDTHS = [1, 2, 5]


def _inputs(rng, width, dtype=np.float64):
    return jnp.asarray(rng.normal(size=(9, width)), dtype), jnp.asarray(rng.normal(size=(6, width)), dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RBF, sk.RBF),
        (Matern12, lambda l: sk.Matern(l, nu=0.5)),
        (Matern32, lambda l: sk.Matern(l, nu=1.5)),
        (Matern52, lambda l: sk.Matern(l, nu=2.5)),
    ],
)
def test_stationary_kernels_agree_with_scikit_learn(ours, theirs, width, rng):
    x, x2 = _inputs(rng, width)
    expected = 1.7 * theirs(ARD[:width])(np.asarray(x), np.asarray(x2))
    np.testing.assert_allclose(ours(ARD[:width], 1.7).gram(x, x2), expected, rtol=1e-10)


@pytest.mark.parametrize("width", WIDTHS)
def test_other_kernels_agree_with_scikit_learn(width, rng):
    x, x2 = _inputs(rng, width)
    pairs = [
        (RationalQuadratic(1.2, 1.0, 0.7), sk.RationalQuadratic(1.2, 0.7)),
        (Linear(1.0, bias_variance=0.49), sk.DotProduct(0.7)),
        (Polynomial(3, 1.0, 0.49), sk.DotProduct(0.7) ** 3),
        (RBF(0.6) * Linear(1.0, 1.0) + Constant(0.2), sk.RBF(0.6) * sk.DotProduct(1.0) + sk.ConstantKernel(0.2)),
    ]
    if width == 1:  # in higher dimensions scikit-learn's periodic kernel is another one
        pairs.append((Periodic(0.8, 1.0, 1.9), sk.ExpSineSquared(0.8, 1.9)))
    for ours, theirs in pairs:
        expected = theirs(np.asarray(x), np.asarray(x2))
        np.testing.assert_allclose(ours.gram(x, x2), expected, rtol=1e-9, atol=1e-12)


def test_periodic_is_a_product_over_columns(rng):
    x, x2 = _inputs(rng, 2)
    parts = [Periodic(ARD[d], period=1.5 + d, active_dims=(d,)) for d in (0, 1)]
    both = Periodic(ARD[:2], period=np.array([1.5, 2.5]))
    np.testing.assert_allclose(both.gram(x, x2), Product(*parts).gram(x, x2), rtol=1e-10)
    np.testing.assert_allclose(both.gram(x + jnp.array([[1.5, 5.0]]), x2), both.gram(x, x2), rtol=1e-8)


def _hidden_layer(kernel, x, activation, rng, num_units=200_000):
    """Mean and standard error of the products of a random hidden layer's units."""
    weights = rng.normal(size=(num_units, x.shape[1])) * np.sqrt(np.asarray(kernel.weight_variance.value))
    biases = rng.normal(size=(num_units, 1)) * np.sqrt(float(kernel.bias_variance.value))
    units = activation(weights @ np.asarray(x).T + biases)
    products = units[:, :1] * units
    return products.mean(axis=0), products.std(axis=0) / np.sqrt(num_units)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arc_cosine_is_a_random_hidden_layer(order, rng):
    x, _ = _inputs(rng, 2)
    kernel = ArcCosine(order, ARD[:2], 0.6, variance=1.4)
    mean, error = _hidden_layer(kernel, x, lambda a: (a > 0) * a**order, rng)
    assert np.all(np.abs(kernel.gram(x)[0] - 2.8 * mean) <= 5 * 2.8 * error + 1e-12)


def test_neural_network_is_a_random_hidden_layer(rng):
    from scipy.special import erf

    x, _ = _inputs(rng, 2)
    kernel = NeuralNetwork(ARD[:2], 0.6, variance=1.4)
    mean, error = _hidden_layer(kernel, x, erf, rng)
    assert np.all(np.abs(kernel.gram(x)[0] - 1.4 * mean) <= 5 * 1.4 * error)


@pytest.mark.parametrize("width", [1, 4, 30])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_distances_are_accurate_far_from_the_origin(width, offset, dtype, rng):
    x = jnp.asarray(offset + rng.normal(size=(40, width)), dtype)
    x2 = jnp.concatenate([x[:5], jnp.asarray(offset + rng.normal(size=(10, width)), dtype)])
    exact = ((np.asarray(x, np.float64)[:, None] - np.asarray(x2, np.float64)[None]) ** 2).sum(axis=-1)
    error = np.abs(np.asarray(squared_distance(x, x2)) - exact)
    assert error.max() <= 40 * width * np.finfo(dtype).eps
    assert np.all(np.asarray(squared_distance(x, x2))[np.arange(5), np.arange(5)] == 0)
    assert np.all(np.diag(squared_distance(x)) == 0)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(("kernel", "curvature"), [(RBF, 1.0), (Matern32, 3.0), (Matern52, 5.0 / 3.0)])
def test_second_derivatives_at_coincident_points(kernel, curvature, width, rng):
    point = jnp.asarray(rng.normal(size=width))

    def k(a, b):
        return kernel(2.0, 1.5).gram(a[None], b[None])[0, 0]

    cross = jax.jit(jax.jacfwd(jax.grad(k, argnums=0), argnums=1))(point, point)
    np.testing.assert_allclose(cross, 1.5 * curvature / 4.0 * np.eye(width), atol=1e-7)


def test_correlation_is_a_function_of_squared_distance(rng):
    x, x2 = _inputs(rng, 2)
    for kernel in (RBF(ARD[:2], 2.0), Matern12(ARD[:2], 2.0), RationalQuadratic(ARD[:2], 2.0, 0.5)):
        r2 = squared_distance(x / ARD[None, :2], x2 / ARD[None, :2])
        np.testing.assert_allclose(2.0 * kernel.correlation(r2), kernel.gram(x, x2), rtol=1e-12)
        assert float(kernel.correlation(jnp.zeros(()))) == 1.0


def test_tiny_variance_keeps_gradients_finite():
    kernel = RBF(1.0, positive(1e-300))
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(k.gram(jnp.ones((2, 1))))))(kernel)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))


def test_active_dims_select_columns(rng):
    x, x2 = _inputs(rng, 4)
    for kind in (RBF, Matern12, RationalQuadratic, Periodic, Linear, Polynomial, ArcCosine, NeuralNetwork):
        chosen = kind(active_dims=(3, 1)).gram(x, x2)
        np.testing.assert_allclose(chosen, kind().gram(x[:, [3, 1]], x2[:, [3, 1]]), rtol=1e-12)


def test_sums_and_products_are_flat():
    a, b, c = RBF(), Linear(), White()
    assert len(((a + b) + (c + a)).parts) == 4
    assert len(((a * b) * (c * a)).parts) == 4
    assert [type(part) for part in (a * b + c).parts] == [Product, White]
    assert [type(part) for part in ((a + b) * c).parts] == [Sum, White]


def test_white_noise_is_correlated_with_itself_only():
    x = jnp.zeros((3, 2))
    np.testing.assert_array_equal(White(0.5).gram(x), 0.5 * np.eye(3))
    np.testing.assert_array_equal(White(0.5).gram(x, x), np.zeros((3, 3)))


def test_parameters_are_kept_as_given():
    lengthscale = positive(2.0, trainable=False)
    assert RBF(lengthscale).lengthscale is lengthscale
    assert not freeze(RBF()).variance.trainable


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ard", [True, False])
def test_kernels_by_name(name, ard):
    kernel = kernel_from_name(name, 3, lengthscale=2.0, variance=3.0, ard=ard)
    for dtype in (jnp.float32, jnp.float64):
        result = jax.eval_shape(kernel.gram, jnp.ones((9, 3), dtype), jnp.ones((6, 3), dtype))
        assert (result.shape, result.dtype) == ((9, 6), dtype)
    if hasattr(kernel, "lengthscale"):
        assert kernel.lengthscale.shape == ((3,) if ard else ())
        np.testing.assert_allclose(kernel.lengthscale.value, 2.0, rtol=1e-12)
    np.testing.assert_allclose(kernel.variance.value, 3.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: kernel_from_name("matern5", 2), "Unknown kernel 'matern5'. Did you mean 'matern52'.*rbf, matern12"),
        (lambda: kernel_from_name("RBF", 2), "Did you mean 'rbf'"),
        (lambda: kernel_from_name("zzz", 2), r"Unknown kernel 'zzz'\. The known kernels are: rbf"),
        (lambda: kernel_from_name("rbf", 0), "input_dim must be 1 or more, but it is 0"),
        (lambda: kernel_from_name("rbf", 2, lengthscale=np.ones(3)), "lengthscale must be .* 2 entries.*shape"),
        (lambda: kernel_from_name("rbf", 2, lengthscale=np.ones(2), ard=False), "a single number when ard=False"),
        (lambda: kernel_from_name("rbf", 2, variance=np.ones(2)), "variance must be a single number"),
        (lambda: RBF(-1.0), "lengthscale must be greater than 0"),
        (lambda: RBF(1.0, np.nan), "variance must be greater than 0 and finite"),
        (lambda: RBF(real(1.0)), "lengthscale must stay positive"),
        (lambda: RBF(np.ones((2, 2))), r"lengthscale must be a number or a vector, but it has shape \(2, 2\)"),
        (lambda: RBF(np.ones(3), active_dims=(0, 1)), "lengthscale has 3 entries, but the kernel looks at 2"),
        (lambda: RBF(np.ones(3)).gram(jnp.ones((4, 2))), "lengthscale has 3 entries, but the kernel looks at 2"),
        (lambda: Linear(np.ones(3)).diagonal(jnp.ones((4, 2))), "variance has 3 entries"),
        (lambda: RBF(active_dims=()), "active_dims must name distinct columns"),
        (lambda: RBF(active_dims=(0, 0)), r"active_dims must name distinct columns.*\(0, 0\)"),
        (lambda: White(active_dims=(-1,)), "active_dims must name distinct columns, counted from 0"),
        (lambda: RBF(active_dims=(0, 2)).gram(jnp.ones((4, 2))), "reaches beyond the inputs, which have 2 columns"),
        (lambda: ArcCosine(3), "order must be a whole number from 0 to 2, but it is 3"),
        (lambda: ArcCosine(1, bias_variance=0.0), "bias_variance must be greater than 0"),
        (lambda: Polynomial(0), "degree must be a whole number from 1 to 100, but it is 0"),
        (lambda: Periodic(period=-1.0), "period must be greater than 0"),
        (lambda: Sum(), "Sum needs at least one kernel"),
        (lambda: flattened(Product, (RBF(), 2.0)), r"Product takes kernels.*Constant\(2.0\)"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(build, message):
    with pytest.raises(SettingError, match=message):
        build()


@given(
    st.sampled_from([RBF, Matern12, Periodic, Linear, ArcCosine, NeuralNetwork, White, Constant]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.permutations(range(5)),
    st.integers(1, 5),
)
def test_shapes(kind, num1, num2, order, num_active):
    kernel = kind(active_dims=tuple(order[:num_active]))
    x, x2 = jnp.ones((num1, 5)), jnp.ones((num2, 5))
    assert jax.eval_shape(kernel.gram, x).shape == (num1, num1)
    assert jax.eval_shape(kernel.gram, x, x2).shape == (num1, num2)
    assert jax.eval_shape(kernel.diagonal, x).shape == (num1,)


@given(st.floats(max_value=0.0, allow_nan=False), st.sampled_from(["lengthscale", "variance"]))
def test_hyperparameters_must_be_positive(value, name):
    with pytest.raises(SettingError, match=f"{name} must be greater than 0"):
        Matern52(**{name: value})


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=4))
def test_active_dims_work_or_are_refused(dims):
    fits = len(set(dims)) == len(dims) and all(0 <= dim < 5 for dim in dims)
    refusal = contextlib.nullcontext() if fits else pytest.raises(SettingError, match="active_dims")
    with refusal:
        jax.eval_shape(RBF(active_dims=tuple(dims)).gram, jnp.ones((2, 5)))
