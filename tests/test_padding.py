"""Rows of weight 0 change no bound, gradient or posterior, and data of many sizes share programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.compilation import count_compilations
from fathomgp.data import ArraySource, Batch
from fathomgp.inference.dsvi import initial_q, streamed_loss
from fathomgp.inference.exact import condition, log_evidence
from fathomgp.inference.sgpr import collapsed_elbo, optimal_posterior
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model
from fathomgp.parameters import partition

N = 270  # 288 on the ladder


def _batches(seed=0):
    """The same rows without padding and with it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, 2))
    y = np.sin(2.0 * x[:, :1]) + 0.3 * rng.normal(size=(N, 1))
    padded = ArraySource(x, y).everything()
    assert len(padded.x) == 288
    plain = Batch(
        x=padded.x[:N],
        y=padded.y[:N],
        observed=padded.observed[:N],
        weight=padded.weight[:N],
        index=padded.index[:N],
        num_data=padded.num_data,
    )
    return plain, padded, x


def _value_and_gradient(bound, model, batch):
    learned, constant = partition(model)
    return jax.jit(jax.value_and_grad(lambda learned: bound(eqx.combine(learned, constant), batch)))(learned)


@pytest.mark.parametrize("bound", [log_evidence, collapsed_elbo])
def test_evidence_and_gradient_do_not_see_the_padding(bound):
    plain, padded, x = _batches()
    model = build_model(x, Gaussian(0.1), 1, num_inducing=12)
    (value, gradient), (same, again) = (_value_and_gradient(bound, model, batch) for batch in (plain, padded))
    assert float(same) == pytest.approx(float(value), rel=1e-10)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-8, atol=1e-8)


def test_the_streamed_bound_does_not_see_the_padding(key):
    plain, padded, x = _batches()
    model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=8)
    q = initial_q(model, inner_root=0.1)
    losses = [streamed_loss(model, q, batch, key=key, num_samples=1) for batch in (plain, padded)]
    assert float(losses[0][0].data) == pytest.approx(float(losses[1][0].data), rel=1e-10)
    for one, other in zip(jax.tree.leaves(losses[0][1]), jax.tree.leaves(losses[1][1]), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("answer", [condition, optimal_posterior])
def test_posteriors_do_not_see_the_padding(answer, key):
    plain, padded, x = _batches()
    model = build_model(x, Gaussian(0.1), 1, num_inducing=12)
    new = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2)))
    one, other = (answer(model, batch).predict_f(new, key=key) for batch in (plain, padded))
    np.testing.assert_allclose(other.means, one.means, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(other.variances, one.variances, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "method",
    ["exact", "dsvi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgpr", "decoupled", "aep", "sghmc"))],
)
def test_a_second_fit_of_other_rows_in_the_same_bucket_compiles_nothing(method, flag_off):
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(140, 2)), rng.normal(size=140)

    def fit(rows):
        settings = {} if method == "exact" else {"num_inducing": 6}
        model = DeepGPRegressor(method, max_iter=2, random_state=0, **settings).fit(X[:rows], y[:rows])
        model.predict(X[:3], return_std=True)

    fit(131)
    with count_compilations() as count:
        fit(137)
    assert count.programs == 0
