"""How good predictions are. NumPy in, numbers out, y in its own units; NaN in ``y_true`` means missing and is left out.

Scores of a distribution take the :class:`~fathomgp.predictive.Predictive`; scores of a point take the point.

Example:
    >>> import numpy as np
    >>> rmse(np.array([1.0, 2.0, np.nan]), np.array([1.0, 4.0, 0.0])).round(6).item()
    1.414214
"""

import numpy as np

from fathomgp.errors import DataError
from fathomgp.predictive import Predictive


def evaluate(predictive: Predictive, y_true: np.ndarray) -> dict[str, float]:
    """The usual scores of a regression by name: rmse, mae, log_density, crps, coverage_95 and smse."""
    point = predictive.mean()
    return {
        "rmse": float(rmse(y_true, point)),
        "mae": float(mae(y_true, point)),
        "smse": float(smse(y_true, point)),
        "log_density": float(mean_log_density(y_true, predictive)),
        "crps": float(crps(y_true, predictive)),
        "coverage_95": float(coverage(y_true, predictive, 0.95)),
    }


def rmse(y_true: np.ndarray, y_pred: np.ndarray) -> np.floating:
    """Root mean squared error, ``sqrt(mean (y - m)^2)``."""
    return np.sqrt(np.nanmean(_difference(y_true, y_pred) ** 2))


def mae(y_true: np.ndarray, y_pred: np.ndarray) -> np.floating:
    """Mean absolute error, ``mean |y - m|``."""
    return np.nanmean(np.abs(_difference(y_true, y_pred)))


def smse(y_true: np.ndarray, y_pred: np.ndarray) -> np.floating:
    """Standardised mean squared error, ``mean (y - m)^2 / var(y)``, averaged over outputs: 1 for the mean of y."""
    error = np.nanmean(_difference(y_true, y_pred) ** 2, axis=0)
    return np.mean(error / np.nanvar(np.asarray(y_true, np.float64), axis=0))


def mean_log_density(y_true: np.ndarray, predictive: Predictive) -> np.floating:
    """``mean log p(y)`` over rows with any observed output, jointly over outputs: high is good."""
    return np.mean(predictive.log_density(y_true)[_observed_rows(y_true)])


def nlpd(y_true: np.ndarray, predictive: Predictive) -> np.floating:
    """Negative log predictive density, ``-mean log p(y)``: low is good."""
    return -mean_log_density(y_true, predictive)


def msll(y_true: np.ndarray, predictive: Predictive, y_train: np.ndarray) -> np.floating:
    """Mean standardised log loss: :func:`nlpd` less that of ``N(mean(y_train), var(y_train))``. Negative is good.

    Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, section 2.5.
    """
    train, test = np.asarray(y_train, np.float64), np.asarray(y_true, np.float64)
    average, variance = np.nanmean(train, axis=0), np.nanvar(train, axis=0)
    trivial = 0.5 * np.log(2.0 * np.pi * variance) + 0.5 * (test - average) ** 2 / variance
    per_row = np.nansum(trivial.reshape(len(test), -1), axis=1)
    return nlpd(y_true, predictive) - np.mean(per_row[_observed_rows(y_true)])


def crps(y_true: np.ndarray, predictive: Predictive) -> np.floating:
    """Mean continuous ranked probability score, ``E|Y - y| - E|Y - Y'| / 2``, in the units of y: low is good."""
    return np.nanmean(predictive.crps(y_true))


def coverage(y_true: np.ndarray, predictive: Predictive, level: float = 0.95) -> np.floating:
    """The share of y within the central interval of that level: ``level`` itself when well calibrated."""
    y = np.asarray(y_true, np.float64)
    lower, upper = predictive.interval(level)
    inside = (_like(y, lower) <= y) & (y <= _like(y, upper))
    return np.mean(inside[~np.isnan(y)])


def calibration_error(y_true: np.ndarray, predictive: Predictive, num_levels: int = 19) -> np.floating:
    """Mean over levels ``q`` of ``|share of y with F(y) <= q - q|``: 0 when probabilities mean what they say."""
    probability = predictive.cdf(y_true)
    probability = probability[~np.isnan(probability)]
    levels = np.arange(1, num_levels + 1) / (num_levels + 1)
    return np.mean([abs(np.mean(probability <= level) - level) for level in levels])


def accuracy(y_true: np.ndarray, y_pred: np.ndarray) -> np.floating:
    """The share of right labels. ``y_pred`` holds labels, or class probabilities (N, K)."""
    labels = np.asarray(y_pred)
    labels = labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.ravel()
    return np.mean(labels == np.asarray(y_true).ravel())


def error_rate(y_true: np.ndarray, y_pred: np.ndarray) -> np.floating:
    """``1 -`` :func:`accuracy`."""
    return 1.0 - accuracy(y_true, y_pred)


def log_loss(y_true: np.ndarray, probabilities: np.ndarray) -> np.floating:
    """``-mean log p(y)`` of labels 0, ..., K-1 under class probabilities (N, K)."""
    return -np.mean(np.log(_of_label(y_true, probabilities)))


def brier(y_true: np.ndarray, probabilities: np.ndarray) -> np.floating:
    """Brier score, ``mean sum_k (p_k - 1[y = k])^2``, between 0 and 2."""
    table = np.asarray(probabilities, np.float64)
    return np.mean(np.sum(table**2, axis=1) - 2.0 * _of_label(y_true, table) + 1.0)


def auc(y_true: np.ndarray, probabilities: np.ndarray) -> float:
    """Area under the ROC curve from class probabilities (N, K); one against the rest, averaged, for K > 2."""
    from sklearn.metrics import roc_auc_score

    table = np.asarray(probabilities, np.float64)
    labels = np.asarray(y_true).ravel().astype(int)
    if table.shape[1] == 2:
        return float(roc_auc_score(labels, table[:, 1]))
    return float(roc_auc_score(labels, table, multi_class="ovr", labels=np.arange(table.shape[1])))


def _difference(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    y = np.asarray(y_true, np.float64)
    return y - _like(y, y_pred)


def _like(y: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """``answer`` in the shape of ``y``: (N,) and (N, 1) are the same thing, nothing else is."""
    values = np.asarray(answer, np.float64)
    if values.size != y.size or values.shape[0] != y.shape[0]:
        raise DataError(f"y_true has the shape {y.shape}, but the prediction has {values.shape}.")
    return values.reshape(y.shape)


def _observed_rows(y_true: np.ndarray) -> np.ndarray:
    y = np.asarray(y_true, np.float64)
    return ~np.all(np.isnan(y.reshape(len(y), -1)), axis=1)


def _of_label(y_true: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    labels = np.asarray(y_true).ravel().astype(int)
    return np.asarray(probabilities, np.float64)[np.arange(len(labels)), labels]
