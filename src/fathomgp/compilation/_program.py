"""Functions that compile once per kind of arguments, into the bounded store."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import numpy as np

from fathomgp.compilation._options import CompilerOptions
from fathomgp.compilation._store import programs
from fathomgp.kept import keep_compiled_if_asked

_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans")

P = ParamSpec("P")
T = TypeVar("T")


class _Compiled(NamedTuple):
    """An executable from arrays to arrays, and what it returns beside them."""

    run: Callable[..., Any]
    static_result: Any


class Program(Generic[P, T]):
    """A pure function, compiled once per structure, shapes and dtypes of its arguments: see :func:`program`."""

    def __init__(self, function: Callable[P, T], options: CompilerOptions):
        functools.update_wrapper(self, function)
        self._function, self._options = function, dict(options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's value; within another traced function it becomes a part of that."""
        arrays, static = eqx.partition((args, kwargs), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._function(*args, **kwargs)
        static_leaves, static_structure = jax.tree.flatten(static)
        key = (
            self,
            structure,
            static_structure,
            tuple((type(leaf), leaf) for leaf in static_leaves),
            tuple(map(_kind, leaves)),
            _surroundings(),
        )
        compiled = programs.get(key, lambda: self._compile(leaves, structure, static))
        return eqx.combine(compiled.run(*leaves), compiled.static_result)

    def __get__(self, instance: Any, owner: Any) -> Any:
        """As a method, bound to its object like a function."""
        return self if instance is None else functools.partial(self, instance)

    def _compile(self, leaves: list[Any], structure: Any, static: Any) -> _Compiled:
        _keep_if_asked()
        results: list[Any] = []

        # A function of its own for every program: JAX's caches let go of what belongs to it together with it.
        def traced(*leaves: Any) -> Any:
            args, kwargs = eqx.combine(jax.tree.unflatten(structure, leaves), static)
            arrays, rest = eqx.partition(self._function(*args, **kwargs), eqx.is_array)
            results.append(rest)
            return arrays

        traced.__name__ = traced.__qualname__ = getattr(self._function, "__name__", "program")
        executable = jax.jit(traced, compiler_options=self._options or None).lower(*leaves).compile()
        return _Compiled(executable, results[-1])


@overload
def program(function: Callable[P, T], *, options: CompilerOptions | None = None) -> Program[P, T]: ...
@overload
def program(*, options: CompilerOptions) -> Callable[[Callable[P, T]], Program[P, T]]: ...
def program(function: Any = None, *, options: CompilerOptions | None = None) -> Any:
    """``equinox.filter_jit`` whose programs live in the library's bounded store.

    Arrays of the arguments are traced; all else, Python's numbers too, is part of the program.

    Args:
        function: a pure function of arrays, modules and whatever hashes.
        options: XLA's compiler options, see :mod:`fathomgp.compilation._options`.

    Example:
        >>> import jax.numpy as jnp
        >>> double = program(lambda x: 2.0 * x)
        >>> double(jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    if function is None:
        return lambda function: Program(function, options or {})
    return Program(function, options or {})


@functools.cache
def _keep_if_asked() -> None:
    """Once per process, before its first compilation."""
    keep_compiled_if_asked()


def _kind(leaf: Any) -> Hashable:
    """What of an array a program depends on. An array that is committed to devices decides where it runs."""
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)  # keys have none
        return leaf.shape, leaf.dtype, weak, leaf.sharding if leaf.committed else None
    return np.shape(leaf), leaf.dtype, False, None


def _surroundings() -> Hashable:
    """The settings of JAX that change what a function computes."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)
