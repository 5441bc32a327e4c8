"""Is the posterior of a deep GP Gaussian? Kurtosis tests on draws of the inducing values.

Havasi et al. (2018, Figure 1) reject it on every dataset: among 100 inducing values a dataset, some have p-values below
1e-5. That threshold already accounts for testing many. A model of one layer is the check of the test itself: its
posterior is Gaussian. Chains start at draws of the prior, so that they can end in different modes; how many coordinates
have chains that disagree stands beside the p-values, because chains that are too short disagree as well.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fathomgp._version import __version__
from fathomgp.bench._figures import save_figure
from fathomgp.bench._results import ResultFile
from fathomgp.data import Dataset, load_dataset, standard_split
from fathomgp.diagnostics import coordinate_r_hat, kurtosis_p_values
from fathomgp.estimators import DeepGPRegressor
from fathomgp.inference import SGHMC
from fathomgp.plots import BLUE, GREY

THRESHOLD = 1e-5
COLUMNS = (
    "dataset",
    "depth",
    "settings",
    "tested",
    "draws",
    "smallest_p",
    "below_threshold",
    "apart",
    "p_values",
    "version",
)
KEY = ("dataset", "depth", "settings")


def open_gaussianity_results(path: str | os.PathLike[str]) -> ResultFile:
    """The file of results, with what earlier runs put there."""
    return ResultFile(path, COLUMNS, KEY)


def gaussianity_key(dataset: str, depth: int, inference: SGHMC) -> dict[str, Any]:
    """The columns of :data:`KEY`."""
    settings = f"{inference.burn_in}+{inference.sampling} steps, {inference.chains} chains"
    settings += " from the prior" if inference.start == "prior" else ""
    return {"dataset": dataset, "depth": depth, "settings": settings}


def judge_gaussianity(name: str, depth: int, inference: SGHMC, *, num_inducing: int = 100) -> dict[str, Any]:
    """Sample the posterior on the training part of split 0 and test 100 of its coordinates."""
    dataset: Dataset = load_dataset(name)
    train, _ = standard_split(dataset, 0)
    assert dataset.Y is not None
    estimator = DeepGPRegressor(inference, depth=depth, num_inducing=num_inducing, random_state=0)
    estimator.fit(dataset.X[train].astype(float), dataset.Y[train, 0])
    draws = inducing_values(estimator.posterior_)
    p_values, r_hat = kurtosis_p_values(draws), coordinate_r_hat(draws)
    return gaussianity_key(name, depth, inference) | {
        "tested": len(p_values),
        "draws": draws.shape[0] * draws.shape[1],
        "smallest_p": float(f"{p_values.min():.3g}"),
        "below_threshold": int(np.sum(p_values < THRESHOLD)),
        "apart": int(np.sum(r_hat > 1.1)),  # coordinates whose chains disagree: several modes, or too short
        "p_values": " ".join(f"{p:.3g}" for p in np.sort(p_values)),
        "version": __version__,
    }


def inducing_values(posterior: Any) -> np.ndarray:
    """The values Lz v of all layers side by side: (chains, draws, all coordinates)."""
    layers = []
    for whitener, v in zip(posterior.whiteners, posterior.v, strict=True):
        factor = np.linalg.inv(np.asarray(whitener.inverse_factor))
        factors = np.broadcast_to(factor, (v.shape[-1], *factor.shape[-2:]))  # outputs may have their own, or share
        layers.append(np.einsum("pmn,cdnp->cdmp", factors, np.asarray(v)).reshape(*v.shape[:2], -1))
    return np.concatenate(layers, axis=2)


def save_gaussianity_figure(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> pathlib.Path:
    """The p-values of every dataset on a logarithmic axis, with the threshold: Figure 1 (right) of the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.1 * len(rows), 4.0), layout="constrained")
    ax = figure.subplots()
    for place, row in enumerate(rows):
        p_values = np.maximum(np.array(str(row["p_values"]).split(), float), 1e-20)
        offsets = np.linspace(-0.25, 0.25, len(p_values))
        ax.plot(place + offsets, p_values, ".", ms=4, color=GREY if int(row["depth"]) == 1 else BLUE)
    ax.axhline(THRESHOLD, color="black", lw=0.8, ls="--")
    ax.set(yscale="log", ylabel="p-value of a Gaussian")
    ax.set_xticks(range(len(rows)), [f"{row['dataset']}\n{row['depth']} layer(s)" for row in rows])
    return save_figure(figure, path)
