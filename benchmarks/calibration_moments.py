"""The cases of the calibration suite whose target is known: moments of draws beside a closed form or a long run."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats

from calibration_cases import components, four_keys, line, sampler
from fathomgp.data import ArraySource
from fathomgp.fitting import fit_model
from fathomgp.inference import SGHMC, STRIDE, stride
from fathomgp.kernels import RBF
from fathomgp.likelihoods import AbstractLikelihood, Bernoulli, Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer, Recipe, build_model
from fathomgp.parameters import freeze, real
from references import FITC, LogDensity, hamiltonian_monte_carlo, two_layer_energy

#: Of means and squared distances in standard errors: a few hundred numbers are looked at.
LARGEST_Z = 4.5


class Comparison(NamedTuple):
    """Draws of K quantities beside their target.

    Attributes:
        ess: the least effective sample size of the quantities.
        variance_ratio: of the draws' variances over the target's, the mean over the quantities.
        mean_z: of the quantity whose mean is furthest off, in standard errors.
        square_z: the same of squared distances from the target's mean.
        temperature: kinetic, as the fit's history has it; NaN where there is none.
    """

    ess: float
    variance_ratio: float
    mean_z: float
    square_z: float
    temperature: float


def compare_draws(
    draws: np.ndarray, target: np.ndarray | tuple[np.ndarray, np.ndarray], temperature: float = float("nan")
) -> Comparison:
    """Draws (chains, draws, K) beside other draws, or beside the mean and variance of every quantity.

    Chains with one draw each are independent particles.
    """
    known = isinstance(target, tuple)
    mean, variance = target if known else (target.mean(axis=(0, 1)), target.var(axis=(0, 1)))
    ours, theirs = _moments(draws, mean), None if known else _moments(target, mean)
    distances = []
    for i, moment in enumerate((mean, variance)):
        error = ours[i][1] if theirs is None else np.hypot(ours[i][1], theirs[i][1])
        distances.append((ours[i][0] - moment) / error)
    worst = [float(z[np.argmax(np.abs(z))]) for z in distances]
    own = draws.var(axis=(0, 1), ddof=1)
    return Comparison(float(np.min(_ess(draws))), float(np.mean(own / variance)), *worst, temperature)


def _moments(draws: np.ndarray, centre: np.ndarray) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """The mean and its standard error, of the draws and of their squared distances from ``centre``."""
    values = (draws, (draws - centre) ** 2)
    return [(x.mean(axis=(0, 1)), x.std(axis=(0, 1)) / np.sqrt(_ess(x))) for x in values]


def _ess(draws: np.ndarray) -> np.ndarray:
    if draws.shape[1] == 1:  # independent particles
        return np.full(draws.shape[2], len(draws))
    return np.asarray(array_stats.ess(draws, chain_axis=0, draw_axis=1, method="mean"))


class AbstractMomentCase(abc.ABC):
    """Draws whose target is known.

    Attributes:
        name: of the case.
        replicates: how many the suite makes.
    """

    name: str
    replicates: int

    @abc.abstractmethod
    def compare(self, number: int) -> Comparison:
        """One run beside its target."""

    @abc.abstractmethod
    def holds(self, ratio: float, worst: tuple[float, float], ess: float) -> bool:
        """Whether the mean variance ratio, the worst distances and the least effective sample size will do."""


# --- FITC -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ManyRows(AbstractMomentCase):
    """SGHMC with minibatches beside FITC's posterior in closed form: the inducing points' function at some inputs."""

    name: str
    rows: int
    model: DeepGP
    inference: SGHMC
    replicates: int = 10

    def compare(self, number: int) -> Comparison:
        """A data set of its own every time."""
        truth_key, fit_key, read_key, _ = four_keys(self.name, number)
        rng = np.random.default_rng(np.asarray(jax.random.bits(truth_key, (4,))))
        x, places = rng.uniform(-2.0, 2.0, size=(self.rows, 2)), rng.uniform(-1.8, 1.8, size=(20, 2))
        fitc = FITC.of(self.model, x)
        y = fitc.A.T @ rng.normal(size=len(fitc.A)) + np.sqrt(fitc.spread + fitc.noise) * rng.normal(size=self.rows)
        mean, covariance = fitc.posterior(y)
        source = ArraySource(x, y[:, None])
        result = fit_model(self.inference, self.model, source, key=fit_key, verbose=False)
        draws = np.asarray(components(result.posterior, jnp.asarray(places), read_key)[0])[:, :, 0]
        A = FITC.of(self.model, places).A
        target = (A.T @ mean, np.sum(A * (covariance @ A), axis=0))
        heat = float(result.history["temperature"][-self.inference.sampling :].mean())
        return compare_draws(draws.reshape(self.inference.chains, -1, len(places)), target, heat)

    def holds(self, ratio: float, worst: tuple[float, float], ess: float) -> bool:
        """The issue's interval, and its number of draws."""
        return 0.9 < ratio < 1.15 and ess >= 800


# --- any energy -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeepSampler(AbstractMomentCase):
    """SGHMC's inducing values of two layers beside a long Hamiltonian run on the same energy, all rows in one batch."""

    name: str
    model: DeepGP
    x: np.ndarray
    y: np.ndarray
    inference: SGHMC
    replicates: int = 1

    def compare(self, number: int) -> Comparison:
        """One fit and one long run."""
        fit_key, start_key, run_key, _ = four_keys(self.name, number)
        source = ArraySource(self.x, self.y)
        result = fit_model(self.inference, self.model, source, key=fit_key, verbose=False)
        ours = np.concatenate([np.asarray(v).reshape(*v.shape[:2], -1) for v in result.posterior.v], axis=2)
        start = jax.random.normal(start_key, (16, ours.shape[2]))
        energy = two_layer_energy(self.model, self.x, self.y, bound=self.inference.energy == "bound")
        theirs = long_run(energy, start, run_key)
        return compare_draws(ours, theirs, float(result.history["temperature"][-self.inference.sampling :].mean()))

    def holds(self, ratio: float, worst: tuple[float, float], ess: float) -> bool:
        """Nothing is off by more than chance explains."""
        return max(worst) < LARGEST_Z


@dataclasses.dataclass(frozen=True)
class Particles(AbstractMomentCase):
    """STRIDE's particles at the end of an E step beside a long Hamiltonian run on the same target.

    Looked at are all white variables, and the log likelihood.
    """

    name: str
    model: DeepGP
    x: np.ndarray
    y: np.ndarray
    inference: STRIDE
    replicates: int = 3

    def compare(self, number: int) -> Comparison:
        """One E step from the stationary start, and one long run."""
        fit_key, start_key, run_key, _ = four_keys(self.name, number)
        source, frozen = ArraySource(self.x, self.y), freeze(self.model)
        posterior = fit_model(self.inference, frozen, source, key=fit_key, verbose=False).posterior
        white = [given.white for given in posterior.hidden]
        if not isinstance(self.model.likelihood, Gaussian):
            white.append(posterior.top.mean)
        ours = np.concatenate([np.asarray(part).reshape(len(part), -1) for part in white], axis=1)
        phi = eqx.filter_jit(self._phi(source, fit_key))
        start = jax.random.normal(start_key, (16, ours.shape[1]))
        theirs = long_run(lambda w: phi(w) - 0.5 * jnp.sum(w**2, axis=1), start, run_key)
        value = jax.jit(lambda draws: jax.lax.map(phi, draws))
        draws = [
            np.concatenate([w, np.asarray(value(jnp.asarray(w)))[..., None]], axis=2) for w in (ours[:, None], theirs)
        ]
        return compare_draws(*draws)

    def _phi(self, source: ArraySource, key: jax.Array) -> LogDensity:
        """The log likelihood that an E step follows, as the algorithm itself has it."""
        state = self.inference.init(freeze(self.model), source, key=key)
        phase = self.inference.plan(len(self.x), None)[0]
        state = self.inference.enter(phase, state, source, key=key)
        return stride._target(state, source.everything())

    def holds(self, ratio: float, worst: tuple[float, float], ess: float) -> bool:
        """Nothing is off by more than chance explains."""
        return max(worst) < LARGEST_Z


def long_run(log_density: LogDensity, start: jax.Array, key: jax.Array) -> np.ndarray:
    """Draws whose chains, from starts all over the prior, agree."""
    draws, acceptance = hamiltonian_monte_carlo(log_density, start, key)
    r_hat = float(np.max(array_stats.rhat(draws, chain_axis=0, draw_axis=1)))
    if not (r_hat < 1.02 and 0.6 < acceptance < 0.95):
        raise RuntimeError(f"The long run is no reference: R-hat is {r_hat:.3f}, acceptance {acceptance:.2f}.")
    return draws


# --- cases ------------------------------------------------------------------------------------------------------------


def moment_cases() -> dict[str, AbstractMomentCase]:
    """All of them."""
    long = sampler(2000, draws=1000, spacing=20)
    rows = [ManyRows(f"SGHMC, {rows:,} rows", rows, grid_model(), long) for rows in (8000, 40_000)]
    x = line(25)
    y = np.sin(1.5 * x) + 0.3 * np.random.default_rng(1).normal(size=x.shape)
    labels = np.where(y > 0.0, 1.0, 0.0)
    deep = [
        DeepSampler(f"SGHMC, two layers, {energy}", _deep(x, Gaussian(0.1)), x, y, _side_by_side(energy))
        for energy in ("marginal", "bound")
    ]
    roads = {
        "bound": (Gaussian(0.1), {"hidden": "exact"}),
        "evidence": (Gaussian(0.1), {"hidden": "exact", "target": "evidence"}),
        "bound, ACA": (Gaussian(0.1), {"hidden": "aca", "rank": 10}),
        "bound, at inducing points": (Gaussian(0.1), {"hidden": "sparse"}),
        "labels": (Bernoulli(), {"hidden": "exact"}),
    }
    particles = [
        Particles(f"STRIDE, {name}", _deep(x, likelihood), x, labels if name == "labels" else y, _one_step(**settings))
        for name, (likelihood, settings) in roads.items()
    ]
    return {case.name: case for case in (*rows, *deep, *particles)}


def grid_model(noise: float = 0.01) -> DeepGP:
    """One layer with 36 inducing inputs on a grid, which explain nearly all of the function."""
    ends = np.linspace(-2.0, 2.0, 6)
    z = real(np.stack(np.meshgrid(ends, ends), axis=-1).reshape(-1, 2))
    return DeepGP((Layer(RBF(1.0, 1.0), Zero(1), z, 1),), Gaussian(noise))


def _deep(x: np.ndarray, likelihood: AbstractLikelihood) -> DeepGP:
    """Two layers of one output with a single mode: a hidden layer further from its mean can be folded the other way."""
    recipe = Recipe(lengthscale=1.0, inner_variance=0.1)
    return build_model(x, likelihood, 1, depth=2, num_inducing=6, kernel="matern52", recipe=recipe)


def _side_by_side(energy: str) -> SGHMC:
    return sampler(2000, draws=400, spacing=40, chains=8, energy=energy)


def _one_step(**settings: Any) -> STRIDE:
    usual = {"particles": 500, "rounds": 1, "moves": 400, "exchanges": 0, "shallow_rounds": 0, "step_size": 0.3}
    return STRIDE(**(usual | settings))
