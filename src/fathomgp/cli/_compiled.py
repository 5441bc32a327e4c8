"""What XLA has compiled is kept between runs of the command: a second run of its kind starts at once.

This is for the command alone. Whoever imports the package decides for their own process, through JAX's setting
``jax_compilation_cache_dir``.
"""

import hashlib
import os
import pathlib
import platform

from fathomgp._places import cache_directory


def keep_compiled() -> None:
    """Let JAX keep its programs in the cache directory, unless it was told where; it must not be imported yet."""
    # XLA warns, on some processors as of an error, about every program that it finds again. Real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_directory() / "compiled" / _processor()))


def _processor() -> str:
    """A name for the kind of processor: programs of one may not run on another that shares the directory."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    kind = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features")][:2]
    return hashlib.sha256("\n".join([platform.machine(), *(kind or lines[:1])]).encode()).hexdigest()[:12]
