"""A small algorithm for tests of the fit loop: a noisy walk towards the mean of the batches it sees."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fathomgp.data import ArraySource
from fathomgp.inference import AbstractInference, AbstractInfo, AbstractPosterior, Phase
from fathomgp.kernels import RBF
from fathomgp.likelihoods import Gaussian
from fathomgp.means import Zero
from fathomgp.model import DeepGP, Layer

TRACES = []


class WalkState(eqx.Module):
    position: Float[Array, " D"]
    careful: Int[Array, ""]
    steps: Int[Array, ""]


class WalkInfo(AbstractInfo):
    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    rows: Float[Array, ""]


class WalkPosterior(AbstractPosterior):
    model: DeepGP
    state: WalkState

    def predict_f(self, x, *, key, full_cov=False):
        raise AssertionError("not part of this toy")

    def draw_functions(self, x, *, key, n):
        raise AssertionError("not part of this toy")

    def propagate(self, x, *, key):
        raise AssertionError("not part of this toy")


class Walk(AbstractInference):
    """``bad`` holds step numbers whose result is NaN; phases are done at step ``done_at``; ``last`` names the last."""

    bad: tuple[int, ...] = eqx.field(static=True, default=())
    done_at: int = eqx.field(static=True, default=10**6)
    batch_size: int | None = eqx.field(static=True, default=4)
    phases: int = eqx.field(static=True, default=2)
    last: str = eqx.field(static=True, default="walk")

    def init(self, model, data, *, key):
        return WalkState(jnp.zeros(data.num_inputs), jnp.asarray(0, jnp.int32), jnp.asarray(0, jnp.int32))

    def plan(self, num_data, max_iter):
        names = ("walk",) * (self.phases - 1) + (self.last,)
        return tuple(Phase(name, max_iter or 40, batch_size=self.batch_size) for name in names)

    def enter(self, phase, state, data, *, key):
        return WalkState(
            state.position + 0.1 * jax.random.normal(key, state.position.shape), state.careful, state.steps
        )

    def step(self, phase, state, batch, *, key):
        TRACES.append(phase.name)
        noise = 0.01 * jax.random.normal(key, state.position.shape)
        position = 0.9 * state.position + 0.1 * jnp.mean(batch.x, axis=0) + noise
        bad = jnp.isin(state.steps + 1, jnp.asarray((*self.bad, -1), jnp.int32))
        objective = jnp.where(bad, jnp.nan, jnp.sum(position**2))
        info = WalkInfo(objective, ~bad, state.steps + 1 == self.done_at, jnp.zeros(()), jnp.sum(batch.weight))
        # A failed step is undone, so the counter moves on only when steps succeed, or nothing would ever recover.
        return WalkState(position, state.careful, state.steps + 1), info

    def back_off(self, state):
        return WalkState(state.position, state.careful + 1, state.steps + 1)

    def posterior(self, state, data):
        return WalkPosterior(tiny_model(), state)


def tiny_model() -> DeepGP:
    return DeepGP((Layer(RBF(), Zero(1), None, 1),), Gaussian(0.1))


def tiny_source(rows: int = 10) -> ArraySource:
    rng = np.random.default_rng(1)
    return ArraySource(rng.normal(size=(rows, 2)), rng.normal(size=(rows, 1)))
