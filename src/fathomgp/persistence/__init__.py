"""Files: a model or checkpoint is one safetensors file. No pickle, nothing executed.

``<name>.safetensors`` holds every array bit for bit, and in its metadata a description of the object in JSON with a
checksum for each array and a seal over the whole file. It is written beside and renamed in one atomic step, so readers
see the last file or the new one, whole; of several writers the last wins; and no writer removes what another's file
names, since a file names no other. Reading checks the seal, the schema and all sizes before anything is built, and
builds only classes that have a tag (:mod:`fathomgp.tags`) or were registered.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from fathomgp.errors import ModelFileError
from fathomgp.persistence._container import FORMAT as FORMAT
from fathomgp.persistence._container import pack, unpack
from fathomgp.persistence._first_format import FirstFormat
from fathomgp.persistence._objects import describe, rebuild
from fathomgp.persistence._replace import replace_file
from fathomgp.persistence._schema import check_type as check_type
from fathomgp.tags import tagged

C = TypeVar("C", bound=type)


@overload
def register(cls: C) -> C: ...
@overload
def register(cls: str) -> Callable[[C], C]: ...
def register(cls: Any) -> Any:
    """Let instances of a class of yours, an ``eqx.Module`` or dataclass, be saved and loaded: use it as a decorator.

    ``@register("mine/kernel")`` gives it a name of its own in files, which outlives a move to another module;
    ``@register`` takes the class's present name. A file that names any other class is refused.
    """
    if isinstance(cls, str):
        return tagged(cls)
    return tagged(f"{cls.__module__}.{cls.__qualname__}")(cls)


def save_bundle(directory: str | os.PathLike, name: str, content: Any) -> pathlib.Path:
    """Write ``content`` as the bundle ``name`` of a directory, which is created if need be. Returns the file's path.

    A :class:`~fathomgp.errors.WriteError` says why a disk took no file; what was there before is then unchanged.
    """
    directory = pathlib.Path(directory)
    spec, arrays = describe(content)
    blob = pack(spec, arrays)
    path = _path(directory, name)
    replace_file(path, blob)
    FirstFormat(directory, name).remove()
    return path


def load_bundle(directory: str | os.PathLike, name: str, *, first_format: bool = True) -> Any:
    """Read the bundle ``name`` of a directory; a :class:`ModelFileError` says what is wrong with it.

    Args:
        directory: the directory.
        name: the bundle's name.
        first_format: whether files of fathomgp 0.1 are read too.
    """
    directory = pathlib.Path(directory)
    path, former = _path(directory, name), FirstFormat(directory, name)
    if path.is_file() or not former.exists():
        return rebuild(*unpack(_read(path), path), path)
    if not first_format:
        raise ModelFileError(
            f"{former.path} was written by an older version of fathomgp (format 1, this one writes {FORMAT}): remove "
            "it to start afresh, or finish with that version."
        )
    try:
        return rebuild(*former.read(), former.path)
    except ModelFileError:
        if path.is_file():  # replaced meanwhile by a writer of this version
            return load_bundle(directory, name)
        raise


def bundle_exists(directory: str | os.PathLike, name: str) -> bool:
    """Whether a directory holds a bundle of that name."""
    directory = pathlib.Path(directory)
    return _path(directory, name).is_file() or FirstFormat(directory, name).exists()


def _path(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / f"{name}.safetensors"


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(f"{path} does not exist: give the directory that save() wrote.") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check the path and its permissions.") from None
