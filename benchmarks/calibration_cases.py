"""The cases of the calibration suite: what is simulated, and what an algorithm makes of it.

A rank case is one simulation a call: quantities of the truth, and the same quantities of the draws that an algorithm
leaves when it has seen the data. If the algorithm samples the posterior of the model that made them, the truth is one
more draw among them (Talts et al. 2018).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fathomgp.data import ArraySource
from fathomgp.fitting import fit_model
from fathomgp.inference import AEP, DSVI, SGHMC, STRIDE, AbstractInference, AbstractPosterior, Sequential
from fathomgp.inference.exact import condition
from fathomgp.kernels import Matern52
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer, Recipe, build_model
from fathomgp.parameters import freeze, real
from references import FITC

#: Where f is looked at, beside the data.
PROBES = np.array([[-1.1], [0.2], [1.7]])
SHALLOW = ("f(a)", "f(b)", "f(c)", "log p(y given f)", "norm of f")
DEEP = (*SHALLOW, "h(b)", "norm of h")

Fit = Callable[[DeepGP, ArraySource, jax.Array], AbstractPosterior]


class AbstractRankCase(abc.ABC):
    """One kind of simulation.

    Attributes:
        name: of the case.
        quantities: names of the numbers that are ranked.
        replicates: how many simulations the suite makes.
        provable: whether ranks must be uniform: the target of the algorithm is the model that made the data.
    """

    name: str
    quantities: tuple[str, ...]
    replicates: int
    provable: bool

    @abc.abstractmethod
    def replicate(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Quantities of the truth, (Q,), and of the draws, (L, Q)."""


@dataclasses.dataclass(frozen=True)
class Joint(AbstractRankCase):
    """Data from the full prior of a model with one or more layers; draws of all layers jointly over rows and probes.

    Attributes:
        model: with hyperparameters that stay.
        x: inputs of the data.
        fit: from model, data and key to a posterior.
        read: draws of every layer, a posterior's answer at given inputs.
    """

    name: str
    model: DeepGP
    x: np.ndarray
    fit: Fit
    read: Callable[[AbstractPosterior, jax.Array, jax.Array], list[jax.Array]]
    replicates: int = 200
    provable: bool = True

    @property
    def quantities(self) -> tuple[str, ...]:
        """More where there are hidden layers."""
        return SHALLOW if self.model.depth == 1 else DEEP

    def replicate(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw functions and noise, fit, draw again."""
        prior_key, noise_key, fit_key, read_key = four_keys(self.name, number)
        everywhere = jnp.asarray(np.concatenate([self.x, PROBES]))
        truth = _sample_prior(self.model, everywhere, prior_key)
        noise = float(self.model.likelihood.variance.value)
        y = np.asarray(truth[-1][0, : len(self.x)] + noise**0.5 * jax.random.normal(noise_key, (len(self.x), 1)))
        posterior = self.fit(self.model, ArraySource(self.x, y), fit_key)
        draws = self.read(posterior, everywhere, read_key)
        return self._describe(truth, y, noise)[0], self._describe(draws, y, noise)

    def _describe(self, layers: list[jax.Array], y: np.ndarray, noise: float) -> np.ndarray:
        f, hidden = np.asarray(layers[-1])[:, :, 0], [np.asarray(layer) for layer in layers[:-1]]
        residual = y[:, 0] - f[:, : len(self.x)]
        figures = [*f[:, len(self.x) :].T, -0.5 * np.sum(residual**2, axis=1) / noise, np.linalg.norm(f, axis=1)]
        for h in hidden:
            figures += [h[:, len(self.x) + 1, 0], np.linalg.norm(h.reshape(len(h), -1), axis=1)]
        return np.stack(figures, axis=1)


@dataclasses.dataclass(frozen=True)
class Marginal(AbstractRankCase):
    """Data from FITC, the model of SGHMC's marginal energy; the function is what the inducing values say.

    Attributes:
        model: of one layer.
        x: inputs of the data.
        inference: with hyperparameters that stay.
    """

    name: str
    model: DeepGP
    x: np.ndarray
    inference: AbstractInference
    replicates: int = 200
    provable: bool = True
    quantities: tuple[str, ...] = SHALLOW

    def replicate(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw inducing values and rows given these, fit, draw again."""
        truth_key, fit_key, read_key, _ = four_keys(self.name, number)
        rng = np.random.default_rng(np.asarray(jax.random.bits(truth_key, (4,))))
        everywhere = np.concatenate([self.x, PROBES])
        fitc, size = FITC.of(self.model, everywhere), len(self.x)
        mean, spread = fitc.A.T @ rng.normal(size=len(fitc.A)), fitc.spread
        y = (mean + np.sqrt(spread + fitc.noise) * rng.normal(size=len(mean)))[:size, None]
        result = fit_model(self.inference, self.model, ArraySource(self.x, y), key=fit_key, verbose=False)
        answer = components(result.posterior, jnp.asarray(everywhere), read_key)
        means, spreads = (np.asarray(part)[:, :, 0] for part in answer)
        truth = self._describe(mean[None], spread[None], y, fitc.noise, rng)[0]
        return truth, self._describe(means, spreads, y, fitc.noise, rng)

    def _describe(self, mean, spread, y, noise, rng) -> np.ndarray:
        size = len(y)
        f = mean[:, size:] + np.sqrt(spread[:, size:]) * rng.normal(size=(len(mean), len(PROBES)))
        total = spread[:, :size] + noise
        density = -0.5 * np.sum((y[:, 0] - mean[:, :size]) ** 2 / total + np.log(total), axis=1)
        return np.column_stack([f, density, np.linalg.norm(mean, axis=1)])


# --- models -----------------------------------------------------------------------------------------------------------


def shallow_model(num_inducing: int, noise: float = 0.05) -> DeepGP:
    """One layer on a line, inducing inputs evenly spaced."""
    z = real(np.linspace(-2.0, 2.0, num_inducing)[:, None])
    return DeepGP((Layer(Matern52(0.7, 1.3), Zero(1), z, 1),), Gaussian(noise))


def deep_model(x: np.ndarray, noise: float = 0.05, num_inducing: int = 10) -> DeepGP:
    """Two layers whose hidden one is far from its mean, the identity."""
    recipe, likelihood = Recipe(lengthscale=0.8, inner_variance=0.3), Gaussian(noise)
    return build_model(x, likelihood, 1, depth=2, num_inducing=num_inducing, kernel="matern52", recipe=recipe)


def line(rows: int) -> np.ndarray:
    """Inputs between -2 and 2, the same for every replicate."""
    return np.random.default_rng(rows).uniform(-2.0, 2.0, size=(rows, 1))


# --- cases ------------------------------------------------------------------------------------------------------------


def rank_cases() -> dict[str, AbstractRankCase]:
    """All of them, those that must be uniform first."""
    x30, x40 = line(30), line(40)
    shallow, deep = shallow_model(30), deep_model(x30)
    stride = STRIDE(
        particles=19, rounds=1, moves=600, exchanges=0, hidden="exact", standard=True, target="evidence",
        shallow_rounds=0, step_size=0.3,
    )  # fmt: skip
    once = {"episodes": 1, "shallow_start": False, "inner_scale": 1.0, "test_samples": 99, "budget": 45}
    cases: list[AbstractRankCase] = [
        Joint("exact GP", shallow, x40, _condition, _joint_functions, 1000),
        Marginal("SGHMC, 200 rows", shallow_model(12), line(200), sampler(800), 400),
        Marginal("SGHMC, 2,000 rows", shallow_model(12), line(2000), sampler(800), 200),
        Joint("STRIDE, exact layers", deep, x30, fixed(stride), _paths, 400),
        Joint("sequential, one layer", shallow, x40, fixed(Sequential(**once)), _paths, 1000),
        Joint("sequential, one layer, delta=0", shallow, x40, fixed(Sequential(delta=0.0, **once)), _paths, 1000),
    ]
    guesses = {
        "DSVI, two layers": DSVI(steps=1500, shallow_start=False, test_samples=99),
        "AEP, two layers": AEP(steps=1000, shallow_start=False, test_samples=99),
        "sequential, two layers": Sequential(**once),
    }
    unproven = (
        Joint(name, deep_model(line(60)), line(60), fixed(method), _paths, replicates=100, provable=False)
        for name, method in guesses.items()
    )
    return {case.name: case for case in (*cases, *unproven)}


def sampler(burn_in: int, draws: int = 19, spacing: int = 60, **settings: Any) -> SGHMC:
    """SGHMC with its default step size, whose draws lie far enough apart to be independent."""
    fixed = {"hyperparameters": "fixed", "energy": "marginal"}
    return SGHMC(burn_in=burn_in, sampling=draws * spacing, draws=draws, **(fixed | settings))


def fixed(inference: AbstractInference) -> Fit:
    """A fit that learns no hyperparameters."""

    def fit(model: DeepGP, source: ArraySource, key: jax.Array) -> AbstractPosterior:
        return fit_model(inference, freeze(model), source, key=key, verbose=False).posterior

    return fit


def _condition(model: DeepGP, source: ArraySource, key: jax.Array) -> AbstractPosterior:
    return condition(model, source.everything(), shared=True)


@eqx.filter_jit
def _sample_prior(model: DeepGP, x: jax.Array, key: jax.Array) -> list[jax.Array]:
    return model.sample_prior(x, key=key)


@eqx.filter_jit
def _paths(posterior: AbstractPosterior, x: jax.Array, key: jax.Array) -> list[jax.Array]:
    return posterior.propagate(x, key=key)


@eqx.filter_jit
def _joint_functions(posterior: AbstractPosterior, x: jax.Array, key: jax.Array) -> list[jax.Array]:
    return [posterior.sample_functions(key, 99)(x)]


@eqx.filter_jit
def components(posterior: AbstractPosterior, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    mixture = posterior.predict_f(x, key=key)
    return jnp.asarray(mixture.means), jnp.asarray(mixture.variances)


def four_keys(name: str, number: int) -> jax.Array:
    """Four keys that depend on the replicate's number and on nothing else of the run."""
    return jax.random.split(jax.random.fold_in(jax.random.key(sum(map(ord, name))), number), 4)
