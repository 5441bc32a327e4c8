"""From what a fit is given, arrays or a stream, to a source in standard units."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike

from fathomgp.data import AbstractSource, ArraySource, ParquetSource, Standardizer, Targets
from fathomgp.errors import DataError, DataWarning, SettingError
from fathomgp.estimators._settings import Method
from fathomgp.likelihoods import AbstractLikelihood
from fathomgp.linalg import default_policy
from fathomgp.notices import tell

#: k-means and PCA look at so many rows at most.
_RECIPE_ROWS = 20_000


class Prepared(NamedTuple):
    """Data ready for a fit.

    Attributes:
        source: rows in standard units.
        sample: inputs of some of them, for recipes.
        x_scaler: from the user's inputs to standard ones.
        y_scaler: the same for the targets.
        target_names: their names, if they have any.
        squeeze: whether y has one dimension.
    """

    source: AbstractSource
    sample: np.ndarray
    x_scaler: Standardizer
    y_scaler: Standardizer
    target_names: list[str] | None
    squeeze: bool


def prepare_arrays(
    X: np.ndarray,
    targets: Targets,
    likelihood: AbstractLikelihood,
    *,
    dtype: Any,
    seed: int,
    noise: np.ndarray | None = None,
) -> Prepared:
    """Arrays, standardised and held in memory. ``noise``: known variances of the targets."""
    x_scaler, y_scaler = Standardizer.fit(X), Standardizer.identity(targets.Y.shape[1])
    if likelihood.scales_targets:
        y_scaler = Standardizer.fit(targets.Y, targets.observed)
    scaled = np.where(targets.observed, y_scaler.transform(targets.Y), 0.0)
    inputs = np.asarray(x_scaler.transform(X))
    if noise is not None:
        noise = np.where(targets.observed, noise / np.asarray(y_scaler.scale) ** 2, 1.0)
        noise = np.asarray(raised_to_nugget(noise, "noise_variance", dtype))
    source = ArraySource(inputs, scaled, targets.observed, noise=noise, dtype=dtype)
    sample = inputs if len(inputs) <= _RECIPE_ROWS else source.subset(_RECIPE_ROWS, seed=seed)[0]
    names = None if targets.names is None else list(targets.names)
    return Prepared(source, sample, x_scaler, y_scaler, names, targets.squeeze)


def raised_to_nugget(variance: ArrayLike, name: str, dtype: Any) -> ArrayLike:
    """Noise variances in standard units, but none that is less than what every factorisation adds."""
    nugget = default_policy(dtype).first
    if np.any(np.asarray(variance) < nugget):
        tell(
            f"{name} is less than {nugget:g} of the variance of y, the least that factorises: that much is taken.",
            DataWarning,
            stacklevel=6,
        )
    return np.maximum(variance, nugget)


def prepare_stream(stream: ParquetSource, likelihood: AbstractLikelihood, *, dtype: Any, seed: int) -> Prepared:
    """A stream, standardised as it is read."""
    x_moments, y_moments = stream.moments()
    x_scaler, y_scaler = Standardizer.from_moments(x_moments), Standardizer.identity(stream.num_outputs)
    if likelihood.scales_targets:
        y_scaler = Standardizer.from_moments(y_moments)
    encoder = _label_encoder(stream) if likelihood.target_kind == "class" else y_scaler
    source = stream.standardized(x_scaler, encoder, dtype)
    x, y, _ = source.subset(_RECIPE_ROWS, seed=seed)
    if likelihood.target_kind != "class":
        likelihood.check_targets(np.asarray(y_scaler.inverse(y.astype(np.float64))))
    return Prepared(source, x.astype(np.float64), x_scaler, y_scaler, list(stream.target_names), stream.squeeze)


def check_stream(stream: ParquetSource, y: Any, name: Any, method: Method) -> None:
    """Refuse a fit to a stream that cannot be."""
    if y is not None:
        raise SettingError("A stream holds its own target: name it as the stream's target, and leave y out.")
    if not method.uses_batches:
        raise SettingError(
            f"method={name!r} needs all rows in memory, but a stream hands them over in batches: choose method='dsvi'."
        )


def stream_classes(stream: ParquetSource) -> np.ndarray:
    """The labels of a stream's target: equally spaced numbers, whole ones as such."""
    labels, name = stream.labels(), stream.target_names[0]
    if stream.num_outputs != 1 or labels is None or len(labels) < 2:
        raise DataError(f"The target {name!r} holds no labels of two or more classes: use DeepGPRegressor for numbers.")
    if len(np.unique(np.diff(labels))) > 1:
        found = ", ".join(f"{label:g}" for label in labels[:10])
        raise DataError(f"The labels of {name!r} are {found}: number them 0, 1, 2, ...")
    return labels.astype(np.int64) if np.all(labels == np.floor(labels)) else labels


def _label_encoder(stream: ParquetSource) -> Standardizer:
    """The map from labels to 0, 1, ..."""
    classes = stream_classes(stream).astype(np.float64)
    return Standardizer(classes[:1], np.diff(classes)[:1])
