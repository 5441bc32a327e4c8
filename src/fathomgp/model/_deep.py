"""The model: layers of Gaussian processes and a likelihood. It holds no data."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.errors import SettingError
from fathomgp.kernels import AbstractKernel
from fathomgp.likelihoods import AbstractLikelihood
from fathomgp.linalg import safe_cholesky
from fathomgp.means import AbstractMean
from fathomgp.model._architectures import AbstractArchitecture, Composition, Knots
from fathomgp.parameters import Parameter
from fathomgp.tags import tagged


@tagged("model/layer")
class Layer(eqx.Module):
    """One vector-valued Gaussian process: ``width`` independent outputs that share kernel and inducing inputs.

        f_p ~ GP(m_p, k),   p = 1, ..., width

    With inducing inputs of shape (width, M, D) every output has its own, and its own kernel: the arrays of ``kernel``
    then have a leading axis of that length (:func:`separate_outputs`). That costs ``width`` factorisations and twice
    the products, and pays where M shared points cannot carry what the outputs have to learn.

    Attributes:
        kernel: the covariance k.
        mean: the mean m, from the layer's inputs to its ``width`` outputs.
        z: the inducing inputs, (M, D) or (width, M, D), or ``None`` for algorithms without any.
        width: the number of outputs.
        noise: variance of white noise added to the outputs before the next layer sees them, or ``None``.
    """

    kernel: AbstractKernel
    mean: AbstractMean
    z: Parameter | None
    width: int = eqx.field(static=True)
    noise: Parameter | None = None

    def __check_init__(self):
        if self.width < 1:
            raise SettingError(f"A layer needs at least one output, but its width is {self.width}.")
        if self.mean.output_dim != self.width:
            raise SettingError(
                f"The mean function has {self.mean.output_dim} outputs but the layer's width is {self.width}: "
                "build the mean for that width."
            )
        shape = (0, 0) if self.z is None else self.z.shape
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != self.width):
            raise SettingError(f"Inducing inputs must be (M, D) or ({self.width}, M, D), but their shape is {shape}.")

    @property
    def separate(self) -> bool:
        """Whether every output has its own kernel and inducing inputs."""
        return self.z is not None and len(self.z.shape) == 3

    @property
    def num_inducing(self) -> int:
        """M, or 0 without inducing inputs."""
        return 0 if self.z is None else self.z.shape[-2]


@tagged("model/deep-gp")
class DeepGP(eqx.Module):
    """Layers composed from the inputs to the latent functions of a likelihood.

        h_0 = x,   h_l = f_l(h_{l-1}) + noise,   y ~ p(y | h_L)

    Depth 1 is the ordinary Gaussian process.

    Attributes:
        layers: from the inputs to the outputs.
        likelihood: p(y | f) of the last layer's values f.
        skip_inputs: whether every layer after the first also sees the inputs x (Duvenaud et al. 2014), appended to h.
        architecture: what a layer makes of the values of the layer below; h_{l-1} itself in the formula above.
    """

    layers: tuple[Layer, ...]
    likelihood: AbstractLikelihood
    skip_inputs: bool = eqx.field(static=True, default=False)
    architecture: AbstractArchitecture = Composition()

    def __check_init__(self):
        if not self.layers:
            raise SettingError("A deep GP needs at least one layer.")
        if self.skip_inputs and not isinstance(self.architecture, Composition):
            raise SettingError("skip_inputs belongs to the composition architecture: set skip_inputs=False.")

    @property
    def depth(self) -> int:
        """The number of layers, L."""
        return len(self.layers)

    def layer_input(
        self, level: int, x: Float[Array, "N D"], h: Float[Array, "N E"], knots: Knots | None = None
    ) -> Float[Array, "N F"]:
        """What layer ``level`` sees at ``x`` when the layer below has the values ``h`` there.

        ``knots`` are inputs and values of the layer below between which the injective architecture integrates; by
        default ``x`` and ``h`` themselves.
        """
        if level == 0:
            return h
        inputs = self.architecture.inputs(x, h, (x, h) if knots is None else knots)
        return jnp.concatenate([inputs, x], axis=1) if self.skip_inputs else inputs

    def sample_prior(
        self, x: Float[Array, "N D"], *, key: PRNGKeyArray, num_samples: int = 1
    ) -> list[Float[Array, "S N _"]]:
        """Draws of every layer at ``x`` before any data are seen, jointly over the rows."""
        draw = jax.vmap(lambda one: self._sample_layers(x, one))
        return draw(jax.random.split(key, num_samples))

    def _sample_layers(self, x: Float[Array, "N D"], key: PRNGKeyArray) -> list[Float[Array, "N _"]]:
        h, draws = x, []
        for level, layer in enumerate(self.layers):
            key, function_key, noise_key = jax.random.split(key, 3)
            inputs = self.layer_input(level, x, h)
            noise = jax.random.normal(function_key, (len(x), layer.width), x.dtype)
            h = layer.mean(inputs) + _correlate(layer, inputs, noise)
            draws.append(h)
            if layer.noise is not None:
                h = h + jnp.sqrt(layer.noise.value) * jax.random.normal(noise_key, h.shape, h.dtype)
        return draws


def separate_outputs(layer: Layer, z: Float[Array, "P M D"]) -> Layer:
    """A layer whose outputs have the inducing inputs ``z`` and kernels of their own, all equal at the start."""
    own = jax.tree.map(lambda leaf: jnp.tile(leaf[None], (layer.width,) + (1,) * leaf.ndim), layer.kernel)
    return Layer(own, layer.mean, Parameter(z), layer.width, layer.noise)


def _correlate(layer: Layer, x: Float[Array, "N D"], noise: Float[Array, "N P"]) -> Float[Array, "N P"]:
    """Standard normal noise, given the covariance of the layer's outputs at ``x``."""
    if not layer.separate:
        return safe_cholesky(layer.kernel(x)).lower @ noise
    lower = safe_cholesky(jax.vmap(lambda kernel: kernel(x))(layer.kernel)).lower
    return jnp.einsum("pij,jp->ip", lower, noise)
