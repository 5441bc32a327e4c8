"""How many programs XLA compiled: for tests and benchmarks, eager operations included."""

import contextlib
from collections.abc import Iterator

import jax

#: JAX reports the end of every compilation under this name.
_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompilationCount:
    """What was compiled in a ``with`` block, by all threads.

    Attributes:
        programs: how many programs.
        seconds: what XLA took for them.
    """

    def __init__(self) -> None:
        self.programs = 0
        self.seconds = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Count the programs that JAX compiles within the block, one for every eager operation on a new shape too.

    Example:
        >>> import jax.numpy as jnp
        >>> with count_compilations() as count:
        ...     _ = jnp.ones(7) + 1.0
        >>> count.programs > 0
        True
    """
    count = CompilationCount()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            count.programs += 1
            count.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
