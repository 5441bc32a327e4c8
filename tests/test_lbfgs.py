import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import toy
from fathomgp.errors import NonFiniteError
from fathomgp.inference._lbfgs import (
    best_model,
    fitted_model,
    lbfgs_begin,
    lbfgs_init,
    lbfgs_shuffle,
    lbfgs_step,
    model_to_point,
)
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer
from fathomgp.parameters import freeze


def model_with(values) -> DeepGP:
    """A model whose trainable vector is ``values`` (all but the last two entries are log lengthscales)."""
    values = jnp.asarray(values, float)
    layer = Layer(RBF(jnp.exp(values[:-2]), jnp.exp(values[-2])), Zero(1), None, 1)
    return DeepGP((layer,), Gaussian(1e-6 + jnp.exp(values[-1])))


def minimise(function, start, max_steps=500, tolerance=1e-10):
    objective = lambda model: (function(model_to_point(model)), jnp.zeros(()))  # noqa: E731
    step = jax.jit(lambda state: lbfgs_step(objective, state, tolerance=tolerance))
    state = lbfgs_begin(lbfgs_init(model_with(start)), model_with(start))
    count, done = 0, False
    while count < max_steps and not done:
        state, info = step(state)
        count, done = count + 1, bool(info.done)
    return state, count


def rosenbrock(x):
    return jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def test_rosenbrock_as_good_as_scipy(rng):
    start = rng.uniform(-1.5, 1.5, size=6)
    state, count = minimise(rosenbrock, start)
    theirs = scipy.optimize.minimize(
        lambda x: np.asarray(rosenbrock(jnp.asarray(x))),
        start,
        jac=lambda x: np.asarray(jax.grad(rosenbrock)(jnp.asarray(x))),
        method="L-BFGS-B",
    )
    assert float(state.value) < max(1e-8, 10.0 * theirs.fun)
    assert count < 3 * theirs.nfev + 20


def test_quadratic_is_solved_exactly(rng):
    root = rng.normal(size=(5, 5))
    matrix = jnp.asarray(root @ root.T + 0.1 * np.eye(5))
    target = jnp.asarray(rng.normal(size=5))
    state, _ = minimise(lambda x: 0.5 * (x - target) @ matrix @ (x - target), rng.normal(size=5))
    assert np.allclose(model_to_point(best_model(state)), target, atol=1e-3)


def test_non_finite_regions_are_backed_away_from():
    barrier = lambda x: jnp.sum(x**2) - jnp.log(jnp.sum(x) + 1.0)  # noqa: E731  NaN where the sum is below -1
    state, _ = minimise(barrier, [3.0, 3.0, 3.0])
    x = model_to_point(best_model(state))
    assert np.all(np.isfinite(x))
    assert np.allclose(jax.grad(barrier)(x), 0.0, atol=1e-3)


def test_the_best_start_is_kept(key):
    start = model_with([1.0, 1.0, 1.0])
    bowl = lambda model: (jnp.sum(model_to_point(model) ** 2), jnp.zeros(()))  # noqa: E731
    state = lbfgs_begin(lbfgs_init(start), start)
    for _ in range(30):
        state, _ = lbfgs_step(bowl, state, tolerance=1e-9)
    good = float(state.value)
    state = lbfgs_begin(state, lbfgs_shuffle(state, spread=3.0, key=key))
    state, _ = lbfgs_step(bowl, state, tolerance=1e-9)
    assert float(state.value) > good
    assert float(bowl(best_model(state))[0]) == pytest.approx(good)


def test_restarts_stay_around_the_first_start(key):
    state = lbfgs_init(toy.tiny_model())
    for number in range(20):
        start = lbfgs_shuffle(state, spread=1.0, key=jax.random.fold_in(key, number))
        state = lbfgs_begin(state, start)
    assert np.max(np.abs(model_to_point(start) - state.origin)) <= 1.0


def test_a_start_without_a_finite_value_is_over_at_once():
    nowhere = lambda model: (jnp.sum(model_to_point(model)) * jnp.nan, jnp.zeros(()))  # noqa: E731
    state, info = lbfgs_step(nowhere, lbfgs_init(toy.tiny_model()), tolerance=1e-9)
    assert bool(info.done)
    with pytest.raises(NonFiniteError, match="not finite at any start"):
        fitted_model(state)


def test_nothing_to_learn_is_done_at_once():
    frozen = freeze(toy.tiny_model())
    state, info = lbfgs_step(lambda model: (jnp.ones(()), jnp.zeros(())), lbfgs_init(frozen), tolerance=1e-9)
    assert bool(info.done)
    assert float(fitted_model(state).likelihood.variance.value) == pytest.approx(0.1)


def test_first_start_is_the_recipes_own_and_later_ones_differ(key):
    state = lbfgs_init(toy.tiny_model())
    first = lbfgs_shuffle(state, spread=1.0, key=key)
    assert np.allclose(model_to_point(first), model_to_point(state.model))
    state = lbfgs_begin(state, first)
    assert not np.allclose(model_to_point(lbfgs_shuffle(state, spread=1.0, key=key)), model_to_point(state.model))
