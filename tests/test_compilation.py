"""The store of programs: bounded, one compilation per key, alive while it runs; and the ladder of shapes."""

import gc
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.compilation import ProgramStore, count_compilations, memory_maps, padded_length, power_of_two, program
from fathomgp.errors import SettingError


@pytest.fixture
def store(monkeypatch):
    """A store of its own for a test, so that what other tests left does not matter."""
    fresh = ProgramStore(most=4)
    monkeypatch.setattr("fathomgp.compilation._program.programs", fresh)
    return fresh


@program
def _square(x, times=1):
    return {"square": x**2 * times, "times": times, "name": "squared"}


def test_equal_shapes_compile_once_and_other_values_do_not_count(store):
    first = _square(np.arange(3.0))
    assert first["name"] == "squared"
    assert first["times"] == 1
    with count_compilations() as count:
        np.testing.assert_array_equal(_square(np.full(3, 2.0))["square"], 4.0)
        np.testing.assert_array_equal(_square(jnp.asarray(np.full(3, 3.0)))["square"], 9.0)
    assert len(store) == 1
    assert count.programs == 0


def test_shapes_dtypes_numbers_and_the_float64_scope_are_programs_of_their_own(store):
    store.limit(most=10)
    _square(np.arange(3.0))
    _square(np.arange(4.0))
    _square(np.arange(3))
    _square(np.arange(3.0), 2)
    _square(np.arange(3.0), 2.0)  # 2 == 2.0, yet they promote differently
    with jax.enable_x64(False):
        assert _square(np.arange(3.0, dtype=np.float32))["square"].dtype == np.float32
    assert len(store) == 6


def test_within_a_traced_function_it_is_a_part_of_that(store):
    traced = jax.jit(jax.vmap(lambda x: _square(x)["square"]))(jnp.ones((2, 3)))
    np.testing.assert_array_equal(traced, 1.0)
    assert float(jax.grad(lambda x: _square(x)["square"])(jnp.asarray(3.0))) == 6.0
    assert len(store) == 0


def test_methods_and_modules_as_arguments(store):
    class Box(eqx.Module):
        side: jax.Array

        @program
        def area(self, factor):
            return self.side**2 * factor

    assert float(Box(jnp.asarray(3.0)).area(jnp.asarray(2.0))) == 18.0
    assert float(Box(jnp.asarray(2.0)).area(jnp.asarray(2.0))) == 8.0
    assert len(store) == 1


def test_the_least_recently_used_are_given_back(store):
    for n in (1, 2, 3, 4):
        _square(np.ones(n))
    _square(np.ones(1))  # used again: 2 is now the oldest
    _square(np.ones(5))
    with count_compilations() as count:
        _square(np.ones(1))
        _square(np.ones(5))
        assert count.programs == 0
        _square(np.ones(2))
        assert count.programs == 1


@pytest.mark.skipif(memory_maps() is None, reason="this system does not tell its memory maps")
def test_programs_that_are_given_back_free_their_memory_maps(store):
    store.limit(most=1000)

    @program
    def factor(x):
        return jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x), dtype=x.dtype))

    factor(np.ones((1, 1)))
    gc.collect()
    before = memory_maps()
    for n in range(2, 42):
        factor(np.ones((n, n)))
    grown = memory_maps()
    assert grown - before >= 80
    store.clear()
    assert memory_maps() - before <= 0.3 * (grown - before)


@pytest.mark.skipif(memory_maps() is None, reason="this system does not tell its memory maps")
def test_half_the_store_goes_when_maps_run_short(store):
    store.limit(most=1000, most_maps=1)
    for n in range(1, 9):
        _square(np.ones(n))
    assert len(store) <= 2


def test_threads_compile_a_key_once(store):
    started, compiled = threading.Barrier(6), []

    def compile_program():
        compiled.append(1)
        return "program"

    def ask():
        started.wait()
        assert store.get("key", compile_program) == "program"

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def test_a_program_that_cannot_be_compiled_is_tried_again(store):
    def broken():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.get("key", broken)
    assert store.get("key", lambda: 3) == 3


def test_bad_bounds_are_refused(store):
    with pytest.raises(SettingError, match="most must be a whole number of at least 1, but it is 0"):
        store.limit(most=0)


@pytest.mark.parametrize("count", [*range(1, 40), 255, 256, 257, 1000, 4097, 100_001])
def test_the_ladder_wastes_little(count):
    length = padded_length(count)
    assert count <= length
    assert padded_length(length) == length
    assert length < 2 * count if count <= 256 else length <= 1.125 * count
    assert power_of_two(count) >= length


def test_the_ladder_has_few_rungs():
    assert len({padded_length(n) for n in range(1, 501)}) == 9 + 8
