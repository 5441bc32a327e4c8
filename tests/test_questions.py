"""Questions to a fitted model compile once per few shapes, never per call, and padding changes no answer."""

import numpy as np
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.compilation import count_compilations
from fathomgp.data import read_inputs

_SLOW = pytest.mark.slow
METHODS = (
    "exact",
    "dsvi",
    "sghmc",
    "stride",
    *(pytest.param(name, marks=_SLOW) for name in ("sgpr", "decoupled", "aep", "meanfield", "sequential")),
)
QUESTIONS = {
    "mean": lambda model, x, seed: model.predict(x),
    "std": lambda model, x, seed: model.predict(x, return_std=True)[1],
    "covariance": lambda model, x, seed: model.predict(x, return_cov=True)[1],
    "quantiles": lambda model, x, seed: model.predict_quantiles(x, [0.1, 0.9]),
    "density": lambda model, x, seed: model.log_density(x, x[:, 0]),
    "crps": lambda model, x, seed: model.predict_distribution(x).crps(x[:, 0]),
    "draws": lambda model, x, seed: model.sample_y(x, 2, random_state=seed),
    "independent draws": lambda model, x, seed: model.predict_distribution(x).sample(2, seed),
    "latent": lambda model, x, seed: model.predict_distribution(x).latent_std(),
}
ROWS = np.random.default_rng(5).uniform(size=(40, 2))


@pytest.fixture(scope="module")
def fitted():
    """A fitted model of every method, made when it is first asked for."""
    models = {}

    def fit(method):
        if method not in models:
            rng = np.random.default_rng(3)
            X = rng.uniform(size=(24, 2))
            y = np.sin(5.0 * X[:, 0]) + 0.1 * rng.normal(size=24)
            settings = {} if method == "exact" else {"num_inducing": 5}
            models[method] = DeepGPRegressor(method, max_iter=2, random_state=0, **settings).fit(X, y)
        return models[method]

    return fit


@pytest.mark.parametrize("method", METHODS)
def test_equal_shapes_compile_nothing_and_rows_share_few_programs(fitted, method, flag_off):
    model = fitted(method)
    for name, ask in QUESTIONS.items():
        ask(model, ROWS[:5], 0)
        with count_compilations() as again:
            ask(model, ROWS[:5] + 0.1, 1)
            ask(model, ROWS[:9], 2)
        assert again.programs == 0, name
        with count_compilations() as more:
            for rows in (17, 25, 40):
                ask(model, ROWS[:rows], rows)
        assert more.programs <= 4, name


@pytest.mark.parametrize("method", METHODS)
def test_joint_draws_and_covariances_do_not_see_the_padding(fitted, method, flag_off):
    model = fitted(method)
    few, many = model.sample_y(ROWS[:5], 3, random_state=7), model.sample_y(ROWS[:20], 3, random_state=7)
    np.testing.assert_allclose(few, many[:5], rtol=1e-6, atol=1e-6)
    mean, covariance = model.predict(ROWS[:5], return_cov=True)
    if method in ("exact", "sgpr"):
        np.testing.assert_allclose(mean, model.predict(ROWS[:5]), rtol=1e-9)
        np.testing.assert_allclose(np.sqrt(np.diag(covariance)), model.predict(ROWS[:5], return_std=True)[1], rtol=1e-6)
    assert np.all(np.linalg.eigvalsh(covariance) > 0.0)


def test_a_functions_draws_are_a_callable_that_compiles_once(fitted, flag_off):
    import jax

    model = fitted("dsvi")
    x, _ = read_inputs(ROWS[:6], estimator=model, reset=False)
    with jax.enable_x64(True):
        draws = model.posterior_.sample_functions(jax.random.key(3), 4)
        first = draws(jax.numpy.asarray(x))
        with count_compilations() as again:
            other = model.posterior_.sample_functions(jax.random.key(4), 4)(jax.numpy.asarray(x))
        assert again.programs == 0
        assert first.shape == (4, 6, 1)
        assert not np.allclose(first, other)
        gradient = jax.grad(lambda x: draws(x)[0, 0, 0])(jax.numpy.asarray(x))
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient[0] != 0.0)
