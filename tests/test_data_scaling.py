"""Standardising, mergeable moments, splits and generated data."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from fathomgp.data._generated import step_function, step_truth
from fathomgp.data._named import Dataset
from fathomgp.data._scaling import Moments, Standardizer
from fathomgp.data._splits import k_fold, random_split, standard_split
from fathomgp.errors import DataError, SettingError


def two_pass(X):
    mean = X.mean(axis=0)
    return mean, X.std(axis=0)


class TestMoments:
    @given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([0.0, 1.0, 1e3]), st.integers(0, 99))
    def test_blocks_equal_two_passes(self, sizes, offset, seed):
        rng = np.random.default_rng(seed)
        blocks = [offset + rng.standard_normal((size, 3)) for size in sizes]
        moments = Moments.empty(3)
        for block in blocks:
            moments = moments.update(block)
        X = np.concatenate(blocks)
        assert moments.count.tolist() == [len(X)] * 3
        if len(X):
            mean, std = two_pass(X)
            np.testing.assert_allclose(moments.mean, mean, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(moments.std, std, rtol=1e-12, atol=1e-12)

    def test_merging_does_not_depend_on_the_order(self, rng):
        parts = [Moments.of(rng.standard_normal((size, 2)) * 100.0) for size in (3, 50, 7)]
        left = parts[0].merge(parts[1]).merge(parts[2])
        right = parts[2].merge(parts[0].merge(parts[1]))
        for a, b in zip((left.count, left.mean, left.M2), (right.count, right.mean, right.M2), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)

    def test_weights_count_rows_and_masks_drop_entries(self, rng):
        X = rng.standard_normal((6, 2))
        weight = np.array([0.0, 1.0, 2.0, 1.0, 3.0, 0.0])
        repeated = Moments.of(np.repeat(X, weight.astype(int), axis=0))
        weighted = Moments.of(np.where(weight[:, None] > 0, X, np.nan), weight=weight)
        np.testing.assert_allclose(weighted.mean, repeated.mean, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(weighted.std, repeated.std, rtol=1e-12)


class TestStandardizer:
    def test_zero_mean_unit_variance_and_back(self, rng):
        X = rng.standard_normal((50, 3)) * np.array([1e-6, 1.0, 1e6]) + np.array([0.0, -5.0, 1e6])
        scaler = Standardizer.fit(X)
        Z = scaler.transform(X)
        np.testing.assert_allclose(Z.mean(axis=0), 0.0, atol=1e-12)
        np.testing.assert_allclose(Z.std(axis=0), 1.0, rtol=1e-12)
        np.testing.assert_allclose(scaler.inverse(Z), X, rtol=1e-12, atol=1e-18)

    @pytest.mark.parametrize("value", [0.0, 7.0, 0.1, -1e9, 1e-300, 1e300])
    def test_constant_columns_become_zeros(self, value):
        X = np.full((101, 1), value)
        scaler = Standardizer.fit(X)
        assert scaler.scale[0] == 1.0
        np.testing.assert_allclose(scaler.transform(X), 0.0, atol=4 * np.finfo(float).eps * abs(value))

    def test_rounding_is_not_variation(self, rng):
        X = 1e9 * (1.0 + np.finfo(float).eps * rng.integers(-2, 3, (40, 1)))
        assert Standardizer.fit(X).scale[0] == 1.0

    def test_small_variation_on_a_large_offset_is(self, rng):
        small = rng.standard_normal((500, 1))
        X = 1e9 + small
        np.testing.assert_allclose(Standardizer.fit(X).scale, (X - 1e9).std(axis=0), rtol=1e-12)
        np.testing.assert_allclose(Standardizer.fit(X).scale, small.std(axis=0), rtol=1e-6)

    def test_missing_outputs_are_ignored(self, rng):
        Y = rng.standard_normal((30, 2))
        observed = np.ones(Y.shape, bool)
        observed[10:, 1] = False
        scaler = Standardizer.fit(np.where(observed, Y, np.nan), observed)
        np.testing.assert_allclose(scaler.shift, [Y[:, 0].mean(), Y[:10, 1].mean()], rtol=1e-10)
        np.testing.assert_allclose(scaler.scale, [Y[:, 0].std(), Y[:10, 1].std()], rtol=1e-10)

    def test_a_column_without_data_is_left_alone(self):
        scaler = Standardizer.fit(np.full((3, 1), np.nan), np.zeros((3, 1), bool))
        assert (scaler.shift[0], scaler.scale[0]) == (0.0, 1.0)

    def test_values_too_large_to_square(self):
        with pytest.raises(DataError, match=r"column 1 are too large to be squared.*larger unit"):
            Standardizer.fit(np.array([[1.0, 1e200], [2.0, -1e200]]))

    def test_dtype_and_kind_follow_the_input(self, dtype, rng):
        scaler = Standardizer.fit(rng.standard_normal((9, 2)))
        x = rng.standard_normal((4, 2)).astype(dtype)
        assert isinstance(scaler.transform(x), np.ndarray)
        assert scaler.transform(x).dtype == dtype
        z = eqx.filter_jit(lambda s, v: s.transform(v))(scaler, jnp.asarray(x))
        assert z.dtype == dtype
        np.testing.assert_allclose(z, scaler.transform(x), rtol=1e-5)
        assert scaler.inverse(z).dtype == dtype

    def test_identity(self, rng):
        x = rng.standard_normal((4, 3))
        np.testing.assert_array_equal(Standardizer.identity(3).transform(x), x)
        np.testing.assert_array_equal(Standardizer.identity(3).inverse(x), x)


class TestSplits:
    def dataset(self, test_idx):
        X = np.zeros((6, 1))
        return Dataset("toy", X, X, "real", test_idx, None, None, "", "")

    def test_standard_split(self):
        train, test = standard_split(self.dataset(np.array([[0, 1], [5, 2]], np.int32)), 1)
        assert train.tolist() == [0, 1, 3, 4]
        assert test.tolist() == [5, 2]

    def test_standard_split_refusals(self):
        with pytest.raises(DataError, match="toy has no published splits: use random_split or k_fold"):
            standard_split(self.dataset(None), 0)
        for index in (-1, 2):
            with pytest.raises(SettingError, match=f"toy has the splits 0 to 1, but split {index} was asked for"):
                standard_split(self.dataset(np.array([[0, 1], [5, 2]])), index)

    @given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 5))
    def test_random_split_is_a_partition(self, n, fraction, seed):
        train, test = random_split(n, fraction, seed)
        assert sorted([*train, *test]) == list(range(n))
        assert len(train) >= 1
        assert len(test) >= 1
        assert abs(len(test) - n * fraction) <= 1.0
        np.testing.assert_array_equal(random_split(n, fraction, seed)[1], test)

    @given(st.integers(2, 40), st.integers(2, 10), st.integers(0, 5))
    def test_k_fold_tests_every_row_once(self, n, folds, seed):
        folds = min(folds, n)
        pairs = k_fold(n, folds, seed)
        assert sorted(np.concatenate([test for _, test in pairs])) == list(range(n))
        assert all(sorted([*train, *test]) == list(range(n)) for train, test in pairs)
        sizes = [len(test) for _, test in pairs]
        assert max(sizes) - min(sizes) <= 1

    def test_refusals(self):
        with pytest.raises(SettingError, match="test_fraction must lie between 0 and 1, but it is 1"):
            random_split(10, 1.0, 0)
        with pytest.raises(DataError, match="1 rows cannot be split"):
            random_split(1, 0.5, 0)
        with pytest.raises(SettingError, match=r"folds must lie between 2 and the number of rows \(3\), but it is 4"):
            k_fold(3, 4, 0)


class TestStepFunction:
    def test_the_closed_form_is_the_integral(self):
        for x in (0.0, 0.09, 0.1, 0.17, 0.33, 0.395, 0.41, 0.6):

            def integrand(y, x=x):
                gauss = np.exp(-((x - y) ** 2) / 2e-4) / np.sqrt(2e-4 * np.pi)
                return gauss * np.sin(np.pi * (y - 0.25) / 0.15)

            expected, _ = quad(integrand, 0.1, 0.4, points=[min(max(x, 0.1), 0.4)], epsabs=1e-13, limit=200)
            np.testing.assert_allclose(step_truth(np.array([x]))[0], expected, atol=1e-11)

    def test_steps(self):
        x = np.array([0.6001, 0.75, 0.7501, 0.9, 0.9001, 1.0])
        assert step_truth(x).tolist() == [-1.0, -1.0, 1.0, 1.0, 0.0, 0.0]

    def test_observations(self, seed):
        X, y = step_function(seed=seed)
        assert X.shape == (200, 1)
        assert (X[0, 0], X[-1, 0]) == (0.0, 1.0)
        residual = y - step_truth(X[:, 0])
        assert 0.01 < residual.std() < 0.03
        np.testing.assert_array_equal(step_function(seed=seed)[1], y)
        np.testing.assert_array_equal(step_function(n=7, noise_std=0.0)[1], step_truth(np.linspace(0.0, 1.0, 7)))
