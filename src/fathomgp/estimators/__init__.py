"""The scikit-learn face: DeepGPRegressor, DeepGPClassifier, and load for what they saved."""

from fathomgp.estimators._classifier import DeepGPClassifier as DeepGPClassifier
from fathomgp.estimators._gplvm import GPLVM as GPLVM
from fathomgp.estimators._load import load as load
from fathomgp.estimators._regressor import DeepGPRegressor as DeepGPRegressor
