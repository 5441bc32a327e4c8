"""Public datasets by name: from a directory, from the cache, or from their public home.

What is recorded here is not the checksum of a download but of the arrays made from it: a SHA-256 over ``X``, ``y`` (or
``Y``) and ``test_idx``, each as its name, dtype and shape followed by its little-endian bytes in row order. So every
copy is checked in the same way, wherever it came from and however it was packed.
"""

import hashlib
import http.client
import os
import pathlib
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int

from fathomgp._outputs import replacing
from fathomgp._places import cache_directory
from fathomgp.data._catalogue import CATALOGUE, Arrays, Entry
from fathomgp.data._tables import near_miss
from fathomgp.errors import DataError

_CHECKED = ("X", "y", "Y", "test_idx")


@dataclass(frozen=True)
class Dataset:
    """A named dataset in its original units.

    Attributes:
        name: the name it was asked for by.
        X: inputs (N, D) in the dtype they are stored in (images are uint8).
        Y: targets (N, P), labels counting from 0; ``None`` for unsupervised sets.
        target_kind: "real", "class" or "none".
        test_idx: row numbers of the published test sets, one split a row.
        feature_names: names of the inputs, where the source has them.
        target_names: names of the targets, where the source has them.
        description: one line.
        source: the public home.
        extras: further arrays of the set (second targets, dates, groups, ...).
    """

    name: str
    X: np.ndarray
    Y: Float64[np.ndarray, "N P"] | None
    target_kind: str
    test_idx: Int[np.ndarray, "splits n"] | None
    feature_names: tuple[str, ...] | None
    target_names: tuple[str, ...] | None
    description: str
    source: str
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


class DatasetRow(NamedTuple):
    """A line of :func:`list_datasets`."""

    name: str
    num_rows: int
    num_features: int
    task: str
    source: str
    local: bool


def list_datasets(*, directory: str | pathlib.Path | None = None) -> list[DatasetRow]:
    """Every named dataset, and whether it can be loaded without a download."""
    return [
        DatasetRow(e.name, e.num_rows, e.num_features, e.task, e.home.source, _find(e.name, directory) is not None)
        for e in CATALOGUE.values()
    ]


def load_dataset(name: str, *, directory: str | pathlib.Path | None = None) -> Dataset:
    """A dataset by name: from ``directory`` (default: ``FATHOMGP_DATA``), else the cache, else a download."""
    entry = _entry(name)
    path = _find(name, directory) or fetch_dataset(name)
    arrays = _read_archive(path)
    if array_checksum(arrays) != entry.checksum:
        raise DataError(f"{path} does not hold the published data of {name!r} (its SHA-256 differs): replace the file.")
    return _as_dataset(entry, arrays)


def fetch_dataset(name: str, *, address: str | None = None) -> pathlib.Path:
    """Download a dataset into the cache and return the file; wrong data are refused and leave nothing behind.

    The checksum is that of the resulting arrays, see the top of this module.

    Args:
        name: a name of :func:`list_datasets`.
        address: a mirror that holds the files of the public home under the same names.
    """
    entry = _entry(name)
    home = entry.home
    remedy = f"put {name}.npz into a directory and set FATHOMGP_DATA to it"
    if home.parse is None:
        raise DataError(f"{name!r} cannot be downloaded automatically; it lives at {home.source}: {remedy}.")
    base = (address or home.address).rstrip("/")
    try:
        arrays = home.parse(lambda file: _download(f"{base}/{file}"))
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{name!r} cannot be downloaded from {base} ({error}): check the connection or {remedy}."
        ) from error
    except (ValueError, IndexError) as error:
        raise DataError(f"{base} does not hold {name!r} in the known format ({error}): {remedy}.") from error
    if array_checksum(arrays) != entry.checksum:
        raise DataError(f"{base} does not hold the published data of {name!r} (their SHA-256 differs): {remedy}.")
    return _write_archive(cache_directory() / f"{name}.npz", arrays)


def array_checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the arrays that define a dataset: ``X``, ``y`` or ``Y``, ``test_idx``, in this order."""
    digest = hashlib.sha256()
    for name in _CHECKED:
        if name in arrays:
            array = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<"))
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _download(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode("utf-8")


def _find(name: str, directory: str | pathlib.Path | None) -> pathlib.Path | None:
    places = [directory or os.environ.get("FATHOMGP_DATA"), cache_directory()]
    files = [pathlib.Path(place) / f"{name}.npz" for place in places if place]
    return next((file for file in files if file.is_file()), None)


def _read_archive(path: pathlib.Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a readable .npz archive ({error}): replace or delete the file.") from error


def _write_archive(path: pathlib.Path, arrays: Arrays) -> pathlib.Path:
    """Write beside the final place and rename, so that no half-written file is ever found there."""
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def _as_dataset(entry: Entry, arrays: Arrays) -> Dataset:
    X = arrays["X"] if "X" in arrays else arrays["Y"]
    Y = arrays["y"][:, None] if "y" in arrays else arrays.get("Y")
    kind = "none" if entry.task == "unsupervised" else "class" if entry.task.endswith("classes") else "real"
    known = {*_CHECKED, "X_names", "Y_names"}
    return Dataset(
        name=entry.name,
        X=X,
        Y=None if kind == "none" or Y is None else Y.astype(np.float64),
        target_kind=kind,
        test_idx=arrays.get("test_idx"),
        feature_names=_names(arrays, "X_names"),
        target_names=_names(arrays, "Y_names"),
        description=entry.description,
        source=entry.home.source,
        extras={name: array for name, array in arrays.items() if name not in known},
    )


def _names(arrays: Arrays, name: str) -> tuple[str, ...] | None:
    return tuple(arrays[name].tolist()) if name in arrays else None


def _entry(name: str) -> Entry:
    if name not in CATALOGUE:
        hint = near_miss(name, CATALOGUE) or f" the names are {', '.join(CATALOGUE)}."
        raise DataError(f"There is no dataset {name!r}:{hint}")
    return CATALOGUE[name]
