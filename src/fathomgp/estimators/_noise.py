"""Gaussian noise whose size the user tells."""

import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from fathomgp._checks import shown
from fathomgp.data import ArraySource
from fathomgp.errors import DataError, SettingError
from fathomgp.estimators._prepare import Prepared, raised_to_nugget
from fathomgp.estimators._settings import Method
from fathomgp.likelihoods import AbstractLikelihood, Gaussian
from fathomgp.likelihoods._gaussian import SMALLEST_VARIANCE
from fathomgp.linalg import default_policy
from fathomgp.parameters import positive


def check_noise(noise: Any, likelihood: AbstractLikelihood, name: Any, method: Method) -> None:
    """Refuse a ``noise`` that is none, and one that the likelihood or the method cannot have."""
    if isinstance(noise, str) and noise == "learn":
        return
    number = isinstance(noise, numbers.Real) and not isinstance(noise, bool | np.bool_)
    if not number and not (isinstance(noise, str) and noise == "none"):
        raise SettingError(
            f"noise must be 'learn', 'none' or one number, the variance in units of y squared, but it is "
            f"{shown(noise)}: variances of each row go to fit(X, y, noise_variance=...)."
        )
    if number and not (noise > 0 and np.isfinite(float(noise))):
        none = ": noise='none' stands for no noise" if noise == 0 else ""
        raise SettingError(f"noise is a variance and must be positive and finite, but it is {shown(noise)}{none}.")
    refuse_other_noise(f"noise={shown(noise)}", likelihood)
    if not method.fixes_noise:
        raise SettingError(f"method={shown(name)} learns its noise and cannot be told it: leave noise='learn'.")


def refuse_other_noise(what: str, likelihood: AbstractLikelihood) -> None:
    """Only Gaussian noise has one variance to be told."""
    if not isinstance(likelihood, Gaussian):
        kind = type(likelihood).__name__
        raise SettingError(f"{what} is for Gaussian noise, but the likelihood is {kind}: leave noise='learn'.")


def check_noise_of_rows(noise: Any, likelihood: AbstractLikelihood, name: Any, method: Method) -> None:
    """Refuse known variances beside another word on the noise, or where nobody can use them."""
    if not (isinstance(noise, str) and noise == "learn"):
        raise SettingError(f"noise={shown(noise)} and noise_variance both tell the noise: leave one of them out.")
    refuse_other_noise("noise_variance", likelihood)
    if not method.noise_of_rows:
        raise SettingError(
            f"method={shown(name)} knows no noise variances of rows: use method='exact' or 'dsvi', "
            "or one number, noise=..."
        )


def read_noise_variance(noise_variance: Any, shape: tuple[int, int], observed: np.ndarray | None = None) -> np.ndarray:
    """Known variances (N, P), in units of y squared, one a row or one a row and output; only those observed matter."""
    try:
        values = np.asarray(noise_variance, np.float64)
    except Exception:
        raise DataError(f"noise_variance must hold numbers, but it is {shown(noise_variance)}.") from None
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or values.shape[0] != shape[0] or values.shape[1] not in (1, shape[1]):
        raise DataError(
            f"noise_variance has the shape {np.shape(noise_variance)}, but there are {shape[0]} rows and {shape[1]} "
            "outputs: give one variance a row, or one a row and output."
        )
    values = np.broadcast_to(values, shape)
    wrong = ~(np.isfinite(values) & (values > 0.0)) & (True if observed is None else observed)
    if np.any(wrong):
        row = int(np.flatnonzero(np.any(wrong, axis=1))[0])
        found = values[row][wrong[row]][0]
        raise DataError(f"noise_variance must be positive and finite, but it is {found:g} in row {row}.")
    return values


def stand_in(data: Prepared) -> AbstractLikelihood:
    """The model's own noise where that of every row is known: their geometric mean, for whatever needs one number."""
    assert isinstance(data.source, ArraySource)
    noise, observed = data.source.noise, data.source.observed
    assert noise is not None
    return frozen_gaussian(float(np.exp(np.mean(np.log(noise[observed])))))


def with_noise(
    likelihood: AbstractLikelihood, noise: Any, data: Prepared, dtype: Any, method: Method
) -> AbstractLikelihood:
    """The likelihood whose noise, a constant, has the size that was told."""
    if isinstance(data.source, ArraySource) and data.source.noise is not None:
        return stand_in(data)
    if isinstance(noise, str) and noise == "learn":
        return likelihood
    scale = np.asarray(data.y_scaler.scale, np.float64)
    if isinstance(noise, str):
        nugget = default_policy(dtype).first
        # Steps of fewer inducing points than rows divide by it: below this, some were not finite.
        nugget = max(nugget, SMALLEST_VARIANCE) if method.uses_inducing else nugget
        _check_answers_agree(data, float(np.sqrt(nugget)))
        return frozen_gaussian(nugget)
    # One number where it can be one: outputs that share it share a factorisation.
    variance = float(noise) / (scale[0] if np.ptp(scale) == 0.0 else scale) ** 2
    return frozen_gaussian(raised_to_nugget(variance, f"noise={noise:g}", dtype))


def frozen_gaussian(variance: ArrayLike) -> Gaussian:
    """Gaussian noise that is not learned; it may be smaller than noise that is."""
    return Gaussian(positive(jnp.asarray(variance), name="noise", trainable=False))


def _check_answers_agree(data: Prepared, tolerance: float) -> None:
    """Refuse rows with the same inputs and different outputs: no function without noise goes through them."""
    source = data.source
    if not isinstance(source, ArraySource):
        raise SettingError(
            "noise='none' must see that no two rows contradict each other, which a stream does not show: give the "
            "smallest noise that you believe in as a number."
        )
    place = np.unique(source.x, axis=0, return_inverse=True)[1].ravel()
    order = np.argsort(place, kind="stable")
    for y, seen in zip(source.y.T, source.observed.T, strict=True):
        rows = order[seen[order]]
        same = (np.diff(place[rows]) == 0) & (np.abs(np.diff(y[rows])) > tolerance)
        if np.any(same):
            first = int(np.flatnonzero(same)[0])
            one, other = rows[first], rows[first + 1]
            raise DataError(
                f"noise='none' needs one y at each place, but rows {one} and {other} have the same inputs and "
                "different y: average such rows, or use noise='learn'."
            )
