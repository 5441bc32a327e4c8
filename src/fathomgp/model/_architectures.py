"""Architectures: what a hidden layer's values u(x) do to the covariance of the next layer (Dunlop et al. 2018).

    composition   k(u(x), u(x'))                             u is a map of the input space
    convolution   k with the length u(x) at x (Paciorek)     u is a length scale, in units of k's own
    injective     k(g(x), g(x')),  g = integral of u^2       u is the root of a monotone map's slope, for one input

All three are the stationary kernel k(x, x') where u is neutral: u(x) = x (or its linear image) for composition, u = 1
for the others. Hidden layers have the neutral values as their prior mean, so a deep model contains the shallow one and
is centred on it.
"""

import abc
import difflib
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fathomgp._checks import shown
from fathomgp.errors import SettingError
from fathomgp.kernels import AbstractKernel, AbstractStationary, Convolution
from fathomgp.means import AbstractMean, Constant, linear_map
from fathomgp.parameters import real
from fathomgp.tags import tagged

#: Inputs at which a hidden layer's values are known, and these values.
Knots = tuple[Float[Array, "K D"], Float[Array, "K E"]]


class AbstractArchitecture(eqx.Module):
    """How layers are joined.

    Attributes:
        by_row: whether a row of :meth:`inputs` follows from that row of ``x`` and ``h`` alone, whatever the knots.
    """

    by_row: ClassVar[bool] = True

    @abc.abstractmethod
    def inputs(self, x: Float[Array, "N D"], h: Float[Array, "N E"], knots: Knots) -> Float[Array, "N F"]:
        """What a layer's kernel sees when the layer below has the values ``h`` at ``x``."""

    @abc.abstractmethod
    def kernel(self, base: AbstractKernel) -> AbstractKernel:
        """The kernel of a layer that sees :meth:`inputs`, made of a stationary one."""

    @abc.abstractmethod
    def neutral(self, x: np.ndarray, width: int) -> AbstractMean:
        """The hidden values, as a mean function of what the layer sees, at which the next layer is stationary in x."""

    @abc.abstractmethod
    def width(self, input_dim: int, largest: int) -> int:
        """The hidden layers' number of outputs, unless the user says otherwise."""

    @abc.abstractmethod
    def kernel_dim(self, num_columns: int) -> int:
        """Of how many columns of :meth:`inputs` the stationary kernel measures distances."""

    @abc.abstractmethod
    def check(self, input_dim: int, widths: list[int]) -> None:
        """Refuse inputs or widths that the architecture cannot have."""


@tagged("architecture/composition")
class Composition(AbstractArchitecture):
    """``k(u(x), u(x'))``: layers are functions of functions (Damianou and Lawrence 2013)."""

    def inputs(self, x: Float[Array, "N D"], h: Float[Array, "N E"], knots: Knots) -> Float[Array, "N E"]:
        """The hidden values."""
        return h

    def kernel(self, base: AbstractKernel) -> AbstractKernel:
        """The base itself."""
        return base

    def neutral(self, x: np.ndarray, width: int) -> AbstractMean:
        """The identity, or a linear map to the hidden width."""
        return linear_map(x, width)

    def width(self, input_dim: int, largest: int) -> int:
        """As wide as the inputs."""
        return min(input_dim, largest)

    def kernel_dim(self, num_columns: int) -> int:
        """All of them."""
        return num_columns

    def check(self, input_dim: int, widths: list[int]) -> None:
        """Any widths will do."""


class _AbstractScalar(AbstractArchitecture):
    """Hidden layers with one output each, around 1."""

    def neutral(self, x: np.ndarray, width: int) -> AbstractMean:
        """1."""
        return Constant(real(jnp.ones(width), trainable=False))

    def width(self, input_dim: int, largest: int) -> int:
        """One output."""
        return 1

    def check(self, input_dim: int, widths: list[int]) -> None:
        """One input where the map is monotone, one output always."""
        self._check_input(input_dim)
        for width in widths:
            if width != 1:
                raise SettingError(
                    f"This architecture has hidden layers with one output, but hidden_dim asks for {width}: "
                    "leave hidden_dim=None, or use architecture='composition'."
                )

    @abc.abstractmethod
    def _check_input(self, input_dim: int) -> None:
        """Refuse numbers of inputs that make no sense."""


@tagged("architecture/convolution")
class ConvolutionArchitecture(_AbstractScalar):
    """Hidden values are local length scales: see :class:`fathomgp.kernels.Convolution`."""

    shortest: float = eqx.field(static=True, default=0.1)
    longest: float = eqx.field(static=True, default=10.0)

    def inputs(self, x: Float[Array, "N D"], h: Float[Array, "N 1"], knots: Knots) -> Float[Array, "N F"]:
        """X and, last, u."""
        return jnp.concatenate([x, h], axis=1)

    def kernel(self, base: AbstractKernel) -> AbstractKernel:
        """Paciorek's kernel around the base."""
        if not isinstance(base, AbstractStationary):
            raise SettingError(
                f"architecture='convolution' needs a stationary kernel with a lengthscale, but this is "
                f"{type(base).__name__}: use 'rbf', a Matern kernel or 'rational_quadratic'."
            )
        return Convolution(base, self.shortest, self.longest)

    def kernel_dim(self, num_columns: int) -> int:
        """All but u."""
        return num_columns - 1

    def _check_input(self, input_dim: int) -> None:
        pass


@tagged("architecture/injective")
class Injective(_AbstractScalar):
    """``k(g(x), g(x'))`` with the monotone ``g(x) = integral of max(u(z), smallest)^2 dz`` over z up to x.

    The integral runs over the knots by the trapezoidal rule, and from the nearest knot below to x itself: where the
    knots are the data, these are exactly sums over the sorted data, and a new row's answer depends on no other row.

    Attributes:
        smallest: bounds the slope of g from below, so the map cannot fold (mode collapse) nor stand still.
    """

    by_row: ClassVar[bool] = False

    smallest: float = eqx.field(static=True, default=0.3)

    def __check_init__(self):
        if self.smallest <= 0.0:
            raise SettingError(f"smallest must be positive, but it is {self.smallest}.")

    def inputs(self, x: Float[Array, "N 1"], h: Float[Array, "N 1"], knots: Knots) -> Float[Array, "N 1"]:
        """G."""
        places, values = knots
        order = jnp.argsort(places[:, 0])
        t, w = places[order, 0], self._slope(values[order, 0])
        g = jnp.concatenate([jnp.zeros(1, w.dtype), jnp.cumsum(0.5 * (w[1:] + w[:-1]) * jnp.diff(t))])
        below = jnp.clip(jnp.searchsorted(t, x[:, 0], side="right") - 1, 0, len(t) - 1)
        rest = 0.5 * (self._slope(h[:, 0]) + w[below]) * (x[:, 0] - t[below])
        return (g[below] + rest)[:, None]

    def kernel(self, base: AbstractKernel) -> AbstractKernel:
        """The base itself."""
        return base

    def kernel_dim(self, num_columns: int) -> int:
        """The one column."""
        return num_columns

    def _slope(self, u: Float[Array, " N"]) -> Float[Array, " N"]:
        return jnp.maximum(u, self.smallest) ** 2

    def _check_input(self, input_dim: int) -> None:
        if input_dim != 1:
            raise SettingError(
                f"architecture='injective' warps one input by a monotone map, but there are {input_dim}: integrals "
                "along a line have no counterpart there. Use 'composition' or 'convolution'."
            )


ARCHITECTURES: dict[str, AbstractArchitecture] = {
    "composition": Composition(),
    "convolution": ConvolutionArchitecture(),
    "injective": Injective(),
}


def find_architecture(architecture: str | AbstractArchitecture) -> AbstractArchitecture:
    """An architecture by its name, or itself."""
    if isinstance(architecture, AbstractArchitecture):
        return architecture
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        close = difflib.get_close_matches(str(architecture).lower(), ARCHITECTURES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingError(
            f"architecture={shown(architecture)} is unknown: choose one of {', '.join(map(repr, ARCHITECTURES))}.{hint}"
        )
    return ARCHITECTURES[architecture]
