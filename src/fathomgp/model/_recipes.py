"""Recipes: well-started models, built from data and named after the papers whose initial values they take."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fathomgp._checks import shown
from fathomgp.compilation import padded_length, program, repeat_last_row
from fathomgp.errors import SettingError
from fathomgp.kernels import AbstractKernel, kernel_from_name
from fathomgp.likelihoods import AbstractLikelihood, refuse_sizes
from fathomgp.means import AbstractMean, Linear, Zero
from fathomgp.model._architectures import AbstractArchitecture, find_architecture
from fathomgp.model._deep import DeepGP, Layer, separate_outputs
from fathomgp.parameters import positive, real, unfreeze
from fathomgp.priors import (
    FlatTowardsZero,
    LogNormal,
    Normal,
    check_priors,
    lengthscale_prior,
    parameter_names,
    with_priors,
)
from fathomgp.tags import tagged

#: A setting beyond these is a slip: the model would not fit into memory.
_DEEPEST, _WIDEST = 100, 10_000
#: Rows a weight of all the linear means, below which they stay as they are.
_ROWS_A_WEIGHT = 12
#: What likelihoods call the size of their noise.
_NOISE = ("variance", "scale")
#: k-means on more rows than this would cost more than it helps.
_KMEANS_ROWS = 10_000


@tagged("model/recipe")
@dataclasses.dataclass(frozen=True)
class Recipe:
    """Initial values, for standardised inputs and outputs.

    Attributes:
        lengthscale: of every kernel; ``None`` means sqrt(D), at which k(x, x') of two random rows is far from 0 and 1.
        variance: of every kernel.
        inner_variance: of the inner layers' kernels, if another: a small one lets a deep model start as a shallow one.
        layer_noise: variance of the white noise between layers; ``None`` for none.
        max_width: inner layers are as wide as the inputs, up to this.
        learn_means: whether the inner layers' linear means are learned, projections that no ARD kernel can express,
            where there are twelve rows a weight of all layers': with fewer they fit the noise (200 rows of 12 inputs:
            0.2 nats worse; three layers on 1,439 rows of 11: 0.07). The papers keep them fixed.
        centred: whether hidden layers have the mean at which the next layer is stationary (the identity, for
            composition); otherwise their mean is zero.
        max_separate: inner layers up to this width have a kernel and inducing inputs an output, where the algorithm
            allows. That costs a factorisation an output, and is worth 0.1 to 0.2 nats a datum on concrete and energy.
        priors: whether a single layer's hyperparameters have weak priors; the papers maximise without any.
        reference: where the values come from.
    """

    lengthscale: float | None = None
    variance: float = 1.0
    layer_noise: float | None = None
    max_width: int = 30
    inner_variance: float | None = None
    learn_means: bool = False
    centred: bool = True
    max_separate: int = 0
    priors: bool = False
    reference: str = ""


RECIPES: dict[str, Recipe] = {
    "default": Recipe(
        inner_variance=0.1,
        learn_means=True,
        max_separate=16,
        priors=True,
        reference="lengthscale sqrt(D) is safe in any number of inputs",
    ),
    "salimbeni2017": Recipe(2.0, 2.0, 1e-5, 30, reference="Salimbeni and Deisenroth (2017), supplement"),
    "latz2025": Recipe(centred=False, reference="Latz et al. (2025): hidden layers with mean 0 and variance 1"),
    "havasi2018": Recipe(None, 0.01, None, 10, reference="Havasi et al. (2018) and the authors' code"),
}


def build_model(
    x: np.ndarray,
    likelihood: AbstractLikelihood,
    num_outputs: int,
    *,
    recipe: str | Recipe = "default",
    depth: int = 1,
    num_inducing: int | Sequence[int] | None = None,
    hidden_dim: int | Sequence[int] | None = None,
    kernel: str | AbstractKernel | Sequence[str | AbstractKernel] = "rbf",
    skip_inputs: bool = False,
    architecture: str | AbstractArchitecture = "composition",
    separate: bool = False,
    priors: Any = "weak",
    seed: int = 0,
) -> DeepGP:
    """A deep GP that starts well on the standardised inputs ``x``.

    Inner layers have a fixed mean at which the next layer is stationary in ``x``: for composition a linear one (the
    identity, a PCA map or a padding with zeros, as widths ask), so that the untrained model already passes the inputs
    through; the last layer's mean is zero. Inducing inputs are k-means centres of ``x``, mapped through the same means.

    Args:
        x: standardised inputs, or a random subset of them.
        likelihood: gives the number of latent functions of the last layer.
        num_outputs: P.
        recipe: the name of a set of initial values, or one of your own.
        depth: the number of layers.
        num_inducing: M, one number or one a layer; ``None`` builds layers without inducing inputs.
        hidden_dim: width of the inner layers, one number or one a layer; as wide as the inputs by default.
        kernel: a name or a kernel, one for all layers or one a layer.
        skip_inputs: whether later layers also see ``x``.
        architecture: how layers are joined, a name or an object.
        separate: whether the algorithm allows inner layers whose outputs have kernels and inducing inputs of their own;
            the recipe says up to which width.
        priors: ``"weak"`` (those of :func:`weak_priors` for one layer, where the recipe has any), ``None``, or a
            mapping from names of parameters (``lengthscale``, ``variance``, ``noise``, ...) to priors, the others
            having none.
        seed: of k-means.
    """
    chosen, joined = _find_recipe(recipe), find_architecture(architecture)
    refuse_sizes(likelihood, num_outputs)
    if depth < 1:
        raise SettingError(f"depth counts GP layers and must be at least 1, but it is {depth}.")
    if depth > _DEEPEST:
        raise SettingError(f"depth counts GP layers and must be at most {_DEEPEST}, but it is {shown(depth)}.")
    input_dim = x.shape[1]
    widths = _widths(hidden_dim, depth, joined.width(input_dim, chosen.max_width))
    joined.check(input_dim, widths)
    kernels = _per_layer(kernel, depth, "kernel")
    counts = _per_layer(num_inducing, depth, "num_inducing")
    centres = {count: kmeans_centres(x, count, seed=seed) for count in set(counts) if count is not None}
    learned = chosen.learn_means and len(x) >= _ROWS_A_WEIGHT * _num_weights(input_dim, widths, skip_inputs)
    layers, seen, h, reached = [], [], x, centres
    for level in range(depth):
        if skip_inputs and level > 0:
            h = np.concatenate([h, x], axis=1)
            reached = {count: np.concatenate([z, centres[count]], axis=1) for count, z in reached.items()}
        last = level == depth - 1
        width = likelihood.num_latents(num_outputs) if last else widths[level]
        neutral: AbstractMean = Zero(width) if last else joined.neutral(h, width)
        noise = None if last or chosen.layer_noise is None else positive(chosen.layer_noise, name="layer noise")
        columns = h.shape[1] if level == 0 else joined.kernel_dim(h.shape[1])
        seen.append(columns)
        base = _layer_kernel(kernels[level], columns, chosen, inner=not last)
        layer = Layer(
            kernel=base if level == 0 else joined.kernel(base),
            mean=_layer_mean(neutral, chosen.centred, learned),
            z=None if counts[level] is None else real(reached[counts[level]]),
            width=width,
            noise=noise,
        )
        if separate and width <= chosen.max_separate and not last and layer.z is not None:
            layer = separate_outputs(layer, _own_inducing(h, layer, seed=seed))
        layers.append(layer)
        if not last:
            h = _push(joined, neutral, h, x)
            reached = {count: _push(joined, neutral, z, centres[count]) for count, z in reached.items()}
    model = DeepGP(tuple(layers), likelihood, skip_inputs, joined)
    return _with_beliefs(model, priors, seen, chosen)


def weak_priors(model: DeepGP, num_inputs: Sequence[int]) -> DeepGP:
    """The model with the priors that the estimators use, for standardised data.

    Lengthscales follow :func:`~fathomgp.priors.lengthscale_prior`. Signal variance is within a factor of e^2 or so of
    the data's; inner layers may be as flat as they like, and noise as small, but neither is much larger than the data.
    Learned linear means stay near the neutral map, by 1 / sqrt(D).

    Args:
        model: the model.
        num_inputs: how many columns the kernel of every layer sees.
    """
    layers = []
    for level, (layer, columns) in enumerate(zip(model.layers, num_inputs, strict=True)):
        last = level == model.depth - 1
        beliefs = {
            "lengthscale": lengthscale_prior(columns),
            "variance": LogNormal(0.0, 2.0) if last else FlatTowardsZero(1.0),
        }
        layers.append(dataclasses.replace(layer, kernel=with_priors(layer.kernel, beliefs), mean=_near(layer.mean)))
    likelihood = with_priors(model.likelihood, {name: FlatTowardsZero(1.0) for name in _NOISE})
    return dataclasses.replace(model, layers=tuple(layers), likelihood=likelihood)


def _near(mean: AbstractMean) -> AbstractMean:
    """A learned linear mean that is believed to be near where it is."""
    if not isinstance(mean, Linear):
        return mean
    location = tuple(map(tuple, np.asarray(mean.weights.value, np.float64).tolist()))
    return with_priors(mean, {"weights": Normal(location, 1.0 / np.sqrt(len(location)))})


def _with_beliefs(model: DeepGP, priors: Any, num_inputs: Sequence[int], recipe: Recipe) -> DeepGP:
    if priors is None:
        return model
    if isinstance(priors, str):
        if priors != "weak":
            raise SettingError(f"priors must be 'weak', None, or a mapping of priors, but it is {priors!r}.")
        # Deep models start from a fitted shallow part; what these priors do to them has not been measured by itself.
        return weak_priors(model, num_inputs) if recipe.priors and model.depth == 1 else model
    of_layers, of_likelihood = parameter_names(model.layers), parameter_names(model.likelihood)
    noise = [name for name in of_likelihood if name in _NOISE]
    check_priors(priors, tuple(sorted({*of_layers, *of_likelihood, *(["noise"] if noise else [])} - {"z"})))
    layers = tuple(with_priors(layer, priors) for layer in model.layers)
    named = {name: priors.get("noise") if name in noise else priors.get(name) for name in of_likelihood}
    return dataclasses.replace(model, layers=layers, likelihood=with_priors(model.likelihood, named))


def _num_weights(input_dim: int, widths: list[int], skip_inputs: bool) -> int:
    """How many weights the inner layers' linear means have."""
    seen = [input_dim, *(width + input_dim * skip_inputs for width in widths)]
    return sum(columns * width for columns, width in zip(seen, widths, strict=False))


def _layer_mean(neutral: AbstractMean, centred: bool, learned: bool) -> AbstractMean:
    if not centred:
        return Zero(neutral.output_dim)
    return unfreeze(neutral) if learned else neutral


def _own_inducing(h: np.ndarray, layer: Layer, *, seed: int) -> jnp.ndarray:
    """Inducing inputs for every output of a layer that sees ``h``: the k-means centres first, then random rows."""
    assert layer.z is not None
    rng, count = np.random.default_rng(seed), layer.num_inducing
    others = [h[rng.choice(len(h), count, replace=len(h) < count)] for _ in range(layer.width - 1)]
    return jnp.stack([layer.z.value, *(jnp.asarray(rows, layer.z.raw.dtype) for rows in others)])


def _push(architecture: AbstractArchitecture, mean: AbstractMean, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What the next layer sees at ``x`` when this one, which sees ``rows``, has its mean values."""
    padded = padded_length(len(rows), smallest=16)
    return np.asarray(_compiled_push(architecture, mean, repeat_last_row(rows, padded), repeat_last_row(x, padded)))[
        : len(rows)
    ]


@program
def _compiled_push(architecture: AbstractArchitecture, mean: AbstractMean, rows: Any, x: Any) -> Array:
    places, values = jnp.asarray(x), mean(jnp.asarray(rows))
    return architecture.inputs(places, values, (places, values))


def kmeans_centres(x: np.ndarray, num_centres: int, *, seed: int = 0) -> np.ndarray:
    """k-means centres of the rows of ``x``; the distinct rows themselves when these are no more."""
    if num_centres < 1:
        raise SettingError(f"num_inducing must be at least 1, but it is {num_centres}.")
    distinct = np.unique(x, axis=0)
    if len(distinct) <= num_centres:
        return distinct
    from sklearn.cluster import KMeans

    if len(distinct) > _KMEANS_ROWS:
        distinct = np.random.default_rng(seed).choice(distinct, _KMEANS_ROWS, replace=False)
    return KMeans(num_centres, n_init=1, max_iter=30, random_state=seed % 2**32).fit(distinct).cluster_centers_


def _find_recipe(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise SettingError(f"There is no recipe {shown(recipe)}; choose one of {', '.join(sorted(RECIPES))}.")
    return RECIPES[recipe]


def _widths(hidden_dim: int | Sequence[int] | None, depth: int, default: int) -> list[int]:
    widths = _per_layer(default if hidden_dim is None else hidden_dim, depth - 1, "hidden_dim")
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, (int, np.integer)) or width < 1:
            raise SettingError(f"hidden_dim must be a whole number of at least 1, but it is {shown(width)}.")
        if width > _WIDEST:
            raise SettingError(f"hidden_dim must be at most {_WIDEST}, but it is {shown(width)}.")
    return [int(width) for width in widths]


def _per_layer(value, count: int, name: str) -> list:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise SettingError(
                f"{name} has {len(value)} entries, but {count} layers need one each: give {count}, or one."
            )
        return list(value)
    return [value] * count


def _layer_kernel(kernel: str | AbstractKernel, input_dim: int, recipe: Recipe, *, inner: bool) -> AbstractKernel:
    if isinstance(kernel, AbstractKernel):
        return kernel
    lengthscale = float(np.sqrt(input_dim)) if recipe.lengthscale is None else recipe.lengthscale
    variance = recipe.inner_variance if inner and recipe.inner_variance is not None else recipe.variance
    return kernel_from_name(kernel, input_dim, lengthscale=lengthscale, variance=variance)
