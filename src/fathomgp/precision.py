"""Floating point: the float64 scope of the public entry points, and constants scaled by dtype.

Importing fathomgp changes no global setting. The public entry points (estimators, predictives, ``load`` and the
command line) run inside a float64 scope instead, through the decorator :func:`double_precision`. Who calls kernels,
layers, algorithms or posteriors directly chooses the precision with ``jax.enable_x64``.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fathomgp.errors import ForkedProcessError

F = TypeVar("F", bound=Callable[..., Any])


def double_precision(function: F) -> F:
    """Run ``function`` with 64-bit floats switched on, whatever the global flag says.

    The scope is thread-local and ends with the call, so it must not wrap a generator: a ``yield`` would leak it.
    """

    @functools.wraps(function)
    def scoped(*args, **kwargs):
        refuse_forked()
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return scoped  # type: ignore[return-value]


#: The process that first used JAX through fathomgp.
_first_process: list[int] = []


def refuse_forked() -> None:
    """Raise in a process that was forked from one that had used JAX: it lacks JAX's threads and would wait for ever."""
    if not _first_process:
        _first_process.append(os.getpid())
    if _first_process[0] != os.getpid():
        raise ForkedProcessError(
            f"Process {os.getpid()} was forked from one that had used JAX, and would wait for JAX's threads for ever: "
            "start processes with multiprocessing.get_context('spawn') or 'forkserver', or with joblib's loky."
        )


def default_float() -> jnp.dtype:
    """The float dtype of new parameters: float64 when 64-bit floats are on, else float32."""
    return jnp.zeros(()).dtype


def variance_floor(dtype: Any) -> float:
    """The smallest variance kept, as a share of a unit scale: 1e-12 in float64, 1e-6 or so in float32.

    Differences of large numbers lose a few ``eps`` of their scale: below that a variance is rounding.
    """
    return max(1e-12, 10.0 * float(jnp.finfo(dtype).eps))


def clamp_variance(variance: jax.Array) -> jax.Array:
    """Bound a variance below by :func:`variance_floor`; the gradient through a clamped entry is zero."""
    return jnp.maximum(variance, jnp.asarray(variance_floor(variance.dtype), variance.dtype))
