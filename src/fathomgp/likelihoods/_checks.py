"""What all likelihoods refuse in targets, and in numbers of outputs."""

import dataclasses

import numpy as np

from fathomgp.errors import DataError, SettingError
from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.parameters import Parameter


def refuse_infinite(y: np.ndarray) -> None:
    """Infinite targets are an error; NaN means missing."""
    refuse(np.isinf(y), y, "is infinite", "Remove that row, or set it to NaN if the value is missing.")


def refuse_sizes(likelihood: AbstractLikelihood, num_outputs: int) -> None:
    """A parameter is one number, or has a value an output: any other size is an error."""
    for field in dataclasses.fields(likelihood):
        value = getattr(likelihood, field.name)
        if isinstance(value, Parameter) and value.shape not in ((), (num_outputs,)):
            outputs = "one output" if num_outputs == 1 else f"{num_outputs} outputs"
            raise SettingError(
                f"{type(likelihood).__name__}'s {field.name} has the shape {value.shape}, but there "
                f"{'is' if num_outputs == 1 else 'are'} {outputs}: give one number, or a list of {num_outputs}."
            )


def refuse(bad: np.ndarray, y: np.ndarray, fault: str, remedy: str) -> None:
    """Raise a sentence about the first true entry of ``bad``."""
    if np.any(bad):
        row, output = (int(index) for index in np.argwhere(bad)[0])
        raise DataError(f"y has the value {y[row, output]:g} in row {row}, output {output}, which {fault}. {remedy}")
