"""From what users hand over to arrays: bad input is refused here, in one sentence, before any work.

NumPy arrays, lists, pandas and polars frames and pyarrow tables are accepted. Neither pandas nor polars nor pyarrow is
imported for that: an object of theirs can only arrive when they are already loaded.
"""

import difflib
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from fathomgp._checks import shown
from fathomgp.data._files import read_blocks
from fathomgp.errors import DataError, DataWarning, SettingError
from fathomgp.notices import tell

#: A value so many times as far from the median of its column as the others are leaves no digits for them.
_FAR_APART = 1e6
_NUMBERS = "biuf"  # NumPy's kinds: bool, integer, unsigned, float


class ColumnTypeError(DataError, TypeError):
    """A value is not a number at all: also a ``TypeError``, as ``float(value)`` would raise."""


class Targets(NamedTuple):
    """What :func:`read_targets` returns.

    Attributes:
        Y: the targets, 0.0 where missing.
        observed: true where a target was measured.
        squeeze: whether y came as one dimension, so that predictions should too.
        names: the columns' names, if they have any.
    """

    Y: Float64[np.ndarray, "N P"]
    observed: Bool[np.ndarray, "N P"]
    squeeze: bool
    names: tuple[str, ...] | None


def read_inputs(
    X: Any,
    *,
    feature_names: Sequence[str] | None = None,
    num_features: int | None = None,
    name: str = "X",
    estimator: Any = None,
    reset: bool | None = None,
    min_rows: int | None = None,
) -> tuple[Float64[np.ndarray, "N D"], tuple[str, ...] | None]:
    """The inputs as a float64 array, and the names of their columns (``None`` for arrays).

    At predict time frames must have the columns of the fit, in its order; arrays are taken by position.

    Args:
        X: the table.
        feature_names: the names seen by the fit.
        num_features: the number of columns seen by the fit.
        name: how messages call the table.
        estimator: a scikit-learn estimator. scikit-learn then keeps or checks its ``n_features_in_`` and
            ``feature_names_in_`` and words the complaint about a difference; the two arguments above are not needed.
        reset: true for a fit, false for a prediction; by default a fit is a call that names no earlier columns.
        min_rows: the fewest rows accepted: 2 for a fit, 1 for a prediction.
    """
    fitting = (feature_names is None and num_features is None) if reset is None else reset
    table = _as_table(X, name)
    _check_size(table, min_rows or (2 if fitting else 1))
    if estimator is not None:
        _check_contract(estimator, X, table, reset=fitting)
    else:
        _check_columns(table, feature_names, num_features)
    values = _as_numbers(table)
    _check_finite(table, values, remedy="fill such entries or drop their rows")
    if fitting:
        _name_dominating_cells(table, values, np.ones(values.shape, bool))
    return values, table.names


def read_targets(
    y: Any, *, missing: str = "error", kind: str = "real", num_rows: int | None = None, more: bool = False
) -> Targets:
    """The targets as a float64 array (N, P) with a mask of the measured entries.

    Whether the values suit a likelihood (whole counts, labels from 0) is for its ``check_targets`` to say.

    Args:
        y: one or two dimensions; a Series or a frame keeps its names.
        missing: "error" refuses NaN, "mask" takes it as not measured.
        kind: "real", "count" or "class": constant labels get no warning here.
        num_rows: the number of rows of X, to be matched.
        more: whether these rows continue earlier ones: then a target may be constant, or missing throughout.
    """
    if missing not in ("error", "mask"):
        raise SettingError(f"missing must be 'error' or 'mask', but it is {missing!r}.")
    if y is None:
        raise DataError("A fit requires y to be passed, but the target y is None: give one value per row of X.")
    table = _as_table(y, "y", vector_allowed=True)
    if num_rows is not None and table.num_rows != num_rows:
        raise DataError(f"X has {num_rows} rows but y has {table.num_rows}: give one target per row.")
    _check_size(table, 1)
    values = _as_numbers(table)
    observed = ~np.isnan(values) if missing == "mask" else np.ones(values.shape, bool)
    _check_finite(table, np.where(observed, values, 0.0), remedy="drop such rows, or pass missing='mask' for NaN")
    if not more:
        _check_observed(table, values, observed, warn_constant=kind != "class")
        _name_dominating_cells(table, values, observed)
    return Targets(np.where(observed, values, 0.0), observed, table.is_vector, table.names)


def read_table(path: str | pathlib.Path, *, target: str | list[str] | None) -> tuple[Any, Any]:
    """The input columns (a pandas frame) and the target of a CSV or Parquet file.

    The index tells where a row is: the line of a CSV file, the row of a Parquet file. The target is a Series for one
    name, a frame for a list of names, and ``None`` for ``None``: a table to predict.
    """
    path = pathlib.Path(path)
    (frame,) = read_blocks(path)
    targets = [target] if isinstance(target, str) else list(target or [])
    for column in targets:
        if column not in frame.columns:
            known = [str(label) for label in frame.columns]
            hint = near_miss(column, known) or f" its columns are {_listing(known)}."
            raise DataError(f"{path.name} has no target column {column!r}:{hint}")
    X = frame.drop(columns=targets)
    if X.shape[1] == 0:
        raise DataError(f"{path.name} has no column beside the target: give at least one input column.")
    _as_numbers(_as_table(X, path.name))  # refuses text by the file's name
    return X, None if target is None else frame[target]


def near_miss(word: str, options: Iterable[str]) -> str:
    """The end of a sentence that proposes the option most like ``word``; nothing when none is like it.

    Example:
        >>> near_miss("bostn", ["boston", "yacht"])
        " did you mean 'boston'?"
    """
    options = list(options)
    lowered = {option.lower(): option for option in options}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f" did you mean {lowered[close[0]]!r}?" if close else ""


class _Table(NamedTuple):
    """Columns before they are known to be numbers. ``array`` is set where they came as one array.

    ``index`` is that of a pandas object: it knows the rows by other numbers once they were split or read in blocks.
    """

    name: str
    columns: Sequence[np.ndarray]
    names: tuple[str, ...] | None
    array: np.ndarray | None
    num_rows: int
    is_vector: bool
    index: Any = None

    def place(self, row: int) -> str:
        """Where a row is, for the end of a sentence."""
        return place_of(self.index, row)

    def label(self, column: int) -> str:
        """How a sentence begins that complains about a column."""
        if self.is_vector:
            return self.name
        return f"Column {self.names[column]!r} of {self.name}" if self.names else f"Column {column} of {self.name}"


def place_of(index: Any, row: int) -> str:
    """A row by its number and, where the index of a pandas object tells more, by its line or its label.

    Example:
        >>> place_of(None, 3)
        'row 3'
    """
    if index is None:
        return f"row {row}"
    label = index[row]
    if index.name in ("line", "row"):
        return f"{index.name} {label}"
    return f"row {row}" if isinstance(label, int | np.integer) and label == row else f"row {row}, labelled {label!s}"


def index_of(data: Any) -> Any:
    """The index of a pandas frame or series, else ``None``."""
    return data.index if _loaded(data, "pandas", "DataFrame", "Series") else None


def _as_table(data: Any, name: str, *, vector_allowed: bool = False) -> _Table:
    """Split ``data`` into columns; with ``vector_allowed`` one dimension passes as one column."""
    if _loaded(data, "scipy.sparse", "sparray", "spmatrix"):
        raise DataError(f"{name} is a sparse matrix, but only dense data are supported: pass {name}.toarray().")
    frame = _frame_columns(data)
    if frame is not None:
        labels, columns = frame
        return _Table(name, columns, _check_labels(labels, name), None, len(data), False, index_of(data))
    label = getattr(data, "name", None)
    array = _as_array(data, name)
    if array.ndim == 1 and vector_allowed:
        names = (label,) if isinstance(label, str) and label else None
        return _Table(name, [array], names, array[:, None], len(array), True, index_of(data))
    _check_dimensions(array, name)
    return _Table(name, list(array.T), None, array, len(array), False)


def _frame_columns(data: Any) -> tuple[list[Any], list[np.ndarray]] | None:
    """Labels and columns of a frame of pandas, polars or pyarrow, else ``None``."""
    if _loaded(data, "pandas", "DataFrame"):
        return list(data.columns), [_pandas_column(data.iloc[:, j]) for j in range(data.shape[1])]
    if _loaded(data, "polars", "DataFrame"):
        return list(data.columns), [_polars_column(column) for column in data.get_columns()]
    if _loaded(data, "pyarrow", "Table"):
        return list(data.column_names), [_plainly(column.to_numpy, column) for column in data.columns]
    return None


def _polars_column(series: Any) -> np.ndarray:
    import polars

    # Whole numbers of 128 bits and decimals are numbers too, though NumPy has no type for them.
    return _plainly((series.cast(polars.Float64) if series.dtype.is_numeric() else series).to_numpy, series)


def _plainly(convert: Callable[[], Any], data: Any) -> np.ndarray:
    """What a conversion to NumPy gives; whatever it raises, the data cannot be used."""
    try:
        return convert()
    except Exception as error:
        kind = getattr(data, "type", getattr(data, "dtype", type(data).__name__))
        raise DataError(
            f"Values of the kind {kind} cannot be read ({shown(error)}): turn them into numbers."
        ) from error


def _loaded(value: Any, module: str, *types: str) -> bool:
    """Whether ``value`` is of a type of a module, without importing it."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in types))


def _pandas_column(series: Any) -> np.ndarray:
    # Nullable integers and booleans would arrive as objects; their dtype says that they are numbers.
    if series.dtype.kind in _NUMBERS:
        return _plainly(lambda: series.to_numpy(dtype=np.float64, na_value=np.nan), series)
    return _plainly(series.to_numpy, series)


def _as_array(data: Any, name: str) -> np.ndarray:
    if _loaded(data, "pandas", "Series"):
        return _pandas_column(data)
    if _loaded(data, "polars", "Series"):
        return _polars_column(data)
    if isinstance(data, np.ma.MaskedArray):
        return np.ma.filled(_plainly(lambda: data.astype(np.float64), data), np.nan)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise DataError(f"The rows of {name} differ in length: give every row the same number of values.") from error
    except Exception as error:
        raise DataError(f"{name} cannot be read as numbers ({shown(error)}): give an array or a table.") from error
    # NumPy turns a list of numbers and words into words: keep the values apart, to name the offending column.
    return np.asarray(data, dtype=object) if array.dtype.kind in "US" and isinstance(data, list | tuple) else array


def _check_dimensions(array: np.ndarray, name: str) -> None:
    if array.ndim == 2:
        return
    shape = f"{name} has the shape {array.shape}, but rows and columns are needed:"
    if array.ndim == 0:
        raise DataError(f"{name} is a single value ({array.item()!r}), but rows and columns are needed: pass a table.")
    if array.ndim == 1:
        raise DataError(
            f"{shape} Reshape your data with {name}.reshape(-1, 1) if it is one column, "
            f"or with {name}.reshape(1, -1) if it is one row."
        )
    raise DataError(f"{shape} Reshape your data with {name}.reshape(len({name}), -1).")


def _check_labels(labels: list[Any], name: str) -> tuple[str, ...] | None:
    """The labels if they are text; labels of another kind (0, 1, 2, ...) count as none."""
    text = [label for label in labels if isinstance(label, str)]
    if not text:
        return None
    if len(text) < len(labels):
        raise ColumnTypeError(
            f"Some columns of {name} are named by text and some are not: "
            f"make all names text, for example with {name}.columns = {name}.columns.astype(str)."
        )
    repeated = [label for label in dict.fromkeys(text) if text.count(label) > 1]
    if repeated:
        raise DataError(f"{name} has several columns named {repeated[0]!r}: rename or drop all but one.")
    return tuple(text)


def _check_size(table: _Table, min_rows: int) -> None:
    rows, columns = table.num_rows, len(table.columns)
    if columns == 0:
        raise DataError(
            f"{table.name} has 0 feature(s) (shape=({rows}, 0)) while a minimum of 1 is required: add a column."
        )
    if rows < min_rows:
        raise DataError(
            f"{table.name} has {rows} sample{'' if rows == 1 else 's'}, but at least {min_rows} "
            f"{'is' if min_rows == 1 else 'are'} needed: add rows."
        )


def _check_contract(estimator: Any, X: Any, table: _Table, *, reset: bool) -> None:
    """scikit-learn's own bookkeeping of column names and counts, with a hint at misspelt names."""
    from sklearn.utils.validation import validate_data

    try:
        validate_data(estimator, X if table.array is None else table.array, reset=reset, skip_check_array=True)
    except ValueError as error:
        expected = getattr(estimator, "feature_names_in_", ())
        hints = [f"{new!r}:{near_miss(new, expected)}" for new in table.names or () if new not in expected]
        raise DataError(f"{error}{' '.join(hint for hint in hints if hint.endswith('?'))}") from error


def _check_columns(table: _Table, feature_names: Sequence[str] | None, num_features: int | None) -> None:
    if feature_names is not None and table.names is not None:
        _check_names(table.name, table.names, tuple(feature_names))
    expected = len(feature_names) if num_features is None and feature_names is not None else num_features
    if expected is not None and len(table.columns) != expected:
        raise DataError(
            f"{table.name} has {len(table.columns)} features, but the model is expecting {expected} features as input: "
            "give the columns of the fit."
        )


def _check_names(name: str, names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if names == expected:
        return
    unknown = [label for label in names if label not in expected]
    missing = [label for label in expected if label not in names]
    if not unknown and not missing:
        raise DataError(
            f"The columns of {name} are in another order than at the fit: "
            f"put them into the order {_listing(expected, most=20)}."
        )
    faults = [f"unknown {_listing(unknown)}"] * bool(unknown) + [f"missing {_listing(missing)}"] * bool(missing)
    hints = [f"{label!r}:{near_miss(label, missing)}" for label in unknown if near_miss(label, missing)]
    remedy = " ".join(hints) or f"the model needs {_listing(expected, most=20)}."
    raise DataError(f"The columns of {name} are not those of the fit ({'; '.join(faults)}): {remedy}")


def _as_numbers(table: _Table) -> Float64[np.ndarray, "N D"]:
    if table.array is not None and table.array.dtype.kind in _NUMBERS:
        return np.asarray(table.array, np.float64)
    return np.column_stack([_column_as_numbers(table, j) for j in range(len(table.columns))])


def _column_as_numbers(table: _Table, j: int) -> Float64[np.ndarray, " N"]:
    column, label = table.columns[j], table.label(j)
    kind = column.dtype.kind
    if kind in _NUMBERS and column.ndim == 1:
        return column.astype(np.float64)
    if kind == "c":
        raise DataError(f"Complex data not supported: {label} is complex, so pass its real and imaginary parts apart.")
    if kind in "mM":
        raise DataError(f"{label} holds dates: turn them into numbers, for example days since the first one.")
    values = _objects_as_numbers(table, j)
    # An array of objects has one dtype for all columns, so numbers may hide there; a frame's column chose it.
    if table.array is None:
        raise DataError(f"{label} has the dtype object: convert it to numbers (for example astype(float)) or drop it.")
    return values


def _objects_as_numbers(table: _Table, j: int) -> Float64[np.ndarray, " N"]:
    """A column of Python objects. What cannot be read is named first; text that looks like a number is text too."""
    column, label = table.columns[j], table.label(j)
    values, text = np.empty(len(column)), None
    for row, value in enumerate(column):
        is_text = isinstance(value, str | bytes)
        text = row if is_text and text is None else text
        try:
            values[row] = value
        except OverflowError:
            raise DataError(f"{label} holds a number beyond all floats in {table.place(row)}: scale it.") from None
        except (TypeError, ValueError) as error:
            if is_text:
                raise _holds_text(table, j, row) from None
            what = f"something that is no number ({error}, in {table.place(row)})"
            raise ColumnTypeError(f"{label} holds {what}: encode it or drop it.") from error
    if text is not None:
        raise _holds_text(table, j, text)
    return values


def _holds_text(table: _Table, j: int, row: int) -> DataError:
    what = f"text ({str(table.columns[j][row])[:40]!r} in {table.place(row)})"
    return DataError(f"{table.label(j)} holds {what}: encode it as numbers or drop it.")


def _check_finite(table: _Table, values: Float64[np.ndarray, "N D"], *, remedy: str) -> None:
    finite = np.isfinite(values)
    if finite.all():
        return
    row, column = (int(i) for i in np.argwhere(~finite)[0])
    what = "NaN" if np.isnan(values[row, column]) else "inf"
    raise DataError(f"{table.label(column)} contains {what} (first in {table.place(row)}): {remedy}.")


def _check_observed(
    table: _Table, values: Float64[np.ndarray, "N P"], observed: Bool[np.ndarray, "N P"], *, warn_constant: bool
) -> None:
    """Every target needs a value, and a constant one deserves a warning."""
    for j in range(values.shape[1]):
        seen = values[observed[:, j], j]
        if len(seen) == 0:
            raise DataError(f"{table.label(j)} has no measured value: drop this target.")
        if warn_constant and len(seen) > 1 and np.all(seen == seen[0]):
            message = f"{table.label(j)} is constant ({seen[0]:g}): the fit can only repeat this value."
            tell(message, DataWarning, stacklevel=4)


def _name_dominating_cells(table: _Table, values: Float64[np.ndarray, "N D"], known: Bool[np.ndarray, "N D"]) -> None:
    """Warn of values beside which all others of their column look alike once the column is standardised."""
    for j in range(values.shape[1]):
        column = values[known[:, j], j]
        with np.errstate(over="ignore"):
            apart = np.abs(column - np.median(column))
        usual = np.median(apart[apart > 0.0]) if np.any(apart > 0.0) else np.inf
        far = apart / _FAR_APART > usual
        if far.any():
            worst = int(np.argmax(apart))
            row = int(np.flatnonzero(known[:, j])[worst])
            others = f" and {far.sum() - 1} more" if far.sum() > 1 else ""
            tell(
                f"{table.label(j)} holds {column[worst]:g} in {table.place(row)}{others}, {apart[worst] / usual:.0e} "
                "times as far from the middle as the others are: beside it they all look alike, so check it, drop the "
                "row or take logarithms.",
                DataWarning,
                stacklevel=4,
            )


def _listing(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
