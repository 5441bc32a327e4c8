"""Files that commands write: never over an input, and whole or not at all. Light to import."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator

from fathomgp.errors import SettingError


def refuse_inputs(option: str, out: str | os.PathLike, inputs: Iterable[str | os.PathLike | int]) -> None:
    """Refuse an output that is one of the inputs under whatever name: files are told by device and inode.

    Args:
        option: what messages call the output.
        out: a path that need not exist.
        inputs: paths, or open file descriptors.
    """
    for place in inputs:
        try:
            same = os.path.samestat(os.stat(out), os.stat(place))
        except OSError:  # what is not there is not overwritten
            continue
        if same:
            raise SettingError(f"{option} {out} would overwrite the data: name another file.")


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A place beside ``path`` to write to; at the end it takes the name in one step, and after an error it goes.

    If nothing was written there, nothing is replaced. A symbolic link stays one: its target is replaced.

    Example:
        >>> with replacing("answers.csv") as part:  # doctest: +SKIP
        ...     part.write_text("mean,std")
    """
    target = pathlib.Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise SettingError(f"{path} is no regular file: name a file to write.")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        if part.exists():
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_writable(directory: str | os.PathLike, what: str) -> None:
    """Refuse a directory in which no file can be made, or which cannot be made itself; nothing is left behind."""
    place = pathlib.Path(directory).absolute()
    try:
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        with tempfile.NamedTemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise SettingError(f"{what} {directory} cannot be written ({reason}): name another directory.") from None
