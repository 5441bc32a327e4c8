"""Class labels: from what users hand over (text, numbers, booleans, categories) to 0, 1, ..., K-1 and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64

from fathomgp._checks import shown
from fathomgp.data._tables import Targets, _loaded, index_of, place_of
from fathomgp.errors import DataError, SettingError


def read_labels(
    y: Any, *, missing: str = "error", num_rows: int | None = None, classes: np.ndarray | None = None
) -> tuple[Targets, np.ndarray]:
    """Labels as numbers 0.0, 1.0, ... (N, 1) with a mask of the known ones, and the classes, sorted.

    Args:
        y: one label a row. ``None``, NaN and pandas' NA mean that a label is missing.
        missing: "error" refuses missing labels, "mask" takes them as not known.
        num_rows: the number of rows of X, to be matched.
        classes: those of an earlier fit; labels beside them are refused.

    Example:
        >>> targets, classes = read_labels(["spam", "ham", "spam"])
        >>> targets.Y[:, 0].tolist(), classes.tolist()
        ([1.0, 0.0, 1.0], ['ham', 'spam'])
    """
    if missing not in ("error", "mask"):
        raise SettingError(f"missing must be 'error' or 'mask', but it is {missing!r}.")
    values, name = _label_column(y)
    places = index_of(y)
    if num_rows is not None and len(values) != num_rows:
        raise DataError(f"X has {num_rows} rows but y has {len(values)}: give one label per row.")
    known = ~_is_missing(values)
    if missing == "error" and not known.all():
        place = place_of(places, int(np.argmin(known)))
        raise DataError(
            f"y contains NaN (first in {place}): give every row a label, or pass missing='mask' for unknown ones."
        )
    rows = np.flatnonzero(known)
    labels = _one_type(values[known], lambda i: place_of(places, int(rows[i])))
    found = _distinct(labels) if classes is None else classes
    codes = np.zeros((len(values), 1))
    codes[known, 0] = _encode(labels, found, lambda i: place_of(places, int(rows[i])))
    return Targets(codes, known[:, None], True, None if name is None else (name,)), found


def _label_column(y: Any) -> tuple[np.ndarray, str | None]:
    """The labels in one dimension, missing ones as ``None`` or NaN, and the column's name."""
    if y is None:
        raise DataError("A fit requires y to be passed, but the target y is None: give one label per row of X.")
    if (_loaded(y, "pandas", "DataFrame") or _loaded(y, "polars", "DataFrame")) and y.shape[1] == 1:
        y = y[y.columns[0]]
    name = getattr(y, "name", None)
    if _loaded(y, "pandas", "Series"):
        y = y.to_numpy() if y.dtype.kind in "biuf" else y.astype(object).where(y.notna(), None).to_numpy()
    elif _loaded(y, "polars", "Series"):
        y = y.to_list()
    return _one_dimension(_as_labels(y)), name if isinstance(name, str) and name else None


def _as_labels(y: Any) -> np.ndarray:
    try:
        return np.asarray(y)
    except Exception as error:
        raise DataError(f"y holds no labels ({shown(error)}): give one label per row of X.") from error


def _one_dimension(array: np.ndarray) -> np.ndarray:
    from sklearn.utils.validation import column_or_1d

    if array.size == 0:
        raise DataError("y is empty: give one label per row of X.")
    if array.ndim != 1 and array.shape[1:] != (1,):
        raise DataError(f"y has the shape {array.shape}, but one label a row is needed: give y one dimension.")
    if array.dtype.kind not in "OUbiuf":
        raise DataError(f"Unknown label type: y has the dtype {array.dtype}: give text, whole numbers or booleans.")
    return np.ravel(column_or_1d(array, warn=True))


def _is_missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), bool)
    return np.array([value is None or (isinstance(value, float) and value != value) for value in values])


def _one_type(labels: np.ndarray, place: Callable[[int], str]) -> np.ndarray:
    """Text or whole numbers; arrays of objects that are numbers become arrays of numbers."""
    if labels.dtype.kind == "O":
        text = np.array([isinstance(label, str) for label in labels], bool)
        if text.any() and not text.all():
            where = place(int(np.argmin(text)))
            raise DataError(f"y mixes text with other labels ({labels[~text][0]!r} in {where}): make all labels text.")
        labels = labels if text.any() else _as_labels(labels.tolist())
        if labels.ndim != 1 or labels.dtype.kind == "c":
            raise DataError(f"Unknown label type: y holds {shown(labels[0])}: give text, whole numbers or booleans.")
    if labels.dtype.kind == "f":
        fractional = ~np.isfinite(labels) | (labels != np.floor(labels))
        if fractional.any():
            where = place(int(np.argmax(fractional)))
            raise DataError(
                f"Unknown label type: y is continuous ({labels[fractional][0]:g} in {where}), not labels of classes: "
                "use DeepGPRegressor for numbers, or bin them."
            )
    return labels


def _distinct(labels: np.ndarray) -> np.ndarray:
    try:
        classes = np.unique(labels)
    except TypeError as error:
        raise DataError(
            f"Unknown label type: y holds {shown(labels[0])}: give text, whole numbers or booleans."
        ) from error
    if len(classes) < 2:
        only = f"a single class ({classes[0]!s})" if len(classes) else "no known label"
        raise DataError(f"y holds {only}, but at least 2 classes are needed: add rows of another class.")
    return classes


def _encode(labels: np.ndarray, classes: np.ndarray, place: Callable[[int], str]) -> Float64[np.ndarray, " N"]:
    unknown = ~np.isin(labels, classes)
    if unknown.any():
        where, label = place(int(np.argmax(unknown))), labels[unknown][0]
        names = ", ".join(str(name) for name in classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise DataError(f"y has the label {label!s} in {where}, which the fit did not see: its classes are {names}.")
    return np.searchsorted(classes, labels).astype(np.float64)
