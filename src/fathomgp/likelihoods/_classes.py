"""What all classification likelihoods share."""

import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fathomgp._checks import whole_number
from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._checks import refuse, refuse_infinite

#: More classes than this are no classes.
_MOST = 100_000


class AbstractClassLikelihood(AbstractLikelihood):
    """Labels 0, 1, ..., K-1. The latents of one output are columns of :meth:`probabilities`; outputs lie abreast.

    A final class implements :meth:`probabilities`; the moments and the distribution function of the label, read as a
    number, follow from it.
    """

    scales_targets: ClassVar[bool] = False
    target_kind: ClassVar[str] = "class"
    #: K, the number of classes.
    num_classes: eqx.AbstractVar[int]

    @abc.abstractmethod
    def probabilities(self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, "N K"]:
        """``P(Y = k)`` of one output, for all classes, when ``f ~ N(mean, variance)``; rows sum to one."""

    def predict_moments(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]
    ) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
        """Mean and variance of the label, read as a number."""
        table = self._probability_table(mean, variance)
        labels = jnp.arange(self.num_classes, dtype=mean.dtype)[None, None, :]
        average = jnp.sum(table * labels, axis=-1)
        return average, jnp.sum(table * (labels - average[..., None]) ** 2, axis=-1)

    def cdf(
        self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"], y: Float[Array, "N P"]
    ) -> Float[Array, "N P"]:
        """The sum of the probabilities of the labels up to ``y``."""
        labels = jnp.arange(self.num_classes, dtype=mean.dtype)[None, None, :]
        table = self._probability_table(mean, variance)
        return jnp.minimum(jnp.sum(jnp.where(labels <= y[..., None], table, 0.0), axis=-1), 1.0)

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse everything but 0, 1, ..., K-1."""
        refuse_infinite(y)
        known = np.isnan(y) | np.isin(y, np.arange(self.num_classes))
        refuse(
            ~known,
            y,
            f"is not one of the labels 0 to {self.num_classes - 1}",
            f"Encode the {self.num_classes} classes as whole numbers from 0.",
        )

    def _probability_table(self, mean: Float[Array, "N Q"], variance: Float[Array, "N Q"]) -> Float[Array, "N P K"]:
        width = self.num_latents(1)
        table = self.probabilities(mean.reshape(-1, width), variance.reshape(-1, width))
        return table.reshape(mean.shape[0], -1, self.num_classes)


def one_hot(y: Float[Array, "N P"], num_classes: int) -> Bool[Array, "R K"]:
    """Labels as rows of a Boolean table, outputs below one another."""
    return y.reshape(-1, 1) == jnp.arange(num_classes, dtype=y.dtype)[None, :]


def check_num_classes(num_classes: int) -> int:
    """Refuse fewer than two classes."""
    return whole_number(num_classes, "num_classes", 2, _MOST)
