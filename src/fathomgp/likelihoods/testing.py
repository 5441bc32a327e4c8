"""The checks that every likelihood passes; run them on your own.

    from fathomgp.likelihoods.testing import check_likelihood
    check_likelihood(MyLikelihood())          # with 64-bit floats switched on

A check raises an ``AssertionError`` that says what disagrees. :data:`CHECKS` holds them one by one, by name.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.errors import DataError
from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._classes import AbstractClassLikelihood
from fathomgp.parameters import cast, partition

_ROWS = 4096


def check_likelihood(likelihood: AbstractLikelihood, *, num_outputs: int = 1, key: PRNGKeyArray | None = None) -> None:
    """Run every check."""
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(CHECKS))
    for check, one in zip(CHECKS.values(), keys, strict=True):
        check(likelihood, num_outputs, one)


def latents_and_targets(
    likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray, num_rows: int = 5
) -> tuple[Float[Array, "N Q"], Float[Array, "N Q"], Float[Array, "N P"]]:
    """Plausible ``mean``, ``variance`` and ``y``, the last drawn from the likelihood."""
    keys = jax.random.split(key, 3)
    shape = (num_rows, likelihood.num_latents(num_outputs))
    mean = jax.random.uniform(keys[0], shape, np.float64, -1.0, 1.0)
    variance = jax.random.uniform(keys[1], shape, np.float64, 0.05, 0.6)
    return mean, variance, _draws(likelihood, mean, keys[2])[0]


def check_normalised(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """``p(y | f)`` and ``exp(log_z)`` sum or integrate to one over ``y``, and have the stated moments."""
    mean, variance, _ = latents_and_targets(likelihood, num_outputs, key)
    for name, spread in (("log_prob", jnp.zeros_like(variance)), ("log_z", variance)):
        moments = _scores(likelihood, mean, spread, jnp.zeros((len(mean), num_outputs)))
        average, second = moments["mean"], moments["variance"]
        grid, weights = _target_grid(likelihood, average, second)
        mass = np.exp(_on_grid(likelihood, mean, spread, grid)[name]) * weights
        _close(mass.sum(0), 1.0, 1e-3, f"the total of exp({name}) over y")
        _close((mass * grid).sum(0), average, 5e-3, "the predictive mean")
        _close((mass * (grid - average) ** 2).sum(0), second, 2e-2, "the predictive variance")


def check_classes(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Over the classes ``exp(log_z)`` is the predictive probability and sums to one, whatever the latent variances."""
    if not isinstance(likelihood, AbstractClassLikelihood):
        return
    width = likelihood.num_latents(1)
    mean_key, variance_key = jax.random.split(key)
    mean = jax.random.uniform(mean_key, (20, width), np.float64, -2.0, 2.0)
    log_variance = jax.random.uniform(variance_key, mean.shape, np.float64, -12.0, 3.0)
    labels = np.broadcast_to(np.arange(float(likelihood.num_classes))[:, None, None], (likelihood.num_classes, 20, 1))
    table = np.exp(_on_grid(likelihood, mean, jnp.exp(log_variance), labels)["log_z"])[:, :, 0].T
    probabilities = jax.jit(likelihood.probabilities)(mean, jnp.exp(log_variance))
    _close(table.sum(axis=1), 1.0, 1e-6, "the total of exp(log_z) over the classes")
    _close(table, probabilities, 1e-6, "exp(log_z) of every class beside the predictive probability")


def check_cdf(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """The distribution function is the running sum or integral of ``exp(log_z)``."""
    mean, variance, _ = latents_and_targets(likelihood, num_outputs, key)
    moments = _scores(likelihood, mean, variance, jnp.zeros((len(mean), num_outputs)))
    grid, weights = _target_grid(likelihood, moments["mean"], moments["variance"])
    table = _on_grid(likelihood, mean, variance, grid)
    mass = np.exp(table["log_z"]) * weights
    half = 0.5 * mass if likelihood.target_kind == "real" else 0.0
    _close(table["cdf"], np.cumsum(mass, axis=0) - half, 2e-3, "the distribution function")


def check_no_variance(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Without latent variance, ``expected_log_prob`` and ``log_z`` are ``log_prob``."""
    mean, _, y = latents_and_targets(likelihood, num_outputs, key)
    scores = _scores(likelihood, mean, jnp.full_like(mean, 1e-12), y)
    _close(scores["log_prob"], likelihood.log_prob(mean, y), 1e-10, "compiled log_prob")
    _close(scores["expected_log_prob"], scores["log_prob"], 1e-4, "expected_log_prob at variance 1e-12")
    _close(scores["log_z"], scores["log_prob"], 1e-4, "log_z at variance 1e-12")


def check_log_z(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """``log_z`` is ``log E[p^alpha]`` and ``expected_log_prob`` is ``E[log p]``, by Monte Carlo with its own error."""
    target_key, noise_key = jax.random.split(key)
    mean, variance, y = latents_and_targets(likelihood, num_outputs, target_key)
    noise = jax.random.normal(noise_key, (20_000, *mean.shape), mean.dtype)
    latents = mean[None] + jnp.sqrt(variance)[None] * noise
    draws = np.asarray(jax.jit(jax.vmap(lambda f: likelihood.log_prob(f, y)))(latents))
    scores = _scores(likelihood, mean, variance, y)
    _within_errors(scores["expected_log_prob"], draws, "expected_log_prob")
    _within_errors(np.exp(scores["log_z"]), np.exp(draws), "exp(log_z)")
    _within_errors(np.exp(scores["log_z_half"]), np.exp(0.5 * draws), "exp(log_z) at alpha = 1/2")


def check_small_alpha(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """``log_z / alpha`` tends to ``expected_log_prob`` as ``alpha -> 0``."""
    mean, variance, y = latents_and_targets(likelihood, num_outputs, key)
    limit = jax.jit(lambda: likelihood.log_z(mean, variance, y, 1e-6) / 1e-6)()
    _close(limit, _scores(likelihood, mean, variance, y)["expected_log_prob"], 2e-2, "log_z / alpha at alpha = 1e-6")


def check_sample(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Draws follow the distribution function."""
    target_key, draw_key = jax.random.split(key)
    mean, _, y = latents_and_targets(likelihood, num_outputs, target_key)
    draws = _draws(likelihood, mean, draw_key)
    expected = _scores(likelihood, mean, jnp.full_like(mean, 1e-12), y)["cdf"]
    _within_errors(expected, np.asarray(draws <= y[None], np.float64), "the share of draws below y")


def check_gradients(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Gradients in the latents' moments and in the parameters agree with central differences."""
    target_key, direction_key = jax.random.split(key)
    mean, variance, y = latents_and_targets(likelihood, num_outputs, target_key)
    learned, constant = partition(likelihood)
    start = (learned, mean, variance)
    _, gradient = _total_and_gradient(start, constant, y)
    leaves, tree = jax.tree.flatten(start)
    for i, slope in enumerate(jax.tree.leaves(gradient)):
        direction = jax.random.normal(jax.random.fold_in(direction_key, i), slope.shape, slope.dtype)
        moved = [jax.tree.unflatten(tree, _with(leaves, i, leaves[i] + h * direction)) for h in (1e-5, -1e-5)]
        ahead, behind = (_total_and_gradient(point, constant, y)[0] for point in moved)
        _close(jnp.sum(slope * direction), (ahead - behind) / 2e-5, 1e-4, f"the gradient in leaf {i} of {tree}")


def check_transformations(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Rows mapped one by one give what they give together."""
    mean, variance, y = latents_and_targets(likelihood, num_outputs, key)
    together = _scores(likelihood, mean, variance, y)
    for name in ("expected_log_prob", "log_z"):
        score = getattr(likelihood, name)
        mapped = jax.jit(jax.vmap(lambda m, v, t, s=score: s(m[None], v[None], t[None])[0]))(mean, variance, y)
        _close(mapped, together[name], 1e-10, f"mapped {name}")


def check_dtype(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Single precision in, single precision out, and about the same numbers."""
    target_key, sample_key = jax.random.split(key)
    inputs = latents_and_targets(likelihood, num_outputs, target_key)
    low, low_inputs = cast((likelihood, inputs), jnp.float32)
    shapes = eqx.filter_eval_shape(_all_scores, low, *low_inputs)
    shapes["sample"] = eqx.filter_eval_shape(lambda f: low.sample(f, key=sample_key), low_inputs[0])
    for name, answer in shapes.items():
        assert answer.dtype == jnp.float32, f"{name} turned float32 into {answer.dtype}."
        assert answer.shape == inputs[2].shape, f"{name} has the shape {answer.shape}, but y has {inputs[2].shape}."
    totals = []
    for model, (mean, variance, y) in ((likelihood, inputs), (low, low_inputs)):
        learned, constant = partition(model)
        totals.append(_total_and_gradient((learned, mean, variance), constant, y)[0])
    _close(totals[1], totals[0], 1e-3, "the scores in single precision")


def check_extremes(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Scores and their gradients stay finite for means of +-1000 and variances from 1e-12 to 1e6."""
    _, _, y = latents_and_targets(likelihood, num_outputs, key)
    width = likelihood.num_latents(num_outputs)
    signs = np.where(np.arange(width) % 2 == 0, 1.0, -1.0)[None, :] * np.array([[1.0], [-1.0], [1.0], [-1.0], [0.0]])
    variance = np.broadcast_to(np.array([[1e-12], [1.0], [1e6], [1e-4], [1e6]]), signs.shape)
    for dtype in (jnp.float32, jnp.float64):
        learned, constant = partition(cast(likelihood, dtype))
        start = (learned, jnp.asarray(1e3 * signs, dtype), jnp.asarray(variance, dtype))
        answers = _total_and_gradient(start, constant, y.astype(dtype))
        finite = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(answers))
        assert finite, f"a score or its gradient is not finite for extreme {jnp.dtype(dtype)} inputs: {answers}."


def check_target_rules(likelihood: AbstractLikelihood, num_outputs: int, key: PRNGKeyArray) -> None:
    """Draws are valid targets, so is NaN (missing); infinity is not."""
    y = np.array(latents_and_targets(likelihood, num_outputs, key)[2])
    y[0] = np.nan
    likelihood.check_targets(y)
    y[1] = np.inf
    try:
        likelihood.check_targets(y)
    except DataError:
        return
    raise AssertionError("check_targets accepted an infinite target.")


CHECKS: dict[str, Callable[[AbstractLikelihood, int, PRNGKeyArray], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_normalised,
        check_classes,
        check_cdf,
        check_no_variance,
        check_log_z,
        check_small_alpha,
        check_sample,
        check_gradients,
        check_transformations,
        check_dtype,
        check_extremes,
        check_target_rules,
    )
}


def _all_scores(likelihood: AbstractLikelihood, mean: Array, variance: Array, y: Array) -> dict[str, Array]:
    """Every figure of the contract that has the shape of ``y``."""
    average, spread = likelihood.predict_moments(mean, variance)
    return {
        "log_prob": likelihood.log_prob(mean, y),
        "expected_log_prob": likelihood.expected_log_prob(mean, variance, y),
        "log_z": likelihood.log_z(mean, variance, y),
        "log_z_half": likelihood.log_z(mean, variance, y, 0.5),
        "cdf": likelihood.cdf(mean, variance, y),
        "mean": average,
        "variance": spread,
    }


_compiled_scores = eqx.filter_jit(_all_scores)


def _scores(likelihood: AbstractLikelihood, mean: Array, variance: Array, y: Array) -> dict[str, np.ndarray]:
    """The scores of any number of rows, padded to one size: a single compilation serves all checks."""
    padded = (jnp.asarray(np.resize(np.asarray(x), (_ROWS, x.shape[1]))) for x in (mean, variance, y))
    return {name: np.asarray(x)[: len(y)] for name, x in _compiled_scores(likelihood, *padded).items()}


def _on_grid(likelihood: AbstractLikelihood, mean: Array, variance: Array, grid: np.ndarray) -> dict[str, np.ndarray]:
    """The scores of every row at every point of a grid of targets (G, N, P)."""
    times = (len(grid), 1)
    targets = jnp.asarray(grid.reshape(-1, grid.shape[2]))
    table = _scores(likelihood, jnp.tile(mean, times), jnp.tile(variance, times), targets)
    return {name: x.reshape(grid.shape) for name, x in table.items()}


@eqx.filter_jit
def _total_and_gradient(point: Any, constant: AbstractLikelihood, y: Array) -> tuple[Array, Any]:
    """A sum of the scores with unequal weights, and its gradient in (parameters, mean, variance)."""

    def total(point: Any) -> Array:
        likelihood, (mean, variance) = eqx.combine(point[0], constant), point[1:]
        return (
            jnp.sum(likelihood.log_prob(mean, y))
            + 0.7 * jnp.sum(likelihood.expected_log_prob(mean, variance, y))
            + 0.6 * jnp.sum(likelihood.log_z(mean, variance, y))
            + 0.3 * jnp.sum(likelihood.log_z(mean, variance, y, 0.5))
        )

    return eqx.filter_value_and_grad(total)(point)


@eqx.filter_jit
def _draws(likelihood: AbstractLikelihood, f: Array, key: PRNGKeyArray) -> Array:
    """Ten thousand draws of every row."""
    draws = likelihood.sample(jnp.tile(f, (10_000, 1)), key=key)
    return draws.reshape(10_000, f.shape[0], draws.shape[1])


def _target_grid(
    likelihood: AbstractLikelihood, average: np.ndarray, spread: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values of y with their weights, both (G, N, P): all labels, the likely counts, or a sinh-spaced grid."""
    if likelihood.target_kind == "real":
        t, step = np.linspace(-14.0, 14.0, 801, retstep=True)
        unit = 0.2 * np.sqrt(spread)[None]
        return average[None] + unit * np.sinh(t)[:, None, None], unit * np.cosh(t)[:, None, None] * step
    size = 200 if likelihood.target_kind == "count" else getattr(likelihood, "num_classes", 2)
    table = np.broadcast_to(np.arange(float(size))[:, None, None], (size, *average.shape))
    return table, np.ones_like(table)


def _with(leaves: list[Array], index: int, leaf: Array) -> list[Array]:
    return [*leaves[:index], leaf, *leaves[index + 1 :]]


def _close(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(
        np.asarray(actual), np.broadcast_to(np.asarray(expected), np.shape(actual)), tolerance, tolerance, err_msg=what
    )


def _within_errors(expected: Any, draws: np.ndarray, what: str) -> None:
    """The mean of ``draws`` over the first axis is ``expected`` up to six standard errors and 0.2 %."""
    allowed = 6.0 * draws.std(0) / np.sqrt(len(draws)) + 2e-3 * (1.0 + np.abs(np.asarray(expected)))
    excess = np.abs(draws.mean(0) - np.asarray(expected)) / allowed
    assert np.all(excess < 1.0), f"{what} is {np.asarray(expected)}, but draws say {draws.mean(0)}."
