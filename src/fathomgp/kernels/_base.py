"""The contract that every kernel keeps."""

import abc
from typing import TYPE_CHECKING, Any

import equinox as eqx
from jaxtyping import Array, Float

from fathomgp._checks import check_types_first

if TYPE_CHECKING:
    from fathomgp.kernels._algebra import Product, Sum


class AbstractKernel(eqx.Module):
    """A covariance function ``k(x, x')``: symmetric and positive semi-definite.

    A final kernel implements :meth:`gram` and :meth:`diagonal`. It adds no jitter: that is the work of
    :mod:`fathomgp.linalg`. ``kernel(x)`` and ``kernel(x, x2)`` are short for :meth:`gram`.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        check_types_first(cls)

    @abc.abstractmethod
    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The matrix of ``k(x1_i, x2_j)``.

        ``x2=None`` means the same points as ``x1``. The difference matters to white noise, which is correlated with
        itself only: ``gram(x)`` holds it on the diagonal, ``gram(x, x2)`` does not, even where points coincide.
        """

    @abc.abstractmethod
    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The variances ``k(x_i, x_i)``: the diagonal of ``gram(x)`` without forming it."""

    def __call__(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """Short for :meth:`gram`."""
        return self.gram(x1, x2)

    def __add__(self, other: "AbstractKernel") -> "Sum":
        """``(k1 + k2)(x, x') = k1(x, x') + k2(x, x')``."""
        from fathomgp.kernels._algebra import Sum

        return Sum(self, other)

    def __mul__(self, other: "AbstractKernel") -> "Product":
        """``(k1 k2)(x, x') = k1(x, x') k2(x, x')``."""
        from fathomgp.kernels._algebra import Product

        return Product(self, other)
