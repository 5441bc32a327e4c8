import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from fathomgp.data import ArraySource
from fathomgp.errors import DataError, SettingError
from fathomgp.fitting import fit_model
from fathomgp.inference import DSVI
from fathomgp.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    RobustMax,
    Softmax,
    StudentT,
    likelihood_from_name,
)
from fathomgp.likelihoods.testing import CHECKS, check_likelihood, latents_and_targets
from fathomgp.model import build_model

LIKELIHOOD_CASES = {
    "gaussian": lambda: Gaussian(0.2),
    "heteroscedastic": lambda: HeteroscedasticGaussian(-1.0),
    "student_t": lambda: StudentT(5.0, 0.3),
    "poisson": lambda: Poisson(),
    "bernoulli": lambda: Bernoulli(),
    "robustmax": lambda: RobustMax(3),
    "softmax": lambda: Softmax(3, num_points=256),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", LIKELIHOOD_CASES)
def test_conformance(name, check, key):
    CHECKS[check](LIKELIHOOD_CASES[name](), 1, key)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda: Gaussian(np.array([0.1, 0.3])),
        lambda: HeteroscedasticGaussian(np.array([-1.0, -2.0])),
        lambda: RobustMax(3),
    ],
)
def test_two_outputs_are_two_problems(likelihood, key):
    likelihood = likelihood()
    mean, variance, y = latents_and_targets(likelihood, 2, key)
    assert likelihood.predict_moments(mean, variance)[0].shape == y.shape == (5, 2)
    changed = y.at[:, 1].set(0.0)
    log_z = jax.jit(lambda y: likelihood.log_z(mean, variance, y, 0.3))
    np.testing.assert_array_equal(log_z(y)[:, 0], log_z(changed)[:, 0])


def test_check_likelihood_runs_them_all():
    check_likelihood(Gaussian(np.array([0.1, 0.2])), num_outputs=2)


def column(*values):
    return jnp.asarray(values, jnp.float64)[:, None]


MEAN, VARIANCE = column(0.0, 0.5, -1.0, 2.0), column(0.5, 1.0, 0.02, 1e-4)


def gaussian_average(function, mean, variance):
    sd = np.sqrt(variance)
    limits = mean - 10 * sd, mean + 10 * sd
    return integrate.quad(
        lambda f: function(f) * np.exp(-0.5 * ((f - mean) / sd) ** 2) / (sd * np.sqrt(2 * np.pi)),
        *limits,
        limit=400,
        epsabs=1e-13,
    )[0]


def reference(function, y):
    rows = zip(np.asarray(MEAN)[:, 0], np.asarray(VARIANCE)[:, 0], np.asarray(y)[:, 0], strict=True)
    return np.array([[gaussian_average(lambda f, t=t: function(f, t), m, v)] for m, v, t in rows])


ONE_LATENT = {
    "student_t": (StudentT(4.0, 0.1), lambda f, y: stats.t.logpdf(y, 4.0, f, 0.1), column(0.1, 3.0, -1.0, 2.3)),
    "poisson": (Poisson(), lambda f, y: stats.poisson.logpmf(y, np.exp(f)), column(0, 7, 3, 40)),
    "bernoulli": (Bernoulli(), lambda f, y: stats.norm.logcdf(f if y else -f), column(0, 1, 1, 0)),
}


@pytest.mark.parametrize("name", ONE_LATENT)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_log_z_against_numerical_integration(name, alpha):
    likelihood, log_density, y = ONE_LATENT[name]
    expected = np.log(reference(lambda f, t: np.exp(alpha * log_density(f, t)), y))
    np.testing.assert_allclose(
        jax.jit(lambda *args: likelihood.log_z(*args, alpha))(MEAN, VARIANCE, y), expected, 1e-8, 1e-8
    )


@pytest.mark.parametrize("name", ONE_LATENT)
def test_expected_log_prob_against_numerical_integration(name):
    likelihood, log_density, y = ONE_LATENT[name]
    # 20 nodes: exact where the noise is as wide as the latent, some 10 % where it is ten times narrower.
    tolerance = {"student_t": 0.1, "poisson": 1e-10, "bernoulli": 1e-6}[name]
    expected = reference(log_density, y)
    np.testing.assert_allclose(
        eqx.filter_jit(likelihood.expected_log_prob)(MEAN, VARIANCE, y), expected, tolerance, tolerance
    )


@pytest.mark.parametrize("name", ["student_t", "poisson"])
def test_cdf_against_numerical_integration(name):
    likelihood, _, y = ONE_LATENT[name]
    cdf = {
        "student_t": lambda f, t: stats.t.cdf(t, 4.0, f, 0.1),
        "poisson": lambda f, t: stats.poisson.cdf(t, np.exp(f)),
    }
    np.testing.assert_allclose(
        eqx.filter_jit(likelihood.cdf)(MEAN, VARIANCE, y), reference(cdf[name], y), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_heteroscedastic_log_z_against_numerical_integration(alpha):
    mean, variance, y = np.array([0.2, -1.3]), np.array([0.3, 0.8]), 1.1
    z, step = np.linspace(-9.0, 9.0, 1501, retstep=True)
    f, g = mean[0] + np.sqrt(variance[0]) * z[:, None], mean[1] + np.sqrt(variance[1]) * z[None, :]
    weights = stats.norm.pdf(z)[:, None] * stats.norm.pdf(z)[None, :] * step**2
    expected = np.log(np.sum(weights * stats.norm.pdf(y, f, np.exp(0.5 * (g + 0.3))) ** alpha))
    args = jnp.asarray(mean)[None], jnp.asarray(variance)[None], column(y)
    log_z = jax.jit(lambda *args: HeteroscedasticGaussian(0.3).log_z(*args, alpha))(*args)
    np.testing.assert_allclose(log_z, expected, rtol=1e-7)


def test_heteroscedastic_cdf_against_numerical_integration():
    mean, variance, y = np.array([0.2, -1.3]), np.array([0.3, 0.8]), 1.1

    def given_noise(g):
        return stats.norm.cdf(y, mean[0], np.sqrt(variance[0] + np.exp(g + 0.3)))

    expected = gaussian_average(given_noise, mean[1], variance[1])
    cdf = eqx.filter_jit(HeteroscedasticGaussian(0.3).cdf)(
        jnp.asarray(mean)[None], jnp.asarray(variance)[None], column(y)
    )
    np.testing.assert_allclose(cdf, expected, rtol=1e-9)


def test_gaussian_closed_forms():
    y, noise = column(0.3, -1.0, 2.0, 0.0), 0.25
    likelihood = Gaussian(noise)
    total = np.asarray(VARIANCE) + noise
    np.testing.assert_allclose(
        likelihood.log_z(MEAN, VARIANCE, y), stats.norm.logpdf(y, MEAN, np.sqrt(total)), rtol=1e-12
    )
    np.testing.assert_allclose(likelihood.cdf(MEAN, VARIANCE, y), stats.norm.cdf(y, MEAN, np.sqrt(total)), rtol=1e-12)
    alpha = 0.3
    printed = (
        stats.norm.logpdf(y, MEAN, np.sqrt(VARIANCE + noise / alpha))
        + 0.5 * np.log(2 * np.pi * noise / alpha)
        - 0.5 * alpha * np.log(2 * np.pi * noise)
    )
    np.testing.assert_allclose(likelihood.log_z(MEAN, VARIANCE, y, alpha), printed, rtol=1e-10)


def test_bernoulli_probabilities():
    expected = stats.norm.cdf(MEAN / np.sqrt(1 + VARIANCE))
    np.testing.assert_allclose(
        Bernoulli().probabilities(MEAN, VARIANCE), np.hstack([1 - expected, expected]), atol=1e-12
    )


def test_robustmax_probabilities(rng):
    mean, variance = rng.normal(size=(4, 3)), rng.uniform(0.3, 1.5, size=(4, 3))
    likelihood = RobustMax(3, epsilon=0.01)

    def wins(row, c):
        others = [j for j in range(3) if j != c]
        sd = np.sqrt(variance[row])

        def beaten(x):
            return np.prod([special.ndtr((x - mean[row, j]) / sd[j]) for j in others])

        return gaussian_average(beaten, mean[row, c], variance[row, c])

    win = np.array([[wins(row, c) for c in range(3)] for row in range(4)])
    expected = 0.99 * win + 0.005 * (1 - win)
    args = jnp.asarray(mean), jnp.asarray(variance)
    np.testing.assert_allclose(eqx.filter_jit(likelihood.probabilities)(*args), expected, atol=2e-4)
    for c in range(3):
        y = jnp.full((4, 1), float(c))
        np.testing.assert_allclose(np.exp(eqx.filter_jit(likelihood.log_z)(*args, y))[:, 0], expected[:, c], atol=2e-4)
        elbo = win[:, c] * np.log(0.99) + (1 - win[:, c]) * np.log(0.005)
        np.testing.assert_allclose(eqx.filter_jit(likelihood.expected_log_prob)(*args, y)[:, 0], elbo, atol=2e-3)


@pytest.mark.parametrize("K", [2, 3, 10])
def test_robustmax_with_latents_of_any_width(rng, K):
    # Gauss-Hermite nodes of the chosen latent step over narrower ones: 0.523 for 0.587, and sums of 0.93 to 1.04.
    mean, sd = rng.uniform(-2.0, 2.0, size=(40, K)), 10.0 ** rng.uniform(-3.0, 0.5, size=(40, K))

    def wins(m, s):
        x = np.unique(np.concatenate([m[:, None] + s[:, None] * np.linspace(-9.0, 9.0, 2001)]).ravel())
        z = (0.5 * (x[1:] + x[:-1])[:, None] - m) / s
        mass, beaten = np.diff(special.ndtr((x[:, None] - m) / s), axis=0), special.ndtr(z)
        return [np.sum(mass[:, c] * np.prod(np.delete(beaten, c, axis=1), axis=1)) for c in range(K)]

    likelihood = RobustMax(K, epsilon=1e-3)
    expected = 1e-3 / (K - 1) + (1 - 1e-3 - 1e-3 / (K - 1)) * np.array(
        [wins(*row) for row in zip(mean, sd, strict=True)]
    )
    args = jnp.asarray(mean), jnp.asarray(sd**2)
    np.testing.assert_allclose(jax.jit(likelihood.probabilities)(*args), expected, atol=1e-4)
    log_z = jax.jit(jax.vmap(lambda y: likelihood.log_z(*args, jnp.full((40, 1), y))))(jnp.arange(float(K)))
    np.testing.assert_allclose(np.exp(log_z[:, :, 0]).T, expected, atol=1e-4)


def test_softmax_probabilities_with_the_default_points(rng):
    """Two classes are one logistic: the only case with an easy exact answer."""
    mean, variance = rng.normal(size=(6, 2)), rng.uniform(0.1, 1.0, size=(6, 2))
    exact = [
        gaussian_average(lambda d: 1 / (1 + np.exp(-d)), m[1] - m[0], v.sum())
        for m, v in zip(mean, variance, strict=True)
    ]
    answer = Softmax(2).probabilities(jnp.asarray(mean), jnp.asarray(variance))
    np.testing.assert_allclose(answer[:, 1], exact, atol=5e-3)
    np.testing.assert_allclose(answer.sum(axis=1), 1.0, rtol=1e-12)


def test_log_probabilities_survive_the_far_tail():
    y = column(1.0)
    slope = jax.grad(lambda m: Bernoulli().log_prob(m, y).sum())(column(-40.0))
    np.testing.assert_allclose(slope, 40.0, rtol=1e-3)
    slope = jax.grad(lambda m: Bernoulli().log_prob(m, y).sum())(column(-1e6))
    np.testing.assert_allclose(slope, 1e6, rtol=1e-6)


def test_poisson_samples_large_rates(key):
    draws = Poisson().sample(jnp.full((2000, 1), 30.0), key=key)
    rate = np.exp(30.0)
    assert abs(float(draws.mean()) - rate) < 6 * np.sqrt(rate / 2000)


def test_noise_has_a_lower_bound():
    likelihood = Gaussian(2e-6)
    assert likelihood.variance.lower == 1e-6
    with pytest.raises(SettingError, match="variance must be greater than 1e-06"):
        Gaussian(0.0)
    with pytest.raises(SettingError, match="df must be greater than 2"):
        StudentT(df=1.0)


@pytest.mark.parametrize(
    ("likelihood", "bad", "match"),
    [
        (Gaussian(), np.inf, "the value inf in row 2, output 0, which is infinite"),
        (Poisson(), -1.0, "the value -1 in row 2, output 0, which is negative"),
        (Poisson(), 0.5, "not a whole number"),
        (Bernoulli(), 2.0, "not one of the labels 0 to 1"),
        (RobustMax(3), 3.0, "not one of the labels 0 to 2"),
        (Softmax(3), 0.5, "not one of the labels"),
        (Softmax(3), -np.inf, "infinite"),
    ],
)
def test_bad_targets_are_named(likelihood, bad, match):
    with pytest.raises(DataError, match=match):
        likelihood.check_targets(np.array([[0.0], [np.nan], [bad]]))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "match"),
    [
        (Gaussian(np.array([0.1])), 2, r"Gaussian's variance has the shape \(1,\), but there are 2 outputs: give one"),
        (Gaussian(np.array([0.1, 0.2])), 1, "there is one output"),
        (HeteroscedasticGaussian(np.zeros(3)), 2, "HeteroscedasticGaussian's offset has the shape"),
        (StudentT(np.array([4.0]), 0.1), 2, "StudentT's df has the shape"),
        (StudentT(4.0, np.full((2, 1), 0.1)), 2, "StudentT's scale has the shape"),
    ],
)
def test_parameters_of_another_size_than_the_outputs_are_refused(likelihood, outputs, match):
    # Gaussian([0.1]) with two outputs ended in a loop's error about shapes.
    with pytest.raises(SettingError, match=match):
        build_model(np.zeros((3, 1)), likelihood, outputs)


def test_an_algorithm_is_given_no_likelihood_of_another_size(key):
    x = np.linspace(0.0, 1.0, 5)[:, None]
    model = build_model(x, Gaussian(0.1), 2, num_inducing=2)
    model = eqx.tree_at(lambda model: model.likelihood, model, Gaussian(np.array([0.1])))
    with pytest.raises(SettingError, match="there are 2 outputs"):
        fit_model(DSVI(), model, ArraySource(x, np.zeros((5, 2))), key=key)


def test_registry():
    assert set(LIKELIHOODS) == set(LIKELIHOOD_CASES)
    assert isinstance(likelihood_from_name("student_t", df=3.0), StudentT)
    with pytest.raises(SettingError, match=r"no likelihood 'gausian'.*Did you mean 'gaussian'"):
        likelihood_from_name("gausian")
    with pytest.raises(SettingError, match=r"'robustmax' cannot be built from.*num_classes"):
        likelihood_from_name("robustmax")
    with pytest.raises(SettingError, match="num_classes must be a whole number from 2"):
        likelihood_from_name("softmax", num_classes=1)
    with pytest.raises(SettingError, match="epsilon must lie between 0 and"):
        RobustMax(2, epsilon=0.7)
