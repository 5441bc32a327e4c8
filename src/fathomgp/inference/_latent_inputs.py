"""Unknown inputs: Gaussians on them, the posterior that holds them, and those of new rows."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.inference._base import AbstractPosterior
from fathomgp.inference._lbfgs import lbfgs_minimise
from fathomgp.inference._propagation import Matched, PropagatedPosterior, diagonal, match, push
from fathomgp.model import DeepGP
from fathomgp.parameters import Parameter, positive, real
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged

_START_VARIANCE = 0.1
_STEPS = 200


class Latent(eqx.Module):
    """Independent Gaussians, one a datum and dimension."""

    mean: Parameter
    variance: Parameter


@tagged("posterior/latent-inputs")
class LatentInputsPosterior(AbstractPosterior):
    """What an unsupervised fit has learned: functions from latent inputs to outputs, and the inputs of the data.

    Attributes:
        model: the fitted model.
        functions: q(f), to be asked at latent inputs.
        means: of q(x), one row a datum.
        variances: of q(x).
    """

    model: DeepGP
    functions: PropagatedPosterior
    means: Float[Array, "N D"]
    variances: Float[Array, "N D"]

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """The latent functions at latent inputs."""
        return self.functions.predict_f(x, key=key, full_cov=full_cov)

    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Draws from the joint posterior of the rows of each call."""
        return self.functions.draw_functions(x, key=key, n=n)

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Joint draws of every layer."""
        return self.functions.propagate(x, key=key)


def input_divergence(inputs: Latent) -> Float[Array, " N"]:
    """``KL[q(x) || N(0, I)]`` of every datum."""
    m, s = inputs.mean.value, inputs.variance.value
    return 0.5 * jnp.sum(m**2 + s - jnp.log(s) - 1.0, axis=1)


@program
def infer_inputs(
    posterior: LatentInputsPosterior,
    y: Float[Array, "N P"],
    observed: Bool[Array, "N P"],
    start: Float[Array, "N D"],
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """Means and variances of q(x) for new rows of outputs, the functions held: each row maximises its own bound.

    E_q(x)[log p(y | f(x))] - KL[q(x) || N(0, I)]
    """
    model = posterior.model
    layers = [match(*pair) for pair in zip(model.layers, posterior.functions.conditionals, strict=True)]

    def objective(inputs: Latent) -> tuple[Float[Array, ""], Float[Array, ""]]:
        mean, variance = _through(model, layers, inputs.mean.value, inputs.variance.value)
        figures = model.likelihood.expected_log_prob(mean, variance, y)
        gain = jnp.sum(jnp.where(observed, figures, 0.0)) - jnp.sum(input_divergence(inputs))
        return -gain / len(y), jnp.zeros((), y.dtype)

    first = Latent(real(start), positive(jnp.full_like(start, _START_VARIANCE)))
    found = lbfgs_minimise(objective, first, max_steps=_STEPS, tolerance=1e-7)
    return found.mean.value, found.variance.value


def _through(
    model: DeepGP, layers: list[Matched], mean: Float[Array, "N D"], variance: Float[Array, "N D"]
) -> tuple[Float[Array, "N Q"], Float[Array, "N Q"]]:
    for level, (layer, matched) in enumerate(zip(model.layers, layers, strict=True)):
        mean, variance = push(layer, matched, mean, variance)
        if level < model.depth - 1 and layer.noise is not None:
            variance = variance + layer.noise.value
    return mean, diagonal(variance)
