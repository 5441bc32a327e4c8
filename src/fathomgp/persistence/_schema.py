"""The schema of a file is the declaration of its classes: every field must be what its annotation says."""

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import AbstractArray

from fathomgp.errors import ModelFileError


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The annotations of a class; none where they cannot be found out, as for classes made inside functions."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        return {}


def check_type(value: Any, annotation: Any, path: str) -> None:
    """Refuse a value that is not what an annotation says.

    Args:
        value: what was read.
        annotation: a type; one that this function does not know allows everything.
        path: where it was read, for the message.
    """
    if not _fits(value, annotation):
        wanted = getattr(annotation, "__name__", str(annotation))
        raise ModelFileError(f"{path} is {_show(value)}, but must be {wanted}: the file is damaged.")


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is None or annotation is type(None):
        return value is None
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return _fits_array(value, annotation)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and _fits_tuple(value, parts)
    if origin in (list, dict):
        inside = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(item, parts[-1]) for item in inside)
    if origin is Callable:
        return callable(value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation) if _is_plain_class(annotation) else True


def _is_plain_class(annotation: Any) -> bool:
    module = getattr(annotation, "__module__", "")
    return isinstance(annotation, type) and not module.startswith("jaxtyping") and annotation is not Any


def _fits_tuple(value: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
    if len(parts) == 2 and parts[1] is Ellipsis:
        return all(_fits(item, parts[0]) for item in value)
    return not parts or (len(value) == len(parts) and all(map(_fits, value, parts)))


def _fits_array(value: Any, annotation: Any) -> bool:
    """An array of the annotation's kind of numbers and number of axes, on the host or on a device."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        return False
    kind = np.ndarray if isinstance(value, np.ndarray) else jax.Array
    return isinstance(value, annotation.dtype[kind, annotation.dim_str])


def _show(value: Any) -> str:
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of {value.dtype} of shape {value.shape}"
    return f"{str(value)[:60]!r}" if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
