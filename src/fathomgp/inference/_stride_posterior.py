"""The mixture (5) of Latz et al. (2025): one sparse GP a particle.

Exact hidden layers at new inputs are drawn from their conditional given the particle's values at the data; their mean
alone would understate the variance. The noise of a draw is shared by all rows, so a row's answer depends on no other.
Hidden layers by ACA or at the inducing points are another model, of low rank: the white variables fix them everywhere.
Drawing what the low rank leaves out, at new inputs but not at the data, would add noise that no datum has shown.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.inference._base import AbstractPosterior
from fathomgp.inference._stride_hidden import mean_path
from fathomgp.inference._stride_top import Conditioned
from fathomgp.kernels import AbstractKernel
from fathomgp.linalg import product, safe_cholesky
from fathomgp.model import Conditional, DeepGP, joint_moments, moments
from fathomgp.precision import clamp_variance
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged


@tagged("stride/given")
class Given(eqx.Module):
    """A hidden layer's GP given its white variables at the anchors.

    Attributes:
        z: what the layer sees at the anchors; one entry for all particles in the bottom layer.
        white: the white variables.
        inverse: L^-1 of the anchors' covariance, as many as entries of ``z``.
    """

    z: Float[Array, "T R F"]
    white: Float[Array, "S R W"]
    inverse: Float[Array, "T R R"]


@tagged("stride/trace")
class Trace(eqx.Module):
    """The end of the last E step, for diagnostics: steps whose sizes were frozen, NaN before them.

    Attributes:
        log_likelihood: of every particle at every step.
        acceptance: the probability with which it moved.
        nonfinite: proposals of the whole fit that were rejected because they had no finite likelihood.
        distance: the mean square of every particle's white variables at every step; about 1 for draws of the prior.
    """

    log_likelihood: Float[Array, "S T"]
    acceptance: Float[Array, "S T"]
    nonfinite: Float[Array, ""]
    distance: Float[Array, "S T"] | None = None


@tagged("posterior/stride")
class STRIDEPosterior(AbstractPosterior):
    """What STRIDE has learned: S particles, each a GP given its hidden layers.

    Attributes:
        model: the fitted model.
        hidden: the hidden layers given the particles.
        top: the last layer given the particles.
        knots: inputs, and the hidden values of every layer there, for the injective architecture.
        inducing: the inducing points, rows of the (standardised) inputs.
        trace: the last E step.
        interpolated: whether the last hidden layer is interpolated by the bottom layer's GP (fully sparse, depth > 2).
        low_rank: whether the hidden layers are those of ACA or of the inducing points.
        num_samples: S.
    """

    model: DeepGP
    hidden: tuple[Given, ...]
    top: Conditioned
    knots: tuple[Float[Array, "N D"], tuple[Float[Array, "S N 1"], ...]] | None
    inducing: Float[Array, "M D"]
    trace: Trace
    interpolated: bool = eqx.field(static=True, default=False)
    low_rank: bool = eqx.field(static=True, default=False)
    num_samples: int = eqx.field(static=True, default=50)

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """A component a particle; with ``full_cov`` hidden values are drawn jointly over the rows."""
        log_weights = jnp.full(self.num_samples, -jnp.log(float(self.num_samples)), x.dtype)
        values = self._joint_values(x, key) if full_cov else self._shared_values(x, key)
        inputs = self._seen(self.model.depth - 1, x, values[-1])
        if not full_cov:
            return Mixture(log_weights, *jax.vmap(self._moments)(inputs, self.top), None)
        means, covariances = jax.lax.map(lambda parts: self._joint(*parts), (inputs, self.top))
        covariances = jnp.moveaxis(covariances, 1, -1)
        variances = clamp_variance(jnp.moveaxis(jnp.diagonal(covariances, axis1=1, axis2=2), -1, 1))
        return Mixture(log_weights, means, variances, covariances)

    @program
    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Draws from the joint posterior of the rows of each call; every draw takes one particle."""
        rounds = -(-n // self.num_samples)
        draw_key, order_key = jax.random.split(key)
        draws = jax.lax.map(lambda one: self._joint_draw(x, one)[-1], jax.random.split(draw_key, rounds))
        order = jax.random.permutation(order_key, rounds * self.num_samples)
        return draws.reshape(-1, *draws.shape[2:])[order[:n]]

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """A joint draw of every layer from every particle."""
        return self._joint_draw(x, key)

    @property
    def draws_whole(self) -> bool:
        """Never: hidden values and the last layer are drawn at the rows of each call."""
        return False

    def _shared_values(self, x: Float[Array, "N D"], key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Hidden values whose noise all rows share."""
        values: list[Float[Array, "S N _"]] = []
        for level, given in enumerate(self.hidden):
            mean, root = self._hidden_moments(level, x, values)
            if self.low_rank:
                values.append(mean)
                continue
            noise = jax.random.normal(jax.random.fold_in(key, level), (len(mean), 1, given.white.shape[2]), x.dtype)
            values.append(mean + root[:, :, None] * noise)
        return values

    def _hidden_moments(
        self, level: int, x: Float[Array, "N D"], values: list[Array]
    ) -> tuple[Float[Array, "S N W"], Float[Array, "S N"] | Float[Array, "1 N"]]:
        """Conditional means and standard deviations of a hidden layer."""
        given, kernel, inputs, trend = self._conditioning(level, x, values)
        if len(given.z) == 1:  # one product for all particles
            A = product(given.inverse[0], kernel(given.z[0], inputs[0]))
            S, R, W = given.white.shape
            wide = product(A.T, jnp.swapaxes(given.white, 0, 1).reshape(R, S * W))
            mean = jnp.swapaxes(wide.reshape(-1, S, W), 0, 1)
            variance = (kernel.diagonal(inputs[0]) - jnp.sum(A**2, axis=0))[None]
        else:
            mean, variance = jax.vmap(lambda *parts: _moments(kernel, *parts))(
                given.z, given.inverse, given.white, inputs
            )
        return trend + mean, jnp.sqrt(clamp_variance(variance))

    def _joint_values(self, x: Float[Array, "N D"], key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Hidden values, jointly over the rows."""
        if self.low_rank:
            return self._shared_values(x, key)
        values: list[Float[Array, "S N _"]] = []
        for level in range(len(self.hidden)):
            given, kernel, inputs, trend = self._conditioning(level, x, values)
            size = len(given.white)
            noise = _rows_first_normal(jax.random.fold_in(key, level), (size, len(x), given.white.shape[2]), x.dtype)
            parts = jax.tree.map(
                lambda leaf, size=size: jnp.broadcast_to(leaf, (size, *leaf.shape[1:])),
                (given.z, given.inverse, inputs),
            )
            draw = lambda parts, kernel=kernel: _draw(kernel, *parts)  # noqa: E731
            values.append(trend + jax.lax.map(draw, (*parts, given.white, noise)))
        return values

    def _conditioning(
        self, level: int, x: Float[Array, "N D"], values: list[Array]
    ) -> tuple[Given, AbstractKernel, Float[Array, "T N F"], Float[Array, "T N W"]]:
        """A hidden layer's GP, what it sees at ``x``, and its mean there."""
        last = level == len(self.hidden) - 1
        if level == 0 or (self.interpolated and last):
            trend = mean_path(self.model, x)[level][None]
            return self.hidden[level], self.model.layers[0].kernel, x[None], trend
        inputs = self._seen(level, x, values[-1])
        layer = self.model.layers[level]
        return self.hidden[level], layer.kernel, inputs, jax.vmap(layer.mean)(inputs)

    def _joint_draw(self, x: Float[Array, "N D"], key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        hidden_key, top_key = jax.random.split(key)
        values = self._joint_values(x, hidden_key)
        inputs = self._seen(self.model.depth - 1, x, values[-1])
        noise = _rows_first_normal(top_key, (self.num_samples, len(x), self.top.mean.shape[2]), x.dtype)

        def draw(parts: tuple[Array, Conditioned, Array]) -> Float[Array, "N Q"]:
            inputs, top, noise = parts
            mean, covariance = self._joint(inputs, top)
            return mean + jnp.einsum("qij,jq->iq", safe_cholesky(covariance).lower, noise)

        return [*values, jax.lax.map(draw, (inputs, self.top, noise))]

    def _seen(self, level: int, x: Float[Array, "N D"], below: Float[Array, "S N W"]) -> Float[Array, "S N F"]:
        """What a layer sees, given the values of the layer below."""
        if self.knots is None:
            return jax.vmap(lambda h: self.model.layer_input(level, x, h))(below)
        places, values = self.knots
        see = lambda h, known: self.model.layer_input(level, x, h, (places, known))  # noqa: E731
        return jax.vmap(see)(below, values[level - 1])

    def _moments(
        self, inputs: Float[Array, "N F"], top: Conditioned
    ) -> tuple[Float[Array, "N Q"], Float[Array, "N Q"]]:
        """Moments of the last layer given one particle."""
        return moments(self.model.layers[-1], Conditional(top.z, top.mean, top.whitening, top.roots), inputs)

    def _joint(
        self, inputs: Float[Array, "N F"], top: Conditioned
    ) -> tuple[Float[Array, "N Q"], Float[Array, "Q N N"]]:
        """Mean and covariance between rows of the last layer given one particle."""
        return joint_moments(self.model.layers[-1], Conditional(top.z, top.mean, top.whitening, top.roots), inputs)


def _rows_first_normal(key: PRNGKeyArray, shape: tuple[int, int, int], dtype: Any) -> Float[Array, "S N W"]:
    """Standard normal numbers of which the first rows do not depend on how many rows there are."""
    samples, rows, width = shape
    return jnp.swapaxes(jax.random.normal(key, (rows, samples, width), dtype), 0, 1)


def _moments(
    kernel: AbstractKernel,
    z: Float[Array, "R F"],
    inverse: Float[Array, "R R"],
    white: Float[Array, "R W"],
    inputs: Float[Array, "N F"],
) -> tuple[Float[Array, "N W"], Float[Array, " N"]]:
    """Mean (without the prior's) and variance of a GP given white variables at ``z``."""
    A = product(inverse, kernel(z, inputs))
    return A.T @ white, kernel.diagonal(inputs) - jnp.sum(A**2, axis=0)


def _draw(
    kernel: AbstractKernel,
    z: Float[Array, "R F"],
    inverse: Float[Array, "R R"],
    inputs: Float[Array, "N F"],
    white: Float[Array, "R W"],
    noise: Float[Array, "N W"],
) -> Float[Array, "N W"]:
    """A joint draw of a GP (without the prior's mean) given white variables at ``z``."""
    A = product(inverse, kernel(z, inputs))
    return A.T @ white + safe_cholesky(kernel(inputs) - A.T @ A).lower @ noise
