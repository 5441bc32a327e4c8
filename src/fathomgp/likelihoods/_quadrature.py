r"""Expectations under Gaussians, where no closed form exists.

* :func:`expectation`: Gauss-Hermite, :math:`E[g(f)] \approx \sum_q w_q g(\mu + \sigma z_q)`, 20 nodes.
* :func:`log_expectation`: the same for :math:`\log E[e^{\ell(f)}]`, with the nodes moved to the mode of the integrand
  and scaled by its curvature (adaptive Gauss-Hermite): right even where the likelihood is much the narrower one.
* :func:`log_gamma_rule`: the trapezoid rule in :math:`u = \log t` under a gamma density, which converges exponentially.

References:
    Liu and Pierce (1994), A note on Gauss-Hermite quadrature. Biometrika 81.
    Trefethen and Weideman (2014), The exponentially convergent trapezoidal rule. SIAM Review 56.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fathomgp._rules import normal_rule
from fathomgp.likelihoods._special import safe_sqrt

NUM_NODES = 20
_LARGEST_SHIFT = 1e4
_BISECTIONS = 40

Elementwise = Callable[[Float[Array, "N P"]], Float[Array, "N P"]]


def expectation(
    function: Elementwise, mean: Float[Array, "N P"], variance: Float[Array, "N P"], num_nodes: int = NUM_NODES
) -> Float[Array, "N P"]:
    """``E[function(f)]`` under ``f ~ N(mean, variance)``, for an elementwise function."""
    nodes, log_weights = normal_rule(num_nodes, mean.dtype)
    sd = safe_sqrt(variance)
    terms = jax.vmap(lambda z, log_weight: jnp.exp(log_weight) * function(mean + sd * z))(nodes, log_weights)
    return jnp.sum(terms, axis=0)


def log_expectation(
    log_function: Elementwise, mean: Float[Array, "N P"], variance: Float[Array, "N P"], num_nodes: int = NUM_NODES
) -> Float[Array, "N P"]:
    """``log E[exp(log_function(f))]`` under ``f ~ N(mean, variance)``, for an elementwise function with one mode.

    With ``f = mean + sd e`` and ``e = shift + shrink z`` this is
    ``log shrink + log sum_q w_q exp(log_function(f_q) + (z_q^2 - e_q^2) / 2)``. To the gradient, nodes are constants.
    """
    nodes, log_weights = normal_rule(num_nodes, mean.dtype)
    sd = safe_sqrt(variance)

    def tilt(e: Float[Array, "N P"]) -> Float[Array, "N P"]:
        return log_function(mean + sd * e)

    shift, shrink = _mode(tilt, jnp.zeros_like(mean))

    def term(z: Float[Array, ""], log_weight: Float[Array, ""]) -> Float[Array, "N P"]:
        e = shift + shrink * z
        return log_weight + 0.5 * (z * z - e * e) + tilt(e)

    return jax.nn.logsumexp(jax.vmap(term)(nodes, log_weights), axis=0) + jnp.log(shrink)


def log_gamma_rule(
    shape: Float[Array, "..."],
    rate: Float[Array, "..."],
    lowest: Float[Array, "..."],
    num_nodes: int = 128,
    drop: float = 40.0,
) -> tuple[Float[Array, "nodes ..."], Float[Array, "nodes ..."]]:
    r"""Nodes ``u`` and log weights of a rule for :math:`\int g(e^u) e^{a u - e^u} du / \Gamma(a)`, ``a = shape``.

    ``g`` may move the mass down to where a gamma density of that shape and ``rate >= 1`` has it. Below ``lowest`` the
    integrand must have become ``e^{a u}``: the first node carries the rest of that geometric series. Tails below
    ``exp(-drop)`` of the mass are left out otherwise.
    """
    reach = jnp.sqrt(2.0 * drop / shape)
    left = jnp.maximum(jnp.log(shape / rate) - reach - drop / shape, lowest)
    right = jnp.log(shape + shape * reach + drop)
    step = (right - left) / (num_nodes - 1)
    index = jnp.arange(num_nodes, dtype=shape.dtype).reshape((num_nodes,) + (1,) * shape.ndim)
    u = left[None] + index * step[None]
    log_weights = jnp.log(step)[None] + shape[None] * u - jnp.exp(u) - jax.scipy.special.gammaln(shape)[None]
    rest = -jnp.log(-jnp.expm1(-shape * step))
    return u, log_weights.at[0].add(rest)


def log_gamma_average_rule(
    shape: Float[Array, "..."],
) -> tuple[Float[Array, "nodes ..."], Float[Array, "nodes ..."]]:
    """The cheaper rule for averages of functions between 0 and 1, such as distribution functions: nodes and weights."""
    nothing = jnp.full_like(shape, -jnp.inf)
    u, log_weights = log_gamma_rule(shape, jnp.ones_like(shape), nothing, num_nodes=96, drop=28.0)
    return u, jnp.exp(log_weights)


def _mode(tilt: Elementwise, origin: Float[Array, "N P"]) -> tuple[Float[Array, "N P"], Float[Array, "N P"]]:
    """Mode and width (at most 1) of ``exp(tilt(e) - e^2/2)``, by bisection on the slope.

    For a log-concave likelihood the mode lies between 0 and the slope of ``tilt`` at 0.
    """

    def slope(e: Float[Array, "N P"]) -> Float[Array, "N P"]:
        return jax.jvp(tilt, (e,), (jnp.ones_like(e),))[1]

    slope_of, constants = jax.closure_convert(slope, origin)
    constants = jax.lax.stop_gradient(constants)
    bound = jnp.clip(slope_of(origin, *constants), -_LARGEST_SHIFT, _LARGEST_SHIFT)

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        above = slope_of(middle, *constants) < middle
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.minimum(bound, 0.0), jnp.maximum(bound, 0.0)))
    shift = jax.lax.stop_gradient(0.5 * (low + high))
    curvature = jax.jvp(lambda e: slope_of(e, *constants), (shift,), (jnp.ones_like(shift),))[1]
    return shift, jax.lax.stop_gradient(jax.lax.rsqrt(1.0 + jnp.maximum(-curvature, 0.0)))
