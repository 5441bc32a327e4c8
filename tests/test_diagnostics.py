"""Diagnostics of samplers: known chains get the right verdict, ArviZ gets the right shapes, Gaussians pass."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPRegressor, load
from fathomgp.diagnostics import (
    convergence,
    coordinate_r_hat,
    describe_chains,
    kurtosis_p_values,
    latent_draws,
    to_arviz,
)
from fathomgp.errors import DataError, SettingError
from fathomgp.inference import SGHMC, STRIDE
from fathomgp.inference._stride_posterior import Trace
from fathomgp.plots import plot_chains

QUICK = SGHMC(burn_in=6, sampling=20, draws=10, chains=2, batch_size=16, window=4, shallow_start=False)


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, size=(24, 1))
    estimator = DeepGPRegressor(QUICK, num_inducing=5, random_state=0, verbose=False)
    return estimator.fit(x, np.sin(2 * x[:, 0])), x


def correlated_chain(rng, chains, draws, size, rho=0.9):
    path = [rng.normal(size=(chains, size))]
    for _ in range(draws - 1):
        path.append(rho * path[-1] + np.sqrt(1 - rho**2) * rng.normal(size=(chains, size)))
    return np.stack(path, axis=1)


def test_verdicts_on_chains_that_are_known(rng):
    good = rng.normal(size=(4, 200, 3))
    assert describe_chains(good).verdict.startswith("The chains agree: R-hat is at most 1.0")
    apart = good + 5.0 * np.arange(4)[:, None, None]
    judgement = describe_chains(apart)
    assert judgement.r_hat > 1.5
    assert judgement.verdict.startswith("The chains disagree: ")
    drifting = good[:1] + np.linspace(0.0, 10.0, 200)[None, :, None]
    assert describe_chains(drifting).verdict.startswith("The chain still drifts: ")
    assert describe_chains(good[:1]).verdict.startswith("The chain looks settled: ")
    assert describe_chains(good[:, :5]).verdict.startswith("Too few draws to judge the chains: 5 of each.")


def test_effective_sample_size_of_an_autoregressive_chain(rng):
    judgement = describe_chains(correlated_chain(rng, 4, 4000, 1))
    assert judgement.ess == pytest.approx(16_000 * 0.1 / 1.9, rel=0.35)


def test_gaussian_draws_pass_the_kurtosis_test_and_others_do_not(rng):
    gaussian = correlated_chain(rng, 4, 1000, 40)
    assert np.min(kurtosis_p_values(gaussian)) > 1e-5
    bimodal = np.sign(gaussian) * 2.0 + 0.1 * rng.normal(size=gaussian.shape)
    assert np.median(kurtosis_p_values(bimodal, count=10)) < 1e-5
    apart = gaussian[:, :, :5] + np.array([-9.0, -9.0, 9.0, 9.0])[:, None, None]  # two chains in each of two modes
    assert np.max(kurtosis_p_values(apart)) < 1e-5
    assert np.min(coordinate_r_hat(apart)) > 1.1
    with pytest.raises(DataError, match="draws are independent, but a test of Gaussianity needs 20"):
        kurtosis_p_values(correlated_chain(rng, 1, 30, 2, rho=0.99))


def test_trees_have_chains_and_draws(fitted):
    estimator, _ = fitted
    posterior, rows = estimator.posterior_, np.zeros((3, 1))
    tree = to_arviz(posterior, rows)
    assert dict(tree["posterior"].sizes)["chain"] == 2
    assert tree["posterior"]["v1"].shape == (2, 10, 5, 1)
    assert tree["posterior"]["f"].shape == (2, 10, 3, 1)
    assert tree["sample_stats"]["energy"].dims == ("chain", "draw")
    with jax.enable_x64(True):
        means = posterior.predict_f(jnp.asarray(rows), key=jax.random.key(0)).means
    assert np.allclose(latent_draws(posterior, rows), np.asarray(means).reshape(2, 10, 3, 1))


def test_a_fit_keeps_its_verdict_and_shows_it_when_asked(fitted, capsys, tmp_path):
    estimator, x = fitted
    assert estimator.history_["verdict"].startswith("The chains ")
    assert np.isfinite(estimator.history_["r_hat"])
    assert capsys.readouterr().err == ""
    DeepGPRegressor(QUICK, num_inducing=5, random_state=0, verbose=True).fit(x, np.sin(2 * x[:, 0]))
    assert estimator.history_["verdict"] in capsys.readouterr().err
    estimator.save(tmp_path)
    loaded = load(tmp_path)
    assert loaded.history_["verdict"] == estimator.history_["verdict"]
    assert np.array_equal(loaded.predict(x), estimator.predict(x))


def test_warm_chains_are_told(fitted):
    posterior = dataclasses.replace(fitted[0].posterior_, temperatures=jnp.asarray([1.4, 1.2]))
    with jax.enable_x64(True):
        verdict = convergence(posterior, np.zeros((2, 1))).verdict
    assert "The chains were too warm: their temperature is 1.40 (kinetic) and 1.20 (configurational)" in verdict
    assert dataclasses.replace(posterior, temperatures=jnp.asarray([1.05, 0.9])).doubts() == ()


def test_what_was_not_sampled_has_no_verdict():
    assert convergence("anything else", np.zeros((2, 1))) is None


@pytest.mark.parametrize("kind", ["trace", "rank", "autocorrelation"])
def test_chains_are_drawn(fitted, kind):
    estimator, _ = fitted
    figure = plot_chains(estimator.posterior_, np.zeros((2, 1)), kind=kind)
    assert len(figure.axes) >= 2


def test_unknown_pictures_are_refused():
    with pytest.raises(SettingError, match="kind='cloud' is unknown: choose one of 'trace'"):
        plot_chains(None, None, kind="cloud")


def test_particles_are_chains(rng):
    """STRIDE: one chain a particle, of the steps whose sizes were frozen; they have a verdict and a picture."""
    x = rng.uniform(-2.0, 2.0, size=(24, 1))
    inference = STRIDE(particles=4, rounds=2, moves=24, exchanges=1, candidates=8)
    estimator = DeepGPRegressor(inference, num_inducing=5, random_state=0, verbose=False).fit(x, np.sin(2 * x[:, 0]))
    tree = to_arviz(estimator.posterior_)
    assert tree["posterior"]["log_likelihood"].shape == (4, 12)
    acceptance = tree["sample_stats"]["acceptance_rate"].values
    assert np.all((acceptance >= 0.0) & (acceptance <= 1.0))
    assert estimator.history_["r_hat"] >= 0.9
    assert estimator.history_["ess"] > 0.0
    verdict = estimator.history_["verdict"]
    assert verdict.startswith("The chains ")
    assert "All particles began at one point" in verdict
    assert tree["posterior"]["distance"].shape == (4, 12)
    assert len(plot_chains(estimator.posterior_, kind="trace").axes) > 0
    with pytest.raises(SettingError, match="STRIDE keeps only the last place of its particles"):
        to_arviz(estimator.posterior_, x)
    # Particles that begin at one point agree while all of them still leave it: that is seen in how far they have come.
    noise = jnp.asarray(rng.normal(size=(2, 4, 60)))
    still, drift = 0.5 + 0.01 * noise[1], jnp.broadcast_to(jnp.linspace(0.1, 0.4, 60), (4, 60)) + 0.01 * noise[1]
    for distance, verdict in ((still, "The chains agree"), (drift, "The chains disagree")):
        trace = Trace(noise[0], jnp.ones((4, 60)), jnp.zeros(()), distance)
        posterior = eqx.tree_at(lambda p: p.trace, estimator.posterior_, trace)
        assert convergence(posterior, x).verdict.startswith(verdict)


def test_chains_are_drawn_at_inputs(fitted):
    with pytest.raises(DataError, match="plot_chains shows the latent function at the rows of x: pass a few inputs"):
        plot_chains(fitted[0].posterior_)
