"""What a fitted estimator is, in words and in the user's units."""

from typing import Any

import numpy as np

from fathomgp.likelihoods import Gaussian
from fathomgp.precision import double_precision


def describe_fit(estimator: Any, *, rows: int, held_out: int) -> dict[str, Any]:
    """Name to value: the data, the model, the time it took and the noise it found."""
    model = estimator.model_
    inducing = max(layer.num_inducing for layer in model.layers)
    summary = {
        "rows": f"{rows:,}",
        "fitted to": f"all {rows:,} rows" if held_out == 0 else f"{rows - held_out:,} rows ({held_out:,} held out)",
        "inputs": estimator.n_features_in_,
        "method": str(estimator.method),
        "depth": model.depth,
        "kernel": str(estimator.kernel),
        "steps": estimator.n_iter_,
        "seconds": round(estimator.fit_seconds_, 1),
    }
    if hasattr(estimator, "classes_"):
        summary["classes"] = len(estimator.classes_)
    if inducing:
        summary["inducing points"] = inducing
    noise = noise_std(estimator)
    if noise is not None:
        names = estimator.target_names_ if len(noise) > 1 else [""]
        summary |= {f"noise std {name}".strip(): float(value) for name, value in zip(names, noise, strict=True)}
    return summary


@double_precision
def noise_std(estimator: Any) -> np.ndarray | None:
    """The standard deviation of Gaussian noise for every output, in its own units; ``None`` for other noise."""
    likelihood = estimator.model_.likelihood
    if not isinstance(likelihood, Gaussian):
        return None
    return np.sqrt(np.asarray(likelihood.variance.value)) * estimator.y_scaler_.scale


@double_precision
def lengthscales(estimator: Any) -> np.ndarray | None:
    """One lengthscale an input, of the first layer, for scaled inputs; ``None`` if its kernel has none.

    Where outputs have kernels of their own, the shortest: an input matters if it matters to any of them.
    """
    parameter = getattr(estimator.model_.layers[0].kernel, "lengthscale", None)
    if parameter is None or parameter.shape[-1:] != (estimator.n_features_in_,):
        return None
    return np.asarray(parameter.value).reshape(-1, estimator.n_features_in_).min(axis=0)
