"""What the stochastic methods on whitened Gaussians share: a step of their optimiser."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fathomgp.model import DeepGP
from fathomgp.parameters import partition


def descend(
    optimiser: optax.GradientTransformation,
    memory: Any,
    model: DeepGP,
    q: Any,
    gradient: Any,
    pace: Float[Array, ""],
) -> tuple[DeepGP, Any, Any]:
    """One step on the learned parts of the model and on q, scaled by ``pace``; also the optimiser's new memory."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, memory = optimiser.update(gradient, memory)
    learned, constant = partition(model)
    learned, q = jax.tree.map(lambda value, update: value + pace * update, (learned, q), updates)
    return eqx.combine(learned, constant), q, memory


def lower_roots(q: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of lower-triangular roots."""
    return tuple(eqx.tree_at(lambda layer: layer.root, layer, jnp.tril(layer.root)) for layer in q)
