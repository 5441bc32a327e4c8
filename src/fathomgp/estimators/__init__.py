"""The scikit-learn face: DeepGPRegressor, and load for what it saved."""

from fathomgp.estimators._load import load as load
from fathomgp.estimators._regressor import DeepGPRegressor as DeepGPRegressor
