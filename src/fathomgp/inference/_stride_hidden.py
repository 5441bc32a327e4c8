"""Hidden layers from whitened variables, for S particles at once.

A hidden layer's values at the data come from white variables w ~ N(0, I) at R anchor points, rows I of the data, with
L L^T = k(I, I) given the layer below:

    exact    h = m + L w                      I = all rows
    aca      h = m + k(., I) L^-T w           I = pivots of adaptive cross-approximation: rank R
    sparse   h = m + L w at I alone           I = the inducing points; other rows by interpolation

(Latz et al. 2025, section 3.3).

The bottom layer's kernel is stationary: its factor is the same for all particles, and constant while I is.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from fathomgp.linalg import inverse_lower, pivoted_cholesky, product, safe_cholesky
from fathomgp.means import AbstractMean
from fathomgp.model import DeepGP
from fathomgp.tags import tagged

KINDS = ("exact", "aca", "sparse")

#: Strips of rows in products with an exact hidden layer's factor: four do five eighths of the work.
_STRIPS = 4

#: Values of every hidden layer, at all data or (sparse) at the anchors.
Values = list[Float[Array, "S K _"]]


@tagged("stride/hidden")
class Hidden(eqx.Module):
    """The anchors, and the bottom layer's maps.

    Attributes:
        kind: one of :data:`KINDS`.
        anchors: row numbers of the anchor points.
        trend: the bottom layer's mean at all data.
        root: from white variables to values of the bottom layer at all data, without the mean: k(X, I) L^-T.
        lift: from values at the anchors to values at all data, by the bottom layer's kernel: k(X, I) k(I, I)^-1.
    """

    kind: str = eqx.field(static=True)
    anchors: Int[Array, " R"]
    trend: Float[Array, "N W"]
    root: Float[Array, "N R"]
    lift: Float[Array, "N R"] | None

    def sites(self, x: Float[Array, "N D"]) -> Float[Array, "K D"]:
        """Where hidden layers have values: at the anchors in the sparse kind, at all data in the others."""
        return x[self.anchors] if self.kind == "sparse" else x

    @property
    def lower(self) -> Float[Array, "R R"]:
        """From white variables to values of the bottom layer at the anchors: L, up to its jitter."""
        return jnp.tril(self.root[self.anchors])

    @property
    def at_sites(self) -> Int[Array, " R"]:
        """The anchors' positions among the sites."""
        return jnp.arange(len(self.anchors)) if self.kind == "sparse" else self.anchors


def prepare_hidden(model: DeepGP, x: Float[Array, "N D"], anchors: Int[Array, " R"], kind: str) -> Hidden:
    """Factorise the bottom layer's covariance."""
    kernel, trend = model.layers[0].kernel, model.layers[0].mean(x)
    lower = safe_cholesky(kernel(x[anchors])).lower
    if kind == "exact":
        return Hidden(kind, anchors, trend, lower, None)
    inverse = inverse_lower(lower)
    root = product(kernel(x, x[anchors]), inverse.T)
    return Hidden(kind, anchors, trend, root, root @ inverse if kind == "sparse" else None)


def num_white(model: DeepGP, num_anchors: int) -> int:
    """The number of white variables of all hidden layers."""
    return num_anchors * sum(layer.width for layer in model.layers[:-1])


def white_by_layer(model: DeepGP, num_anchors: int, white: Float[Array, "S n"]) -> Values:
    """The white variables of every hidden layer."""
    parts, start = [], 0
    for layer in model.layers[:-1]:
        end = start + num_anchors * layer.width
        parts.append(white[:, start:end].reshape(-1, num_anchors, layer.width))
        start = end
    return parts


def hidden_values(model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], white: Float[Array, "S n"]) -> Values:
    """The values of every hidden layer at the sites."""
    parts = white_by_layer(model, len(hidden.anchors), white)
    if hidden.kind == "aca":
        return _condition(model, parts, x, hidden.trend, hidden.root, hidden.anchors)[0]
    sites = hidden.sites(x)
    if hidden.kind == "sparse":
        values = [hidden.trend[hidden.anchors][None] + _apply(hidden.lower, parts[0])]
    else:
        values = [hidden.trend[None] + _apply_lower(hidden.root, parts[0])]
    for level in range(1, model.depth - 1):
        inputs = seen(model, level, sites, values[-1])
        values.append(_means(model, level, inputs) + _factor(model, level, inputs) @ parts[level])
    return values


def whitened(model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], values: Values) -> Float[Array, "S n"]:
    """The white variables that give hidden layers these values (at the sites) in the anchors."""
    sites, at = hidden.sites(x), hidden.at_sites
    parts, below = [], None
    for level, h in enumerate(values):
        inputs = sites[None] if below is None else seen(model, level, sites, below)
        z = jnp.take(inputs, at, axis=1)
        lower = hidden.lower[None] if below is None else _factor(model, level, z)
        offset = jnp.take(h, at, axis=1) - _means(model, level, z)
        parts.append(_solve(jnp.broadcast_to(lower, (len(h), *lower.shape[1:])), offset))
        below = h
    return jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


class Sight(NamedTuple):
    """What the last layer sees of S particles, formed for some rows at a time.

    Attributes:
        rows: what the inputs of a row follow from: arrays with one entry a row.
        at: from the entries of B rows to the inputs there, of shape (S, B, F).
    """

    rows: PyTree[Shaped[Array, "N ..."]]
    at: Callable[[PyTree[Shaped[Array, "B ..."]]], Float[Array, "S B F"]]

    def everywhere(self) -> Float[Array, "S N F"]:
        """The inputs at all rows."""
        return self.at(self.rows)

    def at_index(self, index: Int[Array, " B"]) -> Float[Array, "S B F"]:
        """The inputs at some rows."""
        return self.at(jax.tree.map(lambda leaf: leaf[index], self.rows))


def held(inputs: Float[Array, "S N F"]) -> Sight:
    """Inputs that are there already."""
    return Sight(jnp.swapaxes(inputs, 0, 1), _particles_first)


def _particles_first(rows: Float[Array, "B S F"]) -> Float[Array, "S B F"]:
    return jnp.swapaxes(rows, 0, 1)


def sight(model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], white: Float[Array, "S n"]) -> Sight:
    """What the last layer sees of the particles with these white variables.

    By ACA or at the inducing points a row follows from the anchors alone, so that S times N values need never be held
    (unless an architecture looks at all rows together).
    """
    if hidden.kind == "exact" or not model.architecture.by_row:
        return held(top_inputs(model, hidden, x, hidden_values(model, hidden, x, white)))
    I, last = hidden.anchors, model.depth - 2
    if hidden.kind == "sparse":
        trend = hidden.trend if last == 0 else mean_path(model, x)[last]
        offset = hidden_values(model, hidden, x, white)[-1] - trend[I][None]
        rows = (x, trend, hidden.lift)

        def values_at(x: Array, trend: Array, lift: Array) -> Float[Array, "S B W"]:
            return trend[None] + _apply(lift, offset)

    else:
        parts = white_by_layer(model, len(I), white)
        deeper = _condition(model, parts, x[I], hidden.trend[I], hidden.root[I], jnp.arange(len(I)))[1]
        rows = (x, hidden.trend, hidden.root)

        def values_at(x: Array, trend: Array, root: Array) -> Float[Array, "S B W"]:
            return _follow(model, parts[0], deeper, x, trend, root)

    return Sight(rows, lambda rows: seen(model, model.depth - 1, rows[0], values_at(*rows)))


def each_particle(
    model: DeepGP,
    hidden: Hidden,
    x: Float[Array, "N D"],
    white: Float[Array, "S n"],
    above: Float[Array, "S k"],
    function: Callable[[Float[Array, "N F"], Float[Array, " k"]], PyTree],
) -> PyTree[Shaped[Array, "S ..."]]:
    """``function`` of what the last layer sees of a particle, and of its ``above``, one particle after the other.

    Exact hidden layers are formed for all particles at once, the others for one at a time.
    """
    if hidden.kind == "exact":  # one product with all of L for all particles
        inputs = sight(model, hidden, x, white).everywhere()
        return jax.lax.map(lambda own: function(*own), (inputs, above))

    def of_one(own: tuple[Float[Array, " n"], Float[Array, " k"]]) -> PyTree:
        return function(sight(model, hidden, x, own[0][None]).everywhere()[0], own[1])

    return jax.lax.map(of_one, (white, above))


def top_inputs(model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], values: Values) -> Float[Array, "S N F"]:
    """What the last layer sees at all data."""
    return seen(model, model.depth - 1, x, at_data(model, hidden, x, values[-1], model.depth - 2))


def at_data(
    model: DeepGP, hidden: Hidden, x: Float[Array, "N D"], values: Float[Array, "S K W"], level: int
) -> Float[Array, "S N W"]:
    """A hidden layer's values at all data; in the sparse kind interpolated around the layers' means."""
    if hidden.lift is None:
        return values
    trend = mean_path(model, x)[level]
    return trend[None] + _apply(hidden.lift, values - trend[hidden.anchors][None])


def seen(model: DeepGP, level: int, sites: Float[Array, "K D"], below: Float[Array, "S K W"]) -> Float[Array, "S K F"]:
    """What layer ``level`` sees at the sites, given every particle's values of the layer below there."""
    return jax.vmap(lambda h: model.layer_input(level, sites, h))(below)


def mean_path(
    model: DeepGP, x: Float[Array, "N D"], mean: Callable[[int, Array], AbstractMean] | None = None
) -> list[Float[Array, "N _"]]:
    """The hidden layers' values where each is at its mean; ``mean(level, inputs)`` replaces the layers' own."""
    path, inputs = [], x
    for level, layer in enumerate(model.layers[:-1]):
        path.append((layer.mean if mean is None else mean(level, inputs))(inputs))
        inputs = model.layer_input(level + 1, x, path[-1])
    return path


def pivots(model: DeepGP, inputs: Float[Array, "S N F"], weight: Float[Array, " N"], rank: int) -> Int[Array, " R"]:
    """Anchors by adaptive cross-approximation of the last layer's covariance, averaged over the particles.

    Rows of weight 0 are never chosen. Where the rank is exhausted before R pivots are found, unused rows fill up.
    """
    kernel = model.layers[-1].kernel
    diagonal = jnp.mean(jax.vmap(kernel.diagonal)(inputs), axis=0) * weight

    def column(i: Int[Array, ""]) -> Float[Array, " N"]:
        one = lambda h: kernel(h, jax.lax.dynamic_slice_in_dim(h, i, 1))[:, 0]  # noqa: E731
        return jnp.mean(jax.lax.map(one, inputs), axis=0) * weight * weight[i]

    chosen = pivoted_cholesky(diagonal, column, rank).pivots
    return fill_up(chosen, weight)


def fill_up(chosen: Int[Array, " R"], weight: Float[Array, " N"]) -> Int[Array, " R"]:
    """Replace entries -1 by rows that were not chosen, real ones first."""
    order = jnp.where(weight > 0.0, 1.0, 0.5).at[jnp.where(chosen >= 0, chosen, len(weight))].set(0.0, mode="drop")
    spare = jax.lax.top_k(order, len(chosen))[1].astype(chosen.dtype)
    empty = chosen < 0
    return jnp.where(empty, spare[jnp.cumsum(empty) - 1], chosen)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _apply(matrix: Float[Array, "N R"], columns: Float[Array, "S R W"]) -> Float[Array, "S N W"]:
    """One matrix times the columns of all particles, as a single product."""
    S, R, W = columns.shape
    wide = product(matrix, jnp.swapaxes(columns, 0, 1).reshape(R, S * W))
    return jnp.swapaxes(wide.reshape(-1, S, W), 0, 1)


def _apply_lower(lower: Float[Array, "N N"], columns: Float[Array, "S N W"]) -> Float[Array, "S N W"]:
    """:func:`_apply` of a lower-triangular matrix in strips of rows, most of whose zeros are not multiplied.

    In float32, which takes a third of the time. Phi is then off by at most 0.001 nats on energy (noise variance 0.01,
    top variance 1e7), by 1e-5 on boston.
    """
    size, dtype = len(lower), columns.dtype
    lower, columns = lower.astype(jnp.float32), columns.astype(jnp.float32)
    edges = [size * strip // _STRIPS for strip in range(_STRIPS + 1)]
    with jax.default_matmul_precision("highest"):
        strips = [_apply(lower[start:end, :end], columns[:, :end]) for start, end in itertools.pairwise(edges)]
    return jnp.concatenate(strips, axis=1).astype(dtype)


def _means(model: DeepGP, level: int, inputs: Float[Array, "S K F"]) -> Float[Array, "S K W"]:
    return jax.vmap(model.layers[level].mean)(inputs)


class _AtAnchors(NamedTuple):
    """A deeper layer given its white variables at the anchors: ``h = m + k(., z) weights``, ``weights = L^-T w``."""

    z: Float[Array, "S R F"]
    weights: Float[Array, "S R W"]


def _condition(
    model: DeepGP,
    white: list[Float[Array, "S R _"]],
    x: Float[Array, "B D"],
    trend: Float[Array, "B W"],
    root: Float[Array, "B R"],
    at: Int[Array, " R"],
) -> tuple[list[Float[Array, "S B _"]], list[_AtAnchors]]:
    """Hidden layers by ACA at rows among which ``at`` are the anchors; and the deeper ones given the anchors."""
    values, deeper = [trend[None] + _apply(root, white[0])], []
    for level in range(1, model.depth - 1):
        inputs = seen(model, level, x, values[-1])
        z = jnp.take(inputs, at, axis=1)
        lower = _factor(model, level, z)
        weights = jax.lax.linalg.triangular_solve(lower, white[level], left_side=True, lower=True, transpose_a=True)
        deeper.append(_AtAnchors(z, weights))
        values.append(_deeper_values(model, level, deeper[-1], inputs))
    return values, deeper


def _follow(
    model: DeepGP,
    white: Float[Array, "S R W"],
    deeper: list[_AtAnchors],
    x: Float[Array, "B D"],
    trend: Float[Array, "B W"],
    root: Float[Array, "B R"],
) -> Float[Array, "S B _"]:
    """The last hidden layer by ACA at any rows."""
    values = trend[None] + _apply(root, white)
    for level, given in enumerate(deeper, start=1):
        values = _deeper_values(model, level, given, seen(model, level, x, values))
    return values


def _deeper_values(
    model: DeepGP, level: int, given: _AtAnchors, inputs: Float[Array, "S B F"]
) -> Float[Array, "S B W"]:
    covariances = jax.vmap(model.layers[level].kernel.gram)(inputs, given.z)
    return _means(model, level, inputs) + covariances @ given.weights


def _factor(model: DeepGP, level: int, z: Float[Array, "S R F"]) -> Float[Array, "S R R"]:
    return safe_cholesky(jax.vmap(model.layers[level].kernel.gram)(z)).lower


def _solve(lower: Float[Array, "S R R"], columns: Float[Array, "S R W"]) -> Float[Array, "S R W"]:
    return jax.lax.linalg.triangular_solve(lower, columns, left_side=True, lower=True)
