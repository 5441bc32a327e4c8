"""Programs that are kept between processes: a second run of its kind starts at once.

XLA's programs are code that a later process runs. So their directory belongs to the user alone (mode 0700), another
user's is refused, and programs of one kind of processor are kept apart from those of others that share the directory.
Light to import: the command line calls this before JAX is there.
"""

import hashlib
import os
import pathlib
import platform
import stat
import sys
from typing import Any

from fathomgp._places import cache_directory
from fathomgp.errors import SettingError

#: The variable of the environment that names a directory: programs are then kept without a call.
VARIABLE = "FATHOMGP_COMPILED"
#: What is used least recently goes when the programs of a kind of processor take more bytes than this.
_MOST_BYTES = 2 * 1024**3
#: Programs that compile faster are not worth a file.
_SECONDS_WORTH_A_FILE = 0.05


def keep_compiled(directory: str | os.PathLike | None = None) -> pathlib.Path:
    """Keep what XLA compiles in a directory, and take from there what was compiled before; returns the directory.

    For scripts and notebooks: call it once, before the first fit. It sets JAX's own compilation cache, for all programs
    of the process. Several processes may share a directory; a damaged entry is compiled again.

    Args:
        directory: where; by default the environment's ``FATHOMGP_COMPILED``, else the package's cache directory.

    Example::

        import fathomgp

        fathomgp.keep_compiled()
    """
    place = _own_directory(pathlib.Path(directory or os.environ.get(VARIABLE) or cache_directory() / "compiled"))
    # XLA warns, on some processors as of an error, about every program that it finds again. Real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": str(place),
        "jax_compilation_cache_max_size": _MOST_BYTES,
        "jax_persistent_cache_min_compile_time_secs": _SECONDS_WORTH_A_FILE,
    }
    if "jax" in sys.modules:
        import jax

        for name, value in settings.items():
            jax.config.update(name, value)
    else:
        os.environ.update({name.upper(): str(value) for name, value in settings.items()})
    return place


def keep_compiled_if_asked() -> None:
    """:func:`keep_compiled` where the environment names a directory and JAX has none yet."""
    if os.environ.get(VARIABLE):
        keep_compiled()


def _own_directory(root: pathlib.Path) -> pathlib.Path:
    """The directory for this kind of processor, made if it is not there; nobody else may write to it."""
    place = root / _processor()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"Compiled programs cannot be kept in {place}: {error.strerror}. Name another.") from error
    status = place.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise SettingError(
            f"{place} belongs to another user: compiled programs are code, name a directory of your own."
        )
    if stat.S_IMODE(status.st_mode) & 0o077 and os.name == "posix":
        place.chmod(0o700)
    return place


def _processor() -> str:
    """A name for the kind of processor: programs of one may not run on another that shares the directory."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    kind = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features")][:2]
    return hashlib.sha256("\n".join([platform.machine(), *(kind or lines[:1])]).encode()).hexdigest()[:12]
