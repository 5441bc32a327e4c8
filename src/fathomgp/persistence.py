"""Files: models and checkpoints as one JSON description and one safetensors file. No pickle, nothing executed.

A bundle is a directory with two files::

    <name>.json                    format number, a description of the object, and the digest of both files
    <name>-<digest>.safetensors    every array, bit for bit

The arrays are written first under a name of their own and the JSON file is replaced last, in one atomic step, so a
crash at any moment leaves the previous bundle or the new one, never half of each. Reading checks the digests before
anything is built, and builds only classes that are registered here by name.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fathomgp._version import __version__
from fathomgp.errors import ModelFileError
from fathomgp.model import Recipe

#: Raised with every change that old readers cannot read; older numbers stay readable.
FORMAT = 1
_MAGIC = "fathomgp"
#: Classes that files may name, beside fathomgp's own modules.
_registry: dict[str, type] = {f"{Recipe.__module__}.{Recipe.__qualname__}": Recipe}

C = TypeVar("C", bound=type)


def register(cls: C) -> C:
    """Let instances of ``cls``, an ``eqx.Module`` or dataclass of yours, be saved and loaded: use it as a decorator.

    fathomgp's own classes need no registration. A file that names any other class is refused.
    """
    _registry[_class_name(cls)] = cls
    return cls


def save_bundle(directory: str | os.PathLike, name: str, content: Any) -> pathlib.Path:
    """Write ``content`` as the bundle ``name`` of a directory, which is created if need be. Returns the JSON's path."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    spec = _describe(content, arrays, "content")
    blob = _arrays_to_bytes(arrays)
    digest = hashlib.sha256(blob).hexdigest()
    blob_name = f"{name}-{digest[:16]}.safetensors"
    body = {
        "magic": _MAGIC,
        "format": FORMAT,
        "version": __version__,
        "arrays": blob_name,
        "digest": digest,
        "content": spec,
    }
    _write_atomically(directory / blob_name, blob)
    path = directory / f"{name}.json"
    _write_atomically(path, _seal(body))
    for old in directory.glob(f"{name}-*.safetensors"):
        if old.name != blob_name:
            old.unlink(missing_ok=True)
    return path


def load_bundle(directory: str | os.PathLike, name: str) -> Any:
    """Read the bundle ``name`` of a directory; a :class:`ModelFileError` says what is wrong with it."""
    directory = pathlib.Path(directory)
    body = _open_seal(directory / f"{name}.json")
    blob_path = directory / str(body["arrays"])
    if blob_path.parent != directory or not blob_path.is_file():
        raise ModelFileError(
            f"{directory} lacks {body['arrays']!r}, which {name}.json names: copy the whole directory."
        )
    blob = blob_path.read_bytes()
    if hashlib.sha256(blob).hexdigest() != body["digest"]:
        raise ModelFileError(f"{blob_path} is damaged (its digest does not match {name}.json): restore it from a copy.")
    return _rebuild(body["content"], _arrays_from_bytes(blob), "content")


def bundle_exists(directory: str | os.PathLike, name: str) -> bool:
    """Whether a directory holds a bundle of that name."""
    return (pathlib.Path(directory) / f"{name}.json").is_file()


# --- the JSON file and its seal ---------------------------------------------------------------------------------------


def _seal(body: dict[str, Any]) -> bytes:
    text = _canonical(body)
    return _canonical({**body, "seal": hashlib.sha256(text).hexdigest()})


def _open_seal(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFileError(f"{path} does not exist: give the directory that save() wrote.")
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged or not a fathomgp file: it is not JSON ({error}).") from None
    if not isinstance(body, dict) or body.get("magic") != _MAGIC:
        raise ModelFileError(f"{path} is not a fathomgp file: it lacks the mark {_MAGIC!r}.")
    if not isinstance(body.get("format"), int) or body["format"] > FORMAT:
        raise ModelFileError(
            f"{path} has format {body.get('format')!r}, but fathomgp {__version__} reads up to {FORMAT}: "
            "upgrade fathomgp."
        )
    seal = body.pop("seal", None)
    # Comparing bytes, not only the seal: a changed blank or key order is damage too.
    if raw != _seal(body) or seal is None:
        raise ModelFileError(f"{path} is damaged (its seal does not match its content): restore it from a copy.")
    return body


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1, allow_nan=False).encode()


def _write_atomically(path: pathlib.Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private, but models are shared
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _arrays_to_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save({key: np.asarray(array, order="C") for key, array in arrays.items()})


def _arrays_from_bytes(blob: bytes) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(blob)
    except SafetensorError as error:
        raise ModelFileError(f"The arrays cannot be read: {error}. Restore the file from a copy.") from None


# --- objects to descriptions and back ---------------------------------------------------------------------------------
# A description is null, a boolean, an integer, a string or a list as they are, and {"is": kind, ...} for the rest.


def _describe(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"is": "float", "hex": float(value).hex()}
    if isinstance(value, (jax.Array, np.ndarray)):
        return _describe_array(value, arrays, path)
    if isinstance(value, list):
        return [_describe(item, arrays, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple) and type(value) is tuple:
        return {"is": "tuple", "items": [_describe(item, arrays, f"{path}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"is": "dict", "items": {key: _describe(item, arrays, f"{path}.{key}") for key, item in value.items()}}
    if isinstance(value, np.dtype):
        return {"is": "dtype", "name": value.name}
    cls: Any = type(value)
    if _find_class(_class_name(cls)) is cls:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
        described = {key: _describe(item, arrays, f"{path}.{key}") for key, item in fields.items()}
        return {"is": "object", "class": _class_name(type(value)), "fields": described}
    raise ModelFileError(
        f"{path} is a {_class_name(type(value))}, which cannot be saved: make it an eqx.Module and "
        "register it with fathomgp.persistence.register."
    )


def _describe_array(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    kind = "numpy" if isinstance(value, np.ndarray) else "jax"
    if kind == "jax" and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, value = "key", jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        if array.dtype.kind not in "OU" or not all(isinstance(item, str) for item in array.ravel()):
            raise ModelFileError(f"{path} is an array of {array.dtype}, which cannot be saved: use numbers or strings.")
        return {"is": "strings", "items": array.ravel().tolist(), "shape": list(array.shape), "dtype": array.dtype.str}
    arrays[path] = array
    return {"is": kind, "at": path}


def _rebuild(spec: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    if spec is None or isinstance(spec, (bool, str, int)):
        return spec
    if isinstance(spec, list):
        return [_rebuild(item, arrays, f"{path}.{i}") for i, item in enumerate(spec)]
    if not isinstance(spec, dict):
        raise ModelFileError(f"{path} holds {spec!r}, which no fathomgp file contains.")
    try:
        return _rebuild_kind(spec, arrays, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} cannot be read: {type(error).__name__} {error}.") from None


def _rebuild_kind(spec: dict[str, Any], arrays: dict[str, np.ndarray], path: str) -> Any:
    match spec["is"]:
        case "float":
            return float.fromhex(spec["hex"])
        case "tuple":
            return tuple(_rebuild(item, arrays, f"{path}.{i}") for i, item in enumerate(spec["items"]))
        case "dict":
            return {key: _rebuild(item, arrays, f"{path}.{key}") for key, item in spec["items"].items()}
        case "numpy":
            return arrays[spec["at"]]
        case "jax":
            return jnp.asarray(arrays[spec["at"]])
        case "key":
            return jax.random.wrap_key_data(jnp.asarray(arrays[spec["at"]]))
        case "strings":
            dtype = np.dtype(object) if spec["dtype"] == "|O" else np.dtype(spec["dtype"])
            return np.asarray(spec["items"], dtype).reshape(spec["shape"])
        case "dtype":
            return np.dtype(spec["name"])
        case "object":
            return _rebuild_object(spec, arrays, path)
    raise ModelFileError(
        f"{path} is of the unknown kind {spec['is']!r}: the file is newer than this fathomgp, or damaged."
    )


def _rebuild_object(spec: dict[str, Any], arrays: dict[str, np.ndarray], path: str) -> Any:
    cls = _find_class(spec["class"])
    if cls is None:
        raise ModelFileError(
            f"{path} is a {spec['class']!r}, which is not registered: import the module that defines it and register "
            "it with fathomgp.persistence.register before loading."
        )
    expected = {field.name for field in dataclasses.fields(cls)}
    if set(spec["fields"]) != expected:
        raise ModelFileError(
            f"{path} has the fields {sorted(spec['fields'])}, but {spec['class']} has {sorted(expected)}."
        )
    value: Any = object.__new__(cls)
    for key, item in spec["fields"].items():
        object.__setattr__(value, key, _rebuild(item, arrays, f"{path}.{key}"))
    return value


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _find_class(name: str) -> Any:
    """A registered class, or one of fathomgp's own ``eqx.Module`` classes that is already imported."""
    if name in _registry:
        return _registry[name]
    for cls in _all_subclasses(eqx.Module):
        if cls.__module__.startswith("fathomgp.") and _class_name(cls) == name and dataclasses.is_dataclass(cls):
            _registry[name] = cls
            return cls
    return None


def _all_subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [found for child in children for found in (child, *_all_subclasses(child))]
