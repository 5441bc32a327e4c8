"""What a person sees while a fit runs, and why nothing here can end one."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from fathomgp.errors import FitWarning
from fathomgp.notices import tell

#: A callback receives one dictionary: phase, step and steps (of the phase), total (steps of the run), objective,
#: seconds, and posterior: a function that gives what was learned so far.
Callback = Callable[[dict[str, Any]], None]

#: A bar appears only when a fit takes longer than this many seconds.
_PATIENCE = 2.0


class Reporter:
    """Calls the callbacks and drives the progress bar; an exception in either becomes a warning.

    Args:
        callbacks: called after every chunk of steps with one dictionary.
        verbose: ``True`` shows the bar, ``False`` hides it, ``None`` shows it on a terminal only.
    """

    def __init__(self, callbacks: Sequence[Callback], verbose: bool | None):
        self._callbacks = list(callbacks)
        self._wanted = sys.stderr.isatty() if verbose is None else verbose
        self._began = time.monotonic()
        self._before: dict[str, Any] = {}
        self._bar: Any = None
        self._task: Any = None

    def update(self, event: dict[str, Any]) -> None:
        """Tell everyone what happened."""
        for callback in list(self._callbacks):
            try:
                callback(event)
            except Exception as error:
                self._callbacks.remove(callback)
                tell(
                    f"A callback raised {type(error).__name__}: {error}. It is not called again; the fit goes on.",
                    FitWarning,
                    stacklevel=2,
                )
        self._show(event)
        self._before = event

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, event: dict[str, Any]) -> None:
        if not self._wanted:
            return
        try:
            if self._bar is None:
                if time.monotonic() - self._began < _PATIENCE:
                    return
                self._bar = _make_bar()
                self._task = self._bar.add_task("", total=event["steps"], objective=0.0, rate=0.0)
                self._bar.start()
            same = self._before.get("phase") == event["phase"] and self._before["step"] < event["step"]
            before = self._before if same else {"step": 0, "seconds": 0.0}
            rate = (event["step"] - before["step"]) / max(event["seconds"] - before["seconds"], 1e-9)
            self._bar.update(
                self._task,
                description=event["phase"],
                completed=event["step"],
                total=event["steps"],
                objective=event["objective"],
                rate=rate,
            )
        except Exception:  # a broken terminal must not end a fit
            self._wanted = False


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} steps/s"),
        TextColumn("objective {task.fields[objective]:.4f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
