"""STRIDE: scores against brute force, samplers against importance sampling, and one posterior from three roads."""

import dataclasses
import functools
import os
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.fitting import _loop, fit_model
from fathomgp.inference import STRIDE, _stride_top, stride
from fathomgp.inference._mcmc import SAMPLERS, Chains
from fathomgp.inference._stride_exchange import Share, _births, draw_candidates, exchange, particle_bound
from fathomgp.inference._stride_hidden import (
    _apply_lower,
    each_particle,
    fill_up,
    held,
    hidden_values,
    prepare_hidden,
    sight,
    top_inputs,
    whitened,
)
from fathomgp.inference._stride_sites import settle_sites, shallow_bound, shallow_given, sites_about
from fathomgp.inference._stride_start import without_inducing
from fathomgp.inference._stride_top import (
    Top,
    bound,
    carried_over,
    condition_top,
    log_likelihood,
    way_and_log_likelihood,
)
from fathomgp.inference.sgpr import collapsed_elbo
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Bernoulli, Gaussian, Poisson
from fathomgp.linalg import death_scores, default_policy, pivoted_cholesky, sparse_bound
from fathomgp.model import Conditional, DeepGP, Layer, Recipe, build_model, moments
from fathomgp.parameters import real

ARCHITECTURES = ("composition", "convolution", "injective")
#: Draws of importance sampling; FATHOMGP_TEST_DRAWS=1000000 for the long form.
DRAWS = int(os.environ.get("FATHOMGP_TEST_DRAWS", "100000"))
COLLAPSED = Top("collapsed", shared=True)
JITTER = default_policy(np.float64).first


def problem(rng, rows=25, architecture="composition", depth=2, outputs=1, inputs=1, noise=0.1):
    x = rng.uniform(-2.0, 2.0, size=(rows, inputs))
    y = np.sin(2 * x[:, :1]) + 0.3 * rng.normal(size=(rows, outputs))
    model = build_model(
        x,
        Gaussian(noise),
        outputs,
        depth=depth,
        num_inducing=6,
        kernel="matern32",
        recipe=Recipe(lengthscale=0.8, inner_variance=0.4),
        architecture=architecture,
    )
    return without_inducing(model), ArraySource(x, y).everything()


def particles(model, batch, rng, count, kind="exact", anchors=None):
    anchors = jnp.arange(len(batch.x)) if anchors is None else jnp.asarray(anchors)
    hidden = prepare_hidden(model, batch.x, anchors, kind)
    widths = sum(layer.width for layer in model.layers[:-1])
    white = jnp.asarray(rng.normal(size=(count, widths * len(anchors))))
    values = hidden_values(model, hidden, batch.x, white)
    return hidden, white, values, top_inputs(model, hidden, batch.x, values)


def free_energy(model, batch, h, inducing):
    """F_V by dense algebra."""
    real = np.asarray(batch.weight) > 0
    K = np.asarray(model.layers[-1].kernel(h))
    K = K + JITTER * np.mean(np.diagonal(K)) * np.eye(len(K))  # the jitter of K_mm, and of whatever is born
    s2, y = float(model.likelihood.variance.value), np.asarray(batch.y)[real]
    Kmn = np.asarray(model.layers[-1].kernel(h))[np.asarray(inducing)][:, real]
    Q = Kmn.T @ np.linalg.solve(K[np.ix_(inducing, inducing)], Kmn)
    density = stats.multivariate_normal(cov=Q + s2 * np.eye(real.sum())).logpdf(y.T).sum()
    return (
        density
        - 0.5 * y.shape[1] * (np.diagonal(np.asarray(model.layers[-1].kernel(h)))[real].sum() - np.trace(Q)) / s2
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_births_and_deaths_equal_brute_force(architecture, rng):
    model, batch = problem(rng, architecture=architecture)
    *_, inputs = particles(model, batch, rng, 3)
    inducing = np.asarray(rng.choice(25, 6, replace=False), np.int32)
    candidates = np.setdiff1d(np.arange(25), inducing).astype(np.int32)

    @jax.jit
    def scores(h):
        now = particle_bound(model, COLLAPSED, batch, h, jnp.asarray(inducing), jnp.ones(6, bool))
        return now.value, death_scores(now), _births(now, model, COLLAPSED, batch, h, jnp.asarray(candidates))

    for h in inputs:
        value, deaths, births = scores(h)
        now = free_energy(model, batch, h, inducing)
        assert float(value) == pytest.approx(now, abs=1e-8)
        expected = [free_energy(model, batch, h, np.delete(inducing, i)) - now for i in range(6)]
        assert np.allclose(deaths, expected, rtol=0.0, atol=1e-8)
        expected = [free_energy(model, batch, h, np.append(inducing, j)) - now for j in candidates]
        assert np.allclose(births, expected, rtol=0.0, atol=1e-8)
    fast = jax.jit(lambda: bound(model, COLLAPSED, batch, held(inputs), jnp.asarray(inducing)))()
    assert np.allclose(fast, [free_energy(model, batch, h, inducing) for h in inputs], atol=1e-6)


def free_energy_by_output(model, batch, h, inducing):
    """F_V by dense algebra, one output after the other: its own noise, and the rows where it was measured."""
    noise = np.broadcast_to(np.asarray(model.likelihood.variance.value), batch.y.shape[1])
    total = 0.0
    for p, s2 in enumerate(noise):
        real = np.asarray(batch.observed)[:, p]
        K = np.asarray(model.layers[-1].kernel(h))
        K = K + JITTER * np.mean(np.diagonal(K)) * np.eye(len(K))
        y = np.asarray(batch.y)[real, p]
        Kmn = np.asarray(model.layers[-1].kernel(h))[np.asarray(inducing)][:, real]
        Q = Kmn.T @ np.linalg.solve(K[np.ix_(inducing, inducing)], Kmn)
        total += stats.multivariate_normal(cov=Q + s2 * np.eye(len(y))).logpdf(y)
        total -= 0.5 * (np.diagonal(np.asarray(model.layers[-1].kernel(h)))[real].sum() - np.trace(Q)) / s2
    return total


@pytest.mark.parametrize("noise", [0.1, np.array([0.02, 0.5])], ids=["one", "two"])
def test_scores_with_a_noise_an_output_and_missing_ones_equal_brute_force(noise, rng):
    model, batch = problem(rng, outputs=2, noise=noise)
    batch = dataclasses.replace(batch, observed=batch.observed.at[3:9, 1].set(False).at[20:22, 0].set(False))
    *_, inputs = particles(model, batch, rng, 2)
    inducing = np.asarray([0, 4, 11, 15, 20, 23], np.int32)  # row 4 lacks one output, row 20 the other
    candidates, top = np.setdiff1d(np.arange(25), inducing).astype(np.int32), Top("collapsed", shared=False)

    @jax.jit
    def scores(h):
        now = particle_bound(model, top, batch, h, jnp.asarray(inducing), jnp.ones(6, bool))
        return now.value, death_scores(now), _births(now, model, top, batch, h, jnp.asarray(candidates))

    for h in inputs:
        value, deaths, births = scores(h)
        now = free_energy_by_output(model, batch, h, inducing)
        assert float(value) == pytest.approx(now, abs=1e-8)
        expected = [free_energy_by_output(model, batch, h, np.delete(inducing, i)) - now for i in range(6)]
        assert np.allclose(deaths, expected, rtol=0.0, atol=1e-8)
        expected = [free_energy_by_output(model, batch, h, np.append(inducing, j)) - now for j in candidates]
        assert np.allclose(births, expected, rtol=0.0, atol=1e-8)
    each = lambda function: jax.lax.map(lambda h: function(h, h[:0, 0]), inputs)  # noqa: E731
    new = jax.jit(lambda: exchange(model, top, batch, each, jnp.asarray(inducing), 19, key=jax.random.key(0)))()
    before, after = (
        np.mean([free_energy_by_output(model, batch, h, np.asarray(chosen)) for h in inputs])
        for chosen in (inducing, new.inducing)
    )
    assert float(new.gain) == pytest.approx(after - before, abs=1e-8)
    assert float(new.before) == pytest.approx(before, abs=1e-8)


def test_the_bound_is_that_of_sparse_gp_regression_where_the_variance_is_large(rng):
    """Smooth data ask for a variance far above the noise: a jitter of 1e-8 of it, not 1e-10, doubled energy's error."""
    x = rng.normal(size=(200, 3))
    y = x[:, :1] * x[:, 1:2] + x[:, 2:] ** 2 + 0.1 * rng.normal(size=(200, 1))
    batch, inducing = ArraySource(x, y).everything(), jnp.arange(40, dtype=jnp.int32)
    shallow = build_model(x, Gaussian(0.01), 1, depth=1, num_inducing=40, kernel=RBF(40.0, 1e6))
    sparse = eqx.tree_at(lambda m: m.layers[0].z, shallow, real(batch.x[inducing]))
    expected = float(jax.jit(collapsed_elbo)(sparse, batch))
    found = jax.jit(lambda: bound(shallow, COLLAPSED, batch, held(batch.x[None]), inducing))()
    assert float(found[0]) == pytest.approx(expected, abs=0.01)
    one = jax.jit(lambda: particle_bound(shallow, COLLAPSED, batch, batch.x, inducing, jnp.ones(40, bool)).value)()
    assert float(one) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("shared", [True, False])
def test_sums_do_not_depend_on_how_rows_and_particles_are_blocked(shared, rng, monkeypatch):
    model, batch = problem(rng, rows=45, outputs=2)
    if not shared:
        batch = dataclasses.replace(batch, observed=batch.observed.at[3:9, 1].set(False))
    hidden, white, _, _ = particles(model, batch, rng, 4, "aca", range(0, 45, 5))
    inducing, top = jnp.arange(6, dtype=jnp.int32), Top("collapsed", shared)
    monkeypatch.setattr(_stride_top, "_FEWEST_ROWS", 8)

    def value_and_gradient():  # a new function, so a new trace
        value = lambda white: jnp.sum(bound(model, top, batch, sight(model, hidden, batch.x, white), inducing))  # noqa: E731
        return jax.jit(jax.value_and_grad(value))(white)

    found = []
    # All at once, a particle at a time, blocks of its rows, and blocks of the rows of two particles.
    for entries in (1 << 18, 6 * 48, 6 * 13, 6 * 17):
        monkeypatch.setattr(_stride_top, "_ENTRIES", entries)
        found.append(value_and_gradient())
    for value, gradient in found[1:]:
        assert float(value) == pytest.approx(float(found[0][0]), abs=1e-9)
        assert np.allclose(gradient, found[0][1], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("kind", ["exact", "aca", "sparse"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_last_layer_sees_of_some_rows_is_what_it_sees_there_of_all(architecture, kind, depth, rng):
    model, batch = problem(rng, architecture=architecture, depth=depth)
    anchors = None if kind == "exact" else range(0, 25, 3)
    hidden, white, _, inputs = particles(model, batch, rng, 2, kind, anchors)
    some = jnp.asarray([2, 3, 5, 11, 24])
    view = sight(model, hidden, batch.x, white)
    assert np.allclose(view.everywhere(), inputs, rtol=0.0, atol=1e-9)
    assert np.allclose(view.at_index(some), inputs[:, some], rtol=0.0, atol=1e-9)
    assert np.allclose(each_particle(model, hidden, batch.x, white, white, lambda h, _: h), inputs, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("kind", ["raw", "sampled"])
def test_likelihoods_do_not_depend_on_how_rows_are_blocked(kind, rng, monkeypatch):
    model, batch = problem(rng, rows=45)
    batch = dataclasses.replace(batch, observed=batch.observed.at[3:9].set(False))
    hidden, white, _, _ = particles(model, batch, rng, 4, "aca", range(0, 45, 5))
    top = COLLAPSED if kind == "raw" else Top("sampled", shared=False)
    inducing, above = jnp.arange(6, dtype=jnp.int32), jnp.asarray(rng.normal(size=(4, top.num_white(model, 6))))
    monkeypatch.setattr(_stride_top, "_FEWEST_ROWS", 8)

    def value_and_gradient():  # a new function, so a new trace
        def total(white):
            view = sight(model, hidden, batch.x, white)
            return jnp.sum(log_likelihood(model, top, batch, view, inducing, above, raw=jnp.asarray(kind == "raw")))

        return jax.jit(jax.value_and_grad(total))(white)

    whole = value_and_gradient()
    monkeypatch.setattr(_stride_top, "_ENTRIES", 6 * 17)
    for found, expected in zip(value_and_gradient(), whole, strict=True):
        assert np.allclose(found, expected, rtol=0.0, atol=1e-8)


@pytest.mark.parametrize(
    ("rows", "size", "blocks"), [(1000, 300, 4), (1009, 300, 4), (63_000, 1048, 63), (600, 599, 2)]
)
def test_blocks_are_of_equal_length_where_that_can_be(rows, size, blocks):
    count = _stride_top._num_blocks(rows, size)
    assert count == blocks
    assert -(-rows // count) <= size


@pytest.mark.parametrize("kind", ["exact", "aca", "sparse"])
def test_exchanges_see_the_layers_that_learned_hyperparameters_make(kind, rng, key):
    """What an exchange promises is what F_V gains, after the bottom layer's kernel has moved too."""
    x = rng.uniform(-2.0, 2.0, size=(40, 1))
    model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=6)
    source = ArraySource(x, np.sin(3 * x))
    inference = STRIDE(particles=3, candidates=20, hyper_steps=5, hidden=kind, learning_rate=0.1, shallow_rounds=1)
    sample, choose = inference.plan(40, None)[:2]
    batch = source.everything()
    state = inference.enter(sample, inference.init(model, source, key=key), source, key=key)
    state = eqx.tree_at(
        lambda s: s.particles.chains.white, state, jnp.asarray(rng.normal(size=state.particles.chains.white.shape))
    )
    step = eqx.filter_jit(lambda state, key: inference.step(choose, state, batch, key=key))
    for i in range(4):
        state, _ = step(state, jax.random.fold_in(key, i))
    value = eqx.filter_jit(
        lambda inducing: stride._complete_data(state.model, dataclasses.replace(state, inducing=inducing), batch)
    )
    new, _ = eqx.filter_jit(lambda: inference._maybe_exchange(state, batch, key))()
    now = float(value(state.inducing))
    assert float(new.gain) == pytest.approx(float(value(new.inducing)) - now, abs=1e-5)
    assert float(new.before) == pytest.approx(now, abs=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_particle_at_an_impossible_point_holds_no_other_back(sampler, rng, key):
    x = rng.uniform(-2.0, 2.0, size=(30, 1))
    model, source = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=6), ArraySource(x, np.sin(3 * x))
    inference = STRIDE(particles=4, candidates=20, sampler=sampler, shallow_rounds=0, hyper_steps=1)
    sample, choose = inference.plan(30, None)[:2]
    batch = source.everything()
    state = inference.enter(sample, inference.init(model, source, key=key), source, key=key)
    white = state.particles.chains.white.at[2].set(jnp.nan)
    lost = Chains(white, state.particles.chains.value.at[2].set(-jnp.inf), state.particles.chains.gradient)
    state = eqx.tree_at(lambda s: s.particles.chains, state, lost)
    move, moved = eqx.filter_jit(lambda state, key: inference.step(sample, state, batch, key=key)), state
    for i in range(15):
        moved, info = move(moved, jax.random.fold_in(key, i))
        assert bool(info.ok)
    assert np.all(np.asarray(moved.particles.chains.white[jnp.asarray([0, 1, 3])]) != 0.0)
    chosen, info = eqx.filter_jit(lambda: inference.step(choose, state, batch, key=key))()
    assert bool(info.ok)
    assert float(info.gain) > 0.0
    found = inference.enter(sample, chosen, source, key=key).particles.chains  # in the place of one that is possible
    assert np.all(np.isfinite(found.value))
    assert any(np.array_equal(found.white[2], found.white[other]) for other in (0, 1, 3))
    nowhere = eqx.tree_at(lambda s: s.particles.chains.value, state, jnp.full(4, -jnp.inf))
    nowhere = eqx.tree_at(lambda s: s.particles.chains.white, nowhere, jnp.full_like(white, jnp.nan))
    assert not bool(move(nowhere, key)[1].ok)


def test_an_exchange_finds_the_best_swap_and_never_loses(rng, key):
    model, batch = problem(rng)
    *_, inputs = particles(model, batch, rng, 4)
    inducing = np.arange(6, dtype=np.int32)
    average = lambda chosen: np.mean([free_energy(model, batch, h, chosen) for h in inputs])  # noqa: E731
    each = lambda function: jax.lax.map(lambda h: function(h, h[:0, 0]), inputs)  # noqa: E731
    swap = jax.jit(lambda inducing, key: exchange(model, COLLAPSED, batch, each, inducing, 19, key=key))
    before = average(inducing)
    new = swap(jnp.asarray(inducing), key)
    after = new.inducing
    assert float(new.before) == pytest.approx(before, abs=1e-8)
    assert float(new.gain) == pytest.approx(average(np.asarray(after)) - before, abs=1e-8)
    out = max(range(6), key=lambda i: average(np.delete(inducing, i)))
    rest = np.delete(inducing, out)
    best = max(average(np.append(rest, j)) for j in range(25) if j not in rest)
    assert average(np.asarray(after)) == pytest.approx(best, abs=1e-8)
    for i in range(4):
        after = swap(after, jax.random.fold_in(key, i)).inducing
        assert len(set(np.asarray(after).tolist())) == 6
        assert average(np.asarray(after)) >= best - 1e-8
        best = average(np.asarray(after))


@pytest.mark.parametrize("count", [2, 3, 25])
def test_the_best_exchange_of_all_shares_is_the_best_of_all(rng, key, count):
    model, batch = problem(rng)
    *_, inputs = particles(model, batch, rng, 4)
    inducing = jnp.arange(6, dtype=jnp.int32)
    each = lambda function: jax.lax.map(lambda h: function(h, h[:0, 0]), inputs)  # noqa: E731
    swap = jax.jit(lambda share: exchange(model, COLLAPSED, batch, each, inducing, 19, key=key, share=share))
    parts = [swap(Share(jnp.asarray(number, jnp.int32), count)) for number in range(count)]
    whole, best = swap(None), max(parts, key=lambda part: float(part.gain))
    assert np.array_equal(best.inducing, whole.inducing)
    assert float(best.gain) == pytest.approx(float(whole.gain), abs=1e-8)


def test_sites_of_gaussian_noise_are_the_data(rng):
    """Whatever is sampled of the last layer, an exchange is then the one of the collapsed bound."""
    model, batch = problem(rng, outputs=2, noise=np.array([0.02, 0.5]))
    batch = dataclasses.replace(batch, observed=batch.observed.at[3:9].set(False))
    *_, inputs = particles(model, batch, rng, 2)
    inducing = jnp.asarray([0, 9, 11, 15, 20, 23], jnp.int32)
    above = jnp.asarray(rng.normal(size=(2, 12)))

    def swap(top):
        each = lambda function: jax.lax.map(lambda own: function(*own), (inputs, above))  # noqa: E731
        return jax.jit(lambda: exchange(model, top, batch, each, inducing, 19, key=jax.random.key(0)))()

    found, expected = swap(Top("sampled", shared=False)), swap(Top("collapsed", shared=False))
    assert np.array_equal(found.inducing, expected.inducing)
    assert float(found.gain) == pytest.approx(float(expected.gain), abs=1e-6)
    assert float(found.before) == pytest.approx(float(expected.before), abs=1e-6)
    layer, z = model.layers[-1], batch.x[inducing]
    part = dataclasses.replace(batch, x=batch.x[:, :1])
    sites = sites_about(model.likelihood, part, jnp.zeros_like(batch.y), jnp.ones_like(batch.y))
    sparse = DeepGP((Layer(layer.kernel, layer.mean, real(z), 2),), model.likelihood)
    value = jax.jit(lambda: shallow_bound(layer, model.likelihood, part, z, sites))()
    assert float(value) == pytest.approx(float(jax.jit(lambda: collapsed_elbo(sparse, part))()), abs=1e-6)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_settled_sites_are_those_of_the_best_q(likelihood, rng):
    """Where the bound is stationary in the whitened means, v = V dE/dm."""
    x = rng.normal(size=(40, 2))
    batch = ArraySource(x, np.floor(rng.uniform(0.0, 2.0, size=(40, 1)))).everything()
    layer, z = build_model(x, likelihood, 1, num_inducing=8).layers[0], jnp.asarray(x[:8])

    @jax.jit
    def found():
        prior = sites_about(likelihood, batch, jnp.zeros_like(batch.y), jnp.ones_like(batch.y))
        sites = settle_sites(layer, likelihood, batch, z, prior, times=60)
        q = shallow_given(layer, batch, z, sites)

        def expected(mean):
            return jnp.sum(jnp.where(batch.observed, likelihood.expected_log_prob(mean, q.variance, batch.y), 0.0))

        V = jnp.linalg.solve(jnp.linalg.cholesky(layer.kernel(z) + 1e-10 * jnp.eye(8)), layer.kernel(z, batch.x))
        values = [shallow_bound(layer, likelihood, batch, z, own) for own in (prior, sites)]
        return q.white, V @ jax.grad(expected)(q.mean), values

    white, expected, (before, after) = found()
    assert np.allclose(white, expected, atol=1e-5)
    assert after > before


def test_exchanged_inducing_points_leave_the_sampled_function_alone(rng):
    model, batch = problem(rng)
    *_, inputs = particles(model, batch, rng, 2)
    old, new = jnp.asarray([0, 5, 9, 14], jnp.int32), jnp.asarray([0, 5, 20, 14], jnp.int32)
    white = jnp.asarray(rng.normal(size=(2, 4)))

    def values(at, white, h):
        K = np.asarray(model.layers[-1].kernel(h[at]))
        return np.linalg.cholesky(K + 1e-10 * np.eye(4)) @ np.asarray(white)

    moved = jax.jit(lambda new: carried_over(model, held(inputs), old, new, white))
    assert np.allclose(moved(old), white, atol=1e-7)
    for h, before, after in zip(inputs, white, moved(new), strict=True):
        u, kernel = values(old, before, h), model.layers[-1].kernel
        expected = u.copy()
        expected[2] = np.asarray(kernel(h[20:21], h[old]))[0] @ np.linalg.solve(np.asarray(kernel(h[old])), u)
        assert np.allclose(values(new, after, h), expected, atol=1e-6)


def test_candidates_are_real_distinct_and_new(key):
    weight = jnp.asarray([1.0] * 20 + [0.0] * 12)
    inducing = jnp.asarray([3, 7, 11], jnp.int32)
    drawn = np.asarray(draw_candidates(weight, inducing, 17, key=key))
    assert sorted(drawn) == sorted(set(range(20)) - {3, 7, 11})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_anchors_make_all_kinds_one(architecture, rng):
    model, batch = problem(rng, rows=16, architecture=architecture, depth=3)
    anchors = rng.permutation(16)
    hidden, white, values, inputs = particles(model, batch, rng, 3)
    for kind in ("aca", "sparse"):
        other = prepare_hidden(model, batch.x, jnp.asarray(anchors), kind)
        sites = [h[:, anchors] for h in values] if kind == "sparse" else values
        again = whitened(model, other, batch.x, sites)
        new = hidden_values(model, other, batch.x, again)
        assert np.allclose(top_inputs(model, other, batch.x, new), inputs, atol=1e-5)
    # Exact layers are drawn in float32, and what a solve makes of that grows with the condition of the factor.
    tolerance = 5e-7 * np.linalg.cond(np.asarray(hidden.root))
    assert np.allclose(whitened(model, hidden, batch.x, values), white, rtol=0.0, atol=tolerance)


def test_aca_reaches_the_rank_that_the_eigenvalues_allow(rng):
    x = jnp.asarray(rng.uniform(-2, 2, size=(150, 2)))

    K = np.asarray(RBF(1.5)(x))
    values = np.sort(np.linalg.eigvalsh(K))[::-1]
    needed = next(r for r in range(1, 150) if values[r:].sum() < 1e-6 * values.sum())
    result = pivoted_cholesky(jnp.diagonal(jnp.asarray(K)), lambda i: jnp.asarray(K)[:, i], 2 * needed)
    assert np.linalg.norm(K - result.factor @ result.factor.T) < 1e-6 * np.linalg.norm(K)
    filled = np.asarray(fill_up(jnp.asarray([4, -1, 2, -1], jnp.int32), jnp.asarray([1.0] * 5 + [0.0] * 3)))
    assert set(filled) <= set(range(5))
    assert len(set(filled)) == 4


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_strips_of_a_factor_are_the_whole_product(rng, rows):
    lower, columns = np.tril(rng.normal(size=(rows, rows))), rng.normal(size=(2, rows, 3))
    assert np.allclose(_apply_lower(jnp.asarray(lower), jnp.asarray(columns)), lower @ columns)


@pytest.mark.parametrize(("trace", "shared"), [(False, True), (True, False)])
def test_the_quicker_likelihood_is_the_same(rng, trace, shared):
    model, batch = problem(rng, outputs=2)
    if not shared:
        batch = eqx.tree_at(lambda b: b.observed, batch, batch.observed.at[:3, 0].set(False))
    _, white, _, inputs = particles(model, batch, rng, 3)
    top, inducing = Top("collapsed", shared=shared, trace=trace), jnp.asarray([1, 5, 9, 20], jnp.int32)
    value = eqx.filter_jit(functools.partial(log_likelihood, model, top, batch, held(inputs), inducing, white[:, :0]))
    assert np.allclose(value(raw=jnp.asarray(True)), value(raw=jnp.asarray(False)), atol=1e-7, rtol=0)
    raw, same = eqx.filter_jit(way_and_log_likelihood)(model, top, batch, held(inputs), inducing, white[:, :0])
    assert raw
    assert np.allclose(same, value(raw=raw), atol=1e-7, rtol=0)


def test_the_quicker_likelihood_is_refused_where_rounding_would_show(rng):
    model, batch = problem(rng, noise=2e-6)
    _, white, _, inputs = particles(model, batch, rng, 3)
    near = held(inputs[:, :1] + 1e-4 * (inputs - inputs[:, :1]))  # k(Z, Z) is nearly singular
    inducing = jnp.arange(12, dtype=jnp.int32)
    raw, value = eqx.filter_jit(way_and_log_likelihood)(model, COLLAPSED, batch, near, inducing, white[:, :0])
    assert not raw
    sure = eqx.filter_jit(log_likelihood)(model, COLLAPSED, batch, near, inducing, white[:, :0])
    assert np.allclose(value, sure, atol=1e-6, rtol=1e-9)


def test_a_sketch_has_the_structure_of_the_start(rng, key):
    """What is compiled for it, while the start is found, is what the fit runs."""
    x = rng.uniform(-2.0, 2.0, size=(25, 1))
    model, source = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=6), ArraySource(x, np.sin(x))
    inference = STRIDE(particles=3, candidates=10)
    sketch, start = inference.sketch(model, source), inference.init(model, source, key=key)
    assert jax.tree.structure(sketch) == jax.tree.structure(start)
    for ours, theirs in zip(jax.tree.leaves(sketch), jax.tree.leaves(start), strict=True):
        assert jax.typeof(ours) == jax.typeof(theirs)
    assert STRIDE(shallow_rounds=0).sketch(model, source) is None


# --- the sampler is right ---------------------------------------------------------------------------------------------


@pytest.fixture
def six(rng):
    x = np.linspace(-1.5, 1.5, 6)[:, None]
    y = np.sin(3 * x) + 0.2 * rng.normal(size=(6, 1))
    model = build_model(x, Gaussian(0.1), 1, depth=2, kernel="matern32", recipe=Recipe(inner_variance=0.5))
    source = ArraySource(x, y)
    batch = source._on_device(6)
    hidden = prepare_hidden(model, batch.x, jnp.arange(6), "exact")
    inducing = jnp.asarray([0, 2, 3, 5], jnp.int32)
    return model, batch, hidden, inducing


def phi(six, white):
    model, batch, hidden, inducing = six
    return log_likelihood(model, COLLAPSED, batch, sight(model, hidden, batch.x, white), inducing, white[:, :0])


@eqx.filter_jit
def function_moments(six, white):
    """Conditional mean and second moment of f at the data, given each particle."""
    model, batch, hidden, inducing = six
    inputs = sight(model, hidden, batch.x, white).everywhere()
    top, _ = condition_top(model, COLLAPSED, batch, held(inputs), inducing, white[:, :0])
    kernel = model.layers[-1].kernel
    A = jax.vmap(lambda z, whitening, h: whitening @ kernel(z, h))(top.z, top.whitening, inputs)
    mean = jnp.einsum("smn,smq->sn", A, top.mean)
    spread = jnp.sum((top.roots[:, 0] @ A) ** 2, axis=1) - jnp.sum(A**2, axis=1)
    return mean, mean**2 + kernel.diagonal(batch.x)[None] + spread


@pytest.mark.slow
def test_samplers_agree_with_importance_sampling(six, rng, key):
    """E[f] and E[f^2] at six data points: draws of the prior, weighted, against 1,500 chains of each sampler."""
    evaluate = eqx.filter_jit(lambda w: (phi(six, w), *function_moments(six, w)))
    blocks = [evaluate(jnp.asarray(rng.normal(size=(50_000, 6)))) for _ in range(DRAWS // 50_000)]
    log_weight, *moments = (np.concatenate([np.asarray(block[i]) for block in blocks]) for i in range(3))
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    truth = [weight @ moment for moment in moments]
    errors = [np.sqrt((weight**2) @ (moment - mean) ** 2) for moment, mean in zip(moments, truth, strict=True)]
    start, sizes = jnp.asarray(rng.normal(size=(1500, 6))), {"pcn": 0.6, "slice": 0.5, "mala": 0.5}
    for name, sampler in SAMPLERS.items():

        @eqx.filter_jit
        def run(white, size, sampler=sampler):
            target = functools.partial(phi, six)

            def move(now, i):
                keys = jax.random.split(jax.random.fold_in(key, i), len(white))
                return sampler.move(target, now, jnp.full(len(white), size), keys=keys)[0], None

            return jax.lax.scan(move, sampler.begin(target, white), jnp.arange(60))[0]

        chains = run(start, jnp.asarray(sizes[name]))
        for ours, mean, error in zip(function_moments(six, chains.white), truth, errors, strict=True):
            spread = np.hypot(stats.sem(np.asarray(ours), axis=0), error)
            assert np.all(np.abs(np.mean(ours, axis=0) - mean) < 4.5 * spread), name


@pytest.mark.parametrize("name", SAMPLERS)
def test_geweke(six, rng, key, name):
    """Moving w given y, then drawing y given w, leaves their joint distribution alone: w stays standard normal."""
    model, batch, hidden, inducing = six
    sampler, size = SAMPLERS[name], jnp.asarray(0.5)

    def target_of(y):
        return jax.vmap(lambda w, y: phi((model, eqx.tree_at(lambda b: b.y, batch, y), hidden, inducing), w[None])[0])

    @eqx.filter_jit
    def cycle(white, i):
        key_y, key_w = jax.random.split(jax.random.fold_in(key, i))
        inputs = sight(model, hidden, batch.x, white).everywhere()
        kernel = model.layers[-1].kernel

        def observe(h, key):
            now = sparse_bound(kernel(h[inducing]), kernel(h[inducing], h), kernel.diagonal(h), batch.y, 0.1)
            low, noise = jax.random.normal(key, (4,)), jax.random.normal(jax.random.fold_in(key, 1), (6, 1))
            return (now.V.T @ low)[:, None] + jnp.sqrt(0.1) * noise

        y = jax.vmap(observe)(inputs, jax.random.split(key_y, len(white)))
        target = functools.partial(lambda white, y: target_of(y)(white, y), y=y)
        keys = jax.random.split(key_w, len(white))
        return sampler.move(target, sampler.begin(target, white), jnp.full(len(white), size), keys=keys)[0].white

    white = jnp.asarray(rng.normal(size=(2000, 6)))
    for i in range(12):
        white = cycle(white, jnp.asarray(i))
    draws = np.asarray(white).ravel()
    for column in np.asarray(white).T:
        assert stats.kstest(column, "norm").pvalue > 1e-5
    assert abs(np.mean(draws**2) - 1.0) < 4.5 * stats.sem(draws**2)


# --- fits -------------------------------------------------------------------------------------------------------------

SMALL = {"particles": 6, "rounds": 2, "moves": 20, "exchanges": 2, "candidates": 15, "hyper_steps": 2}


@pytest.fixture(scope="module")
def curve():
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 1, size=(60, 1))
    return x, np.where(x[:, 0] < 0.5, np.sin(9 * x[:, 0]), 2.0) + 0.05 * rng.normal(size=60)


@pytest.mark.parametrize(
    ("settings", "tolerance", "counts"),
    [
        ({"hyper_steps": 2}, 1e-6, {1, 2, 3}),
        ({"hyper_steps": 0, "candidates": 60}, 1e-6, {1, 2, 3, 4}),
        ({"hyper_steps": 2, "hidden": "exact"}, 1e-3, {1, 2, 3}),  # exact hidden layers are drawn in float32
    ],
)
def test_cores_that_share_the_work_change_nothing(curve, key, monkeypatch, settings, tolerance, counts):
    x, y = curve
    source, results, pieces = ArraySource(x, y[:, None]), [], []
    method = STRIDE(**(SMALL | {"rounds": 2, "moves": 6} | settings))
    split = STRIDE.split
    monkeypatch.setattr(STRIDE, "split", lambda *args: pieces.append(split(*args)) or pieces[-1])
    for cores in (1, 2, 4):  # 6 particles: 6, 3 + 3, and 2 + 2 + 2
        monkeypatch.setattr(_loop, "available_cores", lambda cores=cores: cores)
        model = build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=10)
        results.append(fit_model(method, model, source, key=key, verbose=False))
    whole = results[0]
    for parts in results[1:]:
        for name in ("objective", "acceptance", "step_size", "nonfinite", "ok"):
            assert np.allclose(parts.history[name], whole.history[name], rtol=tolerance), name
        assert np.allclose(parts.posterior.top.mean, whole.posterior.top.mean, rtol=100 * tolerance, atol=tolerance)
    assert {len(piece) for piece in pieces} == counts

    def failed(*args, piece=_loop._compiled_piece):
        state, guard, *rest = piece(*args)
        return state, eqx.tree_at(lambda guard: guard.total, guard, guard.total + 1), *rest

    monkeypatch.setattr(_loop, "_compiled_piece", failed)
    again = fit_model(method, model, source, key=key, verbose=False)  # a chunk with a failed step is run undivided
    assert np.array_equal(again.history["objective"], whole.history["objective"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings", "depth"),
    [
        ("composition", {}, 2),
        ("injective", {"hidden": "sparse", "sampler": "slice"}, 3),
    ],
)
def test_every_road_fits_and_answers(curve, architecture, settings, depth, tmp_path):
    x, y = curve
    method = STRIDE(**(SMALL | settings))
    model = DeepGPRegressor(method, depth=depth, num_inducing=12, architecture=architecture, random_state=1).fit(x, y)
    assert np.all(model.history_["ok"])
    mean, std = model.predict(x, return_std=True)
    assert np.mean((mean - y) ** 2) < 0.2 * np.var(y)
    assert np.all(std > 0)
    parts = np.concatenate([model.predict(x[i : i + 20]) for i in range(0, 60, 20)])
    assert np.allclose(parts, mean, atol=1e-8)
    assert model.predict(x[:5], return_cov=True)[1].shape == (5, 5)
    assert model.sample_y(x[:5], 8).shape == (5, 8)
    model.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict(x), mean)
    assert model.posterior_.trace.log_likelihood.shape[0] == 6


@pytest.mark.slow
def test_several_outputs_missing_values_repeated_rows_and_the_papers_prior(rng):
    x = np.repeat(rng.uniform(-2, 2, size=(20, 2)), 2, axis=0)
    y = np.stack([np.sin(2 * x[:, 0]), x[:, 1]], axis=1) + 0.05 * rng.normal(size=(40, 2))
    y[3, 0] = np.nan
    method = STRIDE(**(SMALL | {"hyper_steps": 0}))
    model = DeepGPRegressor(method, num_inducing=100, missing="mask", recipe="latz2025", random_state=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y)
    assert any("num_inducing is 100 but there are 40 rows: 40 are used" in str(w.message) for w in caught)
    predicted = model.predict(x)
    assert predicted.shape == (40, 2)
    assert np.nanmean((predicted - y) ** 2) < 0.3


@pytest.mark.slow
def test_the_exact_evidence_is_that_of_all_rows_as_inducing_points(rng):
    model, batch = problem(rng, rows=16, architecture="convolution")
    _, white, _, inputs = particles(model, batch, rng, 3)
    every = jnp.arange(16)
    standard, collapsed = Top("standard", True), COLLAPSED
    exact = log_likelihood(model, standard, batch, held(inputs), every, white[:, :0])
    assert np.allclose(exact, log_likelihood(model, collapsed, batch, held(inputs), every, white[:, :0]), atol=1e-3)
    for h, value in zip(inputs, exact, strict=True):
        K = np.asarray(model.layers[-1].kernel(h)) + 0.1 * np.eye(16)
        assert float(value) == pytest.approx(
            stats.multivariate_normal(cov=K).logpdf(np.asarray(batch.y)[:, 0]), abs=1e-8
        )
    one, two = (condition_top(model, top, batch, held(inputs), every, white[:, :0])[0] for top in (standard, collapsed))
    new = jnp.asarray(rng.normal(size=(5, 2)))
    for i in range(3):
        a, b = (
            moments(model.layers[-1], Conditional(t.z[i], t.mean[i], t.whitening[i], t.roots[i]), new)
            for t in (one, two)
        )
        assert np.allclose(a[0], b[0], atol=1e-3)
        assert np.allclose(a[1], b[1], atol=1e-3)


def test_a_classifier_learns_its_hyperparameters(rng):
    """It kept the recipe's, and was worse than a guess where these do not suit."""
    x = rng.uniform(-2.0, 2.0, size=(60, 2))
    y = np.where(np.sin(2.5 * x[:, 0]) > 0.0, "up", "down")
    method = STRIDE(particles=4, rounds=3, moves=40, candidates=20, exchanges=2)
    model = DeepGPClassifier(method, num_inducing=15, random_state=0, verbose=False).fit(x, y)
    grid = rng.uniform(-2.0, 2.0, size=(200, 2))
    assert np.mean(model.predict(grid) == np.where(np.sin(2.5 * grid[:, 0]) > 0.0, "up", "down")) > 0.8
    lengthscale = np.asarray(model.model_.layers[-1].kernel.lengthscale.value)
    assert lengthscale[1] > 2.0 * lengthscale[0]
    assert np.sum(model.history_["gain"]) > 0.0
    assert np.sum(model.history_["phase"] == 1) == 10


def test_gaussian_noise_keeps_its_hyperparameters_in_the_m_step(curve):
    x, y = curve
    method = STRIDE(**(SMALL | {"hyper_steps": "auto"}))
    model = DeepGPRegressor(method, num_inducing=10, random_state=0, verbose=False).fit(x, y)
    assert np.sum(model.history_["phase"] == 1) == SMALL["exchanges"]


@pytest.mark.slow
def test_other_likelihoods_sample_the_last_layer_too(rng, key):
    likelihood, targets = Poisson(), lambda x: np.round(np.exp(x[:, :1]))
    x = rng.uniform(-2.0, 2.0, size=(40, 2))
    model = build_model(x, likelihood, 1, depth=2, num_inducing=8)
    method = STRIDE(**(SMALL | {"moves": 60, "rounds": 3}))
    result = fit_model(method, model, ArraySource(x, targets(x)), key=key, verbose=False)
    assert np.all(result.history["ok"])
    y = targets(x)
    density = result.posterior.predict_y(jnp.asarray(x), key=key).log_density(y)
    # They begin at the mean of the variational start, where the likelihood is higher than at draws of the posterior.
    assert np.mean(density) > np.mean(stats.poisson(np.mean(y)).logpmf(y)) + 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"particles": 0}, "particles must be at least 1, but it is 0"),
        ({"exchanges": -1}, "exchanges must be at least 0"),
        ({"hidden": "dense"}, "hidden='dense' is unknown: choose one of 'exact', 'aca', 'sparse'"),
        ({"sampler": "nuts"}, "sampler='nuts' is unknown"),
        ({"step_size": 1.5}, "step_size must lie between 0 and 1"),
        ({"hyper_steps": -1}, "hyper_steps must be 'auto' or at least 0, but it is -1"),
        ({"start_rows": 0}, "start_rows must be 'auto' or a whole number of at least 1, but it is 0"),
        ({"standard": True, "hidden": "sparse"}, "no inducing points to sample hidden layers at"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(SettingError, match=message):
        STRIDE(**settings)


def test_the_rows_of_the_start_are_a_setting_and_are_told(curve, key):
    x, y = curve
    source, model = ArraySource(x, y[:, None]), build_model(x, Gaussian(0.1), 1, depth=2, num_inducing=10)
    for rows, used in ((20, 20), (5, 10)):
        method = STRIDE(start_rows=rows)
        expected = (
            f"Hyperparameters start from sparse GP regression on {used} of the 60 rows: start_rows sets how many."
        )
        assert method.remarks(model, source, method.plan(60, None)) == (expected,)
    assert STRIDE().remarks(model, source, ()) == ()
    few = STRIDE(start_rows=20).init(model, source, key=key)
    everything = STRIDE(start_rows=60).init(model, source, key=key)
    assert float(few.model.likelihood.variance.value) != float(everything.model.likelihood.variance.value)


def test_requests_that_make_no_sense(curve, rng):
    x, y = curve
    with pytest.raises(SettingError, match="samples hidden layers, but depth is 1"):
        DeepGPRegressor("stride", depth=1, num_inducing=5).fit(x, y)
    with pytest.raises(SettingError, match="warps one input by a monotone map, but there are 2"):
        DeepGPRegressor("stride", architecture="injective", num_inducing=5).fit(np.repeat(x, 2, axis=1), y)
    with pytest.raises(SettingError, match="method='exact' has no architecture 'injective': use method='stride'"):
        DeepGPRegressor("exact", architecture="injective").fit(x, y)
    phases = STRIDE(rounds=4).plan(10, 8)
    assert [phase.name for phase in phases] == ["E", "M", "E", "M", "E", "M", "E"]
    assert sum(phase.steps for phase in phases if phase.name == "E") == 8
