"""Checkpoints: everything that a run needs in order to go on as if it had never stopped."""

import dataclasses
import os
import pathlib
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fathomgp._outputs import check_writable
from fathomgp.errors import ModelFileError
from fathomgp.fitting._devices import from_numpy, to_numpy
from fathomgp.fitting._guard import Guard
from fathomgp.persistence import bundle_exists, check_type, load_bundle, save_bundle

_NAME = "checkpoint"
#: What a checkpoint holds.
_CONTENT: dict[str, Any] = {
    "identity": dict[str, str],
    "position": dict[str, int],
    "state": list[np.ndarray],
    "guard": list[int],
    "history": dict[str, np.ndarray],
}


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """When and where checkpoints are written.

    Attributes:
        directory: holds one checkpoint, replaced atomically.
        every_seconds: one after so much time at the latest; ``None`` for none by time.
        every_steps: one after every so many steps of the run; ``None`` for none by steps.
    """

    directory: str | os.PathLike
    every_seconds: float | None = 60.0
    every_steps: int | None = None


@dataclasses.dataclass
class Position:
    """Where a run stands.

    Attributes:
        phase: number of the phase in the plan.
        step: steps done in that phase.
        total: steps done in all.
    """

    phase: int = 0
    step: int = 0
    total: int = 0


class Checkpointer:
    """Writes checkpoints when they are due. What it does never changes what the run computes."""

    def __init__(self, settings: Checkpointing, identity: dict[str, str]):
        self._settings = settings
        self._identity = identity
        self._last_time = time.monotonic()
        if jax.process_index() == 0:
            check_writable(settings.directory, "checkpoint")

    def due(self, total: int) -> bool:
        """Whether a checkpoint should be written after ``total`` steps."""
        settings = self._settings
        by_time = settings.every_seconds is not None and time.monotonic() - self._last_time >= settings.every_seconds
        by_steps = settings.every_steps is not None and total % settings.every_steps == 0
        return by_time or by_steps

    def steps_until_due(self, total: int) -> int | None:
        """How many steps a chunk may have so that checkpoints by steps are written on time."""
        every = self._settings.every_steps
        return None if every is None else every - total % every

    def write(self, position: Position, state: Any, guard: Guard, history: dict[str, np.ndarray]) -> None:
        """Write the checkpoint; a :class:`~fathomgp.errors.WriteError` leaves the one before as it was."""
        self._last_time = time.monotonic()
        content = {
            "identity": self._identity,
            "position": dataclasses.asdict(position),
            "state": [to_numpy(leaf) for leaf in jax.tree.leaves(state) if eqx.is_array(leaf)],
            "guard": [int(guard.in_a_row), int(guard.total)],
            "history": history,
        }
        if jax.process_index() == 0:
            save_bundle(self._settings.directory, _NAME, content)

    def read(self) -> dict[str, Any] | None:
        """The checkpoint's content, or ``None`` when there is none; one of another run is refused."""
        directory = pathlib.Path(self._settings.directory)
        if not bundle_exists(directory, _NAME):
            return None
        content = load_bundle(directory, _NAME, first_format=False)
        _check_content(content, directory)
        for name, mine in self._identity.items():
            theirs = content["identity"].get(name)
            if theirs != mine:
                raise ModelFileError(
                    f"The checkpoint in {directory} belongs to another run: its {name} is {theirs}, here it is {mine}. "
                    "Give another directory, or remove that one to start afresh."
                )
        return content


def _check_content(content: Any, directory: pathlib.Path) -> None:
    if not isinstance(content, dict) or set(content) != set(_CONTENT):
        raise ModelFileError(f"{directory} holds no checkpoint as fathomgp writes it: remove it to start afresh.")
    for name, annotation in _CONTENT.items():
        check_type(content[name], annotation, f"The checkpoint in {directory}: its {name}")
    position, guard = content["position"], content["guard"]
    if set(position) != {field.name for field in dataclasses.fields(Position)} or len(guard) != 2:
        raise ModelFileError(f"The checkpoint in {directory} does not say where the run stood: remove it.")
    if min(*position.values(), *guard) < 0:
        raise ModelFileError(f"The checkpoint in {directory} counts below zero: remove it to start afresh.")


def restore_state(template: Any, leaves: list[np.ndarray]) -> Any:
    """The template with its arrays replaced by a checkpoint's."""
    arrays, rest = eqx.partition(template, eqx.is_array)
    old, structure = jax.tree.flatten(arrays)
    shapes = [(to_numpy(leaf).shape, to_numpy(leaf).dtype) for leaf in old]
    if shapes != [(leaf.shape, leaf.dtype) for leaf in leaves]:
        raise ModelFileError("The checkpoint's arrays do not fit this algorithm: it was written by another version.")
    new = [from_numpy(leaf, value) for leaf, value in zip(old, leaves, strict=True)]
    return eqx.combine(jax.tree.unflatten(structure, new), rest)
