"""Float64 inside a user's own program: derivatives, batches and compilation stay in float64 with JAX's flag off.

``jax.enable_x64`` as a scope ends with the Python call, but JAX transposes, batches and lowers what was traced later,
with the flag as the user has it: constants that a rule makes then are float32 and meet float64. One primitive carries
the traced function, and its rules open the scope again. Rows and answers have whatever dtype they have outside.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from fathomgp.compilation._program import program
from fathomgp.precision import refuse_forked

P = ParamSpec("P")
T = TypeVar("T")
Pattern = tuple[bool, ...]

#: Traced functions that are kept, so that derivatives taken outside ``jax.jit`` are traced and compiled once.
_KEPT = 128

_double_p = Primitive("double_precision")
_double_p.multiple_results = True


def double_program(function: Callable[P, T]) -> Callable[P, T]:
    """:func:`program` that computes in float64 whatever JAX's flag, under a user's ``jit``, ``grad`` and ``vmap`` too.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> cube = double_program(lambda x: (x.astype(jnp.float64) ** 3).astype(x.dtype))
        >>> with jax.enable_x64(False):
        ...     slope = jax.grad(cube)(jnp.ones(()))
        >>> float(slope), slope.dtype.name
        (3.0, 'float32')
    """
    compiled = program(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_forked()
        arrays, static = eqx.partition((args, kwargs), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            with jax.enable_x64(True):
                return compiled(*args, **kwargs)
        static_leaves, static_structure = jax.tree.flatten(static)
        kinds = tuple(_Kind.of(leaf) for leaf in leaves)
        closed, out_structure, rest = _trace(
            function, structure, static_structure, tuple((type(x), x) for x in static_leaves), kinds
        )
        return eqx.combine(jax.tree.unflatten(out_structure, _double_p.bind(*leaves, closed=closed)), rest)

    return call


class _Kind(NamedTuple):
    """What of an array a traced function depends on."""

    shape: tuple[int, ...]
    dtype: Any
    weak: bool

    @classmethod
    def of(cls, leaf: Any) -> "_Kind":
        """That of ``leaf``."""
        return cls(tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False)))

    def struct(self) -> jax.ShapeDtypeStruct:
        """A stand-in for the array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)


@functools.lru_cache(_KEPT)
def _trace(
    function: Callable, structure: Any, static_structure: Any, static_leaves: tuple, kinds: tuple[_Kind, ...]
) -> tuple[ClosedJaxpr, Any, Any]:
    static, results = jax.tree.unflatten(static_structure, [leaf for _, leaf in static_leaves]), []

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        arrays, rest = eqx.partition(function(*args, **kwargs), eqx.is_array)
        values, out_structure = jax.tree.flatten(arrays)
        results.append((out_structure, rest))
        return values

    closed = _staged(flat, kinds)
    return closed, *results[-1]


def _staged(function: Callable, kinds: Any) -> ClosedJaxpr:
    with jax.enable_x64(True):
        return jax.make_jaxpr(function)(*(kind.struct() for kind in kinds))


def _evaluate(*args: Any, closed: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(closed)(*args)


_run = program(_evaluate)


@_double_p.def_impl
def _impl(*args: Any, closed: ClosedJaxpr) -> list[Any]:
    with jax.enable_x64(True):
        return _run(*map(jnp.asarray, args), closed=closed)


@_double_p.def_abstract_eval
def _abstract(*args: Any, closed: ClosedJaxpr) -> Any:
    return closed.out_avals


_lowering = mlir.lower_fun(_evaluate, multiple_results=True)


def _lower(context: Any, *args: Any, closed: ClosedJaxpr) -> Any:
    with jax.enable_x64(True):
        return _lowering(context, *args, closed=closed)


def _jvp(primals: Any, tangents: Any, *, closed: ClosedJaxpr) -> Any:
    """The tangents are a call of their own, so that they can be transposed by themselves."""
    moves = tuple(type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents)
    values = _double_p.bind(*primals, closed=closed)
    moving = [t for t, move in zip(tangents, moves, strict=True) if move]
    known = _double_p.bind(*primals, *moving, closed=_pushed(closed, moves))
    real = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in closed.out_avals]
    answers = iter(known)
    zero = [ad.Zero(aval.to_tangent_aval()) for aval in closed.out_avals]
    return values, [next(answers) if is_real else none for is_real, none in zip(real, zero, strict=True)]


@functools.lru_cache(_KEPT)
def _pushed(closed: ClosedJaxpr, moves: Pattern) -> ClosedJaxpr:
    """From inputs and the tangents of those that move, to the tangents of the real outputs."""
    size = len(moves)

    def push(*args: Any) -> list[Any]:
        inputs, tangents = args[:size], args[size:]
        of_moving = lambda *moving: _real(_evaluate(*_merge(moves, moving, _still(moves, inputs)), closed=closed))  # noqa: E731
        return jax.jvp(of_moving, tuple(x for x, move in zip(inputs, moves, strict=True) if move), tangents)[1]

    kinds = [_Kind.of(aval) for aval in closed.in_avals]
    return _staged(
        push, [*kinds, *(_Kind(k.shape, k.dtype, False) for k, move in zip(kinds, moves, strict=True) if move)]
    )


def _transpose(cotangents: Any, *args: Any, closed: ClosedJaxpr) -> list[Any]:
    linear = tuple(ad.is_undefined_primal(x) for x in args)
    given = tuple(type(c) is not ad.Zero for c in cotangents)
    residuals = [x for x, is_linear in zip(args, linear, strict=True) if not is_linear]
    pulled = _pulled(closed, linear, given)
    answers = iter(_double_p.bind(*residuals, *(c for c in cotangents if type(c) is not ad.Zero), closed=pulled))
    return [next(answers) if is_linear else None for is_linear in linear]


@functools.lru_cache(_KEPT)
def _pulled(closed: ClosedJaxpr, linear: Pattern, given: Pattern) -> ClosedJaxpr:
    """From residuals and cotangents of the outputs that have some, to cotangents of the linear inputs."""
    ins, outs = ([_Kind.of(aval) for aval in avals] for avals in (closed.in_avals, closed.out_avals))
    still = [kind for kind, is_linear in zip(ins, linear, strict=True) if not is_linear]
    moving = [kind for kind, is_linear in zip(ins, linear, strict=True) if is_linear]

    def pull(*args: Any) -> Any:
        residuals, cotangents = args[: len(still)], args[len(still) :]
        zeros = [jnp.zeros(out.shape, out.dtype) for out, is_given in zip(outs, given, strict=True) if not is_given]
        of_linear = lambda *inputs: _evaluate(*_merge(linear, inputs, residuals), closed=closed)  # noqa: E731
        return jax.linear_transpose(of_linear, *(kind.struct() for kind in moving))(_merge(given, cotangents, zeros))

    return _staged(pull, [*still, *(out for out, is_given in zip(outs, given, strict=True) if is_given)])


def _batch(args: Any, dims: Any, *, closed: ClosedJaxpr) -> Any:
    axes = tuple(None if dim is batching.not_mapped else dim for dim in dims)
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    return _double_p.bind(*args, closed=_mapped(closed, axes, size)), [0] * len(closed.out_avals)


@functools.lru_cache(_KEPT)
def _mapped(closed: ClosedJaxpr, axes: tuple[int | None, ...], size: int) -> ClosedJaxpr:
    def stacked(kind: _Kind, axis: int | None) -> _Kind:
        shape = kind.shape if axis is None else (*kind.shape[:axis], size, *kind.shape[axis:])
        return _Kind(shape, kind.dtype, kind.weak)

    kinds = [stacked(_Kind.of(aval), axis) for aval, axis in zip(closed.in_avals, axes, strict=True)]
    return _staged(jax.vmap(functools.partial(_evaluate, closed=closed), in_axes=axes), kinds)


def _merge(chosen: Pattern, first: Any, second: Any) -> list[Any]:
    """One list of two: from ``first`` where chosen, else from ``second``."""
    firsts, seconds = iter(first), iter(second)
    return [next(firsts) if is_first else next(seconds) for is_first in chosen]


def _still(moves: Pattern, inputs: Any) -> list[Any]:
    return [x for x, move in zip(inputs, moves, strict=True) if not move]


def _real(values: Any) -> list[Any]:
    return [value for value in values if jnp.issubdtype(value.dtype, jnp.inexact)]


mlir.register_lowering(_double_p, _lower)
ad.primitive_jvps[_double_p] = _jvp
ad.primitive_transposes[_double_p] = _transpose
batching.primitive_batchers[_double_p] = _batch
