r"""Priors of hyperparameters: what is believed of lengthscales, variances and noise before any data are seen.

Where rows are few or columns many the evidence is flat, and its peak is an accident: 60 rows of 300 columns are fitted
to perfection by short lengthscales in a few columns that mean nothing. A prior belongs to a
:class:`~fathomgp.parameters.Parameter` and counts once, beside the log evidence or its bound:

.. math:: \log p(y \mid \theta) + \sum_j \log p(\theta_j)

Densities are those of the unconstrained coordinates (of log lengthscale, for instance), so that the maximum does not
depend on a Jacobian that nobody chose.

Example:
    >>> from fathomgp.kernels import RBF
    >>> kernel = with_priors(RBF(lengthscale=2.0), {"lengthscale": LogNormal(0.0, 1.0)})
    >>> round(float(log_prior(kernel)), 3)
    -1.159
"""

import abc
import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fathomgp.errors import SettingError
from fathomgp.parameters import Parameter, is_parameter
from fathomgp.tags import tagged

T = TypeVar("T")

#: Standard deviations that the unit interval is long: from inputs in the unit cube to standardised ones.
_UNIT_INTERVAL = math.sqrt(12.0)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class AbstractPrior(abc.ABC):
    """The density of a parameter's unconstrained coordinate. A prior is a constant: it hashes."""

    @abc.abstractmethod
    def log_density(self, parameter: Parameter) -> Float[Array, "..."]:
        """One number per entry of the parameter."""


@tagged("prior/log-normal")
@dataclasses.dataclass(frozen=True)
class LogNormal(AbstractPrior):
    """``log value ~ N(location, scale^2)``.

    Attributes:
        location: the mean of the value's logarithm.
        scale: its standard deviation.
    """

    location: float = 0.0
    scale: float = 1.0

    def __post_init__(self):
        _check_scale(self.scale)

    def log_density(self, parameter: Parameter) -> Float[Array, "..."]:
        """With the slope of ``log value`` in the unconstrained coordinate: 1 unless there is a lower bound."""
        raw = parameter.raw
        log_value = raw if not parameter.lower else jnp.log(parameter.value)
        return _log_normal(log_value, self.location, self.scale) + (raw - log_value)


@tagged("prior/normal")
@dataclasses.dataclass(frozen=True)
class Normal(AbstractPrior):
    """``value ~ N(location, scale^2)``, for parameters on the real line.

    Attributes:
        location: one number, or a nested tuple in the shape of the parameter.
        scale: the standard deviation.
    """

    location: Any = 0.0
    scale: float = 1.0

    def __post_init__(self):
        _check_scale(self.scale)

    def log_density(self, parameter: Parameter) -> Float[Array, "..."]:
        """Of every entry."""
        location = jnp.broadcast_to(jnp.asarray(np.asarray(self.location), parameter.raw.dtype), parameter.shape)
        return _log_normal(parameter.raw, location, self.scale)


@tagged("prior/flat-towards-zero")
@dataclasses.dataclass(frozen=True)
class FlatTowardsZero(AbstractPrior):
    """``log p(log value) = -value / scale``: any small value is as likely as another, a large one is not.

    For noise: a log-normal at the usual noise would cost a hundred nats where data have none. It is improper, which
    changes neither a maximum nor a sampler that data hold.

    Attributes:
        scale: the value at which a nat is paid.
    """

    scale: float = 1.0

    def __post_init__(self):
        _check_scale(self.scale)

    def log_density(self, parameter: Parameter) -> Float[Array, "..."]:
        """Zero for small values."""
        return -parameter.value / self.scale


Priors = Mapping[str, AbstractPrior | None]


def lengthscale_prior(num_inputs: int) -> LogNormal:
    r"""The prior of Hvarfner et al. (2024), for standardised inputs.

    .. math:: \log \ell \sim N(\sqrt 2 + \tfrac12 \log D + \log \sqrt{12},\; 3)

    Distances grow with the square root of the number of inputs, and so do the lengthscales of functions that vary
    equally. Theirs is for the unit cube, which is :math:`\sqrt{12}` standard deviations wide.

    References:
        Hvarfner, Hellsten and Nardi (2024), Vanilla Bayesian optimization performs great in high dimensions.
    """
    return LogNormal(math.sqrt(2.0) + 0.5 * math.log(num_inputs) + math.log(_UNIT_INTERVAL), math.sqrt(3.0))


def log_prior(tree: Any) -> Float[Array, ""] | float:
    """The sum of the log densities of all parameters of ``tree`` that are learned and have a prior; 0.0 without any."""
    densities = [
        jnp.sum(node.prior.log_density(node))
        for node in jax.tree.leaves(tree, is_leaf=is_parameter)
        if is_parameter(node) and node.trainable and node.prior is not None
    ]
    return sum(densities[1:], start=densities[0]) if densities else 0.0


def log_prior_and_gradient(learned: T, dtype: Any) -> tuple[Float[Array, ""], T]:
    """:func:`log_prior` in a dtype, and its gradient with respect to the learned part of a model."""

    def value(learned: T) -> Float[Array, ""]:
        return jnp.asarray(log_prior(learned), dtype)

    return jax.value_and_grad(value)(learned)


def with_priors(tree: T, priors: Priors) -> T:
    """A copy of ``tree`` whose parameters have the priors of their names (``lengthscale``, ``variance``, ...).

    A parameter that has a prior keeps it: its owner knows better. ``None`` stands for no prior.
    """

    def attach(path: Any, node: Any) -> Any:
        prior = priors.get(_name(path)) if is_parameter(node) and node.prior is None else None
        return node if prior is None else dataclasses.replace(node, prior=prior)

    return jax.tree_util.tree_map_with_path(attach, tree, is_leaf=is_parameter)


def without_priors(tree: T) -> T:
    """A copy of ``tree`` whose parameters have no priors."""

    def strip(node: Any) -> Any:
        return dataclasses.replace(node, prior=None) if is_parameter(node) else node

    return jax.tree.map(strip, tree, is_leaf=is_parameter)


def parameter_names(tree: Any) -> tuple[str, ...]:
    """The names under which :func:`with_priors` finds parameters."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_parameter)
    return tuple(sorted({_name(path) for path, node in found if is_parameter(node)}))


def check_priors(priors: Any, names: tuple[str, ...]) -> Priors:
    """Refuse priors of parameters that do not exist."""
    if not isinstance(priors, Mapping):
        raise SettingError(
            "priors must be 'weak', None, or a mapping from names of parameters to priors such as "
            f"{{'lengthscale': LogNormal(0.0, 1.0)}}, but it is {priors!r}."
        )
    for name, prior in priors.items():
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingError(f"priors names {name!r}, but the model's parameters are {', '.join(names)}.{hint}")
        if prior is not None and not isinstance(prior, AbstractPrior):
            raise SettingError(
                f"The prior of {name!r} must be a prior such as LogNormal(0.0, 1.0), but it is {prior!r}."
            )
    return priors


def _name(path: Any) -> str:
    return str(getattr(path[-1], "name", path[-1])) if path else ""


def _log_normal(x: Array, location: Any, scale: float) -> Array:
    return -0.5 * ((x - location) / scale) ** 2 - math.log(scale) - _HALF_LOG_2PI


def _check_scale(scale: float) -> None:
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0.0):
        raise SettingError(f"scale must be a positive number, but it is {scale!r}.")
