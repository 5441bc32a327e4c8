"""The checks that every kernel passes, for kernels of your own. They need no test framework.

Example:
    >>> import jax
    >>> from fathomgp.kernels import Matern32
    >>> check_kernel(Matern32(lengthscale=0.7), input_dim=2, key=jax.random.key(0))

Every check raises an AssertionError that says what failed. Parametrise a test over ``CHECKS`` to see them one by one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from fathomgp.kernels._base import AbstractKernel
from fathomgp.parameters import cast
from fathomgp.precision import double_precision

_NUM_POINTS = 12
_SINGLE, _DOUBLE = jnp.float32, jnp.float64

Points = Float[Array, "N D"]


@double_precision
def check_kernel(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """Run every check on ``kernel`` with random inputs of ``input_dim`` columns, in both precisions."""
    for check, one in zip(CHECKS, jax.random.split(key, len(CHECKS)), strict=True):
        check(kernel, input_dim, one)


@double_precision
def check_symmetric(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """``k(x, x') = k(x', x)``."""
    x, x2 = _points(key, input_dim)
    gram, cross, _ = _evaluate(cast(kernel, _DOUBLE), x, x2)
    _assert_close(gram, gram.T, "gram(x) is not symmetric")
    swapped = _evaluate(cast(kernel, _DOUBLE), x2, x)[1]
    _assert_close(cross, swapped.T, "gram(x, x2) differs from gram(x2, x) transposed")


@double_precision
def check_diagonal(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """``diagonal(x)`` is the diagonal of ``gram(x)``."""
    gram, _, diagonal = _evaluate(cast(kernel, _DOUBLE), *_points(key, input_dim))
    _assert_close(diagonal, np.diag(gram), "diagonal(x) differs from the diagonal of gram(x)")


@double_precision
def check_same_points(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """``gram(x) = gram(x, x)``, except for white noise, which adds to the diagonal of ``gram(x)`` alone."""
    x, _ = _points(key, input_dim)
    gram, cross, _ = _evaluate(cast(kernel, _DOUBLE), x, x)
    noise = np.diag(gram - cross)
    _assert_close(gram, cross + np.diag(noise), "gram(x) differs from gram(x, x) off the diagonal")
    assert float(noise.min()) >= -_tolerance(gram), "gram(x) is smaller than gram(x, x) on the diagonal"


@double_precision
def check_row_by_row(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """A row of ``gram(x, x2)`` depends on its own point alone."""
    x, x2 = _points(key, input_dim)
    cross = _evaluate(cast(kernel, _DOUBLE), x, x2)[1]
    moved = jnp.asarray(np.concatenate([x[:1], -2 * np.asarray(x)[1:]]))
    among_others = _evaluate(cast(kernel, _DOUBLE), moved, x2)[1]
    _assert_close(among_others[0], cross[0], "a row of gram(x, x2) depends on the other rows of x")


@double_precision
def check_positive_semidefinite(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """No eigenvalue of ``gram(x)`` is negative beyond rounding, with scattered, close and repeated points."""
    scattered, x = _points(key, input_dim)
    crowded = jnp.asarray(np.concatenate([x[:4], x[:4], x[:4] + 1e-3]))
    for points in (scattered, crowded):
        gram = _evaluate(cast(kernel, _DOUBLE), points, points)[0]
        smallest, largest = np.linalg.eigvalsh(np.asarray(gram))[[0, -1]]
        assert smallest >= -1e-7 * largest, f"gram(x) has the eigenvalue {smallest:g}: not positive semi-definite"


@double_precision
def check_gradients(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """Gradients with respect to parameters and inputs equal finite differences."""
    point_key, direction_key = jax.random.split(key)
    start = (cast(kernel, _DOUBLE), *_points(point_key, input_dim))
    rng = _generator(direction_key)
    weights = jnp.asarray(rng.normal(size=(_NUM_POINTS, _NUM_POINTS)))
    gradient = _flat(_value_and_gradient(start, weights)[1])
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), start)
        slope = gradient @ _flat(direction)
        scale = 1 + float(np.linalg.norm(gradient) * np.linalg.norm(_flat(direction)))
        ahead, behind = (_value_and_gradient(_moved(start, direction, h), weights)[0] for h in (1e-5, -1e-5))
        _assert_close(slope, (ahead - behind) / 2e-5, "the gradient differs from finite differences", 1e-5 * scale)


@double_precision
def check_gradients_at_coincident_points(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """Gradients stay finite where points coincide, at the origin too, in both precisions."""
    points, _ = _points(key, input_dim)
    for dtype in (_SINGLE, _DOUBLE):
        x = points.astype(dtype)
        x = jnp.asarray(np.concatenate([x[:3], x[:3], x[3:8], 0 * x[:1]]))
        weights = jnp.ones((_NUM_POINTS, _NUM_POINTS), dtype)
        _, gradient = _value_and_gradient((cast(kernel, dtype), x, x), weights)
        assert np.isfinite(_flat(gradient)).all(), (
            f"the gradient is not finite where points coincide ({jnp.dtype(dtype)})"
        )


@double_precision
def check_transformations(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """``vmap`` over inputs and parameters changes nothing, and neither does leaving out ``jit``."""
    kernel, (x, x2) = cast(kernel, _DOUBLE), _points(key, input_dim)
    gram, cross, diagonal = _evaluate(kernel, x, x2)
    _assert_close(kernel(x), gram, "gram(x) changes under jit")
    _assert_close(kernel(x, x2), cross, "gram(x, x2) changes under jit")
    _assert_close(kernel.diagonal(x), diagonal, "diagonal(x) changes under jit")
    kernels = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), kernel)
    mapped = _evaluate_batch(kernels, jnp.stack([x2, x]), jnp.stack([x2, x2]))
    for values, expected in zip(mapped, (gram, cross, diagonal), strict=True):
        _assert_close(values[1], expected, "the kernel changes under vmap")


@double_precision
def check_precision(kernel: AbstractKernel, input_dim: int, key: PRNGKeyArray) -> None:
    """The dtype of the inputs is kept, whatever that of the parameters; float32 is close to float64."""
    single = cast(kernel, _SINGLE)
    x, x2 = _points(key, input_dim, _SINGLE)
    for model in (single, cast(kernel, _DOUBLE)):
        for dtype in (_SINGLE, _DOUBLE):
            results = jax.eval_shape(_evaluate, model, x.astype(dtype), x2.astype(dtype))
            assert all(result.dtype == dtype for result in results), f"{jnp.dtype(dtype)} inputs lose their dtype"
    exact = _evaluate(cast(single, _DOUBLE), x.astype(_DOUBLE), x2.astype(_DOUBLE))
    for rough, fine in zip(_evaluate(single, x, x2), exact, strict=True):
        # The square root of a distance keeps half of its digits where points are close.
        tolerance = 4 * float(jnp.finfo(_SINGLE).eps) ** 0.5 * (1 + float(np.abs(fine).max()))
        _assert_close(rough.astype(_DOUBLE), fine, "float32 is far from float64", tolerance)


#: Every check, in the order in which ``check_kernel`` runs them: ``check(kernel, input_dim, key)``.
CHECKS: tuple[Callable[[AbstractKernel, int, PRNGKeyArray], None], ...] = (
    check_precision,
    check_symmetric,
    check_diagonal,
    check_same_points,
    check_row_by_row,
    check_positive_semidefinite,
    check_gradients,
    check_gradients_at_coincident_points,
    check_transformations,
)


# The checks share shapes and these compiled functions, so that a kernel is compiled a few times only; the options make
# that five times faster.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
)


@_jit
def _evaluate(kernel: AbstractKernel, x: Points, x2: Points) -> tuple[Array, Array, Array]:
    return kernel.gram(x), kernel.gram(x, x2), kernel.diagonal(x)


@_jit
def _evaluate_batch(kernels: AbstractKernel, x: Float[Array, "2 N D"], x2: Float[Array, "2 N D"]) -> tuple:
    return jax.vmap(lambda kernel, x, x2: (kernel.gram(x), kernel.gram(x, x2), kernel.diagonal(x)))(kernels, x, x2)


@_jit
def _value_and_gradient(
    point: tuple[AbstractKernel, Points, Points], weights: Float[Array, "N N"]
) -> tuple[Array, Any]:
    """A weighted sum of everything that a kernel computes, and its gradient with respect to parameters and inputs."""

    def total(point: tuple[AbstractKernel, Points, Points]) -> Array:
        kernel, x, x2 = point
        return jnp.sum(weights * (kernel.gram(x) + kernel.gram(x, x2))) + jnp.sum(weights[0] * kernel.diagonal(x))

    return jax.value_and_grad(total)(point)


def _points(key: PRNGKeyArray, input_dim: int, dtype: Any = _DOUBLE) -> tuple[Points, Points]:
    x, x2 = _generator(key).normal(size=(2, _NUM_POINTS, input_dim))
    return jnp.asarray(x, dtype), jnp.asarray(x2, dtype)


def _generator(key: PRNGKeyArray) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def _moved(start: Any, direction: Any, step: float) -> Any:
    return jax.tree.map(lambda leaf, along: jnp.asarray(np.asarray(leaf) + step * along), start, direction)


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _tolerance(values: ArrayLike) -> float:
    return 1e-10 * (1 + float(np.abs(values).max()))


def _assert_close(actual: ArrayLike, expected: ArrayLike, failure: str, tolerance: float | None = None) -> None:
    error = float(np.abs(np.asarray(actual) - np.asarray(expected)).max())
    limit = _tolerance(expected) if tolerance is None else tolerance
    assert error <= limit, f"{failure}: by {error:.3g}, where {limit:.3g} is allowed"
