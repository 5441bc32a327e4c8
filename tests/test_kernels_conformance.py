"""Every kernel keeps the contract; the public suite catches kernels that do not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.kernels import (
    RBF,
    AbstractKernel,
    ArcCosine,
    Constant,
    Convolution,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    NeuralNetwork,
    Periodic,
    Polynomial,
    RationalQuadratic,
    Squashed,
    White,
    testing,
)
from fathomgp.parameters import cast

TWO = jnp.array([0.7, 1.6])
FIVE = jnp.array([0.7, 1.6, 1.1, 2.5, 0.9])  # wide enough for distances by a matrix product

KERNELS = {
    "rbf": (RBF(0.8, 1.7), 2),
    "rbf-ard-wide": (RBF(FIVE, 1.7), 5),
    "matern12": (Matern12(TWO, 0.6), 2),
    "matern12-wide": (Matern12(FIVE, 0.6), 5),
    "matern32": (Matern32(0.9, 1.2), 2),
    "matern32-wide": (Matern32(FIVE, 1.2), 5),
    "matern52-active": (Matern52(TWO, 1.2, active_dims=(2, 0)), 3),
    "matern52-wide": (Matern52(FIVE, 1.2), 5),
    "rational-quadratic": (RationalQuadratic(TWO, 1.3, alpha=0.6), 2),
    "convolution": (Convolution(Matern52(TWO, 1.2), 0.5, 2.0), 3),
    "periodic": (Periodic(TWO, 1.3, period=1.4), 2),
    "linear": (Linear(TWO), 2),
    "linear-bias": (Linear(0.8, bias_variance=0.3), 2),
    "polynomial": (Polynomial(3, TWO, offset=0.5), 2),
    "arccosine0": (ArcCosine(0, TWO, 0.4, 1.3), 2),
    "arccosine1": (ArcCosine(1, TWO, 0.4, 1.3), 2),
    "arccosine2": (ArcCosine(2, TWO, 0.4, 1.3), 2),
    "neural-network": (NeuralNetwork(TWO, 0.4, 1.3), 2),
    "white": (White(0.3), 2),
    "constant": (Constant(0.3), 2),
    "squashed": (Squashed(RBF(0.3, 1.7)), 2),
    "sum": (RBF(0.8) + Linear(TWO) + White(0.2), 2),
    "product": (RBF(0.8, active_dims=(0,)) * Matern32(1.2, active_dims=(1,)) * Constant(2.0), 2),
    "sum-of-products": (RBF(0.8) * (Linear() + Constant(0.5)) + White(0.2) * Constant(0.5), 2),
}


@pytest.mark.parametrize("name", KERNELS)
def test_keeps_the_contract(name, key):
    kernel, input_dim = KERNELS[name]
    testing.check_kernel(kernel, input_dim, key)  # all checks in one test: they share what is compiled


ONE_COLUMN = {name: (kind(0.8, 1.0), 1) for name, kind in {"m12": Matern12, "m32": Matern32, "m52": Matern52}.items()}


@pytest.mark.parametrize("name", [*KERNELS, *ONE_COLUMN])
def test_values_do_not_depend_on_what_else_a_program_evaluates(name, rng):
    """Parts of two matrices in one program made the compiler evaluate distances twice, with roundings that differ: the
    Matern kernels then found coincident points at a distance of 1. Compiled as users have it: see conftest.py."""
    kernel, input_dim = (KERNELS | ONE_COLUMN)[name]
    kernel = cast(kernel, jnp.float64)
    x, rows = jnp.asarray(rng.normal(size=(32, input_dim))), jnp.arange(5, 25)
    optimised = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    both = jax.jit(lambda x: (kernel(x)[rows], kernel(x)[:6]), compiler_options=optimised)
    assert np.allclose(both(x)[0], kernel(x)[rows], rtol=1e-6, atol=1e-6)


class _Broken(AbstractKernel):
    """The RBF kernel with its matrix or diagonal spoilt."""

    spoil_gram: object = eqx.field(static=True)
    spoil_diagonal: object = eqx.field(static=True, default=lambda k: k)

    def gram(self, x1, x2=None):
        return self.spoil_gram(RBF().gram(x1, x2))

    def diagonal(self, x):
        return self.spoil_diagonal(RBF().diagonal(x))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_Broken(lambda k: k + jnp.triu(k)), "not symmetric"),
        (_Broken(lambda k: k, lambda k: 2 * k), "diagonal"),
        (_Broken(lambda k: -k, lambda k: -k), "semi-definite"),
        (_Broken(lambda k: jnp.sqrt(1 - k), lambda k: jnp.sqrt(1 - k)), "finite|semi-definite"),
        (_Broken(lambda k: k.astype(jnp.float64), lambda k: k.astype(jnp.float64)), "float32"),
        (_Broken(lambda k: k - jnp.mean(k, axis=0, keepdims=True)), "symmetric|other rows|diagonal"),
    ],
)
def test_the_suite_catches_broken_kernels(kernel, message, key):
    with pytest.raises(AssertionError, match=message):
        testing.check_kernel(kernel, 2, key)
