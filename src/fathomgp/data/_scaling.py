"""Standardising columns: moments that can be merged, and the shift and scale made from them."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float, Float64

from fathomgp.errors import DataError
from fathomgp.tags import tagged

# A standard deviation below this many units in the last place of the mean is rounding, not variation.
_ROUNDING = 32.0


class Moments(eqx.Module):
    """Count, mean and sum of squared deviations of each column, gathered block by block.

        M2 = sum_i w_i (x_i - mean)^2,    variance = M2 / count

    Two summaries merge without a second pass over the data and without the cancellation of ``E[x^2] - E[x]^2``
    (Chan, Golub & LeVeque 1983), so a stream of blocks and one array give the same figures.

    Example:
        >>> import numpy as np
        >>> whole = Moments.empty(1).update(np.array([[1.0], [2.0]])).update(np.array([[6.0]]))
        >>> float(whole.mean[0]), float(whole.M2[0])
        (3.0, 14.0)
    """

    count: Float64[np.ndarray, " D"]
    mean: Float64[np.ndarray, " D"]
    M2: Float64[np.ndarray, " D"]

    @classmethod
    def empty(cls, dim: int) -> "Moments":
        """The summary of no rows."""
        return cls(np.zeros(dim), np.zeros(dim), np.zeros(dim))

    @classmethod
    def of(
        cls,
        X: Float[np.ndarray, "N D"],
        observed: Bool[np.ndarray, "N D"] | None = None,
        weight: Float[np.ndarray, " N"] | None = None,
    ) -> "Moments":
        """The summary of one block, in two passes.

        Args:
            X: the rows.
            observed: entries that count; all by default.
            weight: how often each row counts; once by default, 0 for padding.
        """
        if observed is None and weight is None:
            return cls._of_all(X.astype(np.float64))
        weights = np.ones(X.shape) if observed is None else observed.astype(np.float64)
        if weight is not None:
            weights = weights * weight[:, None]
        values = np.where(weights > 0, X, 0.0).astype(np.float64)  # what does not count may well be NaN
        count = weights.sum(axis=0)
        mean = _share((weights * values).sum(axis=0), count)
        # The mean of a large offset is off by a few units in its last place: the residuals know by how much.
        mean = mean + _share((weights * (values - mean)).sum(axis=0), count)
        return cls(count, mean, (weights * np.square(values - mean)).sum(axis=0))

    @classmethod
    def _of_all(cls, X: Float64[np.ndarray, "N D"]) -> "Moments":
        """The summary of rows that all count once: a stream of many rows feels the difference."""
        rows = max(1, len(X))
        mean = X.sum(axis=0) / rows
        mean = mean + (X - mean).sum(axis=0) / rows
        return cls(np.full(X.shape[1], float(len(X))), mean, np.square(X - mean).sum(axis=0))

    def update(
        self,
        block: Float[np.ndarray, "N D"],
        observed: Bool[np.ndarray, "N D"] | None = None,
        weight: Float[np.ndarray, " N"] | None = None,
    ) -> "Moments":
        """The summary with one more block of rows."""
        return self.merge(Moments.of(block, observed, weight))

    def merge(self, other: "Moments") -> "Moments":
        """The summary of both sets of rows."""
        count = self.count + other.count
        delta = other.mean - self.mean
        share = _share(other.count, count)
        spread = np.square(delta) * self.count * share
        return Moments(count, self.mean + delta * share, self.M2 + other.M2 + spread)

    @property
    def std(self) -> Float64[np.ndarray, " D"]:
        """The standard deviation (divided by the count, not count - 1); 0 where nothing was counted."""
        return np.sqrt(_share(self.M2, self.count))


@tagged("data/standardizer")
class Standardizer(eqx.Module):
    """The map ``z = (x - shift) / scale`` of each column, and its inverse.

    A column that does not vary gets scale 1, so it turns into zeros and never into NaN. Both maps follow the dtype and
    the kind (NumPy or JAX) of what they are given.

    Example:
        >>> import numpy as np
        >>> X = np.array([[1.0, 7.0], [3.0, 7.0]])
        >>> Standardizer.fit(X).transform(X).tolist()
        [[-1.0, 0.0], [1.0, 0.0]]
    """

    shift: Float[np.ndarray, " D"] | Float[Array, " D"]
    scale: Float[np.ndarray, " D"] | Float[Array, " D"]

    @classmethod
    def identity(cls, dim: int) -> "Standardizer":
        """The map that changes nothing."""
        return cls(np.zeros(dim), np.ones(dim))

    @classmethod
    def fit(
        cls,
        X: Float[np.ndarray, "N D"],
        observed: Bool[np.ndarray, "N D"] | None = None,
        weight: Float[np.ndarray, " N"] | None = None,
    ) -> "Standardizer":
        """Zero mean and unit variance over the rows of ``X`` (arguments as in :meth:`Moments.of`)."""
        with np.errstate(over="ignore", invalid="ignore"):  # reported by from_moments as a sentence
            moments = Moments.of(X, observed, weight)
        return cls.from_moments(moments)

    @classmethod
    def from_moments(cls, moments: Moments) -> "Standardizer":
        """Zero mean and unit variance, given a summary of the rows."""
        std = moments.std
        if not (np.all(np.isfinite(moments.mean)) and np.all(np.isfinite(std))):
            column = int(np.argmin(np.isfinite(moments.mean) & np.isfinite(std)))
            raise DataError(
                f"The values of column {column} are too large to be squared in floating point: "
                "give the column in a larger unit."
            )
        varies = std > _ROUNDING * np.finfo(np.float64).eps * np.abs(moments.mean)
        return cls(moments.mean, np.where(varies, std, 1.0))

    def transform(
        self, x: Float[Array, "N D"] | Float[np.ndarray, "N D"]
    ) -> Float[Array, "N D"] | Float[np.ndarray, "N D"]:
        """From the user's units to standard ones."""
        return (x - self.shift.astype(x.dtype)[None, :]) / self.scale.astype(x.dtype)[None, :]

    def inverse(
        self, z: Float[Array, "N D"] | Float[np.ndarray, "N D"]
    ) -> Float[Array, "N D"] | Float[np.ndarray, "N D"]:
        """From standard units back to the user's."""
        return z * self.scale.astype(z.dtype)[None, :] + self.shift.astype(z.dtype)[None, :]


def _share(part: Float64[np.ndarray, " D"], count: Float64[np.ndarray, " D"]) -> Float64[np.ndarray, " D"]:
    """``part / count``, and 0 where the count is 0."""
    return np.divide(part, count, out=np.zeros_like(count), where=count > 0)
