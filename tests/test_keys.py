"""Keys are used once: by a lint over the package, and by what would go wrong if they were not."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fathomgp
from fathomgp.data import ArraySource
from fathomgp.estimators import _settings
from fathomgp.inference import AEP, DSVI, SGHMC, SGPR, STRIDE, Decoupled, Exact, MeanField, Sequential
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model
from key_lint import check_package, check_source

REUSED = {
    "drawn from twice": "a = normal(key, (3,))\n    b = uniform(key, (3,))",
    "passed on twice": "a = f(x, key=key)\n    b = f(a, key=key)",
    "split and folded": "one, two = split(key)\n    b = f(x, fold_in(key, 1))",
    "folded and used itself": "a = f(x, fold_in(key, 1))\n    b = f(a, key)",
    "folded with a number and with a variable": "a = f(fold_in(key, 1))\n    b = [f(fold_in(key, i)) for i in x]",
    "in every round of a loop": "for i in range(3):\n        x = f(x, key)",
    "for every entry of a list": "a = [f(i, key=key) for i in x]",
    "in what is mapped over an axis": "a = jax.lax.map(lambda i: f(i, key=key), x)",
    "in a function within": "g = lambda x: f(x, key=key)\n    b = f(x, key)",
    "after both ways of a condition": "if x:\n        a = f(key)\n    b = f(key)",
    "an entry of split keys": "keys = split(key)\n    a = f(keys[0])\n    b = f(keys[0])",
    "an attribute": "a = f(self.step_key)\n    b = f(self.step_key)",
}
FINE = {
    "split": "one, two = split(key)\n    a = f(one)\n    b = f(two)",
    "split again": "for i in range(3):\n        key, now_key = split(key)\n        x = f(x, now_key)",
    "folded with every number": "a = [f(fold_in(key, i)) for i in x]",
    "folded with two numbers": "a = f(fold_in(key, 1))\n    b = f(fold_in(key, 2))",
    "one of two ways": "if x:\n        return f(key)\n    return g(key)",
    "either, or": "a = f(key) if x else g(key)",
    "looked at": "a = key_data(key)\n    b = f(key)",
    "meant": "a = f(clone(key))\n    b = f(key)",
    "a key of its own for every entry": "a = jax.lax.map(lambda key: f(key), split(key, 3))",
    "entries of split keys": "keys = split(key)\n    a = f(keys[0])\n    b = f(keys[1])",
}


@pytest.mark.parametrize("name", REUSED)
def test_the_lint_sees_a_key_used_twice(name):
    assert check_source(f"def g(self, x, key):\n    {REUSED[name]}\n")


@pytest.mark.parametrize("name", FINE)
def test_the_lint_lets_pass_what_is_fine(name):
    assert not check_source(f"def g(self, x, key):\n    {FINE[name]}\n")


def test_the_package_uses_every_key_once():
    assert list(map(str, check_package(pathlib.Path(fathomgp.__file__).parent))) == []


def test_what_an_estimator_does_with_its_seed_shares_no_key(seed):
    """A fit splits its key into four; predictions and rows learned later have others."""
    fit = jax.random.split(_settings.key_for(seed, _settings.FIT), 4)
    others = [_settings.key_for(seed, purpose) for purpose in (_settings.FIT, _settings.PREDICT, _settings.LEARN_ON)]
    words = np.concatenate([np.asarray(jax.random.key_data(fit)), np.stack([jax.random.key_data(k) for k in others])])
    assert len(np.unique(words, axis=0)) == 7


# --- observations have noise of their own -----------------------------------------------------------------------------

#: Algorithms and the shape of a model whose posterior they give from their start alone, and the kernel: "periodic" has
#: no random features, so that functions are drawn jointly over the rows.
POSTERIORS = {
    "exact": (Exact(), 1, "rbf"),
    "sgpr": (SGPR(), 1, "rbf"),
    "dsvi": (DSVI(shallow_start=False, inner_root=0.5), 2, "rbf"),
    "dsvi-joint": (DSVI(shallow_start=False, inner_root=0.5), 2, "periodic"),
    "dsvi-joint-1": (DSVI(shallow_start=False), 1, "periodic"),
    "decoupled": (Decoupled(shallow_start=False, inner_root=0.5), 2, "rbf"),
    "sghmc": (SGHMC(hyperparameters="fixed"), 2, "periodic"),
    "stride": (STRIDE(particles=1, shallow_rounds=0, hidden="exact"), 2, "rbf"),
    "sequential": (Sequential(shallow_start=False, inner_scale=1.0), 2, "periodic"),
    "aep": (AEP(shallow_start=False, inner_root=0.5), 2, "rbf"),
    "meanfield": (MeanField(), 2, "rbf"),
}


def start_of(name):
    """A posterior whose noise is as large as the variance of its function, and inputs."""
    rng = np.random.default_rng(0)
    inference, depth, kernel = POSTERIORS[name]
    x = np.linspace(-1.5, 1.5, 12)[:, None]
    source = ArraySource(x, np.sin(2.0 * x) + 0.3 * rng.normal(size=x.shape))
    inducing = None if name == "exact" else 4
    model = build_model(x, Gaussian(0.3), 1, depth=depth, num_inducing=inducing, kernel=kernel)
    init_key, enter_key = jax.random.split(jax.random.key(0))
    phase = inference.plan(source.num_data, 1)[0]
    state = inference.enter(phase, inference.init(model, source, key=init_key), source, key=enter_key)
    if hasattr(state, "search"):  # L-BFGS has looked at nothing yet
        state = eqx.tree_at(lambda s: s.search.value, state, jnp.zeros(()))
    posterior = inference.posterior(state, source)
    return posterior, jnp.asarray([[-0.4], [2.1]])


#: The others share their code, or have functions that are drawn as a whole, which takes long.
QUICK = ("exact", "dsvi-joint", "stride")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in POSTERIORS])
def test_draws_of_y_have_the_variance_of_the_function_and_of_the_noise(name, key):
    posterior, x = start_of(name)
    rounds, n = 400, 2
    function_key, y_key = jax.random.split(key)
    draw_f = eqx.filter_jit(lambda key: posterior.sample_functions(key, n)(x))
    f = np.asarray(jax.lax.map(draw_f, jax.random.split(function_key, rounds)))
    noise = float(f.var(axis=0).max())
    noisy = eqx.tree_at(lambda p: p.model.likelihood.variance.raw, posterior, jnp.asarray(np.log(noise)))
    draw_y = eqx.filter_jit(lambda key: noisy.sample_y(x, key=key, n=n))
    y = np.asarray(jax.lax.map(draw_y, jax.random.split(y_key, rounds)))
    expected, found = f.var(axis=0) + noise, y.var(axis=0)
    # Five standard errors of a variance; the function need not be Gaussian, so by the draws' fourth moments.
    error = np.sqrt(sum(np.var((d - d.mean(axis=0)) ** 2, axis=0) for d in (f, y)) / rounds)
    assert np.all(np.abs(found - expected) < 5.0 * error), (found / expected).tolist()
