"""What all likelihoods refuse in targets."""

import numpy as np

from fathomgp.errors import DataError


def refuse_infinite(y: np.ndarray) -> None:
    """Infinite targets are an error; NaN means missing."""
    refuse(np.isinf(y), y, "is infinite", "Remove that row, or set it to NaN if the value is missing.")


def refuse(bad: np.ndarray, y: np.ndarray, fault: str, remedy: str) -> None:
    """Raise a sentence about the first true entry of ``bad``."""
    if np.any(bad):
        row, output = (int(index) for index in np.argwhere(bad)[0])
        raise DataError(f"y has the value {y[row, output]:g} in row {row}, output {output}, which {fault}. {remedy}")
