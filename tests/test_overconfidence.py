"""Answers that are too sure of themselves, on sets that no setting was chosen on; and the warning of wild cells."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.data import read_inputs, read_targets
from fathomgp.errors import DataWarning

waits = pytest.mark.xfail(strict=True, reason="issue 32")


def worst(method, problem, seeds):
    """Of several draws of a problem, for each by itself may do well."""
    return min(above_constant(method, *problem(np.random.default_rng(seed))) for seed in seeds)


def above_constant(method, x, y, rows):
    """Held-out log density per row, minus that of a Gaussian with the training targets' mean and deviation."""
    mean, sd = y[:rows].mean(), y[:rows].std()
    constant = -0.5 * np.log(2.0 * np.pi * sd**2) - 0.5 * ((y[rows:] - mean) / sd) ** 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DeepGPRegressor(method, random_state=0, verbose=False).fit(x[:rows], y[:rows])
    return np.mean(model.log_density(x[rows:], y[rows:]) - constant)


def wide(rng):
    x = rng.normal(size=(160, 300))
    return x, x[:, 0] + 0.1 * rng.normal(size=160), 60


def few(rng):
    x = rng.normal(size=(105, 3))
    return x, np.sin(2.0 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=105), 5


def one_wild_value(rng):
    x = rng.normal(size=(220, 3))
    y = np.sin(2.0 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=220)
    y[0] = 1e6
    return x, y, 120


def zero_or_one(rng):
    x = rng.normal(size=(220, 3))
    return x, (np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=220) > 0.0).astype(float), 120


@pytest.mark.parametrize("problem", [wide, pytest.param(few, marks=waits), pytest.param(one_wild_value, marks=waits)])
def test_the_exact_gp_is_no_worse_than_a_constant(problem, flag_off):
    assert worst("exact", problem, range(4)) > -0.75


@waits
@pytest.mark.slow
@pytest.mark.parametrize("problem", [wide, few, zero_or_one])
def test_dsvi_is_no_worse_than_a_constant(problem, flag_off):
    assert worst("dsvi", problem, range(3)) > -0.75


# --- the warning ------------------------------------------------------------------------------------------------------


def said(read, values):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(values)
    return [str(warning.message) for warning in caught if "look alike" in str(warning.message)]


def test_cells_that_dominate_their_column_are_named(rng):
    X = rng.normal(size=(50, 3))
    X[7, 1], X[9, 1] = 1e7, -1e8
    (message,) = said(read_inputs, X)
    assert message.startswith("Column 1 of X holds -1e+08 in row 9 and 1 more, ")
    frame = pd.DataFrame(X, columns=["a", "b", "c"], index=pd.Index(range(2, 52), name="line"))
    assert said(read_inputs, frame)[0].startswith("Column 'b' of X holds -1e+08 in line 11 and 1 more")
    (message,) = said(read_targets, X[:, 1])
    assert message.startswith("y holds -1e+08 in row 9")
    y = X[:, 0].copy()
    y[3], y[5] = np.nan, 1e9 + 1e16
    assert said(lambda y: read_targets(1e9 + y, missing="mask"), y)[0].startswith("y holds 1e+16 in row 5")
    with pytest.warns(DataWarning, match="Column 1 of X holds -1e"):
        read_inputs(X)


@pytest.mark.parametrize(
    "column",
    [
        np.eye(50)[0],  # a rare category is no wild value
        1e6 * np.eye(50)[0],
        np.arange(50.0),
        np.full(50, 3.0),
        1e9 + np.linspace(0.0, 1e-3, 50),
        np.geomspace(1.0, 1e5, 50),
        1e-12 * np.linspace(-1.0, 1.0, 50),
        np.random.default_rng(0).standard_cauchy(50),
    ],
)
def test_other_columns_get_no_warning(column):
    assert said(read_inputs, column[:, None]) == []


def test_every_fit_tells_of_a_wild_cell(rng, flag_off):
    X = rng.normal(size=(20, 2))
    y = X[:, 0].copy()
    X[4, 1], y[6] = 1e8, 1e9
    with pytest.warns(DataWarning):
        model = DeepGPRegressor("exact", max_iter=2, random_state=0, verbose=False).fit(X, y)
    told = [message for message in model.messages_ if "look alike" in message]
    assert [message.split(",")[0] for message in told] == [
        "Column 1 of X holds 1e+08 in row 4",
        "y holds 1e+09 in row 6",
    ]
