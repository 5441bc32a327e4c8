"""The mean-field deep GP: its bound against the collapsed and the explicit one, and latent inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.data import ArraySource, load_dataset
from fathomgp.errors import SettingError
from fathomgp.estimators import GPLVM
from fathomgp.inference import MeanField
from fathomgp.inference._propagation import match, push
from fathomgp.inference.dsvi import kl_divergence
from fathomgp.inference.meanfield import Task, _first_beliefs, bound, collapse
from fathomgp.inference.sgpr import collapsed_elbo
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian, Poisson
from fathomgp.means import Linear, Zero
from fathomgp.model import DeepGP, Layer, Whitened, build_model, condition_on, prepare
from fathomgp.parameters import real


@pytest.fixture
def data(rng):
    x = rng.uniform(-2.0, 2.0, size=(20, 2))
    return x, np.concatenate([np.sin(2 * x[:, :1]) * x[:, 1:], x[:, :1]], axis=1) + 0.1 * rng.normal(size=(20, 2))


def test_one_layer_with_known_inputs_is_the_collapsed_bound(data, rng):
    x, y = data
    observed = rng.uniform(size=y.shape) < 0.8
    batch = ArraySource(x, np.where(observed, y, 0.0), observed).everything()
    model = DeepGP((Layer(RBF(0.9, 1.3), Zero(2), real(x[:5]), 2),), Gaussian(np.array([0.1, 0.2])))
    ours = bound(_first_beliefs(model, batch.x, False), batch)[0]
    assert float(ours) == pytest.approx(float(collapsed_elbo(model, batch)), rel=1e-9)


def test_the_collapsed_bound_is_the_explicit_one_at_its_best_q(data, rng):
    """With uncertain inputs and targets, and a mean function that sees the same uncertain inputs."""
    x, y = (jnp.asarray(part) for part in data)
    layer = Layer(RBF(jnp.array([0.9, 1.4]), 1.3), Linear(jnp.asarray(rng.normal(size=(2, 2)))), real(data[0][:5]), 2)
    spread, doubt = (jnp.asarray(rng.uniform(0.05, 0.4, size=(20, 2))) for _ in range(2))
    noise = jnp.asarray([0.1, 0.3])
    whitener = prepare(layer)

    @jax.jit
    def explicit(q):
        mean, variance = push(layer, match(layer, condition_on(layer, whitener, q)), x, spread)
        square = (y - mean) ** 2 + variance + doubt
        return jnp.sum(-0.5 * (jnp.log(2 * jnp.pi * noise)[None] + square / noise[None])) - kl_divergence((q,))

    found = collapse(Task(layer, x, spread, y, doubt, jnp.ones((20, 2)), noise), whitener)
    best = Whitened(found.q.mean, jnp.linalg.cholesky(found.q.root @ jnp.swapaxes(found.q.root, 1, 2)))
    assert float(found.value) == pytest.approx(float(explicit(best)), rel=1e-7)
    for _ in range(3):
        shifted = Whitened(best.mean + 0.05 * jnp.asarray(rng.normal(size=best.mean.shape)), 1.05 * best.root)
        assert float(explicit(shifted)) < float(found.value)


@pytest.mark.slow
def test_the_estimator_learns_and_predicts(data):
    x, y = data
    model = DeepGPRegressor("meanfield", depth=3, num_inducing=8, max_iter=15, random_state=0).fit(x, y)
    objective = model.history_["objective"]
    assert objective[-1] < objective[0]
    mean, std = model.predict(x, return_std=True)
    assert np.mean((mean - y) ** 2) < np.mean((y - y.mean(axis=0)) ** 2)
    assert np.all(std > 0)


@pytest.mark.slow
def test_latent_inputs_of_a_curve_and_of_new_rows(rng):
    angle = np.linspace(0.0, 3.0, 40)
    Y = np.stack([np.cos(angle), angle**2, np.sin(angle / 2)], axis=1) + 0.01 * rng.normal(size=(40, 3))
    model = GPLVM(1, num_inducing=10, max_iter=100, random_state=0).fit(Y)
    order = model.embedding_[:, 0]
    assert abs(np.corrcoef(np.argsort(np.argsort(order)), np.arange(40))[0, 1]) > 0.98
    assert np.all(model.embedding_std_ < 1.0)
    again = model.transform(Y)
    assert abs(np.corrcoef(again[:, 0], order)[0, 1]) > 0.9
    assert np.sqrt(np.mean((model.inverse_transform(model.embedding_) - Y) ** 2)) < 0.1


@pytest.mark.slow
def test_deep_unsupervised_models_improve_their_bound(rng):
    Y = rng.normal(size=(15, 4))
    history = GPLVM(2, depth=2, num_inducing=5, max_iter=10, random_state=0).fit(Y).history_
    assert history["objective"][-1] < history["objective"][0]


@pytest.mark.data
def test_oil_flow_phases_part_in_two_latent_dimensions():
    oil = load_dataset("oil_flow")
    Y, phase = np.asarray(oil.X[:100], float), np.ravel(oil.Y)[:100]
    model = GPLVM(2, num_inducing=25, random_state=0).fit(Y)
    gaps = np.sum((model.embedding_[:, None] - model.embedding_[None]) ** 2, axis=2) + np.diag(np.full(100, np.inf))
    assert np.sum(phase[np.argmin(gaps, axis=1)] != phase) <= 4


def test_what_it_cannot_do_is_said(data, key):
    x, y = data
    source = ArraySource(x, np.round(np.abs(y)))
    with pytest.raises(SettingError, match="needs Gaussian noise, not Poisson"):
        MeanField().init(build_model(x, Poisson(), 2, num_inducing=4), source, key=key)
    model = build_model(x, Gaussian(), 2, depth=2, num_inducing=4, skip_inputs=True)
    with pytest.raises(SettingError, match="Latent inputs cannot also be handed"):
        MeanField(latent_inputs=True).init(model, source, key=key)
