"""STRIDE's M step: inducing points, chosen among the data, that raise F_V averaged over the particles.

An exchange removes the point whose loss costs least and adds the candidate that gains most (algorithm 2 of Latz et al.
2025). All deaths and all births of a particle are scored at once by rank-one formulas, so an exchange costs about as
much as two evaluations of F_V and one pass over the candidates, where the paper evaluates F_V for every one of them.
The point that was removed is always a candidate, so F_V never falls. Where noise is not Gaussian, F_V is that of
the Gaussian sites about a particle's latent functions. Cores can share the candidates: each finds the
best of its own, and the best of those is taken.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fathomgp.data import Batch
from fathomgp.inference._stride_sites import Sites, sites_about
from fathomgp.inference._stride_top import Top, mean_of_possible, members, residuals
from fathomgp.inference.exact import gaussian_noise, output_groups
from fathomgp.linalg import SparseBound, birth_scores, death_scores, inverse_lower, safe_cholesky, sparse_bound
from fathomgp.model import DeepGP
from fathomgp.precision import clamp_variance

#: From a function of one particle, what the last layer sees of it (N, F) and its white variables of that layer, to the
#: function's results for all of them.
EachParticle = Callable[[Callable[[Float[Array, "N F"], Float[Array, " k"]], PyTree]], PyTree]


class Share(eqx.Module):
    """Part ``number`` of ``count`` equal parts of the candidates; where these do not divide, some are in two."""

    number: Int[Array, ""]
    count: int = eqx.field(static=True)

    def of(self, candidates: Int[Array, " J"]) -> Int[Array, " _"]:
        """The candidates in this part."""
        size = -(-len(candidates) // self.count)
        return jax.lax.dynamic_slice_in_dim(candidates, self.number * size, size)


class Exchanged(eqx.Module):
    """What an exchange leads to.

    Attributes:
        inducing: the new set.
        gain: how much F_V rises, averaged over the particles; never below 0, but for rounding.
        before: F_V before it, averaged over the particles.
    """

    inducing: Int[Array, " M"]
    gain: Float[Array, ""]
    before: Float[Array, ""]


def exchange(
    model: DeepGP,
    top: Top,
    batch: Batch,
    each: EachParticle,
    inducing: Int[Array, " M"],
    num_candidates: int,
    *,
    key: PRNGKeyArray,
    share: Share | None = None,
) -> Exchanged:
    """One death and one birth, among random candidates or a share of them.

    Particles pass one after the other, candidates and rows in blocks: a core needs O(N M) memory, whatever |J|, and
    whatever S unless ``each`` holds what all particles see.

    Args:
        model: the model.
        top: how its last layer is treated.
        batch: the data.
        each: ``each(function)`` is ``function`` of what the last layer sees of every particle and of the particle's
            white variables there.
        inducing: the inducing points, as row numbers.
        num_candidates: |J|.
        key: for the candidates.
        share: which of them to look at.
    """
    everyone = jnp.ones(len(inducing), bool)

    def deaths(h: Float[Array, "N F"], white: Float[Array, " k"]) -> tuple[Float[Array, ""], Float[Array, " M"]]:
        sites = particle_sites(model, top, batch, h, inducing, white)
        now = particle_bound(model, top, batch, h, inducing, everyone, sites)
        return now.value, death_scores(now)

    values, losses = each(deaths)
    loss = mean_of_possible(losses, values)
    out = jnp.argmax(loss)
    candidates = draw_candidates(members(top, batch), inducing, num_candidates, key=key)
    own = candidates if share is None else share.of(candidates)
    own = jnp.concatenate([inducing[out][None], own])
    stay = everyone.at[out].set(False)

    def births(h: Float[Array, "N F"], white: Float[Array, " k"]) -> Float[Array, " J"]:
        sites = particle_sites(model, top, batch, h, inducing, white)
        without = particle_bound(model, top, batch, h, inducing, stay, sites)
        return _births(without, model, top, batch, h, own)

    gains = mean_of_possible(each(births), values)
    best = jnp.argmax(gains)
    return Exchanged(inducing.at[out].set(own[best]), loss[out] + gains[best], mean_of_possible(values, values))


def particle_bound(
    model: DeepGP,
    top: Top,
    batch: Batch,
    h: Float[Array, "N F"],
    inducing: Int[Array, " M"],
    active: Bool[Array, " M"],
    sites: Sites | None = None,
) -> SparseBound:
    """F_V of one particle: every output with its own noise and in the rows where it was measured, or given sites."""
    layer, z = model.layers[-1], jnp.take(h, inducing, axis=0)
    if sites is None:
        noise = gaussian_noise(model, batch.y.shape[1])
        outputs = output_groups(residuals(model, batch, h), batch.observed, noise, shared=top.shared)
    else:
        outputs = sites.as_groups(layer.mean(h))
    return sparse_bound(layer.kernel(z), layer.kernel(z, h), layer.kernel.diagonal(h), *outputs, active=active)


def particle_sites(
    model: DeepGP, top: Top, batch: Batch, h: Float[Array, "N F"], inducing: Int[Array, " M"], white: Float[Array, " k"]
) -> Sites | None:
    """What stands for the likelihood about a particle's latent functions; ``None`` for Gaussian noise."""
    if top.kind != "sampled":
        return None
    layer, z = model.layers[-1], jnp.take(h, inducing, axis=0)
    V = inverse_lower(safe_cholesky(layer.kernel(z)).lower) @ layer.kernel(z, h)
    mean = V.T @ white.reshape(len(z), -1) + layer.mean(h)
    unexplained = clamp_variance(layer.kernel.diagonal(h) - jnp.sum(V**2, axis=0))
    return sites_about(model.likelihood, batch, mean, jnp.broadcast_to(unexplained[:, None], mean.shape))


def _births(
    now: SparseBound, model: DeepGP, top: Top, batch: Batch, h: Float[Array, "N F"], candidates: Int[Array, " J"]
) -> Float[Array, " J"]:
    """Gains of one particle; rows without an observation cannot be born."""

    def block(rows: Int[Array, " C"], columns: Int[Array, " B"]) -> Float[Array, "C B"]:
        return model.layers[-1].kernel(jnp.take(h, rows, axis=0), jnp.take(h, columns, axis=0))

    return jnp.where(members(top, batch)[candidates] > 0.0, birth_scores(now, candidates, block), -jnp.inf)


def draw_candidates(
    weight: Float[Array, " N"], inducing: Int[Array, " M"], count: int, *, key: PRNGKeyArray
) -> Int[Array, " J"]:
    """``count`` random rows that are not inducing points yet, without repetition; rows of weight 0 come last."""
    order = jax.random.uniform(key, weight.shape, weight.dtype) + weight
    order = order.at[inducing].set(-1.0, mode="drop")
    return jax.lax.top_k(order, count)[1].astype(inducing.dtype)


def greedy_choice(
    model: DeepGP,
    top: Top,
    batch: Batch,
    h: Float[Array, "N F"],
    num_inducing: int,
    num_candidates: int,
    sites: Sites | None = None,
    *,
    key: PRNGKeyArray,
) -> Int[Array, " M"]:
    """Inducing points for one particle from nothing: one birth after the other, among fresh candidates each time."""
    slots = jnp.arange(num_inducing)

    def birth(i: Int[Array, ""], chosen: Int[Array, " M"]) -> Int[Array, " M"]:
        now = particle_bound(model, top, batch, h, chosen, slots < i, sites)
        taken = jnp.where(slots < i, chosen, len(h))
        candidates = draw_candidates(members(top, batch), taken, num_candidates, key=jax.random.fold_in(key, i))
        gains = jnp.where(jnp.isin(candidates, taken), -jnp.inf, _births(now, model, top, batch, h, candidates))
        return chosen.at[i].set(candidates[jnp.argmax(gains)])

    return jax.lax.fori_loop(0, num_inducing, birth, jnp.zeros(num_inducing, jnp.int32))
