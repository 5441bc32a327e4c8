"""Stable names of the classes that files may hold.

A file names a class by its tag (``kernel/rbf``), never by the module that holds it: code may move, files stay readable.
A tag, once released, is not given to another class and not taken away.
"""

from collections.abc import Callable
from typing import TypeVar

from fathomgp.errors import SettingError

C = TypeVar("C", bound=type)

_classes: dict[str, type] = {}
_tags: dict[type, str] = {}


def tagged(tag: str) -> Callable[[C], C]:
    """Let files hold instances of a class, an ``eqx.Module`` or dataclass, under this tag: use it as a decorator."""

    def mark(cls: C) -> C:
        other = _classes.get(tag, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise SettingError(f"The tag {tag!r} belongs to {other.__module__}.{other.__qualname__}: choose another.")
        _classes[tag], _tags[cls] = cls, tag
        return cls

    return mark


def tag_of(cls: type) -> str | None:
    """The tag of a class, if it has one."""
    return _tags.get(cls)


def class_of(tag: str) -> type | None:
    """The class of a tag, if it is known and imported."""
    return _classes.get(tag)


def known_tags() -> dict[str, type]:
    """Every tag, with its class."""
    return dict(_classes)
