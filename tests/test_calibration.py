"""The calibration suite judges rightly, a small form of it holds, and every kernel of a chain passes Geweke's test."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from calibration import KEY, RANK_COLUMNS, histogram, p_values, ranks_of, report_ranks, run_ranks, shift_and_width
from calibration_cases import Joint, rank_cases, shallow_model
from calibration_moments import compare_draws, long_run
from fathomgp.bench import ResultFile
from fathomgp.data import Batch
from fathomgp.inference import hamiltonian_sampler
from fathomgp.inference._particles import Datum, follow, resample_and_move
from fathomgp.inference._sequential_start import start_layers
from fathomgp.inference.sequential import Sequential, SequentialState
from fathomgp.inference.sghmc import energy_and_gradient
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.model import build_model, prepare_all
from references import FITC, hamiltonian_monte_carlo

# --- the suite itself -------------------------------------------------------------------------------------------------


class Bell:
    """Draws around a noisy observation of a standard normal number, too wide or too narrow by a factor."""

    quantities, provable = ("theta",), True

    def __init__(self, factor, replicates=400):
        self.name, self.factor, self.replicates = f"bell {factor}", factor, replicates

    def replicate(self, number):
        rng = np.random.default_rng(number)
        theta = rng.normal()
        y = theta + rng.normal()
        return np.array([theta]), (0.5 * y + self.factor * 0.5**0.5 * rng.normal(size=19))[:, None]


def test_ranks_are_uniform_for_the_posterior_and_not_for_a_wider_or_narrower_one(tmp_path, capsys):
    read = lambda: ResultFile(tmp_path / "ranks.csv", RANK_COLUMNS, KEY)  # noqa: E731
    for factor, fine in ((1.0, True), (1.4, False), (0.7, False)):
        case = Bell(factor)
        run_ranks({case.name: case}, 150, read())
        assert not report_ranks({case.name: case}, read())  # not all of its replicates are there
        assert "Not run to the end: bell" in capsys.readouterr().out
        run_ranks({case.name: case}, None, read())
        assert len([row for row in read().rows if row["case"] == case.name]) == 400
        assert report_ranks({case.name: case}, read()) == fine


def test_shift_and_width_are_those_of_the_ranks(rng):
    uniform = rng.integers(0, 20, size=(2000, 3))
    assert np.all(np.abs(shift_and_width(uniform, 19)) < 4.0)
    low, narrow = np.minimum(uniform, 14), np.where(rng.uniform(size=(2000, 3)) < 0.2, 19 * (uniform % 2), uniform)
    assert np.all(shift_and_width(low, 19)[0] < -4.0)
    assert np.all(shift_and_width(narrow, 19)[1] > 4.0)


def test_draws_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="not finite"):
        ranks_of(Bell(np.inf), 0)


def test_moments_tell_a_heated_chain_from_a_good_one(rng):
    draws = rng.normal(size=(4, 500, 3))
    good, hot = (compare_draws(scale * draws, (np.zeros(3), np.ones(3))) for scale in (1.0, 1.3))
    assert 0.9 < good.variance_ratio < 1.1
    assert max(abs(good.mean_z), abs(good.square_z)) < 4.5
    assert hot.variance_ratio == pytest.approx(1.69 * good.variance_ratio)
    assert hot.square_z > 4.5
    moved = compare_draws(draws + 0.3, rng.normal(size=(4, 500, 3)))
    assert abs(moved.mean_z) > 4.5


@pytest.mark.slow
def test_the_long_run_has_the_moments_of_a_known_density(key):
    scales = jnp.asarray([[1.0, 0.2, 0.05]])
    log_density = lambda w: -0.5 * jnp.sum(((w - 1.0) / scales) ** 2, axis=1)  # noqa: E731
    draws, acceptance = hamiltonian_monte_carlo(log_density, jax.random.normal(key, (8, 3)), key)
    assert 0.7 < acceptance < 0.9
    found = compare_draws(draws, (np.ones(3), np.asarray(scales[0]) ** 2))
    assert max(abs(found.mean_z), abs(found.square_z)) < 4.5
    two_hills = lambda w: jnp.logaddexp(-jnp.sum((8 * w - 8) ** 2, axis=1), -jnp.sum((8 * w + 8) ** 2, axis=1))  # noqa: E731
    with pytest.raises(RuntimeError, match="no reference"):
        long_run(two_hills, jax.random.normal(key, (8, 1)), key)


def test_the_closed_form_is_the_posterior_of_the_same_model_by_bayes_rule(rng):
    model = shallow_model(5)
    fitc = FITC.of(model, rng.uniform(-2.0, 2.0, size=(12, 1)))
    y = rng.normal(size=12)
    mean, covariance = fitc.posterior(y)
    joint = fitc.A.T @ fitc.A + np.diag(fitc.spread + fitc.noise)
    gain = fitc.A @ np.linalg.inv(joint)
    assert np.allclose(mean, gain @ y)
    assert np.allclose(covariance, np.eye(5) - gain @ fitc.A.T)


# --- a small form of it -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in rank_cases().items() if case.provable and len(case.x) < 1000])
def test_a_sampler_whose_target_made_the_data_ranks_the_truth_uniformly(name):
    case = rank_cases()[name]
    count = 60 if isinstance(case, Joint) and case.model.depth == 1 else 40
    ranks, draws = zip(*(ranks_of(case, number) for number in range(count)), strict=True)
    counts = histogram(np.array(ranks), draws[0], bins=5)
    assert np.all(p_values(counts) > 1e-3)
    assert np.all(np.abs(shift_and_width(np.array(ranks), draws[0])) < 4.0)


# --- Geweke's joint test ----------------------------------------------------------------------------------------------


def same_moments(ours, theirs):
    """All first and second moments of two samples (draws, quantities) agree within chance."""
    for a, b in ((ours, theirs), (_products(ours), _products(theirs))):
        error = np.hypot(stats.sem(a, axis=0), stats.sem(b, axis=0))
        assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error)


def _products(sample):
    upper = np.triu_indices(sample.shape[1])
    return np.einsum("si,sj->sij", sample, sample)[:, *upper]


@pytest.mark.slow
@pytest.mark.parametrize("friction", [0.05, 0.2, 1.0])  # 1: Langevin dynamics
def test_geweke_of_the_hamiltonian_sampler(rng, key, friction):
    """Steps of the chain given y, then y given v: the joint distribution of v and y stays that of the model."""
    same_moments(*_hamiltonian_cycles(rng, key, friction, temperature=1.0))


@pytest.mark.slow
def test_geweke_sees_a_chain_that_is_too_hot(rng, key):
    with pytest.raises(AssertionError):
        same_moments(*_hamiltonian_cycles(rng, key, friction=0.2, temperature=1.3))


def _hamiltonian_cycles(rng, key, friction, temperature):
    """v and y after many cycles, and from the model itself."""
    count, x = 4000, jnp.asarray(rng.uniform(-2.0, 2.0, size=(6, 1)))
    model = shallow_model(3, noise=0.3)
    whiteners, fitc = tuple(prepare_all(model.layers)), FITC.of(model, np.asarray(x))
    A, spread, num_data = jnp.asarray(fitc.A), jnp.asarray(fitc.spread + fitc.noise), jnp.asarray(6.0)
    settings = {"step_size": 0.1, "friction": friction, "temperature": temperature}
    sampler = hamiltonian_sampler(num_data, adapting=False, **settings)

    def observe(v, key):
        return v[..., 0] @ A + jnp.sqrt(spread)[None] * jax.random.normal(key, (count, 6))

    def gradient(v, y):
        ones = jnp.ones((6, 1), bool)
        batch = Batch(x, y[:, None], ones, jnp.ones(6), jnp.arange(6), num_data)
        return energy_and_gradient(model, whiteners, (v,), batch, key=key)[1][0]

    def step(carry, key):
        v, state, y = carry
        move, state = sampler.update(jax.vmap(gradient)(v, y), state, key=key)
        return (v + move, state, y), None

    @jax.jit
    def cycle(carry, key):
        y_key, step_key = jax.random.split(key)
        v, state, _ = carry
        carry, _ = jax.lax.scan(step, (v, state, observe(v, y_key)), jax.random.split(step_key, 10))
        return carry, None

    v = jnp.asarray(rng.normal(size=(count, 3, 1)))
    state = eqx.tree_at(lambda s: s.V, sampler.init(v), jnp.full(v.shape, 0.5))  # about that of the gradient
    h = 0.01 / (6.0 * 0.5**0.5)
    momentum = jnp.sqrt(2.0 * h / (2.0 - friction)) * jnp.asarray(rng.normal(size=v.shape))
    carry = (v, eqx.tree_at(lambda s: s.momentum, state, momentum), observe(v, key))
    v, _, y = jax.jit(lambda c: jax.lax.scan(cycle, c, jax.random.split(key, 60))[0])(carry)
    fresh = rng.normal(size=(count, 3))
    fresh_y = fresh @ fitc.A + np.sqrt(fitc.spread + fitc.noise) * rng.normal(size=(count, 6))
    return np.concatenate([v[..., 0], y], axis=1), np.concatenate([fresh, fresh_y], axis=1)


@pytest.mark.slow
def test_geweke_of_the_move_of_resampled_particles(rng, key):
    """The noise of inner layers given y, then y given the noise: both stay those of the model."""
    count, x = 4000, np.linspace(-1.5, 1.5, 8)[:, None]
    model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=8, kernel=RBF(0.8, 0.5))
    algorithm = Sequential(num_particles=20)
    state = SequentialState(model, start_layers(model, shared=True), jnp.asarray(0, jnp.int32), None)
    rows = tuple(map(jnp.asarray, (x, np.sin(2.0 * x), np.ones(x.shape, bool))))
    state = eqx.filter_jit(lambda s: algorithm.learn(s, rows, jnp.ones(8, bool), key=key)[0])(state)
    gps, place, seen = state.gps, jnp.asarray([[0.4]]), jnp.ones((1, 1), bool)

    def observe(e, key):
        at = follow(model, gps, Datum(place, jnp.zeros((1, 1)), seen), [e])
        return at.mean + jnp.sqrt(at.variance + 0.1) * jax.random.normal(key, (1, 1))

    def one(e, key):
        y_key, move_key = jax.random.split(key)
        y = observe(e, y_key)
        datum = Datum(place, y, seen)
        moved = resample_and_move(model, gps, datum, follow(model, gps, datum, [e]), jnp.zeros(1), move_key)
        return moved.noise[0], y

    @jax.jit
    def run(e, key):
        def cycle(carry, key):
            return jax.vmap(one)(carry[0], jax.random.split(key, count)), None

        return jax.lax.scan(cycle, (e, jnp.zeros((count, 1, 1))), jax.random.split(key, 30))[0]

    start = jnp.asarray(rng.normal(size=(count, 1, 1)))
    e, y = run(start, key)
    fresh = jnp.asarray(rng.normal(size=(count, 1, 1)))
    fresh_y = jax.jit(jax.vmap(observe))(fresh, jax.random.split(jax.random.fold_in(key, 1), count))
    same_moments(*(np.column_stack([np.asarray(part).ravel() for part in pair]) for pair in ((e, y), (fresh, fresh_y))))
    assert stats.kstest(np.asarray(e).ravel(), "norm").pvalue > 1e-5
