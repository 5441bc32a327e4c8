"""Mean functions of GP layers: zero, constant, and the linear maps that keep a deep GP from forgetting its inputs."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from fathomgp.errors import DataError, SettingError
from fathomgp.parameters import Parameter, real
from fathomgp.precision import default_float
from fathomgp.tags import tagged

Inputs = Float[Array, "N D"] | Float[np.ndarray, "N D"]


class AbstractMean(eqx.Module):
    """A mean function ``m(x)`` with ``output_dim`` outputs; it computes in the dtype of its inputs."""

    #: P, the number of outputs.
    output_dim: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N P"]:
        """``m(x)``, row by row."""


@tagged("mean/zero")
class Zero(AbstractMean):
    """``m(x) = 0``."""

    output_dim: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        _check_size(self.output_dim, "output_dim")

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N P"]:
        """Zeros."""
        return jnp.zeros((x.shape[0], self.output_dim), x.dtype)


@tagged("mean/constant")
class Constant(AbstractMean):
    """``m(x) = value``.

    Args:
        value: one number for every output, (P,).
    """

    value: Parameter

    def __init__(self, value: ArrayLike | Parameter):
        self.value = real(value)
        if len(self.value.shape) != 1:
            raise SettingError(f"value must be a vector, one number an output, but it has shape {self.value.shape}.")

    @property
    def output_dim(self) -> int:  # type: ignore[override]
        """P, the number of outputs."""
        return self.value.shape[0]

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N P"]:
        """The value, N times."""
        return jnp.broadcast_to(self.value.value.astype(x.dtype)[None, :], (x.shape[0], self.output_dim))


@tagged("mean/linear")
class Linear(AbstractMean):
    """``m(x) = x W + b``.

    Args:
        weights: W, (D, P).
        bias: b, (P,); ``None`` = none.
        trainable: whether arrays given for W and b are learned. Deep GPs keep their inner means fixed.

    Example:
        >>> padding(2, 3)(jnp.array([[1.0, 2.0]])).tolist()
        [[1.0, 2.0, 0.0]]
    """

    weights: Parameter
    bias: Parameter | None

    def __init__(
        self, weights: ArrayLike | Parameter, bias: ArrayLike | Parameter | None = None, *, trainable: bool = False
    ):
        self.weights = real(weights, trainable=trainable)
        self.bias = None if bias is None else real(bias, trainable=trainable)
        if len(self.weights.shape) != 2:
            raise SettingError(f"weights must be a matrix (inputs, outputs), but it has shape {self.weights.shape}.")
        if self.bias is not None and self.bias.shape != (self.output_dim,):
            raise SettingError(f"bias must have {self.output_dim} entries, but it has shape {self.bias.shape}.")

    @property
    def output_dim(self) -> int:  # type: ignore[override]
        """P, the number of outputs."""
        return self.weights.shape[1]

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N P"]:
        """``x W + b``."""
        input_dim = self.weights.shape[0]
        if x.shape[1] != input_dim:
            raise DataError(f"This linear mean takes {input_dim} input columns, but x has {x.shape[1]}.")
        outputs = x @ self.weights.value.astype(x.dtype)
        return outputs if self.bias is None else outputs + self.bias.value.astype(x.dtype)[None, :]


def identity(dim: int, *, dtype: Any = None) -> Linear:
    """``m(x) = x``, fixed."""
    return padding(dim, dim, dtype=dtype)


def padding(input_dim: int, output_dim: int, *, dtype: Any = None) -> Linear:
    """``m(x) = [x, 0]``, fixed: the inputs and then zeros, for a layer wider than its inputs."""
    _check_size(input_dim, "input_dim")
    if output_dim < input_dim:
        raise SettingError(
            f"Padding cannot map {input_dim} inputs to fewer outputs ({output_dim}): use pca or a larger output_dim."
        )
    return Linear(jnp.asarray(np.eye(input_dim, output_dim), dtype or default_float()))


def pca(x: Inputs, output_dim: int) -> Linear:
    """``m(x) = x V``, fixed, with V the top right-singular vectors of the centred inputs: for a narrowing layer.

    The inputs are centred to find V only: no bias is subtracted. On standardised inputs this is the plain singular
    value decomposition of Salimbeni and Deisenroth (2017); elsewhere it does not spend a direction on the offset. Each
    vector's largest entry is positive, so the same inputs give the same map on every machine.
    """
    _check_size(output_dim, "output_dim")
    if output_dim > x.shape[1]:
        raise SettingError(
            f"PCA cannot map {x.shape[1]} inputs to more outputs ({output_dim}): use padding or a smaller output_dim."
        )
    points = np.asarray(x, np.float64)
    centred = points - points.mean(axis=0)
    _, eigenvectors = np.linalg.eigh(centred.T @ centred)  # D x D: cheap however many rows there are
    top = eigenvectors[:, ::-1][:, :output_dim]
    signs = np.sign(np.take_along_axis(top, np.abs(top).argmax(axis=0)[None, :], axis=0))
    return Linear(jnp.asarray(top * signs, x.dtype))


def linear_map(x: Inputs, output_dim: int) -> Linear:
    """The fixed linear mean of an inner layer: identity, PCA to narrow, padding to widen.

    Salimbeni and Deisenroth, Doubly stochastic variational inference for deep Gaussian processes (2017).
    """
    input_dim = x.shape[1]
    if output_dim < input_dim:
        return pca(x, output_dim)
    return padding(input_dim, output_dim, dtype=x.dtype)


def _check_size(size: int, name: str) -> None:
    if size < 1:
        raise SettingError(f"{name} must be 1 or more, but it is {size}.")
