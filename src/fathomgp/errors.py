"""Errors and warnings: each message is a sentence with the cause, the offending value and the remedy."""


class FathomError(Exception):
    """Base of every error that fathomgp raises on purpose."""


class DataError(FathomError, ValueError):
    """The data cannot be used as they are: wrong shape, missing or non-finite values, unknown columns."""


class SettingError(FathomError, ValueError):
    """An option is unknown, out of range or does not fit the other options."""


class NumericalError(FathomError, ArithmeticError):
    """The computation broke down in floating point."""


class NotPositiveDefiniteError(NumericalError):
    """A covariance matrix has no Cholesky factor even with the largest jitter that the policy allows."""


class NonFiniteError(NumericalError):
    """NaN or infinity appeared where only finite numbers make sense."""


class DivergenceError(NumericalError):
    """A sampler ran away from what the data say, however short its steps."""


class ModelFileError(FathomError, ValueError):
    """A saved model or checkpoint is damaged, foreign, or written by a newer version."""


class WriteError(FathomError, OSError):
    """A file could not be written: no room, or no permission."""


class LostProcessError(FathomError, RuntimeError):
    """Another process of a distributed fit has gone."""


class ForkedProcessError(FathomError, RuntimeError):
    """This process was forked from one that had used JAX, whose threads it lacks."""


class FathomWarning(UserWarning):
    """Base of every warning that fathomgp gives."""


class JitterWarning(FathomWarning):
    """A covariance matrix needed more than the default jitter; the message says how much."""


class DataWarning(FathomWarning):
    """The data are usable but something about them deserves attention."""


class FitWarning(FathomWarning):
    """A fit ended in a way that its user should know of."""
