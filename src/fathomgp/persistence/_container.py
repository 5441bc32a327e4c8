"""One file: arrays and a description, sealed.

The description is the JSON text ``fathomgp`` in the metadata of a safetensors file::

    {"seal", "magic": "fathomgp", "format": 2, "version", "tensors": {name: {"dtype", "shape", "sha256"}}, "content"}

The seal is the SHA-256 of the whole file with zeros in the seal's place. It finds damage, not forgery: whoever can
write the file can seal it again, so everything after the seal is checked as if it were hostile.
"""

import hashlib
import json
import math
import pathlib
from typing import Any

import numpy as np

from fathomgp._version import __version__
from fathomgp.errors import ModelFileError

#: Raised with every change that old readers cannot read; older numbers stay readable.
FORMAT = 2
MAGIC = "fathomgp"
#: Characters of JSON that a reader takes: descriptions of models hold some hundred thousand.
MOST_TEXT = 1 << 26
#: How deep a description may be nested: that of a deep kernel expression in a model needs about 60.
MOST_DEPTH = 200
_UNSEALED = "0" * 64
#: The seal's place in the file: text in JSON in JSON. It is the first entry, so nothing before it can look like it.
_SEAL_MARK = b'"{\\"seal\\": \\"'
#: NumPy's names of the types that tensors may have, and safetensors'.
DTYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{sign}{bits}" for kind, sign in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}

Arrays = dict[str, np.ndarray]


def pack(content: Any, arrays: Arrays) -> bytes:
    """The bytes of a file that holds a description and its arrays."""
    from safetensors.numpy import save

    description = {
        "seal": _UNSEALED,
        "magic": MAGIC,
        "format": FORMAT,
        "version": __version__,
        "tensors": {name: _summary(array) for name, array in sorted(arrays.items())},
        "content": content,
    }
    text = json.dumps(description, allow_nan=False)
    blob = bytearray(save({name: np.asarray(a, order="C") for name, a in arrays.items()}, metadata={MAGIC: text}))
    start = blob.index(_SEAL_MARK) + len(_SEAL_MARK)
    blob[start : start + 64] = _seal(blob, start)
    return bytes(blob)


def unpack(blob: bytes, path: pathlib.Path) -> tuple[Any, Arrays]:
    """The description and the arrays of a file, or a sentence about what is wrong with it.

    Args:
        blob: the file's bytes.
        path: its name, for messages.
    """
    header = _header(blob, path)
    metadata = header.get("__metadata__")
    text = metadata.get(MAGIC) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ModelFileError(f"{path} is not a fathomgp file: it lacks the mark {MAGIC!r}.")
    description = parse(text, path)
    check_format(description, path)
    start = blob.find(_SEAL_MARK) + len(_SEAL_MARK)
    if blob[start : start + 64] != _seal(blob, start):
        raise ModelFileError(f"{path} is damaged (its seal does not match its content): restore it from a copy.")
    missing = {"seal", "version", "tensors", "content"} - set(description)
    if missing:
        raise ModelFileError(f"{path} lacks {', '.join(sorted(map(repr, missing)))}: restore it from a copy.")
    _check_tensors(header, path)
    arrays = read_tensors(blob, path)
    _check_summaries(arrays, description["tensors"], path)
    return description["content"], arrays


def parse(text: str | bytes, path: pathlib.Path) -> dict[str, Any]:
    """JSON of bounded length and depth that holds an object."""
    if len(text) > MOST_TEXT:
        raise ModelFileError(f"{path} has a description of {len(text):,} characters; at most {MOST_TEXT:,} are read.")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged or not a fathomgp file: it is not JSON ({error}).") from None
    if not isinstance(body, dict):
        raise ModelFileError(f"{path} is not a fathomgp file: it lacks the mark {MAGIC!r}.")
    _check_depth(body, path)
    return body


def check_format(body: dict[str, Any], path: pathlib.Path) -> None:
    """Refuse foreign files and files of later versions."""
    if body.get("magic") != MAGIC:
        raise ModelFileError(f"{path} is not a fathomgp file: it lacks the mark {MAGIC!r}.")
    number = body.get("format")
    if type(number) is not int or not 1 <= number <= FORMAT:
        raise ModelFileError(
            f"{path} has format {str(number)[:20]}, but fathomgp {__version__} reads up to {FORMAT}: upgrade fathomgp."
        )


def read_tensors(blob: bytes, path: pathlib.Path) -> Arrays:
    """The arrays of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(blob)
    except (SafetensorError, LookupError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelFileError(
            f"{path} is damaged: its arrays cannot be read ({error}). Restore it from a copy."
        ) from None


def _seal(blob: bytes | bytearray, start: int) -> bytes:
    view = memoryview(blob)
    digest = hashlib.sha256(view[:start])
    digest.update(_UNSEALED.encode())
    digest.update(view[start + 64 :])
    return digest.hexdigest().encode()


def _summary(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": digest}


def _header(blob: bytes, path: pathlib.Path) -> dict[str, Any]:
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > len(blob) - 8:
        raise ModelFileError(f"{path} is damaged or not a fathomgp file: its end is missing. Restore it from a copy.")
    return parse(blob[8 : 8 + size], path)


def _check_tensors(header: dict[str, Any], path: pathlib.Path) -> None:
    """What safetensors' reader takes for granted: a type that NumPy has, and as many bytes as the shape needs."""
    widths = {theirs: np.dtype(ours).itemsize for ours, theirs in DTYPES.items()}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            fits = math.prod(entry["shape"]) * widths[entry["dtype"]] == end - begin
            plain = all(type(size) is int and 0 <= size < 1 << 48 for size in (*entry["shape"], begin, end))
        except (LookupError, TypeError, ValueError):
            fits = plain = False
        if not (fits and plain):
            raise ModelFileError(f"{path} is damaged: its array {name[:80]!r} has no type and shape that can be read.")


def _check_summaries(arrays: Arrays, summaries: Any, path: pathlib.Path) -> None:
    if not isinstance(summaries, dict) or set(summaries) != set(arrays):
        raise ModelFileError(f"{path} is damaged: its arrays are not those that it lists. Restore it from a copy.")
    for name, array in arrays.items():
        if summaries[name] != _summary(array):
            raise ModelFileError(
                f"{path} is damaged: its array {name[:80]!r} does not have the checksum that it lists."
            )


def _check_depth(body: Any, path: pathlib.Path) -> None:
    level = [body]
    for _ in range(MOST_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ModelFileError(f"{path} is damaged or hostile: its description is nested more than {MOST_DEPTH} deep.")
