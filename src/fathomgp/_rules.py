"""Points and weights for expectations under the standard normal: the one place that makes them."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def normal_rule(num_nodes: int, dtype: jnp.dtype) -> tuple[Float[Array, " nodes"], Float[Array, " nodes"]]:
    """Gauss-Hermite nodes and log weights for the standard normal."""
    nodes, log_weights = hermite(num_nodes)
    return jnp.asarray(nodes, dtype), jnp.asarray(log_weights, dtype)


def normal_points(dimension: int, num_points: int, dtype: jnp.dtype) -> Float[Array, "points dimension"]:
    """Fixed quasi Monte Carlo points whose mean, covariance and odd moments are those of the standard normal."""
    return jnp.asarray(sobol_normal(dimension, num_points), dtype)


@functools.lru_cache
def hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite nodes and log weights, on the host."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes, np.log(weights / weights.sum())


@functools.lru_cache
def legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on [0, 1], on the host."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return 0.5 * (nodes + 1.0), 0.5 * weights


@functools.lru_cache
def sobol_normal(dimension: int, num_points: int) -> np.ndarray:
    """Antithetic shifted Sobol points with unit covariance, on the host."""
    # scipy.stats costs half a second to import: only those who need the points pay for it.
    from scipy.special import ndtri
    from scipy.stats import qmc

    half = qmc.Sobol(dimension, scramble=False).random(num_points // 2)
    offset = np.random.default_rng(0).uniform(size=dimension)
    points = ndtri(np.clip((half + offset) % 1.0, 1e-12, 1.0 - 1e-12))
    points = np.concatenate([points, -points])
    eigenvalues, vectors = np.linalg.eigh(points.T @ points / num_points)
    return points @ (vectors / np.sqrt(eigenvalues)) @ vectors.T
