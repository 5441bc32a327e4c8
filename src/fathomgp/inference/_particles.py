"""Particles with weights: draws, effective sample size, resampling and a move that keeps the prior."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def balanced_normal(key: PRNGKeyArray, shape: tuple[int, int], dtype: Any) -> Float[Array, "S W"]:
    """Standard normal draws whose columns have mean 0 and variance 1 exactly, so that equal weights teach nothing."""
    draws = jax.random.normal(key, shape, dtype)
    if shape[0] < 3:
        return draws
    centred = draws - jnp.mean(draws, axis=0, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=0, keepdims=True))


def effective_sample_size(log_weights: Float[Array, " S"]) -> Float[Array, ""]:
    """``1 / sum w^2`` of the normalised weights: S when all are equal, 1 when one has everything."""
    return jnp.exp(2.0 * jax.nn.logsumexp(log_weights) - jax.nn.logsumexp(2.0 * log_weights))


def systematic_resample(key: PRNGKeyArray, log_weights: Float[Array, " S"]) -> Int[Array, " S"]:
    """Indices drawn in proportion to the weights with one uniform number: particle i appears S w_i times, rounded."""
    size = len(log_weights)
    edges = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(size, dtype=edges.dtype) + jax.random.uniform(key, (), edges.dtype)) / size
    return jnp.minimum(jnp.searchsorted(edges, points * edges[-1]), size - 1)
