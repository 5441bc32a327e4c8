import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

import fathomgp.predictive as predictive_module
from fathomgp.errors import DataError, SettingError
from fathomgp.likelihoods import (
    Bernoulli,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    RobustMax,
    Softmax,
    StudentT,
)
from fathomgp.predictive import Mixture, Predictive, concatenate_rows

NOISE = 0.3
LEVELS = [0.001, 0.025, 0.3, 0.5, 0.975, 0.999]


def mixture_of(rng, num_components=7, num_rows=4, num_latents=1, spread=1.0):
    log_weights = np.log(rng.dirichlet(np.ones(num_components)))
    means = spread * rng.normal(size=(num_components, num_rows, num_latents))
    return Mixture(log_weights, means, rng.uniform(0.05, 0.5, size=means.shape))


def regression(rng, likelihood=None, squeeze=True, num_outputs=1, **kwargs):
    likelihood = Gaussian(NOISE) if likelihood is None else likelihood
    mixture = mixture_of(rng, num_latents=likelihood.num_latents(num_outputs), **kwargs)
    shift, scale = rng.normal(size=num_outputs), rng.uniform(0.5, 3.0, size=num_outputs)
    return Predictive(mixture, likelihood, shift, scale, squeeze)


def parts(answer):
    """Weights, means and standard deviations of y in its own units, (S, N, P), under Gaussian noise."""
    mixture = answer.mixture
    weights = np.exp(mixture.log_weights)[:, None, None]
    return weights, answer.shift + answer.scale * mixture.means, answer.scale * np.sqrt(mixture.variances + NOISE)


def reference_density(answer, y):
    weights, means, sds = parts(answer)
    return np.sum(weights * stats.norm.pdf(y, means, sds), axis=0)


@pytest.mark.parametrize("squeeze", [True, False])
def test_moments_and_density_of_a_gaussian_mixture(rng, squeeze):
    answer = regression(rng, squeeze=squeeze)
    weights, means, sds = parts(answer)
    mean = np.sum(weights * means, axis=0)
    variance = np.sum(weights * (sds**2 + means**2), axis=0) - mean**2
    shape = (4,) if squeeze else (4, 1)
    np.testing.assert_allclose(answer.mean(), mean.reshape(shape), rtol=1e-12)
    np.testing.assert_allclose(answer.variance(), variance.reshape(shape), rtol=1e-10)
    np.testing.assert_allclose(answer.std(), np.sqrt(answer.variance()), rtol=1e-12)
    y = answer.mean() + 0.3
    np.testing.assert_allclose(
        answer.log_density(y), np.log(reference_density(answer, y.reshape(4, 1)))[:, 0], rtol=1e-10
    )
    cdf = np.sum(weights * stats.norm.cdf(y.reshape(4, 1), means, sds), axis=0)
    np.testing.assert_allclose(answer.cdf(y), cdf.reshape(shape), rtol=1e-12)
    np.testing.assert_allclose(answer.latent_mean(), mean.reshape(shape), rtol=1e-12)
    latent = variance - NOISE * answer.scale**2
    np.testing.assert_allclose(answer.latent_std(), np.sqrt(latent).reshape(shape), rtol=1e-10)


def test_one_component_is_the_normal_distribution(rng):
    answer = regression(rng, num_components=1)
    _, means, sds = parts(answer)
    normal = stats.norm(means[0, :, 0], sds[0, :, 0])
    np.testing.assert_allclose(answer.quantile(LEVELS), normal.ppf(np.array(LEVELS)[:, None]), rtol=1e-9)
    lower, upper = answer.interval(0.9)
    np.testing.assert_allclose([lower, upper], [normal.ppf(0.05), normal.ppf(0.95)], rtol=1e-9)
    y = answer.mean() + 0.7
    z = (y - means[0, :, 0]) / sds[0, :, 0]
    crps = sds[0, :, 0] * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    np.testing.assert_allclose(answer.crps(y), crps, rtol=1e-10)


@pytest.mark.parametrize(
    "likelihood", [lambda: Gaussian(NOISE), lambda: StudentT(3.0, 0.2), lambda: HeteroscedasticGaussian(-1.0)]
)
def test_real_answers_agree_with_numerical_integration(rng, likelihood):
    answer = regression(rng, likelihood(), num_rows=2)
    t = np.linspace(-13.0, 13.0, 2048)
    grid = answer.mean() + 0.1 * answer.std() * np.sinh(t)[:, None]
    step = 0.1 * answer.std() * np.cosh(t)[:, None] * (t[1] - t[0])
    tall = repeat(answer, len(t))
    density = np.exp(tall.log_density(grid.ravel())).reshape(grid.shape)
    distribution = tall.cdf(grid.ravel()).reshape(grid.shape)
    np.testing.assert_allclose(np.sum(density * step, axis=0), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.sum(density * grid * step, axis=0), answer.mean(), rtol=1e-4, atol=1e-4)
    spread = np.sum(density * (grid - answer.mean()) ** 2 * step, axis=0)
    np.testing.assert_allclose(spread, answer.variance(), rtol=2e-3)
    np.testing.assert_allclose(np.cumsum(density * step, axis=0) - 0.5 * density * step, distribution, atol=1e-4)
    y = answer.mean() + np.array([0.4, -1.1])
    score = np.sum((distribution - (grid >= y)) ** 2 * step, axis=0)
    np.testing.assert_allclose(answer.crps(y), score, rtol=2e-2)


def latents(answer):
    return answer.mixture.means, answer.mixture.variances


def repeat(answer, times):
    """The same rows many times over, to ask about many values of y at once."""
    mixture = Mixture(answer.mixture.log_weights, *(np.tile(x, (1, times, 1)) for x in latents(answer)))
    return Predictive(mixture, *tail(answer))


@pytest.mark.parametrize("likelihood", [lambda: StudentT(3.0, 0.2), lambda: HeteroscedasticGaussian(-1.0)])
def test_integrated_crps_is_accurate(rng, likelihood):
    answer = regression(rng, likelihood(), num_rows=1)
    y = answer.mean()[0] + 0.7

    def cdf(x):
        return answer.cdf(x)[0]

    left = integrate.quad(lambda x: cdf(x) ** 2, -np.inf, y, epsabs=1e-9)[0]
    right = integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, np.inf, epsabs=1e-9)[0]
    np.testing.assert_allclose(answer.crps(y), left + right, rtol=1e-5)
    far = answer.mean()[0] + 50.0 * answer.std()[0]
    centre = answer.crps(answer.mean())[0]
    assert abs(answer.crps(far)[0] - 50.0 * answer.std()[0]) < 2.0 * centre + answer.std()[0]


def test_crps_of_a_gaussian_mixture_is_accurate(rng):
    answer = regression(rng, num_rows=1)
    weights, means, sds = (x.ravel() for x in parts(answer))
    y = means[0] + 0.5

    def cdf(x):
        return np.sum(weights * stats.norm.cdf(x, means, sds))

    left = integrate.quad(lambda x: cdf(x) ** 2, y - 40, y, limit=200)[0]
    right = integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, y + 40, limit=200)[0]
    np.testing.assert_allclose(answer.crps(np.array([y])), left + right, rtol=1e-7)


@pytest.mark.parametrize(
    ("likelihood", "spread"),
    [
        (Gaussian(NOISE), 1.0),
        (Gaussian(NOISE), 100.0),
        (StudentT(3.0, 0.2), 100.0),
        (HeteroscedasticGaussian(-1.0), 1.0),
    ],
)
def test_quantile_inverts_the_cdf(rng, likelihood, spread):
    answer = regression(rng, likelihood, squeeze=False, spread=spread)
    quantiles = answer.quantile(LEVELS)
    assert quantiles.shape == (len(LEVELS), 4, 1)
    for level, values in zip(LEVELS, quantiles, strict=True):
        np.testing.assert_allclose(answer.cdf(values), level, rtol=1e-8)
    y = answer.mean()
    inside = answer.cdf(y)
    row = int(np.argmin(np.abs(inside[:, 0] - 0.5)))
    if spread == 1.0:
        np.testing.assert_allclose(answer.quantile(float(inside[row, 0]))[row, 0], y[row, 0], rtol=1e-8, atol=1e-8)


def test_joint_density_of_several_outputs_and_missing_ones(rng):
    answer = regression(rng, squeeze=False, num_outputs=3)
    y = answer.mean() + 0.2
    y[0, 1] = np.nan
    y[1] = np.nan
    weights, means, sds = parts(answer)
    each = np.where(np.isnan(y), 0.0, stats.norm.logpdf(np.nan_to_num(y), means, sds))
    joint = special.logsumexp(each.sum(-1) + np.log(weights[..., 0]), axis=0)
    np.testing.assert_allclose(answer.log_density(y), joint, rtol=1e-10, atol=1e-12)
    marginal = answer.log_density(y, per_output=True)
    np.testing.assert_array_equal(np.isnan(marginal), np.isnan(y))
    np.testing.assert_allclose(marginal[2:], np.log(reference_density(answer, y))[2:], rtol=1e-10)
    np.testing.assert_array_equal(np.isnan(answer.cdf(y)), np.isnan(y))
    np.testing.assert_array_equal(np.isnan(answer.crps(y)), np.isnan(y))


def counts(rng, num_rows=3, rate=2.0):
    mixture = mixture_of(rng, num_rows=num_rows, spread=0.5)
    shifted = Mixture(mixture.log_weights, mixture.means + rate, mixture.variances)
    return Predictive(shifted, Poisson(), np.zeros(1), np.ones(1), True)


def test_counts(rng):
    answer = counts(rng)
    k = np.arange(1365.0)[:, None]
    table = np.exp(repeat(answer, len(k)).log_density(np.repeat(k, 3))).reshape(-1, 3)
    distribution = np.cumsum(table, axis=0)
    np.testing.assert_allclose(distribution[-1], 1.0, rtol=1e-7)
    np.testing.assert_allclose(answer.mean(), (table * k).sum(0), rtol=1e-4)
    np.testing.assert_allclose(answer.variance(), (table * (k - answer.mean()) ** 2).sum(0), rtol=1e-2)
    np.testing.assert_allclose(answer.cdf(7.5), distribution[7], rtol=1e-8)
    assert np.all(answer.cdf(-0.5) == 0.0)
    for q in (1e-4, 0.1, 0.5, 0.99):
        np.testing.assert_array_equal(answer.quantile(q), np.argmax(distribution >= q, axis=0))
    y = np.array([3.0, 0.0, 40.0])
    np.testing.assert_allclose(answer.crps(y), np.sum((distribution - (k >= y)) ** 2, axis=0), rtol=1e-3)


def test_crps_of_large_counts(rng):
    """Beyond 256 terms a side the sum is taken over cells."""
    answer = counts(rng, num_rows=1, rate=7.0)
    y = np.round(answer.mean())
    k = np.arange(0, 16_384, 1.0)
    distribution = repeat(answer, len(k)).cdf(k)
    np.testing.assert_allclose(answer.crps(y), np.sum((distribution - (k >= y)) ** 2), rtol=1e-3)


@pytest.mark.parametrize("likelihood", [Bernoulli(), RobustMax(3), Softmax(3)])
def test_classes(rng, likelihood):
    mixture = mixture_of(rng, num_latents=likelihood.num_latents(1))
    answer = Predictive(mixture, likelihood, np.zeros(1), np.ones(1), True)
    table = answer.probabilities()
    assert table.shape == (4, likelihood.num_classes)
    np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-12)
    component = [
        likelihood.probabilities(jnp.asarray(m), jnp.asarray(v)) for m, v in zip(*latents(answer), strict=True)
    ]
    np.testing.assert_allclose(table, np.tensordot(np.exp(mixture.log_weights), np.stack(component), 1), rtol=1e-10)
    y = np.array([0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(answer.log_density(y), np.log(table[np.arange(4), y.astype(int)]), atol=1e-3)
    distribution = np.cumsum(table, axis=1)
    np.testing.assert_allclose(answer.cdf(y), distribution[np.arange(4), y.astype(int)], rtol=1e-10)
    np.testing.assert_array_equal(answer.quantile(0.4), np.argmax(distribution >= 0.4, axis=1))
    labels = np.arange(likelihood.num_classes)
    np.testing.assert_allclose(answer.mean(), table @ labels, rtol=1e-10)
    score = np.sum((distribution - (labels >= y[:, None])) ** 2, axis=1)
    np.testing.assert_allclose(answer.crps(y), score, rtol=1e-8, atol=1e-12)
    assert answer.latent_mean().shape == (4, likelihood.num_latents(1))
    with pytest.raises(DataError, match="not one of the labels"):
        answer.log_density(np.full(4, 5.0))


@pytest.mark.parametrize("likelihood", [lambda: Gaussian(NOISE), lambda: Poisson()])
def test_samples_follow_the_answer(rng, seed, likelihood):
    likelihood = likelihood()
    answer = counts(rng) if isinstance(likelihood, Poisson) else regression(rng, likelihood, num_rows=3)
    draws = answer.sample(4000, random_state=seed)
    assert draws.shape == (4000, 3)
    for level in (0.5, 0.9):
        lower, upper = answer.interval(level)
        share = np.mean((lower <= draws) & (draws <= upper), axis=0)
        expected = answer.cdf(upper) - answer.cdf(lower - (1.0 if isinstance(likelihood, Poisson) else 0.0))
        assert np.all(np.abs(share - expected) < 5 * np.sqrt(0.25 / 4000))
    np.testing.assert_array_equal(draws, answer.sample(4000, random_state=seed))
    assert answer.sample(2, np.random.default_rng(seed)).shape == answer.sample(2).shape == (2, 3)


def correlated(rng, num_rows=3, squeeze=True):
    mixture = mixture_of(rng, num_components=2, num_rows=num_rows)
    factor = rng.normal(size=(2, 1, num_rows, num_rows))
    covariances = np.moveaxis(factor @ np.swapaxes(factor, -1, -2), 1, -1) + 0.1 * np.eye(num_rows)[None, :, :, None]
    variances = np.einsum("siiq->siq", covariances)
    mixture = Mixture(mixture.log_weights, mixture.means, variances, covariances)
    return Predictive(mixture, Gaussian(NOISE), np.array([1.0]), np.array([2.0]), squeeze)


def test_covariance_between_rows(rng, seed):
    answer = correlated(rng)
    covariance = answer.covariance()
    np.testing.assert_allclose(np.diag(covariance), answer.variance(), rtol=1e-10)
    draws = answer.sample(20_000, random_state=seed)
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.15 * np.max(covariance))
    np.testing.assert_allclose(correlated(np.random.default_rng(1), squeeze=False).covariance().shape, (3, 3, 1))
    part = answer.mixture.rows(slice(1, 3))
    assert part.covariances.shape == (2, 2, 2, 1)
    np.testing.assert_array_equal(part.covariances, answer.mixture.covariances[:, 1:3, 1:3])


def test_blocks_change_nothing(rng, monkeypatch):
    answer = regression(rng, num_rows=25)
    y = answer.mean() + 0.1

    def ask():
        return answer.mean(), answer.log_density(y), answer.quantile(0.2), answer.crps(y), answer.sample(3, 1)

    whole = ask()
    monkeypatch.setattr(predictive_module, "BLOCK_ROWS", 16)
    pieces = [Predictive(answer.mixture.rows(rows), *tail(answer)) for rows in (slice(0, 10), slice(10, None))]
    np.testing.assert_allclose(np.concatenate([p.quantile(0.2) for p in pieces]), whole[2], rtol=1e-12)
    for one, two in zip(whole, ask(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)
    joined = concatenate_rows([p.mixture for p in pieces])
    np.testing.assert_array_equal(joined.means, answer.mixture.means)


def tail(answer):
    return answer.likelihood, answer.shift, answer.scale, answer.squeeze


def test_mixture_moments_follow_the_dtype(rng, dtype):
    mixture = mixture_of(rng)
    cast = Mixture(*(jnp.asarray(x, dtype) for x in (mixture.log_weights, mixture.means, mixture.variances)))
    assert cast.mean().dtype == cast.variance().dtype == dtype
    total = np.exp(mixture.log_weights)[:, None, None]
    mean = np.sum(total * mixture.means, axis=0)
    expected = np.sum(total * (mixture.variances + mixture.means**2), axis=0) - mean**2
    np.testing.assert_allclose(cast.variance(), expected, rtol=1e-4)


def test_double_precision_without_the_flag(rng, flag_off):
    answer = regression(rng)
    with jax.enable_x64(True):
        mixture = jax.tree.map(jnp.asarray, answer.mixture)
        likelihood = Gaussian(NOISE)
    on_device = Predictive(mixture, likelihood, answer.shift, answer.scale, True)
    weights, means, sds = parts(answer)
    y = answer.mean() + 0.3
    expected = np.log(np.sum(weights * stats.norm.pdf(y[:, None], means, sds), axis=0))[:, 0]
    for each in (
        on_device,
        Predictive(mixture, likelihood, jnp.asarray(answer.shift), jnp.asarray(answer.scale), True),
    ):
        assert each.mean().dtype == each.crps(y).dtype == each.quantile(0.3).dtype == np.float64
    np.testing.assert_allclose(on_device.log_density(y), expected, rtol=1e-12)
    np.testing.assert_allclose(on_device.cdf(on_device.quantile(0.3)), 0.3, rtol=1e-12)


def test_single_precision_inputs_get_double_precision_answers(rng):
    answer = regression(rng)
    mixture = jax.tree.map(lambda x: x.astype(np.float32), answer.mixture)
    single = Predictive(
        mixture, eqx.tree_at(lambda l: l.variance.raw, Gaussian(NOISE), jnp.float32(np.log(NOISE))), *tail(answer)[1:]
    )
    assert single.std().dtype == np.float64
    np.testing.assert_allclose(single.std(), answer.std(), rtol=1e-5)


def test_no_rows(rng):
    answer = regression(rng, num_rows=0)
    assert answer.mean().shape == (0,)
    assert answer.quantile([0.1, 0.9]).shape == (2, 0)
    assert answer.sample(5, 0).shape == (5, 0)


def test_bad_questions_get_sentences(rng):
    answer = regression(rng)
    for q in (0.0, 1.0, [0.5, 1.2], np.nan):
        with pytest.raises(SettingError, match="q must be one number or a list of numbers between 0 and 1"):
            answer.quantile(q)
    with pytest.raises(SettingError, match="level must lie between 0 and 1"):
        answer.interval(95.0)
    with pytest.raises(DataError, match=r"y has the shape \(3,\), but the prediction has \(4,\)"):
        answer.log_density(np.zeros(3))
    with pytest.raises(DataError, match="infinite"):
        answer.crps(np.full(4, np.inf))
    with pytest.raises(SettingError, match="at least 1, but it is 0"):
        answer.sample(0)
    with pytest.raises(SettingError, match=r"needs a classification likelihood, but this is Gaussian"):
        answer.probabilities()
    with pytest.raises(SettingError, match="full_cov=True"):
        answer.covariance()
    with pytest.raises(SettingError, match="HeteroscedasticGaussian needs 2 latents for 1 outputs"):
        Predictive(answer.mixture, HeteroscedasticGaussian(), np.zeros(1), np.ones(1), True)


def test_few_shapes_are_compiled():
    assert [predictive_module._pad(np.zeros((n, 2)), 0, 0).shape[0] for n in (0, 1, 17, 1000)] == [16, 16, 32, 1024]
