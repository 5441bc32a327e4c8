"""Kernels by name, as the estimators and the command line ask for them."""

import difflib
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fathomgp._checks import shown
from fathomgp.errors import SettingError
from fathomgp.kernels._base import AbstractKernel
from fathomgp.kernels._dot_product import ArcCosine, Linear, NeuralNetwork, Polynomial
from fathomgp.kernels._stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic
from fathomgp.precision import default_float

Values = Float[Array, "..."]
#: A builder takes the lengthscale and the variance (numbers or vectors) and the shape of per-column parameters.
KernelBuilder = Callable[[Values, Values, tuple[int, ...]], AbstractKernel]


def _with_lengthscale(kind: Callable[..., AbstractKernel]) -> KernelBuilder:
    return lambda lengthscale, variance, shape: kind(jnp.broadcast_to(lengthscale, shape), variance)


def _with_weights(kind: Callable[..., AbstractKernel], **settings: int) -> KernelBuilder:
    return lambda lengthscale, variance, shape: kind(
        weight_variance=jnp.ones(shape, variance.dtype), variance=variance, **settings
    )


def _with_variances(kind: Callable[..., AbstractKernel]) -> KernelBuilder:
    return lambda lengthscale, variance, shape: kind(variance=jnp.broadcast_to(variance, shape))


KERNELS: dict[str, KernelBuilder] = {
    "rbf": _with_lengthscale(RBF),
    "matern12": _with_lengthscale(Matern12),
    "matern32": _with_lengthscale(Matern32),
    "matern52": _with_lengthscale(Matern52),
    "rational_quadratic": _with_lengthscale(RationalQuadratic),
    "periodic": _with_lengthscale(Periodic),
    "linear": _with_variances(Linear),
    "polynomial": _with_variances(Polynomial),
    "arccosine0": _with_weights(ArcCosine, order=0),
    "arccosine1": _with_weights(ArcCosine, order=1),
    "arccosine2": _with_weights(ArcCosine, order=2),
    "neural_network": _with_weights(NeuralNetwork),
}


def kernel_from_name(
    name: str, input_dim: int, *, lengthscale: ArrayLike = 1.0, variance: ArrayLike = 1.0, ard: bool = True
) -> AbstractKernel:
    """The kernel called ``name`` (a key of ``KERNELS``) for ``input_dim`` input columns.

    Args:
        name: of the kernel.
        input_dim: D, the number of input columns.
        lengthscale: a number, or one for every column; for the kernels that have one.
        variance: a number; for ``"linear"`` and ``"polynomial"`` also one for every column.
        ard: automatic relevance determination: one lengthscale (or weight variance) for every column.

    Example:
        >>> kernel_from_name("matern52", 3, lengthscale=2.0).lengthscale.shape
        (3,)
    """
    if not isinstance(name, str) or name not in KERNELS:
        raise SettingError(_unknown(name))
    if input_dim < 1:
        raise SettingError(f"input_dim must be 1 or more, but it is {input_dim}.")
    shape = (input_dim,) if ard else ()
    values = (_fitting(lengthscale, "lengthscale", shape), _fitting(variance, "variance", shape))
    return KERNELS[name](*values, shape)


def _fitting(value: ArrayLike, name: str, shape: tuple[int, ...]) -> Values:
    array = jnp.asarray(value, default_float())
    if array.shape not in ((), shape):
        allowed = f"a single number or have {shape[0]} entries" if shape else "a single number when ard=False"
        raise SettingError(f"{name} must be {allowed}, but it has shape {array.shape}.")
    return array


def _unknown(name: object) -> str:
    nearest = difflib.get_close_matches(str(name).lower(), KERNELS, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown kernel {shown(name)}.{hint} The known kernels are: {', '.join(KERNELS)}."
