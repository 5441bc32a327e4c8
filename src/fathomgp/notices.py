"""What a fit has to say: warnings kept for the fit that they belong to.

``warnings.catch_warnings`` belongs to the process: a fit that recorded with it would also hold what other threads said
meanwhile. So every warning of fathomgp goes through :func:`tell`, and a fit opens a :func:`collect` of its own, in a
context variable: other threads, and fits inside callbacks, have theirs.
"""

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fathomgp.errors import FathomWarning

F = TypeVar("F", bound=Callable[..., Any])

#: A warning that was kept: its category and its sentence.
Notice = tuple[type[FathomWarning], str]

_kept: contextvars.ContextVar[list[Notice] | None] = contextvars.ContextVar("fathomgp_notices", default=None)


def tell(sentence: str, category: type[FathomWarning], *, stacklevel: int = 1) -> None:
    """Warn, or keep the warning for the fit under way in this context.

    Args:
        sentence: the warning.
        category: its class.
        stacklevel: as in ``warnings.warn``, counted from the caller.
    """
    kept = _kept.get()
    if kept is None:
        warnings.warn(sentence, category, stacklevel=stacklevel + 1)
    else:
        kept.append((category, sentence))


@contextlib.contextmanager
def collect() -> Iterator[list[Notice]]:
    """Keep what is told inside, in the list that this gives; nothing is warned of meanwhile."""
    kept: list[Notice] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def in_this_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for another thread, where it tells what it has to tell to the fit that started the thread."""
    context = contextvars.copy_context()
    # A context can be entered by one thread at a time: each call takes a copy.
    return lambda *arguments: context.copy().run(function, *arguments)


def keeps_notices(fit: F) -> F:
    """A ``fit`` whose estimator keeps what was told as ``messages_``, and whose caller is warned when it ends well.

    An error speaks for itself: a warning beside it, where warnings are errors, would stand in its place.
    """

    @functools.wraps(fit)
    def fit_and_tell(self, *arguments, **settings):
        with collect() as kept:
            fitted = fit(self, *arguments, **settings)
        self.messages_ = list(dict.fromkeys([*self.messages_, *(sentence for _, sentence in kept)]))
        for category, sentence in dict.fromkeys(kept):
            warnings.warn(sentence, category, stacklevel=2)
        return fitted

    return fit_and_tell  # type: ignore[return-value]
