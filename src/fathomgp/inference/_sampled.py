"""The posterior of every algorithm that ends in draws of the whitened inducing values of each layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.inference._base import AbstractPosterior
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.model import DeepGP, Whitener, condition_on, known
from fathomgp.predictive import Mixture
from fathomgp.tags import tagged

#: Above this temperature a verdict says so.
WARM = 1.1

#: v of every layer; with leading axes where several chains or draws are meant.
Values = tuple[Float[Array, "*stack _ _"], ...]


@tagged("posterior/sampled")
class SampledPosterior(AbstractPosterior):
    """Draws of v, several chains of them: each is one deep GP with known inducing values, one component of the answer.

    A component's path through the inner layers has noise of its own, the same for all rows.

    Attributes:
        model: the fitted model.
        whiteners: the factors of k(Z, Z).
        v: the draws, (chains, draws, M, P) for every layer.
        energy: minus the log posterior density of each draw and datum, up to a constant, estimated from a batch.
        temperatures: kinetic and configurational, means over the sampling phase: both are 1 where the draws are those
            of the posterior; ``None`` where there were too few steps to tell.
    """

    model: DeepGP
    whiteners: tuple[Whitener, ...]
    v: tuple[Float[Array, "chains draws _ _"], ...]
    energy: Float[Array, "chains draws"]
    temperatures: Float[Array, "2"] | None = None

    def doubts(self) -> tuple[str, ...]:
        """Whether the chains were too warm."""
        if self.temperatures is None or float(jnp.max(self.temperatures)) <= WARM:
            return ()
        kinetic, configurational = (float(value) for value in self.temperatures)
        return (
            f"The chains were too warm: their temperature is {kinetic:.2f} (kinetic) and {configurational:.2f} "
            f"(configurational) where 1 is right, so that error bars may be {max(kinetic, configurational) ** 0.5:.2f} "
            "times as wide as they should be. Lower step_size or raise batch_size.",
        )

    @property
    def num_samples(self) -> int:
        """S, all chains together."""
        return self.energy.size

    @program
    def predict_f(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, full_cov: bool = False) -> Mixture:
        """A component a draw."""
        parts = self._map(lambda one, key: one.predict_f(x, key=key, full_cov=full_cov), self._pooled(), key)
        means, variances = parts.means[:, 0], parts.variances[:, 0]
        log_weights = jnp.full(self.num_samples, -jnp.log(float(self.num_samples)), x.dtype)
        return Mixture(log_weights, means, variances, parts.covariances[:, 0] if full_cov else None)

    @program
    def draw_functions(self, x: Float[Array, "N D"], *, key: PRNGKeyArray, n: int) -> Float[Array, "n N Q"]:
        """Functions of ``n`` draws, chosen at random, without repetition where there are enough."""
        choice_key, path_key = jax.random.split(key)
        repeats = -(-n // self.num_samples)
        order = jax.random.permutation(choice_key, jnp.tile(jnp.arange(self.num_samples), repeats))[:n]
        chosen = jax.tree.map(lambda leaf: leaf[order], self._pooled())
        return self._map(lambda one, key: one.draw_functions(x, key=key, n=1)[0], chosen, path_key)

    @program
    def propagate(self, x: Float[Array, "N D"], *, key: PRNGKeyArray) -> list[Float[Array, "S N _"]]:
        """Joint draws of every layer, one a draw of v."""
        paths = self._map(lambda one, key: one.propagate(x, key=key), self._pooled(), key)
        return [layer[:, 0] for layer in paths]

    def _pooled(self) -> Values:
        return tuple(layer.reshape(-1, *layer.shape[2:]) for layer in self.v)

    def _map(self, question, draws: Values, key: PRNGKeyArray):
        """The answers of the deep GPs that belong to the draws, stacked."""

        def one(draw_and_key):
            draw, key = draw_and_key
            parts = zip(self.model.layers, self.whiteners, draw, strict=True)
            conditionals = tuple(condition_on(layer, whitener, known(v)) for layer, whitener, v in parts)
            return question(LayeredPosterior(self.model, conditionals, num_samples=1), key)

        return jax.lax.map(one, (draws, jax.random.split(key, len(draws[0]))))
