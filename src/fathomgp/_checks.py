"""Settings that are of the kind they are declared with, refused in a sentence otherwise."""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from fathomgp.errors import SettingError

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
}
#: JAX counts in 32 bits; no count or size of a setting comes near.
_LARGEST = 1 << 62


def check_types_first(cls: type) -> None:
    """Let instances of a dataclass compare the types of their fields with its annotations, before its other checks.

    For ``__init_subclass__`` of an ``eqx.Module``. Fields that are no plain numbers, flags, words or objects of a class
    with that kind of check are left to the class itself.
    """
    own: Callable[[Any], None] | None = cls.__dict__.get("__check_init__")

    def __check_init__(self: Any) -> None:  # noqa: N807
        check_types(self)
        if own is not None:
            own(self)

    cls.__check_init__ = __check_init__  # type: ignore[attr-defined]


def check_types(instance: Any) -> None:
    """Refuse the first field of a dataclass whose value has another type than its annotation says."""
    for field in dataclasses.fields(instance):
        kinds = _plain_kinds(field.type)
        value = getattr(instance, field.name, None)
        if kinds and not any(_is_of_kind(value, kind) for kind in kinds):
            wanted = " or ".join(_WORDS.get(kind) or f"of the kind {kind.__name__}" for kind in kinds)
            raise SettingError(f"{field.name} of {type(instance).__name__} must be {wanted}, but it is {shown(value)}.")


def as_numbers(value: Any, name: str) -> np.ndarray:
    """Numbers of any shape as a float64 array."""
    try:
        return np.asarray(value, np.float64)
    except Exception:
        raise SettingError(f"{name} must hold numbers, but it is {shown(value)}.") from None


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """A whole number between two others, ends included."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise SettingError(f"{name} must be a whole number from {least} to {most}, but it is {shown(value)}.")
    return int(value)


def real_number(value: Any, name: str) -> float:
    """A single number that is finite."""
    number = as_numbers(value, name)
    if number.ndim > 0 or not np.isfinite(number):
        raise SettingError(f"{name} must be a finite number, but it is {shown(value)}.")
    return float(number)


def check_flag(value: Any, name: str) -> bool:
    """What Python takes as true or false."""
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise SettingError(f"{name} must be True or False, but it is {shown(value)}.") from None


def shown(value: Any) -> str:
    """A value for a sentence: short, on one line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a value of the type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain_kinds(annotation: Any) -> tuple[type, ...]:
    """The types of an annotation; none if one of them cannot be checked here."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    kinds = typing.get_args(annotation) if union else (annotation,)
    known = all(kind in _WORDS or dataclasses.is_dataclass(kind) for kind in kinds if isinstance(kind, type))
    return kinds if known and all(isinstance(kind, type) for kind in kinds) else ()


def _is_of_kind(value: Any, kind: type) -> bool:
    if kind is float:
        return _is_of_kind(value, int) or (isinstance(value, float | np.floating) and value == value)
    if kind is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < _LARGEST
    return isinstance(value, bool | np.bool_) if kind is bool else isinstance(value, kind)
