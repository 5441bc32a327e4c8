"""Objects to descriptions and back.

A description is null, a boolean, an integer, a string or a list as they are, and ``{"is": kind, ...}`` for the rest.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fathomgp.errors import ModelFileError
from fathomgp.persistence._container import DTYPES, Arrays
from fathomgp.persistence._schema import check_type, field_types
from fathomgp.tags import class_of, tag_of

#: How deep objects may be nested.
_MOST_DEPTH = 100
_LARGEST = 2**64 - 1


def describe(content: Any) -> tuple[Any, Arrays]:
    """The description of an object, and the arrays that it names."""
    arrays: Arrays = {}
    return _describe(content, arrays, "content", 0), arrays


def _describe(value: Any, arrays: Arrays, path: str, depth: int) -> Any:
    def inner(item: Any, name: Any) -> Any:
        return _describe(item, arrays, f"{path}.{name}", depth + 1)

    if depth > _MOST_DEPTH:
        raise ModelFileError(f"{path[:80]}... is nested more than {_MOST_DEPTH} deep and cannot be saved.")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"is": "float", "hex": float(value).hex()}
    if isinstance(value, (jax.Array, np.ndarray)):
        return _describe_array(value, arrays, path)
    if isinstance(value, list):
        return [inner(item, i) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"is": "tuple", "items": [inner(item, i) for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"is": "dict", "items": {key: inner(item, key) for key, item in value.items()}}
    if isinstance(value, np.dtype):
        return {"is": "dtype", "name": value.name}
    cls: Any = type(value)
    tag = tag_of(cls)
    if tag is None:
        raise ModelFileError(
            f"{path} is a {cls.__module__}.{cls.__qualname__}, which cannot be saved: make it an eqx.Module and "
            "register it with fathomgp.persistence.register."
        )
    fields = {field.name: inner(getattr(value, field.name), field.name) for field in dataclasses.fields(cls)}
    return {"is": "object", "tag": tag, "fields": fields}


def _describe_array(value: Any, arrays: Arrays, path: str) -> Any:
    kind = "numpy" if isinstance(value, np.ndarray) else "jax"
    if kind == "jax" and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, value = "key", jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype.kind in "OU" and all(isinstance(item, str) for item in array.ravel()):
        items = array.ravel().tolist()
        return {"is": "strings", "items": items, "shape": list(array.shape), "kind": array.dtype.kind}
    if array.dtype.name not in DTYPES:
        raise ModelFileError(f"{path} is an array of {array.dtype}, which cannot be saved: use numbers or strings.")
    while path in arrays:  # a key of a dictionary may hold a full stop
        path += "_"
    arrays[path] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return {"is": kind, "at": path}


def rebuild(spec: Any, arrays: Arrays, source: pathlib.Path) -> Any:
    """The object of a description. Every array is taken once, and none may be left.

    Args:
        spec: the description.
        arrays: by name.
        source: the file, for messages.
    """
    arrays = dict(arrays)
    try:
        content = _rebuild(spec, arrays, "content", 0)
    except ModelFileError as error:
        raise ModelFileError(f"{source}: {error}") from None
    if arrays:
        raise ModelFileError(f"{source} holds the array {next(iter(arrays))[:80]!r}, which nothing in it names.")
    return content


def _rebuild(spec: Any, arrays: Arrays, path: str, depth: int) -> Any:
    def inner(item: Any, name: Any) -> Any:
        return _rebuild(item, arrays, f"{path}.{name}", depth + 1)

    if depth > _MOST_DEPTH:
        raise ModelFileError(f"{path[:80]}... is nested more than {_MOST_DEPTH} deep.")
    if isinstance(spec, int) and abs(spec) > _LARGEST:
        raise ModelFileError(f"{path} is a whole number of more than 64 bits: the file is damaged.")
    if spec is None or isinstance(spec, (bool, str, int)):
        return spec
    if isinstance(spec, list):
        return [inner(item, i) for i, item in enumerate(spec)]
    if not isinstance(spec, dict):
        raise ModelFileError(f"{path} holds {str(spec)[:40]!r}, which no fathomgp file contains.")
    kind = spec.get("is")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelFileError(
            f"{path} is of the unknown kind {str(kind)[:40]!r}: the file is newer than this fathomgp, or damaged."
        )
    expected, build = _KINDS[kind]
    if set(spec) != {"is", *expected} or not all(isinstance(spec[name], of) for name, of in expected.items()):
        raise ModelFileError(f"{path} is no {kind} as fathomgp writes it: the file is damaged.")
    try:
        return build(spec, arrays, path, inner)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} cannot be read: {type(error).__name__} {str(error)[:200]}.") from None


Inner = Callable[[Any, Any], Any]


def _rebuild_float(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> float:
    return float.fromhex(spec["hex"])


def _rebuild_tuple(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> tuple[Any, ...]:
    return tuple(inner(item, i) for i, item in enumerate(spec["items"]))


def _rebuild_dict(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> dict[str, Any]:
    return {key: inner(item, key) for key, item in spec["items"].items()}


def _rebuild_dtype(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> np.dtype:
    if spec["name"] not in DTYPES:
        raise ModelFileError(f"{path} is the unknown type {spec['name'][:40]!r} of numbers.")
    return np.dtype(spec["name"])


def _rebuild_strings(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> np.ndarray:
    items, shape = spec["items"], spec["shape"]
    if not all(isinstance(item, str) for item in items) or not all(type(n) is int and n >= 0 for n in shape):
        raise ModelFileError(f"{path} is no array of strings as fathomgp writes it: the file is damaged.")
    if spec["kind"] not in ("O", "U"):
        raise ModelFileError(f"{path} is the unknown kind {spec['kind'][:40]!r} of strings.")
    longest = max(map(len, items), default=1)
    if spec["kind"] == "U" and longest * len(items) > 1000 + 10 * sum(map(len, items)):
        return np.asarray(items, object).reshape(shape)  # one long string would make every place as wide
    return np.asarray(items, object if spec["kind"] == "O" else np.str_).reshape(shape)


def _rebuild_array(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> Any:
    if spec["at"] not in arrays:
        raise ModelFileError(f"{path} names the array {spec['at'][:80]!r}, which the file lacks or names twice.")
    array = arrays.pop(spec["at"])
    if spec["is"] == "key":
        return jax.random.wrap_key_data(jnp.asarray(array))
    return jnp.asarray(array) if spec["is"] == "jax" else array


def _rebuild_object(spec: dict[str, Any], arrays: Arrays, path: str, inner: Inner) -> Any:
    tag, given = spec["tag"], spec["fields"]
    cls: Any = class_of(tag)
    if cls is None:
        raise ModelFileError(
            f"{path} is a {tag[:80]!r}, which is not registered: if it is yours, import the module that registers it "
            "with fathomgp.persistence.register before loading; else upgrade fathomgp."
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ModelFileError(f"{path}, a {tag!r}, has the unknown field {unknown[0][:80]!r}: upgrade fathomgp.")
    types = field_types(cls)
    value: Any = object.__new__(cls)
    for name, field in fields.items():
        item = inner(given[name], name) if name in given else _default(field, path, tag)
        if name in given:
            check_type(item, types.get(name, Any), f"{path}.{name}")
        object.__setattr__(value, name, item)
    for ancestor in cls.__mro__:
        if "__check_init__" in vars(ancestor):  # what equinox calls after the constructor, which did not run
            vars(ancestor)["__check_init__"](value)
    return value


def _default(field: dataclasses.Field, path: str, tag: str) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise ModelFileError(f"{path}, a {tag!r}, lacks the field {field.name!r}: restore the file from a copy.")


#: What a description of each kind holds beside its kind, and how it is built.
_KINDS: dict[str, tuple[dict[str, type], Callable[[dict[str, Any], Arrays, str, Inner], Any]]] = {
    "float": ({"hex": str}, _rebuild_float),
    "tuple": ({"items": list}, _rebuild_tuple),
    "dict": ({"items": dict}, _rebuild_dict),
    "dtype": ({"name": str}, _rebuild_dtype),
    "strings": ({"items": list, "shape": list, "kind": str}, _rebuild_strings),
    "numpy": ({"at": str}, _rebuild_array),
    "jax": ({"at": str}, _rebuild_array),
    "key": ({"at": str}, _rebuild_array),
    "object": ({"tag": str, "fields": dict}, _rebuild_object),
}
