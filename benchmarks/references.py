"""Known posteriors to judge samplers by: FITC's in closed form, any other density's by Hamiltonian Monte Carlo.

Nothing here is shared with the algorithms that are judged, but for kernels and the energies themselves.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from fathomgp.model import DeepGP

LogDensity = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class FITC:
    """One layer whose rows are independent given the inducing values (Snelson and Ghahramani 2006).

        f_i | v ~ N(a_i^T v, k(x_i, x_i) - |a_i|^2),    v ~ N(0, I),    y_i = f_i + e_i

    This is the model that SGHMC's marginal energy describes with one layer.

    Attributes:
        A: a_i as columns.
        spread: the variance of f_i given v.
        noise: the variance of e_i.
    """

    A: np.ndarray
    spread: np.ndarray
    noise: float

    @classmethod
    def of(cls, model: DeepGP, x: np.ndarray) -> "FITC":
        """That of a model's only layer at inputs ``x``."""
        layer = model.layers[0]
        Kzz, Kzx = np.asarray(layer.kernel(layer.z.value)), np.asarray(layer.kernel(layer.z.value, jnp.asarray(x)))
        lower = np.linalg.cholesky(Kzz + 1e-10 * np.mean(np.diag(Kzz)) * np.eye(len(Kzz)))
        A = scipy.linalg.solve_triangular(lower, Kzx, lower=True)
        spread = np.maximum(np.asarray(layer.kernel.diagonal(jnp.asarray(x))) - np.sum(A**2, axis=0), 0.0)
        return cls(A, spread, float(model.likelihood.variance.value))

    def posterior(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of v."""
        weighted = self.A / (self.spread + self.noise)
        covariance = np.linalg.inv(np.eye(len(self.A)) + weighted @ self.A.T)
        return covariance @ (weighted @ y), covariance


def two_layer_energy(model: DeepGP, x: np.ndarray, y: np.ndarray, *, bound: bool, nodes: int = 30) -> LogDensity:
    """Minus SGHMC's energy of two layers, the hidden one with one output, for points (chains, M_1 + M_2) of v.

        log p(v, y) = sum_i E_e[score(y_i; f(h_i))] - |v|^2 / 2,    h_i = mean_i + sd_i e

    with the score ``log p(y_i | h_i, v)`` or, if ``bound``, ``E[log p(y_i | f_i)]``. A step of SGHMC sees one e a row;
    the mean over all e is taken by Gauss and Hermite's rule.
    """
    e, weights = (jnp.asarray(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    first, last = model.layers
    lowers = [_lower(layer.kernel(layer.z.value)) for layer in model.layers]
    noise, rows, columns = model.likelihood.variance.value, jnp.asarray(x), jnp.asarray(y)

    def moments(layer, lower, v, h):
        A = jax.scipy.linalg.solve_triangular(lower, layer.kernel(layer.z.value, h), lower=True)
        variance = jnp.maximum(layer.kernel.diagonal(h) - jnp.sum(A**2, axis=0), 1e-12)
        return layer.mean(h)[:, 0] + A.T @ v, variance

    def one(v: jax.Array) -> jax.Array:
        mean, variance = moments(first, lowers[0], v[: first.num_inducing], rows)
        h = mean[:, None] + jnp.sqrt(variance)[:, None] * e[None, :]
        mean, variance = moments(last, lowers[1], v[first.num_inducing :], h.reshape(-1, 1))
        mean, variance = mean.reshape(h.shape), variance.reshape(h.shape)
        spread = noise if bound else variance + noise
        score = -0.5 * ((columns - mean) ** 2 / spread + jnp.log(2.0 * jnp.pi * spread))
        score = score - 0.5 * variance / noise if bound else score
        return jnp.sum(score @ (weights / jnp.sum(weights))) - 0.5 * jnp.sum(v**2)

    return jax.vmap(one)


def _lower(K: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(K + 1e-10 * jnp.mean(jnp.diagonal(K)) * jnp.eye(len(K)))


def hamiltonian_monte_carlo(
    log_density: LogDensity,
    start: jax.Array,
    key: jax.Array,
    *,
    burn_in: int = 300,
    draws: int = 1000,
    leaps: int = 8,
) -> tuple[np.ndarray, float]:
    """Draws (chains, draws, n) from ``exp(log_density)`` and the mean acceptance.

    Leapfrog steps with Metropolis' correction, so nothing is biased; sizes vary at random by a fifth against
    resonance, and their mean is tuned in the burn-in to an acceptance of 0.8, then frozen.

    Args:
        log_density: of (chains, n) points at once.
        start: (chains, n), spread at least as widely as the target.
        key: decides everything.
        burn_in: moves that are thrown away.
        draws: moves that are kept.
        leaps: of a move.
    """

    def value_and_slope(w):
        value, pull = jax.vjp(log_density, w)
        return value, pull(jnp.ones_like(value))[0]

    def move(state, key, tick):
        w, value, slope, log_size = state
        momentum_key, size_key, accept_key = jax.random.split(key, 3)
        p = jax.random.normal(momentum_key, w.shape, w.dtype)
        size = (jnp.exp(log_size) * jax.random.uniform(size_key, (len(w),), w.dtype, 0.8, 1.2))[:, None]

        def leap(carry, _):
            w, p, _, slope = carry
            p = p + 0.5 * size * slope
            w = w + size * p
            value, slope = value_and_slope(w)
            return (w, p + 0.5 * size * slope, value, slope), None

        new_w, new_p, new_value, new_slope = jax.lax.scan(leap, (w, p, value, slope), length=leaps)[0]
        change = new_value - value + 0.5 * jnp.sum(p**2 - new_p**2, axis=1)
        acceptance = jnp.exp(jnp.minimum(jnp.nan_to_num(change, nan=-jnp.inf), 0.0))
        moves = jax.random.uniform(accept_key, acceptance.shape, acceptance.dtype) < acceptance
        w = jnp.where(moves[:, None], new_w, w)
        value, slope = jnp.where(moves, new_value, value), jnp.where(moves[:, None], new_slope, slope)
        gain = jnp.where(tick < burn_in, (1.0 + tick) ** -0.6, 0.0)
        return (w, value, slope, log_size + gain * (jnp.mean(acceptance) - 0.8)), jnp.mean(acceptance)

    @jax.jit
    def run(start, key):
        def one(state, tick):
            state, acceptance = move(state, jax.random.fold_in(key, tick), tick.astype(start.dtype))
            return state, (state[0], acceptance)

        state = (start, *value_and_slope(start), jnp.log(jnp.asarray(0.1, start.dtype)))
        state = jax.lax.scan(lambda s, i: (one(s, i)[0], None), state, jnp.arange(burn_in))[0]
        return jax.lax.scan(one, state, burn_in + jnp.arange(draws))[1]

    kept, acceptance = run(start, key)
    return np.swapaxes(np.asarray(kept), 0, 1), float(np.mean(acceptance))
