"""Reading saved estimators."""

import os
from typing import Any

from fathomgp.errors import ModelFileError
from fathomgp.estimators._classifier import DeepGPClassifier
from fathomgp.estimators._regressor import DeepGPRegressor
from fathomgp.persistence import load_bundle
from fathomgp.precision import double_precision

_ESTIMATORS = {cls.__name__: cls for cls in (DeepGPRegressor, DeepGPClassifier)}


@double_precision
def load(path: str | os.PathLike) -> Any:
    """The estimator that ``save`` wrote to the directory ``path``, ready to predict.

    Damaged, truncated, foreign and newer files are refused with a :class:`~fathomgp.errors.ModelFileError`; nothing in
    a file is executed.
    """
    content = load_bundle(path, "model")
    cls = _ESTIMATORS.get(content.get("estimator")) if isinstance(content, dict) else None
    if cls is None:
        raise ModelFileError(f"{path} holds no estimator that this version of fathomgp knows.")
    estimator = cls(**content["params"])
    for name, value in content["fitted"].items():
        setattr(estimator, name, value)
    return estimator
