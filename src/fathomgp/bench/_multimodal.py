"""A posterior with two modes, after Figure 2 and Table 1 of Havasi et al. (2018): sampling finds both, a Gaussian one.

Seven points on a step. Two layers explain them in two ways that mirror each other: the hidden function rises and the
second layer rises, or both fall. The hidden layer's prior mean is zero, so neither is preferred. The paper's points
are only in its picture; these are ours.

    mode A: f1(x_7) > f1(x_1),     mode B: f1(x_7) < f1(x_1)

Chains start at draws of the prior, in either mode; only a chain that goes from one to the other, and back, has mixed. A
path between the modes must pass f1(x_7) = f1(x_1), where both ends have one prediction: at best 0 for -1 and 1, which
with the noise variance s2 costs 1 / s2 nats. At 0.01 no chain at temperature 1 crosses.
"""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fathomgp.bench._figures import save_figure
from fathomgp.bench._results import ResultFile
from fathomgp.data import ArraySource
from fathomgp.fitting import fit_model
from fathomgp.inference import DSVI, SGHMC, AbstractPosterior, SampledPosterior
from fathomgp.kernels import kernel_from_name
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import freeze, real
from fathomgp.plots import BLUE, GREY, VERMILION
from fathomgp.precision import double_precision

X = np.linspace(-1.5, 1.5, 7)[:, None]
Y = np.array([-1.0, -1.0, -1.0, 0.0, 1.0, 1.0, 1.0])[:, None]

METHODS = {
    "sghmc": SGHMC(3000, 60_000, draws=600, chains=4, hyperparameters="fixed", start="prior"),
    "dsvi": DSVI(steps=2000, shallow_start=False, test_samples=200, inner_root=0.1),
}
COLUMNS = ("seed", "method", "mode_a", "mode_b", "modes_found", "crossings")
KEY = ("seed", "method")
#: A mode counts as found when so large a share of the draws is in it.
_FOUND = 0.02


def toy_model() -> DeepGP:
    """Two layers of width 1 with zero means and fixed hyperparameters; small noise."""

    def layer(z: np.ndarray) -> Layer:
        return Layer(kernel_from_name("rbf", 1, lengthscale=1.0, variance=1.0), Zero(1), real(z), 1)

    return freeze(DeepGP((layer(X), layer(np.linspace(-2.0, 2.0, 9)[:, None])), Gaussian(0.01)))


def open_multimodal_results(path: str | os.PathLike[str]) -> ResultFile:
    """The file of results, with what earlier runs put there."""
    return ResultFile(path, COLUMNS, KEY)


@double_precision
def fit_toy(method: str, seed: int) -> AbstractPosterior:
    """The posterior of the toy problem by ``"sghmc"`` or ``"dsvi"``."""
    source = ArraySource(X, Y)
    return fit_model(METHODS[method], toy_model(), source, key=jax.random.key(seed), verbose=False).posterior


@double_precision
def in_mode_a(posterior: AbstractPosterior) -> np.ndarray:
    """Whether each draw is in mode A: (chains, draws), one chain where nothing was sampled."""
    hidden = posterior.propagate(jnp.asarray(X[[0, -1]]), key=jax.random.key(0))[0]
    rises = np.asarray(hidden[:, 1, 0] > hidden[:, 0, 0])
    return rises.reshape(posterior.energy.shape if isinstance(posterior, SampledPosterior) else (1, -1))


def crossings(rises: np.ndarray) -> list[int]:
    """How often each chain went from one mode to the other, from draw to draw."""
    return [int(np.sum(chain[1:] != chain[:-1])) for chain in rises]


def toy_row(method: str, seed: int, posterior: AbstractPosterior) -> dict[str, Any]:
    """A row of results."""
    rises = in_mode_a(posterior)
    shares = float(np.mean(rises)), float(np.mean(~rises))
    found = sum(share >= _FOUND for share in shares)
    a, b = (round(share, 4) for share in shares)
    mixing = " ".join(map(str, crossings(rises))) if isinstance(posterior, SampledPosterior) else ""
    return {"seed": seed, "method": method, "mode_a": a, "mode_b": b, "modes_found": found, "crossings": mixing}


@double_precision
def save_multimodal_figure(posteriors: dict[str, AbstractPosterior], path: str | os.PathLike[str]) -> pathlib.Path:
    """Draws of both layers and of their composition, a column a method, coloured by mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(posteriors), 7.5), layout="constrained")
    axes = figure.subplots(3, len(posteriors), squeeze=False, sharey="row")
    grid = np.linspace(-2.0, 2.0, 61)[:, None]
    for column, (method, posterior) in zip(axes.T, posteriors.items(), strict=True):
        hidden, output = (np.asarray(h)[..., 0] for h in posterior.propagate(jnp.asarray(grid), key=jax.random.key(1)))
        for number in np.linspace(0, len(hidden) - 1, 60).astype(int):
            f1, f = hidden[number], output[number]
            colour = BLUE if f1[-10] > f1[9] else VERMILION
            order = np.argsort(f1)
            for ax, x, y in ((column[0], grid[:, 0], f1), (column[1], f1[order], f[order]), (column[2], grid[:, 0], f)):
                ax.plot(x, y, color=colour, alpha=0.25, lw=0.8)
        column[2].plot(X[:, 0], Y[:, 0], "o", color=GREY, mec="black", ms=5)
        column[0].set(title=method.upper(), xlabel="x", ylabel="layer 1: f1(x)")
        column[1].set(xlabel="f1", ylabel="layer 2: f2(f1)")
        column[2].set(xlabel="x", ylabel="f2(f1(x)) and the data")
    return save_figure(figure, path)
