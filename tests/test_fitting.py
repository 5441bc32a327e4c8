import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
from fathomgp.errors import FitWarning, ModelFileError, NonFiniteError, SettingError
from fathomgp.fitting import Checkpointing, EarlyStopping, _loop, fit_model
from fathomgp.fitting._guard import new_guard
from fathomgp.inference._base import slot_of


def run(key, inference=None, **settings):
    inference = toy.Walk() if inference is None else inference
    return fit_model(inference, toy.tiny_model(), toy.tiny_source(), key=key, verbose=False, **settings)


def position(result):
    return np.asarray(result.posterior.state.position)


def test_history_has_an_entry_a_step(key):
    result = run(key)
    assert result.history["step"].tolist() == list(range(80))
    assert result.history["phase"].tolist() == [0] * 40 + [1] * 40
    assert np.all(result.history["rows"] == 4.0)
    assert result.messages == ()


@pytest.mark.parametrize(("steps", "slots"), [(10, 3), (12, 4), (3, 7), (1, 1), (1000, 200)])
def test_every_slot_has_its_share_of_the_steps(steps, slots):
    found = [int(slot_of(jnp.asarray(step, jnp.int32), steps, slots)) for step in range(steps + 1)]
    assert found[0] == 0
    assert found[-1] == min(steps, slots)
    shares = np.bincount(found[:-1])
    assert shares.max() - shares.min() <= 1
    assert sorted(found) == found


def test_slots_are_found_where_their_product_with_steps_leaves_32_bits():
    step = jnp.asarray(29_999, jnp.int32)
    assert int(slot_of(step, 30_000, 100_000)) == 29_999
    assert int(slot_of(step * 70_000, 30_000 * 70_000, 100_000)) == 99_996


@pytest.mark.parametrize("phases", [1, 2])
def test_more_steps_than_can_be_counted_are_refused(key, phases):
    with pytest.raises(SettingError, match=r"would take 2,147,483,648 steps .* choose 2,147,483,647 at the most"):
        run(key, toy.Walk(phases=phases), max_iter=2**31 // phases)


def test_the_last_steps_that_can_be_counted_are_taken(key):
    """A chunk whose steps have the largest numbers there are."""
    inference, source, key = toy.Walk(phases=1), toy.tiny_source(), jax.random.key(0)
    model = toy.tiny_model()
    phase = inference.plan(10, None)[0]
    state = inference.init(model, source, key=key)
    first = _loop._MOST_STEPS - 2
    feed = source.feed(start=first, count=2, capacity=4, batch_size=4)
    *_, ran, _ = _loop.run_chunk(inference, phase, state, new_guard(), feed, first, 2, key, 4)
    assert int(ran) == 2


def test_messages_begin_with_what_was_left_to_the_algorithm(key):
    class Chatty(toy.Walk):
        def remarks(self, model, data, plan):
            return (f"{data.num_data} rows, {len(plan)} phases.",)

    assert run(key, Chatty(phases=1)).messages == ("10 rows, 1 phases.",)


def test_max_iter_is_the_number_of_steps(key):
    assert len(run(key, toy.Walk(phases=1), max_iter=7).history["step"]) == 7


@pytest.mark.parametrize("seconds", [1e-9, 10.0])
def test_chunks_change_nothing(key, monkeypatch, seconds):
    expected = run(key)
    monkeypatch.setattr(_loop, "_CHUNK_SECONDS", seconds)
    result = run(key)
    assert np.array_equal(position(expected), position(result))
    assert np.array_equal(expected.history["objective"], result.history["objective"])


def test_equal_phases_compile_once(key):
    toy.TRACES.clear()
    run(key, toy.Walk(done_at=10**5))
    first = len(toy.TRACES)
    run(key, toy.Walk(done_at=10**5), max_iter=33)
    assert first <= 2  # once for the shapes of Info, once for the loop
    assert len(toy.TRACES) == first


def test_later_phases_are_compiled_while_the_first_runs_and_change_nothing(key, monkeypatch):
    toy.TRACES.clear()
    ahead = run(key, toy.Walk(done_at=10**5 + 1, last="rest"))
    assert {name: toy.TRACES.count(name) for name in ("walk", "rest")} == {"walk": 2, "rest": 2}
    monkeypatch.setattr(_loop._Run, "_compile_in_thread", lambda *_: None)
    alone = run(key, toy.Walk(done_at=10**5 + 2, last="rest"))
    assert np.array_equal(position(ahead), position(alone))


def test_batch_as_large_as_the_data_is_all_rows(key):
    result = run(key, toy.Walk(batch_size=None, phases=1))
    assert np.all(result.history["rows"] == 10.0)


def test_done_ends_the_phase(key):
    assert len(run(key, toy.Walk(done_at=5, phases=1)).history["step"]) == 5


def test_failed_steps_are_undone_counted_and_recovered_from(key):
    with pytest.warns(FitWarning, match=r"5 of \d+ steps were not finite"):
        result = run(key, toy.Walk(bad=(10,), phases=1))
    assert np.all(np.isfinite(position(result)))
    assert int(result.posterior.state.careful) == 1
    assert np.sum(~result.history["ok"]) == 5


def test_a_run_that_never_works_is_an_error(key):
    with pytest.raises(NonFiniteError, match=r"None of the first 25 steps"):
        run(key, toy.Walk(bad=tuple(range(60)), phases=1))


def test_a_run_that_stops_working_ends_with_a_sentence(key):
    with pytest.warns(FitWarning) as caught:
        result = run(key, toy.Walk(bad=tuple(range(20, 90)), phases=2))
    assert any("the result is the last good state" in str(w.message) for w in caught)
    assert len(result.history["step"]) < 80


def test_a_callback_cannot_kill_a_run(key):
    def broken(event):
        raise RuntimeError("no disk")

    with pytest.warns(FitWarning, match="A callback raised RuntimeError: no disk"):
        result = run(key, callbacks=[broken])
    assert len(result.history["step"]) == 80


def test_callbacks_see_the_run(key):
    events = []
    run(key, callbacks=[events.append])
    assert events[-1]["phase"] == "walk"
    assert events[-1]["step"] == events[-1]["steps"] == 40
    assert events[-1]["seconds"] > 0


def test_interrupt_keeps_what_was_learned(key):
    def interrupt(event):
        if event["step"] >= 3:
            raise KeyboardInterrupt

    with pytest.warns(FitWarning, match="Stopped by the user after"):
        result = run(key, callbacks=[interrupt])
    assert 3 <= len(result.history["step"]) < 80
    assert np.all(np.isfinite(position(result)))


def test_early_stopping_ends_a_flat_phase(rng):
    rule = EarlyStopping(window=50, patience=2, tolerance=1e-2)
    falling = np.linspace(10.0, 0.0, 1000)
    flat = np.concatenate([falling, 0.01 * rng.normal(size=400)])
    assert not rule.stops(falling)
    assert rule.stops(flat)


def test_early_stopping_leaves_failed_steps_out(rng):
    flat = 0.01 * rng.normal(size=1000)
    flat[::97] = np.nan
    assert EarlyStopping(window=50, patience=2, tolerance=1e-2).stops(flat)


def test_every_row_once_an_epoch_and_the_same_batches_from_anywhere():
    source = toy.tiny_source(10)
    whole = np.asarray(source.feed(start=0, count=10, capacity=12, batch_size=3, seed=5).rows)
    assert np.array_equal(np.sort(whole[:10].ravel()), np.repeat(np.arange(10), 3))
    assert np.array_equal(np.sort(whole.ravel()[:10]), np.arange(10))
    later = np.asarray(source.feed(start=4, count=3, capacity=3, batch_size=3, seed=5).rows)
    assert np.array_equal(later, whole[4:7])
    pairs = source.feed(start=0, count=2, capacity=2, batch_size=3, batches_per_step=2, ordered=True)
    assert np.asarray(pairs.rows).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 0, 1]]]


def test_early_stopping_looks_at_fixed_steps(key, monkeypatch):
    rule = EarlyStopping(window=10, patience=1, tolerance=10.0)
    lengths = set()
    for seconds in (1e-9, 10.0):
        monkeypatch.setattr(_loop, "_CHUNK_SECONDS", seconds)
        lengths.add(len(run(key, toy.Walk(phases=1), max_iter=200, early_stopping=rule).history["step"]))
    assert lengths == {30}


def test_a_checkpoint_of_another_run_is_refused(key, tmp_path):
    settings = Checkpointing(tmp_path, every_seconds=None, every_steps=5)
    run(key, checkpointing=settings)
    with pytest.raises(ModelFileError, match="belongs to another run: its key is"):
        run(jax.random.fold_in(key, 1), checkpointing=settings)
    with pytest.raises(ModelFileError, match="its max_iter is None, here it is 20"):
        run(key, max_iter=20, checkpointing=settings)
    with pytest.raises(ModelFileError, match="its early_stopping is None"):
        run(key, early_stopping=EarlyStopping(), checkpointing=settings)


CHILD = textwrap.dedent(
    """
    import os, signal, sys
    import jax
    jax.config.update("jax_enable_x64", True)
    import numpy as np, toy
    from fathomgp.fitting import Checkpointing, fit_model
    directory, kill_at, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    seen = [0]
    def kill(event):
        seen[0] += 1
        if seen[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    settings = Checkpointing(directory, every_seconds=None, every_steps=3)
    result = fit_model(toy.Walk(), toy.tiny_model(), toy.tiny_source(), key=jax.random.key(7),
                       checkpointing=settings, callbacks=[kill], verbose=False)
    np.savez(out, position=np.asarray(result.posterior.state.position), objective=result.history["objective"])
    """
)


def child(directory: pathlib.Path, kill_at: int, out: pathlib.Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    command = [sys.executable, "-c", CHILD, str(directory), str(kill_at), str(out)]
    return subprocess.run(command, env=environment, check=False, timeout=300).returncode


def test_killed_and_resumed_equals_undisturbed_bit_for_bit(tmp_path, rng):
    assert child(tmp_path / "calm", 0, tmp_path / "calm.npz") == 0
    for number, kill_at in enumerate(rng.choice(np.arange(1, 27), 5, replace=False)):
        directory, out = tmp_path / f"killed{number}", tmp_path / f"killed{number}.npz"
        assert child(directory, int(kill_at), out) == -signal.SIGKILL
        assert child(directory, 0, out) == 0
        with np.load(tmp_path / "calm.npz") as calm, np.load(out) as resumed:
            assert np.array_equal(calm["position"], resumed["position"])
            assert np.array_equal(calm["objective"], resumed["objective"])
