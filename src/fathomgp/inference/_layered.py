"""The posterior of every algorithm that ends in whitened Gaussians on the inducing values of each layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.inference._base import AbstractPosterior
from fathomgp.kernels import has_features
from fathomgp.linalg import safe_cholesky
from fathomgp.model import Conditional, DeepGP, Layer, joint_moments, moments, sample_path
from fathomgp.precision import clamp_variance
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged


@tagged("posterior/layered")
class LayeredPosterior(AbstractPosterior):
    """q(f) of a deep GP whose layers hold independent Gaussians q(v) = N(m~, T T^T).

    Samples run through the inner layers; the last layer's Gaussian is kept, so S samples give S components. With one
    layer there is nothing to sample: one component.

    Attributes:
        model: the fitted model.
        conditionals: q(f) of every layer.
        num_samples: S.
    """

    model: DeepGP
    conditionals: tuple[Conditional, ...]
    num_samples: int = eqx.field(static=True, default=100)

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """A component a sample path; with ``full_cov`` the paths are drawn jointly over the rows."""
        samples = 1 if self.model.depth == 1 else self.num_samples
        log_weights = jnp.full(samples, -jnp.log(float(samples)), x.dtype)
        keys = jax.random.split(key, samples)
        if full_cov:
            means, covariances = jax.lax.map(lambda one: self._last_joint(x, one), keys)
            covariances = jnp.moveaxis(covariances, 1, -1)
            variances = clamp_variance(jnp.moveaxis(jnp.diagonal(covariances, axis1=1, axis2=2), -1, 1))
            return Mixture(log_weights, means, variances, covariances)
        means, variances = jax.lax.map(lambda one: self._last_marginal(x, one), keys)
        return Mixture(log_weights, means, variances, None)

    @program
    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """``n`` functions: each has one value at an input, in whichever call and beside whichever rows it is asked for.

        They are drawn as a whole by Matheron's rule (Wilson et al. 2020): a prior draw made of random Fourier features,
        corrected at the inducing inputs. The features are new for every draw, so means and covariances are those of
        the posterior. Kernels that have no such features, and white noise between layers, fall back to draws that are
        joint over the rows of a call but new for every call.
        """
        layers = self.model.layers
        whole = all(has_features(layer.kernel) for layer in layers) and all(
            layer.noise is None for layer in layers[:-1]
        )
        draw = self._path if whole else (lambda x, one: self._joint_path(x, one)[-1])
        return jax.lax.map(lambda one: draw(x, one), jax.random.split(key, n))

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Joint draws of every layer."""
        return jax.lax.map(lambda one: self._joint_path(x, one), jax.random.split(key, self.num_samples))

    def _last_marginal(
        self, x: Float[Array, "N D"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "N Q"], Float[Array, "N Q"]]:
        """Moments of the last layer along one path whose noise all rows share."""
        h = x
        for level, layer in enumerate(self.model.layers[:-1]):
            mean, variance = self._moments(level, x, h)
            noise = jax.random.normal(jax.random.fold_in(key, level), (1, layer.width), x.dtype)
            h = mean + jnp.sqrt(variance + _layer_noise(layer, x)) * noise
        return self._moments(self.model.depth - 1, x, h)

    def _last_joint(
        self, x: Float[Array, "N D"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "N Q"], Float[Array, "Q N N"]]:
        path = self._joint_path(x, key, last=False)
        return self._joint(self.model.depth - 1, x, path[-1] if path else x)

    def _joint_path(self, x: Float[Array, "N D"], key: PRNGKeyArray, last: bool = True) -> list[Float[Array, "N _"]]:
        """One draw of every layer, jointly over the rows."""
        h, path = x, []
        for level, layer in enumerate(self.model.layers if last else self.model.layers[:-1]):
            mean, covariance = self._joint(level, x, h)
            if level < self.model.depth - 1:
                covariance = covariance + _layer_noise(layer, x) * jnp.eye(len(x), dtype=x.dtype)[None]
            noise = jax.random.normal(jax.random.fold_in(key, level), (len(x), layer.width), x.dtype)
            h = mean + jnp.einsum("pij,jp->ip", safe_cholesky(covariance).lower, noise)
            path.append(h)
        return path

    def _path(self, x: Float[Array, "N D"], key: PRNGKeyArray) -> Float[Array, "N Q"]:
        """One function, composed of one function a layer."""
        h = x
        for level, (layer, conditional) in enumerate(zip(self.model.layers, self.conditionals, strict=True)):
            inputs = self.model.layer_input(level, x, h)
            h = sample_path(layer, conditional, inputs, key=jax.random.fold_in(key, level))
        return h

    def _moments(self, level: int, x: Array, h: Array) -> tuple[Array, Array]:
        inputs = self.model.layer_input(level, x, h)
        return moments(self.model.layers[level], self.conditionals[level], inputs)

    def _joint(self, level: int, x: Array, h: Array) -> tuple[Array, Array]:
        inputs = self.model.layer_input(level, x, h)
        return joint_moments(self.model.layers[level], self.conditionals[level], inputs)


def _layer_noise(layer: Layer, x: Array) -> Float[Array, ""]:
    return jnp.zeros((), x.dtype) if layer.noise is None else layer.noise.value
