"""Learning on: rows that come after the fit, one or a block at a time."""

from typing import Any

import numpy as np
from sklearn.utils.metaestimators import available_if

from fathomgp.data import Targets
from fathomgp.errors import DataError, SettingError
from fathomgp.estimators._settings import LEARN_ON, find_method, key_for
from fathomgp.inference import SequentialPosterior
from fathomgp.precision import double_precision

#: Scales and hyperparameters come from the first block: fewer rows cannot tell them.
FEWEST_FIRST_ROWS = 10


def _learns_on(estimator: Any) -> bool:
    """Whether the method can learn more rows without a new fit; scikit-learn shows the sentence if not."""
    try:
        able = find_method(estimator.method)[0].grows
    except SettingError:
        able = False
    if not able:
        raise AttributeError(
            f"partial_fit needs method='sequential', but the method is {estimator.method!r}, which learns from all "
            "rows at once: use fit."
        )
    return True


class LearnsOn:
    """``partial_fit`` for estimators whose method is sequential.

    The first block, or an earlier :meth:`fit`, fixes the scales of inputs and targets and the hyperparameters; rows
    that follow update what the layers know, at a cost that does not depend on what came before.
    """

    @available_if(_learns_on)
    @double_precision
    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Any:
        """Learn more rows: one, or a block. Only for ``method="sequential"``.

        Args:
            X: inputs. The first block needs some rows (10 at least) to tell scales and hyperparameters.
            y: targets; NaN is missing where ``missing="mask"``.
            classes: all labels that may ever come, for the first block of a classifier; that block's own by default.
        """
        if hasattr(self, "posterior_"):
            self._predict_then_learn(X, y)
            return self
        if len(X) < FEWEST_FIRST_ROWS:
            raise DataError(
                f"The first block tells scales and hyperparameters, and {len(X)} rows are too few for that: begin with "
                f"{FEWEST_FIRST_ROWS} rows or more; later calls take any number."
            )
        return self._first_block(X, y, classes)  # type: ignore[attr-defined]

    @double_precision
    def _predict_then_learn(self, X: Any, y: Any, *, predict: bool = False) -> dict[str, np.ndarray]:
        """Learn rows; returns mean, std and log density of each before it was learned, in the units of y."""
        posterior: Any = self.posterior_  # type: ignore[has-type]
        if not isinstance(posterior, SequentialPosterior):
            raise SettingError("This estimator was fitted with another method: fit it again with method='sequential'.")
        inputs = self._read(X)  # type: ignore[attr-defined]
        targets: Targets = self._read_more_targets(y, len(inputs))  # type: ignore[attr-defined]
        scaler = self.y_scaler_  # type: ignore[attr-defined]
        if targets.Y.shape[1] != len(scaler.shift):
            raise DataError(f"y has {targets.Y.shape[1]} outputs, but the fit had {len(scaler.shift)}.")
        x = np.asarray(self.x_scaler_.transform(inputs), self._dtype)  # type: ignore[attr-defined]
        scaled = np.where(targets.observed, scaler.transform(targets.Y), 0.0).astype(x.dtype)
        key = key_for(self._seed, LEARN_ON)  # type: ignore[attr-defined]
        self.posterior_, rows = posterior.learn(x, scaled, targets.observed, key=key, predict=predict)
        units = np.where(targets.observed, np.log(scaler.scale), 0.0).sum(axis=1)
        return {
            "mean": np.asarray(scaler.inverse(rows.mean)),
            "std": np.sqrt(rows.variance) * scaler.scale[None, :],
            "log_density": rows.log_density - units,
        }
