"""Where sequential inference starts: hyperparameters from a shallow GP, layers that have seen nothing."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, ArraySource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import Phase
from fathomgp.inference._descent import DescentState
from fathomgp.inference._online import OnlineGP, empty, prior_at
from fathomgp.inference.dsvi import DSVI, inputs_at_means, shallow_start
from fathomgp.likelihoods import AbstractClassLikelihood, AbstractLikelihood, Gaussian, HeteroscedasticGaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import Parameter, all_finite, cast

#: Rows that a shallow start looks at, at the most, unless a setting says otherwise.
START_ROWS = 2000
#: Steps of a variational start.
_START_STEPS = 300


def start_layers(
    model: DeepGP, budget: int | None = None, *, shared: bool, averaged: bool = False, delta: float = 1e-6
) -> tuple[OnlineGP, ...]:
    """Online GPs that have seen nothing.

    Args:
        model: the deep GP.
        budget: active inputs a layer; by default the layers' numbers of inducing inputs.
        shared: all outputs of a row will be observed, with one noise. Without inner layers they then share one
            covariance; particles tell each output, and each inner function, something else.
        averaged: outputs share one covariance all the same, unless they go missing separately.
        delta: see :class:`OnlineGP`.
    """
    gps = []
    for level, layer in enumerate(model.layers):
        if layer.z is None:
            raise SettingError("method='sequential' keeps a budget of active inputs a layer: set num_inducing.")
        inner = level < model.depth - 1
        size = layer.num_inducing if budget is None else budget
        alike = averaged if inner else shared and (averaged or model.depth == 1)
        gps.append(empty(layer, layer.z.shape[1], size, shared=alike, delta=delta))
    return tuple(gps)


@program
def keep_log_noise(gp: OnlineGP, layer: Layer) -> OnlineGP:
    """The prior for the first half of the outputs, what was learned for the second: the log noises."""
    fresh = prior_at(gp, layer, gp.x, gp.active)
    kept = jnp.arange(layer.width) >= layer.width // 2
    mean = jnp.where(kept[None, :], gp.mean, 0.0)
    covariance = jnp.where(kept[:, None, None], gp.covariance, fresh.covariance)
    return OnlineGP(gp.x, mean, covariance, fresh.root, gp.active, gp.delta)


def noise_is_one_number(likelihood: AbstractLikelihood) -> bool:
    """Whether every output of a row tells its function equally much."""
    return isinstance(likelihood, Gaussian) and likelihood.variance.raw.size == 1


def scale_inner_layers(model: DeepGP, share: float) -> DeepGP:
    """The model with the variances of its inner kernels multiplied, where they have one."""

    def scale(layer: Layer) -> Layer:
        variance = getattr(layer.kernel, "variance", None)
        if not isinstance(variance, Parameter) or variance.lower != 0.0:
            return layer
        return eqx.tree_at(lambda l: l.kernel.variance.raw, layer, variance.raw + jnp.log(share))

    return DeepGP((*map(scale, model.layers[:-1]), model.layers[-1]), model.likelihood, model.skip_inputs)


def start_hyperparameters(model: DeepGP, data: AbstractSource, *, rows: int, key: PRNGKeyArray) -> DeepGP:
    """The last layer's kernel and noise from a sparse GP on what the inner means make of some rows' inputs.

    Likelihoods other than the Gaussian borrow the kernel of one that is fitted to their targets: labels as plus and
    minus 2, numbers as they are. Noise that varies is no part of such a fit, and where it is all there is to learn, the
    kernel of the mean would be flat: the heteroscedastic likelihood starts from a variational GP of its own.
    """
    if isinstance(model.likelihood, Gaussian):
        return shallow_start(model, data, key=key, rows=rows)[0]
    if isinstance(model.likelihood, HeteroscedasticGaussian):
        return _variational_start(model, data, rows=rows, key=key)
    likelihood, last = model.likelihood, model.layers[-1]
    rows_key, start_key = jax.random.split(key)
    x, y, observed = data.subset(rows, seed=int(jax.random.bits(rows_key, dtype=jnp.uint32)))
    targets = _as_numbers(likelihood, np.asarray(y))
    observed = np.broadcast_to(observed[:, :1] if targets.shape[1] != y.shape[1] else observed, targets.shape)
    stand_in = Layer(last.kernel, Zero(targets.shape[1]), last.z, targets.shape[1])
    simple = DeepGP((*model.layers[:-1], stand_in), Gaussian(0.1), model.skip_inputs)
    source = ArraySource(np.asarray(x), targets, observed)
    fitted, _ = shallow_start(cast(simple, jnp.float64), source, key=start_key, rows=rows)
    layer = Layer(fitted.layers[-1].kernel, last.mean, fitted.layers[-1].z, last.width, last.noise)
    return DeepGP((*fitted.layers[:-1], layer), likelihood, model.skip_inputs, model.architecture)


def _variational_start(model: DeepGP, data: AbstractSource, *, rows: int, key: PRNGKeyArray) -> DeepGP:
    """The last layer and the likelihood of a one-layer variational GP on what the inner means make of some rows."""
    rows_key, init_key, enter_key, step_key = jax.random.split(key, 4)
    x, y, observed = data.subset(rows, seed=int(jax.random.bits(rows_key, dtype=jnp.uint32)))
    seen = inputs_at_means(model, jnp.asarray(x, jnp.float64))
    source = ArraySource(np.asarray(seen), np.asarray(y), np.asarray(observed))
    shallow = cast(DeepGP(model.layers[-1:], model.likelihood), jnp.float64)
    method = DSVI(shallow_start=False)
    phase = method.plan(source.num_data, _START_STEPS)[0]
    state = method.enter(phase, method.init(shallow, source, key=init_key), source, key=enter_key)
    fitted = _descend(method, phase, state, source.everything(), step_key)
    if not bool(all_finite(fitted)):
        return model  # the hyperparameters that the user or the recipe chose
    layers = (*model.layers[:-1], *fitted.layers)
    return DeepGP(layers, fitted.likelihood, model.skip_inputs, model.architecture)


@program
def _descend(method: DSVI, phase: Phase, state: DescentState, batch: Batch, key: PRNGKeyArray) -> DeepGP:
    """The model after some steps of variational inference on one batch."""
    dynamic, static = eqx.partition(state, eqx.is_array)

    def step(dynamic: Any, key: PRNGKeyArray) -> tuple[Any, None]:
        new = method.step(phase, eqx.combine(dynamic, static), batch, key=key)[0]
        return eqx.partition(new, eqx.is_array)[0], None

    last, _ = jax.lax.scan(step, dynamic, jax.random.split(key, _START_STEPS))
    return eqx.combine(last, static).model


def _as_numbers(likelihood: AbstractLikelihood, y: np.ndarray) -> np.ndarray:
    """Targets that a GP with Gaussian noise can learn."""
    if not isinstance(likelihood, AbstractClassLikelihood):
        return np.log1p(y) if likelihood.target_kind == "count" else y
    if likelihood.num_latents(1) == 1:
        return 4.0 * y - 2.0
    return np.where(y == np.arange(likelihood.num_classes)[None, :], 2.0, -2.0)


@program
def prior_at_inducing(gp: OnlineGP, layer: Layer) -> OnlineGP:
    """The prior, with a layer's inducing inputs as its active set."""
    assert layer.z is not None
    free = jnp.zeros((len(gp.active) - layer.num_inducing, layer.z.shape[1]), jnp.float64)
    x = jnp.concatenate([layer.z.value, free])
    return prior_at(gp, layer, x, jnp.arange(len(x)) < layer.num_inducing)
