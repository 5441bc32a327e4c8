"""Markov chain kernels for targets that are a likelihood times a standard normal prior, S chains at once.

    p(w) ~ exp(Phi(w)) N(w; 0, I)

All three leave the target invariant and know the prior, so their steps need not shrink as the number of variables
grows. A point where Phi is not finite counts as impossible: it is rejected and counted. Every chain has its own key and
its own step size, so that no chain's path depends on which others are moved with it.
"""

import abc
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fathomgp.tags import tagged

#: Phi of S points at once.
Target = Callable[[Float[Array, "S n"]], Float[Array, " S"]]

#: Shrinkages of a slice before a chain stays where it is.
_MAX_SHRINKS = 30


class Chains(eqx.Module):
    """S chains.

    Attributes:
        white: where they are.
        value: Phi there.
        gradient: of Phi there, for kernels that follow it; otherwise without columns.
    """

    white: Float[Array, "S n"]
    value: Float[Array, " S"]
    gradient: Float[Array, "S _"]


class Moves(eqx.Module):
    """What became of one step.

    Attributes:
        acceptance: the probability with which each chain moved; a slice always moves.
        nonfinite: how many of each chain's proposals had no finite Phi.
        evaluations: how often the target was asked.
    """

    acceptance: Float[Array, " S"]
    nonfinite: Int[Array, " S"]
    evaluations: Int[Array, ""]


class AbstractSampler(eqx.Module):
    """A kernel; ``size`` holds the chains' step sizes, between 0 and 1, and ``keys`` one key a chain."""

    #: The mean acceptance that adaptation aims at; 0 for kernels without a step size.
    goal: ClassVar[float]

    @abc.abstractmethod
    def begin(self, target: Target, white: Float[Array, "S n"]) -> Chains:
        """Chains at given points."""

    @abc.abstractmethod
    def move(
        self, target: Target, chains: Chains, size: Float[Array, " S"], *, keys: Key[Array, " S"]
    ) -> tuple[Chains, Moves]:
        """One step of every chain."""


@tagged("sampler/pcn")
class PCN(AbstractSampler):
    """Preconditioned Crank-Nicolson: ``w' = sqrt(1 - b^2) w + b e``, accepted with ``exp(Phi(w') - Phi(w))``.

    References:
        Cotter, Roberts, Stuart and White, MCMC methods for functions (2013).
    """

    goal: ClassVar[float] = 0.25

    def begin(self, target: Target, white: Float[Array, "S n"]) -> Chains:
        """Chains at given points."""
        return Chains(white, finite(target(white)), white[:, :0])

    def move(
        self, target: Target, chains: Chains, size: Float[Array, " S"], *, keys: Key[Array, " S"]
    ) -> tuple[Chains, Moves]:
        """One proposal a chain."""
        noise_keys, accept_keys = _split(keys, 2)
        size = size[:, None]
        white = jnp.sqrt(1.0 - size**2) * chains.white + size * _normal(noise_keys, chains.white)
        value = target(white)
        new = Chains(white, finite(value), chains.gradient)
        return _accept(chains, new, new.value - chains.value, value, accept_keys)


@tagged("sampler/mala")
class MALA(AbstractSampler):
    """Preconditioned Langevin steps: ``w' = a w + (1 - a) grad Phi(w) + b e`` with ``a = sqrt(1 - b^2)``.

    The half-implicit discretisation of the Langevin equation with the prior's covariance as preconditioner: without a
    gradient it is :class:`PCN`.

    References:
        Cotter, Roberts, Stuart and White, MCMC methods for functions (2013), the algorithm pCNL.
    """

    goal: ClassVar[float] = 0.55

    def begin(self, target: Target, white: Float[Array, "S n"]) -> Chains:
        """Chains at given points."""
        value, gradient = _value_and_gradient(target, white)
        return Chains(white, finite(value), gradient)

    def move(
        self, target: Target, chains: Chains, size: Float[Array, " S"], *, keys: Key[Array, " S"]
    ) -> tuple[Chains, Moves]:
        """One proposal a chain."""
        noise_keys, accept_keys = _split(keys, 2)
        size = size[:, None]
        keep = jnp.sqrt(1.0 - size**2)

        def drift(chains: Chains) -> Float[Array, "S n"]:
            return keep * chains.white + (1.0 - keep) * chains.gradient

        white = drift(chains) + size * _normal(noise_keys, chains.white)
        value, gradient = _value_and_gradient(target, white)
        new = Chains(white, finite(value), gradient)

        def energy(at: Chains, to: Chains) -> Float[Array, " S"]:
            """Minus the log of prior times transition density, up to a constant."""
            return 0.5 * jnp.sum(at.white**2 + ((to.white - drift(at)) / size) ** 2, axis=1)

        log_ratio = new.value - chains.value + energy(chains, new) - energy(new, chains)
        return _accept(chains, new, log_ratio, value, accept_keys)


@tagged("sampler/elliptical-slice")
class EllipticalSlice(AbstractSampler):
    """Elliptical slice sampling: no step size, no rejection; the target is asked several times a step.

    References:
        Murray, Adams and MacKay, Elliptical slice sampling (2010).
    """

    goal: ClassVar[float] = 0.0

    def begin(self, target: Target, white: Float[Array, "S n"]) -> Chains:
        """Chains at given points."""
        return Chains(white, finite(target(white)), white[:, :0])

    def move(
        self, target: Target, chains: Chains, size: Float[Array, " S"], *, keys: Key[Array, " S"]
    ) -> tuple[Chains, Moves]:
        """Shrink the bracket of angles of every chain until all are on their slices."""
        noise_keys, height_keys, angle_keys, shrink_keys = _split(keys, 4)
        partner = _normal(noise_keys, chains.white)
        height = chains.value + jnp.log(jnp.maximum(_uniform(height_keys, chains.value.dtype), 1e-300))
        angle = 2.0 * jnp.pi * _uniform(angle_keys, height.dtype)
        start = (jnp.asarray(0, jnp.int32), chains, angle, angle - 2.0 * jnp.pi, angle, jnp.zeros(height.shape, bool))

        def goes_on(carry) -> Bool[Array, ""]:
            return ~jnp.all(carry[5]) & (carry[0] < _MAX_SHRINKS)

        def shrink(carry):
            (count, now, angle, low, high, found), bad = carry[:6], carry[6]
            white = jnp.cos(angle)[:, None] * chains.white + jnp.sin(angle)[:, None] * partner
            value = target(white)
            hit = ~found & (finite(value) > height)
            now = Chains(jnp.where(hit[:, None], white, now.white), jnp.where(hit, value, now.value), now.gradient)
            low, high = jnp.where(angle < 0.0, angle, low), jnp.where(angle < 0.0, high, angle)
            share = _uniform(jax.vmap(lambda key: jax.random.fold_in(key, count))(shrink_keys), angle.dtype)
            bad = bad + (~found & ~jnp.isfinite(value)).astype(jnp.int32)
            return count + 1, now, low + share * (high - low), low, high, found | hit, bad

        count, now, *_, found, bad = jax.lax.while_loop(goes_on, shrink, (*start, jnp.zeros(height.shape, jnp.int32)))
        return now, Moves(found.astype(height.dtype), bad, count)


SAMPLERS: dict[str, AbstractSampler] = {"pcn": PCN(), "slice": EllipticalSlice(), "mala": MALA()}


def adapted(
    log_size: Float[Array, " S"], acceptance: Float[Array, " S"], goal: float, step: Int[Array, ""]
) -> Float[Array, " S"]:
    """Robbins and Monro's rule on the logarithms of the step sizes, with gains that fall like ``step^-0.6``."""
    if goal == 0.0:
        return log_size
    gain = 0.5 * (1.0 + step.astype(log_size.dtype)) ** -0.6
    return jnp.clip(log_size + gain * (acceptance - goal), -9.0, -1e-3)


def finite(value: Float[Array, " S"]) -> Float[Array, " S"]:
    """Minus infinity where Phi is not finite."""
    return jnp.where(jnp.isfinite(value), value, -jnp.inf)


def _accept(
    old: Chains, new: Chains, log_ratio: Float[Array, " S"], value: Float[Array, " S"], keys: Key[Array, " S"]
) -> tuple[Chains, Moves]:
    """Metropolis and Hastings. A chain at an impossible point accepts whatever is possible."""
    possible = jnp.isfinite(new.value)
    acceptance = jnp.where(possible, jnp.exp(jnp.minimum(jnp.nan_to_num(log_ratio, nan=0.0), 0.0)), 0.0)
    moves = _uniform(keys, acceptance.dtype) < acceptance
    chosen = jax.tree.map(lambda a, b: jnp.where(moves.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), new, old)
    return chosen, Moves(acceptance, (~jnp.isfinite(value)).astype(jnp.int32), jnp.asarray(1, jnp.int32))


def _value_and_gradient(target: Target, white: Float[Array, "S n"]) -> tuple[Float[Array, " S"], Float[Array, "S n"]]:
    """Chains do not interact, so the gradient of the sum holds every chain's own."""
    value, pull = jax.vjp(target, white)
    (gradient,) = pull(jnp.ones_like(value))
    return value, jnp.where(jnp.isfinite(gradient), gradient, 0.0)


def chain_keys(key: PRNGKeyArray, numbers: Int[Array, " S"]) -> Key[Array, " S"]:
    """A key for each of the chains with these numbers."""
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def _split(keys: Key[Array, " S"], count: int) -> tuple[Key[Array, " S"], ...]:
    """``count`` keys from every chain's, a kind at a time."""
    several = jax.vmap(lambda key: jax.random.split(key, count))(keys)
    return tuple(several[:, i] for i in range(count))


def _normal(keys: Key[Array, " S"], like: Float[Array, "S n"]) -> Float[Array, "S n"]:
    """Standard normal numbers with 24 random bits each: half the time of 53, and no chain can tell."""
    draw = lambda key: jax.random.normal(key, like.shape[1:], jnp.float32)  # noqa: E731
    return jax.vmap(draw)(keys).astype(like.dtype)


def _uniform(keys: Key[Array, " S"], dtype: jnp.dtype) -> Float[Array, " S"]:
    """One number between 0 and 1 a chain."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), dtype))(keys)
