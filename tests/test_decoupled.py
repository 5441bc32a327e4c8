"""Decoupled deep GPs: DSVI where the sets of points coincide or the extra one is empty; a true bound; it trains."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import Decoupled, dsvi
from fathomgp.inference.decoupled import DecoupledQ, condition_with_kl, decoupled_elbo, decoupled_posterior
from fathomgp.inference.dsvi import elbo, initial_q, streamed_loss
from fathomgp.inference.exact import log_evidence
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer, Recipe, Whitened, build_model
from fathomgp.parameters import partition, real


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(40, 2))
    return x, np.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * rng.normal(size=(40, 1))


def deep(x, depth=2, num_inducing=6) -> DeepGP:
    return build_model(x, Gaussian(0.05), 1, depth=depth, num_inducing=num_inducing, recipe=Recipe(variance=0.5))


def random_q(model, rng):
    def one(q):
        root = np.tril(0.3 * rng.normal(size=q.root.shape)) + np.eye(q.root.shape[1])
        return Whitened(jnp.asarray(rng.normal(size=q.mean.shape)), jnp.asarray(root))

    return tuple(one(q) for q in initial_q(model))


def empty_extra(layer, q) -> DecoupledQ:
    return DecoupledQ(q, jnp.zeros((0, layer.z.shape[1])), jnp.zeros((0, layer.width)))


def same_points(layer, q) -> DecoupledQ:
    return DecoupledQ(Whitened(jnp.zeros_like(q.mean), q.root), layer.z.value, q.mean)


@pytest.mark.parametrize(("parameterisation", "make"), [("orthogonal", empty_extra), ("lifted", same_points)])
def test_it_is_dsvi_where_it_should_be(data, rng, key, parameterisation, make):
    x, y = data
    model, batch = deep(x), ArraySource(x, y).everything()
    q = random_q(model, rng)
    ours = tuple(make(layer, one) for layer, one in zip(model.layers, q, strict=True))
    bound = eqx.filter_jit(decoupled_elbo)(model, ours, batch, key=key, parameterisation=parameterisation)
    assert float(bound) == pytest.approx(float(eqx.filter_jit(elbo)(model, q, batch, key=key)), rel=1e-8)
    new = jnp.asarray(rng.uniform(-2, 2, size=(5, 2)))
    answer = decoupled_posterior(model, ours, 4, parameterisation)[0].predict_f(new, key=key)
    expected = dsvi._posterior(model, q, 4)[0].predict_f(new, key=key)
    assert np.allclose(answer.means, expected.means, atol=1e-7)
    assert np.allclose(answer.variances, expected.variances, atol=1e-7)


def test_orthogonal_is_dsvi_on_both_sets_with_a_block_of_ones(data, rng, key):
    x, y = data
    batch, base, extra = ArraySource(x, y).everything(), x[:5], x[5:12]
    layer = Layer(RBF(0.8, 1.3), Zero(1), real(base), 1)
    model = DeepGP((layer,), Gaussian(0.05))
    (q,) = random_q(model, rng)
    nu = jnp.asarray(rng.normal(size=(7, 1)))
    ours = (DecoupledQ(q, jnp.asarray(extra), nu),)
    both = DeepGP((Layer(layer.kernel, layer.mean, real(x[:12]), 1),), model.likelihood)
    root = jnp.eye(12)[None].at[:, :5, :5].set(q.root)
    theirs = (Whitened(jnp.concatenate([q.mean, nu]), root),)
    bound = float(eqx.filter_jit(decoupled_elbo)(model, ours, batch, key=key, parameterisation="orthogonal"))
    assert bound == pytest.approx(float(eqx.filter_jit(elbo)(both, theirs, batch, key=key)), rel=1e-5)
    assert bound < float(log_evidence(model, batch))


@pytest.mark.parametrize("parameterisation", ["orthogonal", "lifted"])
def test_streamed_gradients_equal_plain_ones(data, rng, key, parameterisation):
    x, y = data
    model, batch = deep(x, depth=1), ArraySource(x, y).everything()
    (q,) = random_q(model, rng)
    ours = (DecoupledQ(q, jnp.asarray(x[:9]), jnp.asarray(rng.normal(size=(9, 1)))),)
    learned, constant = partition(model)
    condition = lambda model, q: condition_with_kl(model, q, parameterisation)  # noqa: E731

    def plain(learned, q):
        rows = (batch.x, batch.y, batch.observed, batch.weight)
        model = eqx.combine(learned, constant)
        conditionals, kl, _ = condition(model, q)
        return kl - dsvi.expected_log_likelihood(model, conditionals, rows, [])

    value, gradient = jax.jit(jax.value_and_grad(plain, (0, 1)))(learned, ours)
    stream = eqx.filter_jit(functools.partial(streamed_loss, key=key, num_samples=1, condition=condition))
    loss, streamed = stream(model, ours, batch)
    assert float(loss.data + loss.kl) == pytest.approx(float(value), rel=1e-9)
    for a, b in zip(jax.tree.leaves(streamed), jax.tree.leaves(gradient), strict=True):
        assert np.allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("parameterisation", ["orthogonal", "lifted"])
def test_it_trains(data, key, parameterisation):
    x, y = data
    algorithm = Decoupled(parameterisation, mean_inducing=20, variance_inducing=5, test_samples=4)
    result = fit_model(algorithm, deep(x), ArraySource(x, y), key=key, max_iter=60, verbose=False)
    objective = result.history["objective"]
    assert np.all(result.history["ok"])
    assert np.mean(objective[-10:]) < np.mean(objective[:10])
    answer = result.posterior.predict_y(jnp.asarray(x), key=key)
    assert np.corrcoef(answer.mean()[:, 0], y[:, 0])[0, 1] > 0.9
    extra = result.posterior.conditionals[-1].extra
    assert result.posterior.conditionals[-1].z.shape == (5, 2)
    # The orthogonal set leaves out points that the variance already has.
    assert 15 <= len(extra.points) <= 20


@pytest.mark.usefixtures("flag_off")
def test_estimators_know_it(data, tmp_path):
    X, Y = data
    settings = {"num_inducing": 10, "depth": 1, "max_iter": 20, "random_state": 0}
    model = DeepGPRegressor("decoupled", **settings).fit(X, Y[:, 0])
    assert model.score(X, Y[:, 0]) > 0.5
    assert model.model_.layers[0].num_inducing == 5
    model.save(tmp_path)
    assert np.array_equal(load(tmp_path).predict(X), model.predict(X))
    labels = DeepGPClassifier("decoupled", **settings).fit(X, Y[:, 0] > 0)
    assert labels.score(X, Y[:, 0] > 0) > 0.6


def test_few_rows_need_no_points_for_the_mean(key):
    x = np.linspace(-1.0, 1.0, 4)[:, None]
    algorithm = Decoupled(variance_inducing=8)
    state = algorithm.init(deep(x, depth=1, num_inducing=4), ArraySource(x, np.sin(x)), key=key)
    assert state.q[0].points.shape == (0, 1)
    assert np.isfinite(
        decoupled_posterior(state.model, state.q, 1, "orthogonal")[0].predict_f(jnp.asarray(x), key=key).means
    ).all()


def test_settings_are_checked():
    with pytest.raises(SettingError, match="parameterisation='coupled' is unknown: choose 'orthogonal' or 'lifted'"):
        Decoupled("coupled")
    with pytest.raises(SettingError, match="mean_inducing must be at least 1, but it is 0"):
        Decoupled(mean_inducing=0)
    with pytest.raises(SettingError, match="natural is a step size between 0 and 1"):
        Decoupled(natural=2.0)
