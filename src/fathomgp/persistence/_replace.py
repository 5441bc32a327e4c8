"""Files replaced in one step, with nothing left behind by writers that were killed."""

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from fathomgp.errors import WriteError

try:
    import fcntl
except ImportError:  # Windows: temporary files then have names of their own
    fcntl = None  # type: ignore[assignment]

#: Seconds that a writer waits for another one's save to end before it writes beside it.
_PATIENCE = 30.0


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it there: readers see what was there before, or all of ``data``.

    All writers of a path use one temporary file, which the one at work has locked. What a killed one left is taken over
    by the next, so there is one such file at most. The lock ends with the process that holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path) as (handle, temporary):
            with open(handle, "wb", closefd=False) as file:
                file.truncate(0)
                file.write(data)
                file.flush()
                os.fsync(handle)
            os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror or error}): make room there, or give another directory. "
            "What was there before is unchanged."
        ) from error


@contextlib.contextmanager
def _temporary(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The handle and the name of a file that no other writer writes; removed if the writing fails."""
    handle, name = _lock(path) or _unshared(path)
    try:
        yield handle, name
    except BaseException:
        with contextlib.suppress(OSError):
            if _is_still(name, handle):  # once renamed, the name may be another writer's
                os.unlink(name)
        raise
    finally:
        os.close(handle)


def _lock(path: pathlib.Path) -> tuple[int, str] | None:
    """The shared temporary file, locked; ``None`` where files cannot be locked or another writer keeps it too long."""
    name, until = str(path.with_name(f".{path.name}.tmp")), time.monotonic() + _PATIENCE
    while fcntl is not None and time.monotonic() < until:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(name, handle):
                return handle, name
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # a file system without locks
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    return None


def _is_still(name: str, handle: int) -> bool:
    """Whether the name still leads to the open file: the writer before may have renamed it."""
    try:
        return os.path.samestat(os.stat(name, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _unshared(path: pathlib.Path) -> tuple[int, str]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    with contextlib.suppress(OSError):
        os.chmod(name, 0o644)  # mkstemp's files are private, but models are shared
    return handle, name


def _sync_directory(directory: pathlib.Path) -> None:
    """Make the renaming outlast a power cut, where directories can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
