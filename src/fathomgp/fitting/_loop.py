"""The one loop that all algorithms share.

Steps run in compiled chunks: a chunk's number of steps is an argument, not part of its shape, so each phase compiles
once, and where chunks begin and end changes nothing that is computed. Step t uses ``fold_in(key, t)`` and the source's
batch t, so a run resumed from a checkpoint equals an uninterrupted one bit for bit.
"""

import contextlib
import dataclasses
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fathomgp._version import __version__
from fathomgp.compilation import ONE_CORE, program
from fathomgp.data import AbstractFeed, AbstractSource, ArraySource
from fathomgp.data._exchange import exchange_arrays
from fathomgp.errors import FitWarning, LostProcessError, ModelFileError, NonFiniteError, SettingError, WriteError
from fathomgp.fitting._checkpoint import Checkpointer, Checkpointing, Position, restore_state
from fathomgp.fitting._devices import ManyDevices, OneDevice, agree, available_cores, choose_placement, keep_everywhere
from fathomgp.fitting._guard import STOP_AFTER, Guard, guarded, new_guard
from fathomgp.fitting._progress import Callback, Reporter
from fathomgp.fitting._stopping import EarlyStopping
from fathomgp.inference import AbstractInference, AbstractInfo, AbstractPosterior, Phase
from fathomgp.likelihoods import refuse_sizes
from fathomgp.model import DeepGP
from fathomgp.notices import collect, in_this_context, tell
from fathomgp.precision import default_float, refuse_forked

#: A chunk should take about this long: short enough for a lively progress bar, long enough to hide Python.
_CHUNK_SECONDS = 0.25
_MAX_CHUNK = 256
#: Steps are counted in 32 bits on the device: in chunks, in states, and in keys.
_MOST_STEPS = 2**31 - 1
#: How XLA's errors begin.
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION)\b")
#: Processes must agree on the length of a chunk without asking the clock.
_SHARED_CHUNK = 16


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a fit returns.

    Attributes:
        posterior: what was learned.
        history: one array a figure, one entry a step: step, phase, objective, ok, jitter, and the algorithm's own.
        messages: sentences about anything unusual, and about what settings left to the algorithm came to.
        seconds: wall-clock time, compilation included.
    """

    posterior: AbstractPosterior
    history: dict[str, np.ndarray]
    messages: tuple[str, ...]
    seconds: float


def fit_model(
    inference: AbstractInference,
    model: DeepGP,
    source: AbstractSource,
    *,
    key: PRNGKeyArray,
    max_iter: int | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpointing: Checkpointing | None = None,
    callbacks: Sequence[Callback] = (),
    verbose: bool | None = None,
) -> FitResult:
    """Fit ``model`` to ``source`` with ``inference``.

    Args:
        inference: the algorithm.
        model: the start, usually from :func:`fathomgp.model.build_model`.
        source: the data.
        key: decides all randomness of the fit.
        max_iter: so many steps a phase unless the algorithm is done earlier; ``None`` leaves it to the algorithm.
        early_stopping: ends a phase whose objective stands still.
        checkpointing: where and how often to save; a checkpoint of the same run found there is resumed.
        callbacks: called after every chunk; one that raises is dropped with a warning.
        verbose: progress bar: yes, no, or (``None``) on a terminal only.
    """
    refuse_sizes(model.likelihood, source.num_outputs)
    if not inference.separates and any(layer.separate for layer in model.layers):
        raise SettingError(
            f"{type(inference).__name__} cannot work with outputs that have kernels of their own: "
            "build the model with a recipe whose separate is False."
        )
    reporter = Reporter(callbacks, verbose) if jax.process_index() == 0 else Reporter((), False)
    refuse_forked()
    with _one_blas_thread():
        return _Run(inference, model, source, key, max_iter, early_stopping, checkpointing, reporter).finish()


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Keep LAPACK's threads from fighting with XLA's for the same cores: Cholesky steps run two to three times faster.

    The limit holds for the time of a fit and is then taken back.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


class _Run:
    """The bookkeeping of one fit, on the host."""

    def __init__(self, inference, model, source, key, max_iter, early_stopping, checkpointing, reporter):
        self.inference, self.source = inference, source
        self.early_stopping, self.reporter = early_stopping, reporter
        self.plan: tuple[Phase, ...] = inference.plan(source.num_data, max_iter)
        _check_length(self.plan)
        self.init_key, self.enter_key, self.step_key, seed_key = jax.random.split(key, 4)
        self.seed = int(jax.random.bits(seed_key, dtype=np.uint32))
        self.began = time.monotonic()
        self.position, self.guard = Position(), new_guard()
        self.history: dict[str, list[np.ndarray]] = {}
        self.messages: list[str] = list(inference.remarks(model, source, self.plan))
        self.placement: OneDevice | ManyDevices = OneDevice()
        self.later: threading.Thread | None = None
        ahead = self._compile_ahead(model)
        self.state = agree(inference.init(model, source, key=self.init_key))
        if ahead is not None:
            ahead.join()
        self.checkpointer = None
        if checkpointing is not None:
            self.checkpointer = Checkpointer(checkpointing, self._identity(model, jax.random.key_data(key), max_iter))
        self.resumed = self._resume()

    def finish(self) -> FitResult:
        """Run what is left of the plan. Ctrl-C ends it with what was learned so far."""
        try:
            while self.position.phase < len(self.plan):
                self._run_phase(self.plan[self.position.phase])
                self.position.phase += 1
                self.position.step = 0
        except KeyboardInterrupt:
            self._say(f"Stopped by the user after {self.position.total} steps; the result is what was learned so far.")
        finally:
            self.reporter.close()
        if int(self.guard.total) > 0:
            self._say(f"{int(self.guard.total)} of {self.position.total} steps were not finite; they were undone.")
        posterior = self.inference.posterior(self.placement.collect(self.state), self.source)
        for sentence in posterior.doubts():
            self._say(sentence)
        history = {name: np.concatenate(parts) for name, parts in self.history.items()}
        return FitResult(posterior, history, tuple(self.messages), time.monotonic() - self.began)

    def _run_phase(self, phase: Phase) -> None:
        if not self.resumed:
            self.state = self._enter(self.position.phase)
        self.resumed = False
        self._compile_or_await_later_phases()
        self.placement = self._placement(phase)
        self.state, self.guard, self.step_key = self.placement.spread((self.state, self.guard, self.step_key))
        kind, capacity = self._static_parts(phase)
        self._compile(kind, capacity)
        shared = jax.process_count() > 1
        pace, done = _SHARED_CHUNK if shared else 1, False
        longest = 1 if phase.joined and self._num_pieces(phase) > 1 else capacity
        while self.position.step < phase.steps and not done:
            count = min(pace, longest, phase.steps - self.position.step, self._steps_to_boundary())
            began = time.monotonic()
            done, ran = self._run_chunk(kind, count, capacity)
            seconds = time.monotonic() - began
            if not shared:
                pace = int(np.clip(_CHUNK_SECONDS * ran / max(seconds, 1e-6), max(1, pace // 2), 2 * pace + 1))
            self._report(phase)
            done = self._check_guard() or done or self._stops_early(phase)
            if self.checkpointer is not None and self.checkpointer.due(self.position.total) and not done:
                self._write_checkpoint()
        self.state, self.guard, self.step_key = self.placement.collect((self.state, self.guard, self.step_key))
        self.placement = OneDevice()

    def _placement(self, phase: Phase) -> OneDevice | ManyDevices:
        return choose_placement(None if phase.batch_size is None else min(phase.batch_size, self.source.num_data))

    def _static_parts(self, phase: Phase) -> tuple[Phase, int]:
        """What a chunk is compiled for: the phase without its numbers of steps, and how many steps it has room for.

        Phases of one name then share a compilation.
        """
        width = phase.batches_per_step * min(phase.batch_size or 1, self.source.num_data)
        return dataclasses.replace(phase, steps=0, begins=0, stretch=None), max(
            1, min(_MAX_CHUNK, self.source.max_chunk_rows // width)
        )

    def _feed(self, phase: Phase, count: int, capacity: int) -> AbstractFeed:
        return self.source.feed(
            start=self.position.step,
            count=count,
            capacity=capacity,
            batch_size=phase.batch_size,
            batches_per_step=phase.batches_per_step,
            ordered=phase.ordered,
            seed=self.seed + self.position.phase,
        ).placed(self.placement)

    def _compile_ahead(self, model: DeepGP) -> threading.Thread | None:
        """Compile the first phase's steps in a thread: a start takes as long to compile, and XLA has cores to spare."""
        return self._compile_in_thread(lambda: self.inference.sketch(model, self.source), self.plan[:1])

    def _compile_or_await_later_phases(self) -> None:
        """Compile the steps of the phases to come in a thread while those of the first run."""
        if self.position.phase == 0:
            state, first = self.state, self.plan[0].name
            later = {phase.name: phase for phase in self.plan if phase.name != first}
            self.later = self._compile_in_thread(lambda: state, tuple(later.values()))
        elif self.later is not None:
            self.later.join()

    def _compile_in_thread(self, start: Callable[[], Any], phases: Sequence[Phase]) -> threading.Thread | None:
        """Compile the steps of phases that follow one another, from a state that ``start`` gives, if it does."""
        double, guard, key = default_float() == np.float64, self.guard, self.step_key
        one_device = all(isinstance(self._placement(phase), OneDevice) for phase in phases)
        if not (phases and one_device and isinstance(self.source, ArraySource)):
            return None
        kinds = [self._static_parts(phase) for phase in phases]
        feeds = [self._feed(kind, 1, capacity) for kind, capacity in kinds]

        def compile_steps() -> None:
            # Whatever goes wrong here will go wrong again where it can be reported.
            with jax.enable_x64(double), contextlib.suppress(Exception), collect():
                state = start()
                for phase, (kind, capacity), feed in zip(phases, kinds, feeds, strict=True):
                    if state is None:
                        return
                    # Programs are compiled with clones of keys: what they compute here is thrown away.
                    state = self.inference.enter(phase, state, self.source, key=jax.random.clone(self.enter_key))
                    run_chunk(self.inference, kind, state, guard, feed, 0, 0, jax.random.clone(key), capacity)

        thread = threading.Thread(target=compile_steps)
        thread.start()
        return thread

    def _compile(self, phase: Phase, capacity: int) -> None:
        """Compile before several threads ask for it, each of which would."""
        if isinstance(self.placement, OneDevice) and self._num_pieces(phase) > 1:
            feed = self._feed(phase, 1, capacity)
            run_chunk(self.inference, phase, self.state, self.guard, feed, 0, 0, self.step_key, capacity)

    def _num_pieces(self, phase: Phase) -> int:
        return len(self.inference.split(phase, self.state, available_cores()))

    def _run_chunk(self, phase: Phase, count: int, capacity: int) -> tuple[bool, int]:
        feed = self._feed(phase, count, capacity)
        with _lost_processes_named(self.position.total):
            state, guard, infos, steps, done = run_chunk(
                self.inference,
                phase,
                self.state,
                self.guard,
                feed,
                self.position.total,
                count,
                self.step_key,
                capacity,
                self.placement.replicated,
            )
            ran = int(steps)
        self._record(phase, infos, ran)
        self.state, self.guard = state, guard
        self.position.step += ran
        self.position.total += ran
        return bool(done), ran

    def _record(self, phase: Phase, infos: AbstractInfo, ran: int) -> None:
        first = self.position.total
        figures = {"step": np.arange(first, first + ran), "phase": np.full(ran, self.position.phase)}
        for field in dataclasses.fields(infos):
            figures[field.name] = np.asarray(getattr(infos, field.name))[:ran]
        for name, values in figures.items():
            self.history.setdefault(name, []).append(values)

    def _report(self, phase: Phase) -> None:
        self.reporter.update(
            {
                "phase": phase.name,
                "step": self.position.step,
                "steps": phase.steps,
                "total": self.position.total,
                "objective": float(self.history["objective"][-1][-1]),
                "seconds": time.monotonic() - self.began,
                "posterior": lambda: self.inference.posterior(self.state, self.source),
            }
        )

    def _check_guard(self) -> bool:
        """Whether too many steps failed in a row: an error when nothing was learned, else the end with a sentence."""
        if not bool(self.guard.stops):
            return False
        if int(self.guard.total) >= self.position.total:
            raise NonFiniteError(
                f"None of the first {STOP_AFTER} steps gave finite numbers: look for extreme values in the data, or "
                "try precision='double', fewer inducing points, or another kernel."
            )
        self._say(
            f"The fit stopped after {self.position.total} steps because the last {STOP_AFTER} gave non-finite numbers; "
            "the result is the last good state."
        )
        self.position.phase = len(self.plan)
        return True

    def _stops_early(self, phase: Phase) -> bool:
        rule = self.early_stopping
        if rule is None or self.position.step % rule.window or self.position.phase >= len(self.plan):
            return False
        return rule.stops(np.concatenate(self.history["objective"])[-self.position.step :])

    def _steps_to_boundary(self) -> int:
        """Steps until the next fixed point in the run: where early stopping looks, or a checkpoint by steps is due."""
        ends = [_MAX_CHUNK]
        if self.early_stopping is not None:
            ends.append(self.early_stopping.window - self.position.step % self.early_stopping.window)
        due = None if self.checkpointer is None else self.checkpointer.steps_until_due(self.position.total)
        return min(ends if due is None else [*ends, due])

    def _enter(self, number: int) -> Any:
        key = jax.random.fold_in(self.enter_key, number)
        return self.inference.enter(self.plan[number], self.state, self.source, key=key)

    def _say(self, message: str) -> None:
        self.messages.append(message)
        tell(message, FitWarning, stacklevel=5)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _identity(self, model: DeepGP, key_words: Array, max_iter: int | None) -> dict[str, str]:
        return {
            "algorithm": repr(self.inference),
            "model": _fingerprint(model),
            "early_stopping": repr(self.early_stopping),
            "data": self.source.fingerprint(),
            "key": str(np.asarray(key_words).tolist()),
            "max_iter": str(max_iter),
            "devices": f"{jax.device_count()} x {jax.devices()[0].platform}",
            "version": __version__,
        }

    def _write_checkpoint(self) -> None:
        assert self.checkpointer is not None
        history = {name: np.concatenate(parts) for name, parts in self.history.items()}
        try:
            self.checkpointer.write(self.position, self.state, self.guard, history)
        except WriteError as error:
            sentence = f"The fit goes on, but a checkpoint was lost: {error}"
            if sentence not in self.messages:
                self._say(sentence)

    def _resume(self) -> bool:
        content = None if self.checkpointer is None else self.checkpointer.read()
        _check_same_start(-1 if content is None else content["position"]["total"])
        if content is None:
            return False
        self.position = Position(**content["position"])
        if self.position.phase >= len(self.plan) or self.position.step > self.plan[self.position.phase].steps:
            raise ModelFileError("The checkpoint stands beyond the end of this run: remove it to start afresh.")
        self.state = restore_state(self._enter(self.position.phase), content["state"])
        self.state = agree(self.state)
        in_a_row, total = content["guard"]
        self.guard = Guard(jnp.asarray(in_a_row, jnp.int32), jnp.asarray(total, jnp.int32))
        self.history = {name: [values] for name, values in content["history"].items()}
        return True


def _check_length(plan: Sequence[Phase]) -> None:
    """Refuse more steps than can be counted."""
    steps = sum(phase.steps for phase in plan)
    if steps > _MOST_STEPS:
        raise SettingError(
            f"The fit would take {steps:,} steps in all its phases, but steps are counted in 32 bits: choose "
            f"{_MOST_STEPS:,} at the most."
        )


def _check_same_start(total: int) -> None:
    """Processes that resume must all have found the same checkpoint."""
    if jax.process_count() == 1:
        return
    totals = [int(found["total"]) for found in exchange_arrays({"total": np.asarray(total)})]
    if len(set(totals)) > 1:
        raise ModelFileError("The processes do not see the same checkpoint: put its directory on storage they share.")


@contextlib.contextmanager
def _lost_processes_named(step: int) -> Iterator[None]:
    """Say in a sentence what XLA says in many when another process has gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Programs compiled ahead of time raise what XLA says as a ValueError.
        if jax.process_count() == 1 or not _STATUS.match(str(error)):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise LostProcessError(
            f"Process {jax.process_index()} lost another process of the job after step {step} ({reason}): "
            "start the job again; it goes on from its last checkpoint."
        ) from error


def _fingerprint(model: DeepGP) -> str:
    """A short text that differs when the model's structure or its initial values do."""
    digest = hashlib.sha256(str(jax.tree.structure(model)).encode())
    for leaf in jax.tree.leaves(model):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def run_chunk(
    inference: AbstractInference,
    phase: Phase,
    state: Any,
    guard: Guard,
    feed: AbstractFeed,
    first: int,
    count: int,
    key: PRNGKeyArray,
    capacity: int,
    replicated: NamedSharding | None = None,
) -> tuple[Any, Guard, AbstractInfo, Int[Array, ""], Bool[Array, ""]]:
    """At most ``count`` steps of a phase; ends early when a step is done or the guard stops.

    ``first`` is the number of the chunk's first step in the whole run; ``replicated`` says how several devices hold
    the state. Returns the state, the guard, the figures of every step (arrays of length ``capacity``), how many steps
    ran, and whether the phase is done. A ``count`` of 0 compiles the program, and the state it returns may be a piece.
    """
    bounds = np.asarray([first, count], np.int32)
    pieces = inference.split(phase, state, available_cores() if replicated is None else 1)
    program = _compiled_chunk if len(pieces) == 1 else _compiled_piece

    def chunk(piece: Any) -> tuple[Any, Guard, AbstractInfo, Int[Array, ""], Bool[Array, ""]]:
        return program(inference, phase, piece, guard, feed, bounds, key, capacity, replicated)

    if len(pieces) == 1 or count == 0:
        return chunk(pieces[0])
    states, guards, infos, ran, done = zip(*_side_by_side(chunk, pieces), strict=True)
    if any(int(piece.total) > int(guard.total) for piece in guards):  # a step that failed must be undone everywhere
        return _compiled_chunk(inference, phase, state, guard, feed, bounds, key, capacity, replicated)
    state, info = inference.join(states, infos)
    return state, guards[0], info, ran[0], jnp.asarray(all(map(bool, done)))


def _side_by_side(call: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """One call a thread, under this thread's precision."""
    double = default_float() == np.float64

    def one(argument: Any) -> Any:
        with jax.enable_x64(double):
            return jax.block_until_ready(call(argument))

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(in_this_context(one), arguments))


def _chunk(inference, phase, state, guard, feed, bounds, key, capacity, replicated):
    first, count = bounds
    arrays, constants = eqx.partition(state, eqx.is_array)

    def one_step(arrays, i):
        state = eqx.combine(arrays, constants)
        return inference.step(phase, state, feed.batch(i), key=jax.random.fold_in(key, first + i))

    def body(carry):
        i, arrays, guard, infos, _ = carry
        new, info = one_step(arrays, i)
        new_arrays, _ = eqx.partition(new, eqx.is_array)
        guard, arrays = guarded_arrays(guard, arrays, *keep_everywhere((new_arrays, info.ok), replicated))
        infos = jax.tree.map(lambda buffer, value: buffer.at[i].set(value), infos, info)
        return i + 1, arrays, guard, infos, info.done & info.ok

    def guarded_arrays(guard, old, new, ok):
        guard, state = guarded(inference, guard, eqx.combine(old, constants), eqx.combine(new, constants), ok)
        return guard, eqx.partition(state, eqx.is_array)[0]

    def goes_on(carry):
        i, _, guard, _, done = carry
        return (i < count) & ~done & ~guard.stops

    info = eqx.filter_eval_shape(lambda: one_step(arrays, jnp.asarray(0, jnp.int32))[1])
    buffers = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), info)
    start = (jnp.asarray(0, jnp.int32), arrays, guard, buffers, jnp.asarray(False))
    ran, arrays, guard, infos, done = jax.lax.while_loop(goes_on, body, start)
    arrays, guard, infos, ran, done = keep_everywhere((arrays, guard, infos, ran, done), replicated)
    return eqx.combine(arrays, constants), guard, infos, ran, done


#: A chunk on all cores, and one on a single core. XLA hands small operations to its threads at a cost: pieces of a
#: state on a core each were stepped in half the time of the whole on two (STRIDE, 50 particles of 700 rows).
_compiled_chunk = program(_chunk)
_compiled_piece = program(_chunk, options=ONE_CORE)
