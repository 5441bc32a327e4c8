"""Where the package may keep files of its own. Light to import: the command line needs it before JAX."""

import os
import pathlib
import sys


def cache_directory() -> pathlib.Path:
    """Where downloads are kept: ``FATHOMGP_CACHE``, else ``fathomgp`` in the platform's cache directory."""
    if chosen := os.environ.get("FATHOMGP_CACHE"):
        return pathlib.Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(xdg) / "fathomgp"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (pathlib.Path(local) if local else pathlib.Path.home() / "AppData" / "Local") / "fathomgp"
    return pathlib.Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "fathomgp"
