"""Kernels: covariance functions ``k(x, x')`` with ``gram`` and ``diagonal``.

Every kernel takes numbers, arrays or :class:`~fathomgp.parameters.Parameter` and computes in the dtype of its inputs.
``+`` and ``*`` combine kernels; ``active_dims`` restricts one to some input columns.
:mod:`fathomgp.kernels.testing` holds the checks that every kernel passes, for kernels of your own.

Example:
    >>> import jax.numpy as jnp
    >>> from fathomgp.kernels import RBF, Periodic, White
    >>> kernel = RBF(2.0) * Periodic(period=7.0, active_dims=(0,)) + White(0.1)
    >>> kernel(jnp.zeros((5, 2))).shape
    (5, 5)
"""

from fathomgp.kernels._algebra import Product as Product
from fathomgp.kernels._algebra import Sum as Sum
from fathomgp.kernels._base import AbstractKernel as AbstractKernel
from fathomgp.kernels._distance import squared_distance as squared_distance
from fathomgp.kernels._dot_product import ArcCosine as ArcCosine
from fathomgp.kernels._dot_product import Linear as Linear
from fathomgp.kernels._dot_product import NeuralNetwork as NeuralNetwork
from fathomgp.kernels._dot_product import Polynomial as Polynomial
from fathomgp.kernels._features import has_features as has_features
from fathomgp.kernels._features import prior_function as prior_function
from fathomgp.kernels._nonstationary import Convolution as Convolution
from fathomgp.kernels._registry import KERNELS as KERNELS
from fathomgp.kernels._registry import kernel_from_name as kernel_from_name
from fathomgp.kernels._simple import Constant as Constant
from fathomgp.kernels._simple import White as White
from fathomgp.kernels._squashed import Squashed as Squashed
from fathomgp.kernels._stationary import RBF as RBF
from fathomgp.kernels._stationary import AbstractStationary as AbstractStationary
from fathomgp.kernels._stationary import Matern12 as Matern12
from fathomgp.kernels._stationary import Matern32 as Matern32
from fathomgp.kernels._stationary import Matern52 as Matern52
from fathomgp.kernels._stationary import Periodic as Periodic
from fathomgp.kernels._stationary import RationalQuadratic as RationalQuadratic
