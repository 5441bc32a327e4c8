"""Functions that stand for computer codes: their published values, their boxes, and reproducible designs."""

import numpy as np
import pytest

from fathomgp.data import COMPUTER_CODES, computer_runs, nearly_noiseless
from fathomgp.errors import SettingError

# By hand, at simple inputs.
CASES = {
    "wing-weight": ([1.0, 1.0, 1.0, 60.0, 1.0, 1.0, 0.01, 1.0, 1.0, 2.0], 0.036 * 4.0**0.6 * 2.0**-0.3 + 2.0),
    "friedman": ([0.5, 1.0, 1.0, 0.2, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9], 10.0 + 5.0 + 2.0 + 2.0),
    "dette-pepelyshev": ([0.0] * 3 + [0.0] * 5, 4 * 4.0 + 9.0 + 16.0),
    "borehole": ([1.0, np.e, 2.0, 5.0, 2.0, 2.0, 1.0, 4.0], 2 * np.pi * 2.0 * 3.0 / (1.0 + 1.0 + 1.0)),
    "otl-circuit": ([1.0, 1.0, 1.0, 1.0, 1.0, 0.1], (6.74 + 11.35 + 0.74) / 2.0),
    # A = 2 + 19.62 - 0.62 = 21, gas = 1, volume = (sqrt(441 + 2.48) - 21) / 1.24
    "piston": (
        [1.0, 1.0, 1.0, 0.62, 2.0, 1.0, 2.0],
        2 * np.pi / np.sqrt(0.62 + (1.24 / (np.sqrt(21.0**2 + 4 * 0.62) - 21.0)) ** 2),
    ),
}


@pytest.mark.parametrize("name", COMPUTER_CODES)
def test_values(name):
    x, y = CASES[name]
    np.testing.assert_allclose(COMPUTER_CODES[name].function(np.array([x])), [y], rtol=1e-5)


def test_a_wing_without_paint_is_a_product_of_powers():
    exponents = [0.758, 0.0035, 0.6, 0.0, 0.006, 0.04, -0.3, 0.49, 0.49]
    wing = np.array([174.0, 252.0, 7.5, 0.0, 34.0, 0.7, 0.12, 3.8, 2000.0, 0.0])
    twice = np.where(np.eye(9, 10, dtype=bool), 2.0 * wing, wing)
    wing_weight = COMPUTER_CODES["wing-weight"].function
    np.testing.assert_allclose(wing_weight(twice) / wing_weight(wing[None]), np.exp2(exponents))


@pytest.mark.parametrize("name", COMPUTER_CODES)
def test_runs_fill_the_box_and_depend_on_the_seed_alone(name):
    code = COMPUTER_CODES[name]
    x, y, x_test, y_test = computer_runs(name, 50, seed=3, num_test=20)
    assert np.all(np.isfinite(y)), name
    assert y_test.shape == (20,)
    for inputs in (x, x_test):
        assert np.all((inputs >= code.lowest) & (inputs <= code.highest))
    strata = np.sort((x - code.lowest) / np.subtract(code.highest, code.lowest) * 50, axis=0)
    np.testing.assert_array_equal(np.floor(strata), np.arange(50.0)[:, None] + np.zeros(x.shape[1]))
    np.testing.assert_array_equal(computer_runs(name, 50, seed=3, num_test=20)[3], y_test)
    assert not np.array_equal(computer_runs(name, 50, seed=4)[1], y)


def test_an_unknown_code_is_refused_with_the_nearest_name():
    with pytest.raises(SettingError, match="borehole"):
        computer_runs("bore-hole", 10)


def test_noise_is_what_was_asked_for():
    x, _, x_test, y_test = nearly_noiseless(noise=0.1, seed=1)
    assert (len(x), len(x_test)) == (92, 1000)
    truth = np.sin(3 * x_test[:, 0]) + x_test[:, 1] * x_test[:, 2] + x_test[:, 3]
    assert 0.09 < np.std(y_test - truth) < 0.11
    np.testing.assert_array_equal(nearly_noiseless(noise=0.0, seed=1)[0], x)
