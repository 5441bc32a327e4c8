"""Where STRIDE starts: the stationary model with hyperparameters and inducing points of sparse GP regression.

For other likelihoods than Gaussian noise that is regression on sites, see :mod:`fathomgp.inference._stride_sites`:
sites and hyperparameters settle in turns, each on the same variational bound.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fathomgp.data import Batch
from fathomgp.inference._base import run_seldom
from fathomgp.inference._lbfgs import lbfgs_minimise
from fathomgp.inference._stride_exchange import greedy_choice
from fathomgp.inference._stride_hidden import mean_path
from fathomgp.inference._stride_sites import Sites, settle_sites, shallow_bound, shallow_given, sites_about
from fathomgp.inference._stride_top import Top
from fathomgp.inference.sgpr import collapsed_elbo_and_jitter
from fathomgp.means import AbstractMean, Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import real
from fathomgp.priors import log_prior

#: L-BFGS steps of a round, at the most.
_STEPS = 500
#: Turns of sites and hyperparameters in a round, and what a turn takes of each.
_SITE_TURNS, _SETTLING, _SITE_STEPS = 4, 10, 20


def shallow_start(
    model: DeepGP,
    top: Top,
    batch: Batch,
    start: Float[Array, "N F"],
    num_inducing: int,
    num_data: int,
    *,
    num_rows: int,
    rounds: int,
    candidates: int,
    key: PRNGKeyArray,
) -> tuple[DeepGP, Int[Array, " M"], Float[Array, " k"]]:
    """Sparse GP regression: greedy inducing points and hyperparameters in turns.

    Args:
        model: of which the last layer and the noise are fitted.
        top: how the last layer is treated.
        batch: the data.
        start: what the last layer sees where it is stationary.
        num_inducing: M.
        num_data: the number of rows that are not padding.
        num_rows: rows to look at, at the most.
        rounds: how often inducing points and hyperparameters alternate.
        candidates: data points looked at for each birth.
        key: for the candidates, and for the rows where there are many.

    Returns:
        The fitted model, the row numbers of the inducing points, and the whitened means of what is sampled there.
    """
    rows_key, choice_key = jax.random.split(key)
    *turn_keys, last_key = jax.random.split(choice_key, rounds + 1)
    rows = jnp.arange(len(start), dtype=jnp.int32)
    if num_data > num_rows:
        rows = jnp.sort(jax.random.permutation(rows_key, num_data)[:num_rows].astype(jnp.int32))
    part = Batch(
        start[rows],
        batch.y[rows],
        batch.observed[rows],
        batch.weight[rows],
        batch.index[rows],
        jnp.sum(batch.weight[rows]),
    )
    candidates = min(max(candidates, num_inducing), len(rows))
    shallow = DeepGP((model.layers[-1],), model.likelihood)
    sites = _first_sites(shallow, part) if top.kind == "sampled" else None
    for turn_key in turn_keys:
        chosen = _choose_greedily(shallow, top, part, num_inducing, candidates, sites, turn_key)
        if sites is None:
            shallow = _fit_shallow(shallow, part, chosen, top.shared)
        else:
            for _ in range(_SITE_TURNS):
                shallow, sites = _fit_to_sites(shallow, part, chosen, sites)
    chosen = _choose_greedily(shallow, top, part, num_inducing, candidates, sites, last_key)
    white = jnp.zeros(0, start.dtype) if sites is None else _white_means(shallow, part, chosen, sites)
    fitted = eqx.tree_at(lambda m: m.layers[-1], model, shallow.layers[0], is_leaf=lambda n: isinstance(n, Layer))
    return eqx.tree_at(lambda m: m.likelihood, fitted, shallow.likelihood), rows[chosen], white


def neutral_path(model: DeepGP, x: Float[Array, "N D"]) -> list[Float[Array, "N _"]]:
    """Hidden values at which the last layer is stationary in x: the means, where they are not zero."""

    def mean(level: int, inputs: Array) -> AbstractMean:
        own = model.layers[level].mean
        return model.architecture.neutral(jax.device_get(inputs), own.output_dim) if isinstance(own, Zero) else own

    return mean_path(model, x, mean)


def without_inducing(model: DeepGP) -> DeepGP:
    """The layers without inducing inputs: STRIDE's are rows of the data."""
    layers = tuple(Layer(layer.kernel, layer.mean, None, layer.width, layer.noise) for layer in model.layers)
    return DeepGP(layers, model.likelihood, model.skip_inputs, model.architecture)


@run_seldom
def _choose_greedily(
    shallow: DeepGP,
    top: Top,
    part: Batch,
    num_inducing: int,
    candidates: int,
    sites: Sites | None,
    key: PRNGKeyArray,
) -> Int[Array, " M"]:
    return greedy_choice(shallow, top, part, part.x, num_inducing, candidates, sites, key=key)


@run_seldom
def _fit_shallow(shallow: DeepGP, part: Batch, chosen: Int[Array, " M"], shared: bool) -> DeepGP:
    """Hyperparameters of highest F_V, inducing points fixed."""

    def objective(model: DeepGP) -> tuple[Float[Array, ""], Float[Array, ""]]:
        value, jitter = collapsed_elbo_and_jitter(model, part, shared)
        return -(value + log_prior(model)) / part.num_data, jitter

    def with_z(z: Any) -> DeepGP:
        return eqx.tree_at(lambda m: m.layers[0].z, shallow, z, is_leaf=lambda n: n is None)

    fixed = with_z(real(part.x[chosen], trainable=False))
    fitted = lbfgs_minimise(objective, fixed, max_steps=_STEPS, tolerance=1e-7)
    return without_inducing(fitted)


@run_seldom
def _first_sites(shallow: DeepGP, part: Batch) -> Sites:
    """Those under the prior."""
    layer = shallow.layers[0]
    mean = layer.mean(part.x)
    variance = jnp.broadcast_to(layer.kernel.diagonal(part.x)[:, None], mean.shape)
    return sites_about(shallow.likelihood, part, mean, variance)


@run_seldom
def _fit_to_sites(shallow: DeepGP, part: Batch, chosen: Int[Array, " M"], sites: Sites) -> tuple[DeepGP, Sites]:
    """Sites settle under the hyperparameters, then hyperparameters rise on the bound of those sites."""
    z = part.x[chosen]
    sites = settle_sites(shallow.layers[0], shallow.likelihood, part, z, sites, times=_SETTLING)

    def objective(model: DeepGP) -> tuple[Float[Array, ""], Float[Array, ""]]:
        value = shallow_bound(model.layers[0], model.likelihood, part, z, sites)
        return -value / part.num_data, jnp.zeros_like(value)

    return lbfgs_minimise(objective, shallow, max_steps=_SITE_STEPS, tolerance=1e-7), sites


@run_seldom
def _white_means(shallow: DeepGP, part: Batch, chosen: Int[Array, " M"], sites: Sites) -> Float[Array, " k"]:
    layer, z = shallow.layers[0], part.x[chosen]
    sites = settle_sites(layer, shallow.likelihood, part, z, sites, times=_SETTLING)
    return shallow_given(layer, part, z, sites).white.reshape(-1)
