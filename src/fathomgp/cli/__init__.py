"""The command line: fit, predict, evaluate, demo, data, bench.

Whatever goes wrong on purpose ends in one line on stderr that names cause and remedy, and in exit code 2.
"""

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from fathomgp.errors import SettingError
from fathomgp.kept import keep_compiled

if TYPE_CHECKING:
    from fathomgp.cli._app import app as app


def __getattr__(name: str) -> Any:
    """Import the commands when they are first asked for: JAX must not be there before :func:`main` has spoken."""
    if name == "app":
        from fathomgp.cli._app import app

        return app
    raise AttributeError(f"module 'fathomgp.cli' has no attribute {name!r}")


def keep_programs() -> None:
    """Keep what is compiled between runs of the command, unless JAX was told where or the place is no use."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with contextlib.suppress(SettingError):
            keep_compiled()


def main() -> None:
    """The entry point of the command ``fathomgp``."""
    keep_programs()
    from fathomgp.cli._app import app

    # A request to end is treated like Ctrl-C: a fit keeps what was learned so far, half-written files go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="fathomgp")
