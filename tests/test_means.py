"""Mean functions and the linear maps of inner layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import means
from fathomgp.errors import DataError, SettingError
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model
from fathomgp.parameters import partition


@pytest.fixture
def x(rng, dtype):
    scales = np.array([1.0, 5.0, 0.1, 2.0])
    return jnp.asarray(3.0 + rng.normal(size=(50, 4)) * scales, dtype)


def test_zero(x):
    mean = means.Zero(3)
    assert mean.output_dim == 3
    np.testing.assert_array_equal(mean(x), np.zeros((50, 3)))
    assert mean(x).dtype == x.dtype


def test_constant(x):
    mean = means.Constant(np.array([1.0, -2.0]))
    assert mean.output_dim == 2
    np.testing.assert_array_equal(mean(x), np.tile([1.0, -2.0], (50, 1)))
    assert mean(x).dtype == x.dtype


def test_linear(x):
    weights, bias = np.arange(8.0).reshape(4, 2), np.array([1.0, 2.0])
    mean = means.Linear(weights, bias)
    assert mean.output_dim == 2
    np.testing.assert_allclose(mean(x), np.asarray(x) @ weights.astype(x.dtype) + bias.astype(x.dtype), rtol=1e-5)
    assert mean(x).dtype == x.dtype


def test_linear_is_fixed_unless_asked_otherwise():
    learned, _ = partition(means.Linear(np.eye(2)))
    assert not jax.tree.leaves(learned)
    learned, _ = partition(means.Linear(np.eye(2), np.ones(2), trainable=True))
    assert len(jax.tree.leaves(learned)) == 2


def test_identity_and_padding(x):
    np.testing.assert_array_equal(means.identity(4)(x), x)
    padded = means.padding(4, 6)(x)
    np.testing.assert_array_equal(padded[:, :4], x)
    np.testing.assert_array_equal(padded[:, 4:], np.zeros((50, 2)))


def test_pca_keeps_the_directions_of_largest_variance(x):
    mean = means.pca(x, 2)
    weights = np.asarray(mean.weights.value, np.float64)
    centred = np.asarray(x, np.float64) - np.asarray(x, np.float64).mean(axis=0)
    top = np.linalg.svd(centred)[2][:2].T
    np.testing.assert_allclose(np.abs(weights.T @ top), np.eye(2), atol=1e-5)
    assert np.all(weights[np.abs(weights).argmax(axis=0), [0, 1]] > 0)
    assert mean.weights.value.dtype == x.dtype
    np.testing.assert_allclose(mean(x), x @ mean.weights.value, rtol=1e-6)


def test_pca_of_fewer_points_than_outputs(rng):
    weights = means.pca(rng.normal(size=(2, 5)), 4).weights.value
    np.testing.assert_allclose(weights.T @ weights, np.eye(4), atol=1e-10)


def test_linear_map_fits_the_widths(x):
    assert np.array_equal(means.linear_map(x, 4).weights.value, np.eye(4))
    assert np.array_equal(means.linear_map(x, 6).weights.value, np.eye(4, 6))
    assert np.array_equal(means.linear_map(x, 2).weights.value, means.pca(x, 2).weights.value)
    assert all(means.linear_map(x, width).weights.value.dtype == x.dtype for width in (2, 4, 6))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: means.Zero(0), SettingError, "output_dim must be 1 or more, but it is 0"),
        (lambda: means.Constant(1.0), SettingError, r"value must be a vector.*shape \(\)"),
        (lambda: means.Linear(np.ones(3)), SettingError, r"weights must be a matrix.*shape \(3,\)"),
        (lambda: means.Linear(np.eye(2), np.ones(3)), SettingError, "bias must have 2 entries"),
        (lambda: means.identity(3)(jnp.ones((4, 2))), DataError, "takes 3 input columns, but x has 2"),
        (lambda: means.padding(3, 2), SettingError, r"cannot map 3 inputs to fewer outputs \(2\)"),
        (lambda: means.identity(0), SettingError, "input_dim must be 1 or more"),
        (lambda: means.pca(np.ones((4, 2)), 3), SettingError, r"cannot map 2 inputs to more outputs \(3\)"),
        (lambda: means.linear_map(np.ones((4, 2)), 0), SettingError, "output_dim must be 1 or more"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_linear_means_are_learned_where_all_layers_have_twelve_rows_a_weight(rng):
    def learned(rows, depth):
        model = build_model(rng.normal(size=(rows, 3)), Gaussian(0.1), 1, depth=depth, num_inducing=5)
        return [layer.mean.weights.trainable for layer in model.layers[:-1]]

    assert learned(12 * 9, 2) == [True]
    assert learned(12 * 9 - 1, 2) == [False]
    assert learned(12 * 9, 3) == [False, False]
    assert learned(12 * 18, 3) == [True, True]
