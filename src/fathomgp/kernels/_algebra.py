"""Sums and products of kernels, which are kernels again."""

import functools
import operator
from typing import Any

from jaxtyping import Array, Float

from fathomgp.errors import SettingError
from fathomgp.kernels._base import AbstractKernel
from fathomgp.tags import tagged


@tagged("kernel/sum")
class Sum(AbstractKernel):
    """``k(x, x') = sum_i k_i(x, x')``: the kernel of a sum of independent functions. Nested sums become one.

    Example:
        >>> from fathomgp.kernels import RBF, Linear, White
        >>> len((RBF() + Linear() + White(0.1)).parts)
        3
    """

    parts: tuple[AbstractKernel, ...]

    def __init__(self, *parts: AbstractKernel):
        self.parts = flattened(Sum, parts)

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The sum of the parts' matrices."""
        return functools.reduce(operator.add, [part.gram(x1, x2) for part in self.parts])

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The sum of the parts' diagonals."""
        return functools.reduce(operator.add, [part.diagonal(x) for part in self.parts])


@tagged("kernel/product")
class Product(AbstractKernel):
    """``k(x, x') = prod_i k_i(x, x')``: similar where every part says so. Nested products become one."""

    parts: tuple[AbstractKernel, ...]

    def __init__(self, *parts: AbstractKernel):
        self.parts = flattened(Product, parts)

    def gram(self, x1: Float[Array, "N D"], x2: Float[Array, "M D"] | None = None) -> Float[Array, "N M"]:
        """The elementwise product of the parts' matrices."""
        return functools.reduce(operator.mul, [part.gram(x1, x2) for part in self.parts])

    def diagonal(self, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """The product of the parts' diagonals."""
        return functools.reduce(operator.mul, [part.diagonal(x) for part in self.parts])


def flattened(kind: type[Sum] | type[Product], parts: tuple[Any, ...]) -> tuple[AbstractKernel, ...]:
    """``parts`` with the parts of every part of the same ``kind`` in its place."""
    if not parts:
        raise SettingError(f"{kind.__name__} needs at least one kernel.")
    for part in parts:
        if not isinstance(part, AbstractKernel):
            raise SettingError(
                f"{kind.__name__} takes kernels, but one part is {part!r}: write a number as Constant({part!r})."
            )
    return sum((part.parts if isinstance(part, kind) else (part,) for part in parts), ())
