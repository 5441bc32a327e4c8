"""Stochastic gradient Hamiltonian Monte Carlo as a gradient transformation, in the manner of optax.

With the energy U(v) = -log p(v, y), G an unbiased estimate of grad U / N, and a step size for every coordinate,

    h = eps^2 / (N sqrt(V)),      V = E[G^2] of that coordinate,

a step is

    p <- (1 - a) p - h N G + N(0, 2 a h),          v <- v + p                                  (momentum first)

(Chen et al. 2014, scale-adapted by Springenberg et al. 2016). At friction a = 1 nothing is left of the old momentum:
preconditioned stochastic gradient Langevin dynamics (Welling and Teh 2011). At temperature 0 it is descent with
momentum 1 - a. There is no accept step, so the chain is biased by O(h); on a unit Gaussian with exact gradients its
stationary variance is 1 / (1 - h / (2 (2 - a))).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

#: Added to E[G^2], which may be zero.
_TINY = 1e-16

Number = float | Float[Array, ""]


class SamplerState(eqx.Module):
    """What the sampler remembers of every coordinate.

    Attributes:
        momentum: p.
        tau: the length of the window over which G is averaged; it grows while G is mostly noise.
        g: the average of G.
        V: the average of G^2.
    """

    momentum: PyTree[Float[Array, "..."]]
    tau: PyTree[Float[Array, "..."]]
    g: PyTree[Float[Array, "..."]]
    V: PyTree[Float[Array, "..."]]


def hamiltonian_sampler(
    num_data: Number = 1.0,
    *,
    step_size: Number = 0.01,
    friction: float = 0.05,
    temperature: Number = 1.0,
    adapting: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Draws from exp(-U): ``update`` takes the gradient of U / N and a ``key``, and returns the move of v.

    Args:
        num_data: N.
        step_size: eps, in units that do not depend on the scale of the energy.
        friction: a, between 0 and 1.
        temperature: multiplies the variance of the noise: 1 samples, 0 descends.
        adapting: whether tau, g and V follow the gradients; a chain whose draws are kept must not adapt.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> sampler = hamiltonian_sampler(step_size=0.1)
        >>> v = jnp.zeros(3)
        >>> state = sampler.init(v)
        >>> move, state = sampler.update(v, state, key=jax.random.key(0))  # U = |v|^2 / 2
        >>> (v + move).shape
        (3,)
    """

    def init(params: PyTree) -> SamplerState:
        ones, zeros = jax.tree.map(jnp.ones_like, params), jax.tree.map(jnp.zeros_like, params)
        return SamplerState(zeros, ones, ones, ones)

    def update(
        gradient: PyTree, state: SamplerState, params: PyTree = None, *, key: PRNGKeyArray, **_: Any
    ) -> tuple[PyTree, SamplerState]:
        h = step_sizes(state, num_data, step_size)

        def move(p: Array, G: Array, h: Array, noise: Array) -> Array:
            return (1.0 - friction) * p - h * num_data * G + jnp.sqrt(2.0 * friction * temperature * h) * noise

        momentum = jax.tree.map(move, state.momentum, gradient, h, _normal_like(gradient, key))
        averages = _adapt(state, gradient) if adapting else (state.tau, state.g, state.V)
        return momentum, SamplerState(momentum, *averages)

    return optax.GradientTransformationExtraArgs(init, update)


def langevin_sampler(
    num_data: Number = 1.0, *, step_size: Number = 0.01, temperature: Number = 1.0, adapting: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient Langevin dynamics: :func:`hamiltonian_sampler` at friction 1."""
    return hamiltonian_sampler(num_data, step_size=step_size, friction=1.0, temperature=temperature, adapting=adapting)


def step_sizes(state: SamplerState, num_data: Number, step_size: Number) -> PyTree[Float[Array, "..."]]:
    """H of every coordinate."""
    return jax.tree.map(lambda V: step_size**2 / (num_data * jnp.sqrt(V + _TINY)), state.V)


def kinetic_temperature(state: SamplerState, num_data: Number, step_size: Number, friction: float) -> Float[Array, ""]:
    """The mean of p^2 in units of 2 h / (2 - a), its value for small steps: above 1, noisy gradients heat the chain."""
    h = step_sizes(state, num_data, step_size)
    shares = jax.tree.map(lambda p, h: jnp.sum(p**2 / h), state.momentum, h)
    size = sum(leaf.size for leaf in jax.tree.leaves(h))
    return sum(jax.tree.leaves(shares)) * (0.5 * (2.0 - friction) / size)


def _adapt(state: SamplerState, gradient: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """tau, g and V after one more gradient, all from the old ones."""
    rate = jax.tree.map(lambda tau: 1.0 / (tau + 1.0), state.tau)
    g = jax.tree.map(lambda g, r, G: (1.0 - r) * g + r * G, state.g, rate, gradient)
    V = jax.tree.map(lambda V, r, G: (1.0 - r) * V + r * G**2, state.V, rate, gradient)
    tau = jax.tree.map(lambda tau, g, V: 1.0 + tau * (1.0 - g**2 / (V + _TINY)), state.tau, state.g, state.V)
    return tau, g, V


def _normal_like(tree: PyTree, key: PRNGKeyArray) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noise = [jax.random.normal(one, leaf.shape, leaf.dtype) for one, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, noise)
