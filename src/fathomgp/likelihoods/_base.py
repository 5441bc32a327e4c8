"""The contract that every likelihood keeps."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp._checks import check_types_first


class AbstractLikelihood(eqx.Module):
    """How an observation ``y`` arises from latent function values ``f``: ``p(y | f)``.

    Shapes: ``f``, ``mean`` and ``variance`` are (N, Q) with ``Q = num_latents(P)``; ``y`` is (N, P) in floating point
    (labels and counts too: 0.0, 1.0, 2.0, ...). Every method that scores ``y`` returns one figure an output, (N, P), so
    that a caller can mask missing outputs with ``jnp.where(observed, figure, 0)``; rows of ``y`` with missing outputs
    hold 0.0 there, which every likelihood accepts.

    ``mean`` and ``variance`` describe independent Gaussians on ``f``.
    """

    #: Whether real-valued targets are standardised before the fit (regression) or left as they are (labels, counts).
    scales_targets: ClassVar[bool]
    #: "real", "count" or "class": the kind of values that y takes.
    target_kind: ClassVar[str]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        check_types_first(cls)

    @abc.abstractmethod
    def num_latents(self, num_outputs: int) -> int:
        """Q, the number of latent functions that ``num_outputs`` outputs need."""

    @abc.abstractmethod
    def log_prob(self, f: Float[Array, "N Q"], y: Float[Array, "N P"]) -> Float[Array, "N P"]:
        """``log p(y | f)``."""

    @abc.abstractmethod
    def expected_log_prob(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``E[log p(y | f)]`` under ``f ~ N(mean, variance)``: the data term of variational bounds."""

    @abc.abstractmethod
    def log_z(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"], alpha: float = 1.0
    ) -> Float[Array, "N P"]:
        """``log E[p(y | f)^alpha]``: the data term of (power) EP; at ``alpha=1`` the predictive log density."""

    @abc.abstractmethod
    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """Mean and variance of ``y`` when ``f ~ N(mean, variance)``."""

    @abc.abstractmethod
    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """``P(Y <= y)`` when ``f ~ N(mean, variance)``."""

    @abc.abstractmethod
    def sample(self, f: Float[Array, "N Q"], *, key: PRNGKeyArray) -> Float[Array, "N P"]:
        """One draw of ``y`` given ``f``."""

    @abc.abstractmethod
    def check_targets(self, y: np.ndarray) -> None:
        """Refuse targets that this likelihood cannot have produced, with a :class:`~fathomgp.errors.DataError`.

        ``y`` is (N, P) in the user's units; missing entries are NaN.
        """
