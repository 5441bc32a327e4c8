"""What every kernel asks of its arguments: shapes that fit, columns that exist, dtypes that follow the inputs."""

import operator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from fathomgp._checks import shown
from fathomgp.errors import SettingError
from fathomgp.parameters import Parameter, positive

_LAST_COLUMN = (1 << 31) - 1
ActiveDims = tuple[int, ...] | None


def positive_number(value: ArrayLike | Parameter, name: str) -> Parameter:
    """A single positive number."""
    parameter = _positive(value, name)
    if parameter.shape != ():
        raise SettingError(f"{name} must be a single number, but it has shape {parameter.shape}.")
    return parameter


def positive_per_column(value: ArrayLike | Parameter, name: str, active_dims: ActiveDims) -> Parameter:
    """A positive number, or one for every input column (automatic relevance determination)."""
    parameter = _positive(value, name)
    if len(parameter.shape) > 1:
        raise SettingError(f"{name} must be a number or a vector, but it has shape {parameter.shape}.")
    if active_dims is not None:
        _check_length(parameter, name, len(active_dims))
    return parameter


def checked_dims(active_dims: ActiveDims) -> ActiveDims:
    """``active_dims`` as a tuple of distinct column numbers."""
    if active_dims is None:
        return None
    try:
        dims = tuple(operator.index(dim) for dim in active_dims)
    except TypeError:
        dims = ()
    if not dims or min(dims) < 0 or max(dims) > _LAST_COLUMN or len(set(dims)) < len(dims):
        raise SettingError(f"active_dims must name distinct columns, counted from 0, but it is {shown(active_dims)}.")
    return dims


def active_columns(x: Float[Array, "N D"], active_dims: ActiveDims) -> Float[Array, "N A"]:
    """The columns of ``x`` that a kernel looks at."""
    if active_dims is None:
        return x
    if max(active_dims) >= x.shape[1]:  # JAX would silently read the last column instead
        raise SettingError(
            f"active_dims {active_dims} reaches beyond the inputs, which have {x.shape[1]} columns "
            f"(0 to {x.shape[1] - 1}): name existing columns."
        )
    return x[:, np.asarray(active_dims)]


def like(parameter: Parameter, x: Float[Array, "N D"]) -> Float[Array, ""]:
    """The value of a single-number parameter in the dtype of ``x``."""
    return parameter.value.astype(x.dtype)


def row_like(parameter: Parameter, x: Float[Array, "N D"], name: str) -> Float[Array, "1 D"] | Float[Array, "1 1"]:
    """The value of a parameter as a row that multiplies ``x``, in the dtype of ``x``."""
    _check_length(parameter, name, x.shape[1])
    return parameter.value.astype(x.dtype).reshape(1, -1)


def log_like(parameter: Parameter, x: Float[Array, "N D"]) -> Float[Array, ""]:
    """The logarithm of a positive parameter, without the detour through ``exp`` where it can be avoided."""
    logarithm = parameter.raw if parameter.lower == 0 else jnp.log(parameter.value)
    return logarithm.astype(x.dtype)


def _positive(value: ArrayLike | Parameter, name: str) -> Parameter:
    parameter = positive(value, name=name)
    if parameter.lower is None or parameter.lower < 0:
        raise SettingError(f"{name} must stay positive: make its parameter with fathomgp.parameters.positive.")
    return parameter


def _check_length(parameter: Parameter, name: str, num_columns: int) -> None:
    if parameter.shape not in ((), (num_columns,)):
        raise SettingError(
            f"{name} has {parameter.shape[0]} entries, but the kernel looks at {num_columns} input columns: "
            "give one entry for each column, or a single number."
        )
