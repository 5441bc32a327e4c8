r"""The mean-field variational deep GP (Damianou and Lawrence 2013), and the Bayesian GP-LVM as its unsupervised case.

Every datum keeps a Gaussian q(h) for each hidden layer, independent of the other layers: the assumption that gave this
method its name, and that later methods dropped. Given these, the layers part, and each is a collapsed sparse GP from
uncertain inputs to uncertain targets. With targets of mean T and variance U, layer noise s2, and psi statistics of the
inputs, a layer contributes

.. math:: F_l = -\tfrac{N}{2}\log 2\pi s_2 - \tfrac{1}{2 s_2}\Big(\sum (T^2 + U) + \Psi_0 - \mathrm{tr}\, C\Big)
          - \tfrac12 \log|B| + \tfrac12 c^T B^{-1} c

with :math:`C = L_z^{-1} \Psi_2 L_z^{-T}`, B = I + C/s2 and :math:`c = L_z^{-1} \Psi_1^T T / s_2`, an output at a time.
The bound is their sum plus the entropies of all q(h); q(v) = N(B^-1 c, B^-1) comes with it. Unsupervised, the inputs
are latent too and pay KL[q(x) || N(0, I)]. Everything is maximised together by L-BFGS.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInference, Phase
from fathomgp.inference._latent_inputs import Latent, LatentInputsPosterior, input_divergence
from fathomgp.inference._lbfgs import LBFGSInfo, LBFGSState, fitted_model, lbfgs_init, lbfgs_step
from fathomgp.inference._propagation import PropagatedPosterior, slope
from fathomgp.inference.dsvi import condition_all, num_start_rows, shallow_start, start_remarks
from fathomgp.kernels.expectations import covariance_sum, psi0, psi1
from fathomgp.likelihoods import Gaussian
from fathomgp.linalg import check_factor, inverse_lower, logdet_lower, safe_cholesky
from fathomgp.model import DeepGP, Layer, Whitened, Whitener, prepare_all
from fathomgp.parameters import positive, real
from fathomgp.priors import log_prior
from fathomgp.tags import tagged

#: The variance of q(h), and of the noise between layers where the model has none, at the start.
_START_VARIANCE = 0.01
#: The variance of q(x) at the start of an unsupervised fit.
_START_INPUT_VARIANCE = 0.1
#: The first jitter of k(Z, Z), as a share of its diagonal. psi2 is a product of two covariances: what rounding leaves
#: of its small eigenvalues is divided by those of k(Z, Z), and was negative on friedman1 with the library's 1e-10.
_JITTER = 1e-6


class Beliefs(eqx.Module):
    """All that is learned.

    Attributes:
        model: hyperparameters and inducing inputs.
        hidden: q(h) of every hidden layer.
        inputs: q(x), when the inputs are latent.
    """

    model: DeepGP
    hidden: tuple[Latent, ...]
    inputs: Latent | None


class MeanFieldState(eqx.Module):
    """The search over :class:`Beliefs`."""

    search: LBFGSState


MeanFieldInfo = LBFGSInfo


@tagged("method/meanfield")
class MeanField(AbstractInference):
    """The mean-field variational deep GP, for Gaussian noise; one latent layer without inputs is the Bayesian GP-LVM.

    Attributes:
        steps: evaluations of the bound, at most, when the user does not say.
        latent_inputs: whether the inputs are unknown; the data's inputs are then where their means start.
        shallow_start: whether the last layer starts from a fitted one-layer sparse GP (not with latent inputs).
        start_rows: rows that the shallow start looks at, at the most; ``"auto"`` is 2,000.
        test_samples: 1 predicts by one deterministic pass; more predict by so many sample paths.
        tolerance: the search ends when steps gain less than this share of the bound.
    """

    steps: int = eqx.field(static=True, default=400)
    latent_inputs: bool = eqx.field(static=True, default=False)
    shallow_start: bool = eqx.field(static=True, default=True)
    start_rows: int | str = eqx.field(static=True, default="auto")
    test_samples: int = eqx.field(static=True, default=1)
    tolerance: float = eqx.field(static=True, default=1e-6)

    def __check_init__(self):
        for name in ("steps", "test_samples"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        num_start_rows(self.start_rows)

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> MeanFieldState:
        """q(h) nearly certain of what the mean functions make of the inputs."""
        if not isinstance(model.likelihood, Gaussian):
            name = type(model.likelihood).__name__
            raise SettingError(f"Mean-field inference needs Gaussian noise, not {name}: use method='aep' or 'dsvi'.")
        if model.skip_inputs and self.latent_inputs:
            raise SettingError("Latent inputs cannot also be handed to later layers: build the model without skips.")
        if self.shallow_start and not self.latent_inputs:
            model, _ = shallow_start(model, data, key=key, rows=num_start_rows(self.start_rows))
        return MeanFieldState(lbfgs_init(_first_beliefs(model, data.everything().x, self.latent_inputs)))

    def plan(self, num_data: int, max_iter: int | None) -> tuple[Phase, ...]:
        """One phase on all rows."""
        return (Phase("bound", self.steps if max_iter is None else max_iter),)

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """How many rows the shallow start has seen, where these are not all."""
        return () if self.latent_inputs else start_remarks(self, model, data)

    def enter(self, phase: Phase, state: MeanFieldState, data: AbstractSource, *, key: PRNGKeyArray) -> MeanFieldState:
        """Nothing changes."""
        return state

    def step(
        self, phase: Phase, state: MeanFieldState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[MeanFieldState, MeanFieldInfo]:
        """One L-BFGS step on minus the bound a datum."""

        def objective(beliefs: Beliefs) -> tuple[Float[Array, ""], Float[Array, ""]]:
            value, jitter = bound(beliefs, batch)
            return -(value + log_prior(beliefs.model)) / batch.num_data, jitter

        search, info = lbfgs_step(objective, state.search, tolerance=self.tolerance)
        return MeanFieldState(search), info

    def back_off(self, state: MeanFieldState) -> MeanFieldState:
        """The line search already shortens its steps."""
        return state

    def posterior(
        self, state: MeanFieldState, data: AbstractSource | None
    ) -> PropagatedPosterior | LatentInputsPosterior:
        """q(f) at the best q(v), and q(x) if the inputs are latent."""
        if data is None:
            raise SettingError("The mean-field posterior needs the training data: pass the source that was fitted.")
        beliefs = fitted_model(state.search)
        conditionals, reports = _condition(beliefs, data.everything())
        for level, report in enumerate(reports):
            check_factor(report, f"The covariance of layer {level + 1}'s inducing points")
        functions = PropagatedPosterior(beliefs.model, tuple(conditionals), num_samples=self.test_samples)
        if beliefs.inputs is None:
            return functions
        inputs = beliefs.inputs
        return LatentInputsPosterior(beliefs.model, functions, inputs.mean.value, inputs.variance.value)


# --- the bound --------------------------------------------------------------------------------------------------------


class Task(eqx.Module):
    """What one layer is asked to explain: uncertain targets at uncertain inputs.

    Attributes:
        layer: the layer.
        inputs: means of the inputs.
        spread: their variances; ``None`` where they are known.
        targets: means of the targets.
        doubt: their variances.
        weight: 1 where a target counts, one column for all outputs or one an output.
        noise: the variance of the noise, likewise.
    """

    layer: Layer
    inputs: Float[Array, "N D"]
    spread: Float[Array, "N D"] | None
    targets: Float[Array, "N P"]
    doubt: Float[Array, "N P"]
    weight: Float[Array, "N K"]
    noise: Float[Array, " K"]


class Collapsed(eqx.Module):
    """A layer's part of the bound and its best q(v)."""

    value: Float[Array, ""]
    q: Whitened


def bound(beliefs: Beliefs, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The bound on ``log p(Y)`` (or ``log p(Y | X)``), and the jitter it needed."""
    whiteners = prepare_all(beliefs.model.layers, jitter=_first_jitter(beliefs))
    tasks = tasks_of(beliefs, batch)
    total = sum(
        (collapse(task, whitener).value for task, whitener in zip(tasks, whiteners, strict=True)),
        start=jnp.zeros((), batch.x.dtype),
    )
    weight = batch.weight[:, None]
    for latent in beliefs.hidden:
        total = total + 0.5 * jnp.sum(weight * jnp.log(2.0 * jnp.pi * jnp.e * latent.variance.value))
    if beliefs.inputs is not None:
        total = total - jnp.sum(batch.weight * input_divergence(beliefs.inputs))
    fine = jnp.all(jnp.stack([whitener.report.ok for whitener in whiteners]))
    return jnp.where(fine, total, jnp.nan), jnp.max(
        jnp.stack([jnp.max(whitener.report.jitter) for whitener in whiteners])
    )


def tasks_of(beliefs: Beliefs, batch: Batch) -> list[Task]:
    """The layers' tasks, from the inputs to the outputs."""
    model = beliefs.model
    x, spread = batch.x, None
    if beliefs.inputs is not None:
        x, spread = beliefs.inputs.mean.value, beliefs.inputs.variance.value
    tasks, rows = [], batch.weight[:, None]
    for level, (layer, latent) in enumerate(zip(model.layers[:-1], beliefs.hidden, strict=True)):
        assert layer.noise is not None
        targets, doubt = latent.mean.value, latent.variance.value
        tasks.append(
            Task(layer, *_inputs(model, level, batch.x, x, spread), targets, doubt, rows, layer.noise.value[None])
        )
        x, spread = targets, doubt
    assert isinstance(model.likelihood, Gaussian)
    noise = jnp.broadcast_to(model.likelihood.variance.value, (batch.y.shape[1],))
    measured = jnp.where(batch.observed, rows, 0.0)
    last = _inputs(model, model.depth - 1, batch.x, x, spread)
    tasks.append(Task(model.layers[-1], *last, batch.y, jnp.zeros_like(batch.y), measured, noise))
    return tasks


def collapse(task: Task, whitener: Whitener) -> Collapsed:
    """A layer's part of the bound at its best q(v)."""
    inverse, outputs = whitener.inverse_factor, task.targets.shape[1]
    weight = jnp.broadcast_to(task.weight, task.targets.shape)
    noise = jnp.broadcast_to(task.noise, (outputs,))
    rest, cross, C, square = _statistics(task, inverse, weight)
    factor = safe_cholesky(jnp.eye(len(inverse), dtype=C.dtype)[None] + C / task.noise[:, None, None], jitter=0.0)
    half = inverse_lower(factor.lower)
    c = (cross / noise[None]).T[:, :, None]
    fit = jnp.sum((half @ c) ** 2, axis=(1, 2))
    count = jnp.sum(weight, axis=0)
    terms = fit - logdet_lower(factor.lower) - (square + rest) / noise - count * jnp.log(2.0 * jnp.pi * noise)
    root = jnp.broadcast_to(jnp.swapaxes(half, 1, 2), (outputs, *half.shape[1:]))
    mean = root @ (half @ c)
    return Collapsed(0.5 * jnp.sum(terms), Whitened(mean[:, :, 0].T, root))


def _statistics(
    task: Task, inverse: Float[Array, "M M"], weight: Float[Array, "N P"]
) -> tuple[Array, Array, Array, Array]:
    """Sums over the data: ``Psi0 - tr C`` (P,), whitened cross terms (M, P), C (K, M, M), squared targets (P,).

    C is a sum of squares and a small rest, and what it leaves of Psi0 a sum of variances, row by row: the difference of
    the two sums would be lost to rounding where noise is small.
    """
    layer, x, spread = task.layer, task.inputs, task.spread
    assert layer.z is not None
    kernel, z = layer.kernel, layer.z.value
    residual = task.targets - layer.mean(x)
    square = residual**2 + task.doubt
    zeroth, K = (
        (kernel.diagonal(x), kernel(x, z)) if spread is None else (psi0(kernel, x, spread), psi1(kernel, z, x, spread))
    )
    A = inverse @ K.T
    C = jnp.einsum("nk,in,jn->kij", task.weight, A, A, optimize="optimal")
    rest, cross = (zeroth - jnp.sum(A**2, axis=0)) @ weight, A @ (weight * residual)
    if spread is None:
        return rest, cross, C, jnp.sum(weight * square, axis=0)
    W = slope(layer, x.shape[1])
    if W is not None:
        # The mean function and the kernel see the same uncertain input: Stein's lemma gives what they share.
        def shared(w: Float[Array, " D"], weight: Float[Array, " N"]) -> Float[Array, " M"]:
            return weight @ jax.jvp(lambda x: psi1(kernel, z, x, spread), (x,), (spread * w[None],))[1]

        cross = cross - inverse @ jax.vmap(shared, in_axes=(1, 1), out_axes=1)(W, weight)
        square = square + spread @ W**2
    spare = inverse[None] @ covariance_sum(kernel, z, x, spread, task.weight) @ inverse.T[None]
    return rest - jnp.trace(spare, axis1=1, axis2=2), cross, C + spare, jnp.sum(weight * square, axis=0)


def _inputs(model: DeepGP, level: int, data: Array, x: Array, spread: Array | None) -> tuple[Array, Array | None]:
    """What a layer sees; inputs that are handed on are certain."""
    inputs = model.layer_input(level, data, x)
    extra = inputs.shape[1] - x.shape[1]
    return inputs, None if spread is None else jnp.pad(spread, ((0, 0), (0, extra)))


@program
def _condition(beliefs: Beliefs, batch: Batch) -> tuple[Any, Any]:
    whiteners = prepare_all(beliefs.model.layers, jitter=_first_jitter(beliefs))
    q = tuple(collapse(*pair).q for pair in zip(tasks_of(beliefs, batch), whiteners, strict=True))
    return condition_all(beliefs.model, q, jitter=_first_jitter(beliefs))


def _first_jitter(beliefs: Beliefs) -> float | None:
    """The library's own where no input is uncertain: there is no psi2 then."""
    return _JITTER if beliefs.hidden or beliefs.inputs is not None else None


def _first_beliefs(model: DeepGP, x: Float[Array, "N D"], latent_inputs: bool) -> Beliefs:
    h, hidden, layers = x, [], []
    for level, layer in enumerate(model.layers[:-1]):
        h = layer.mean(model.layer_input(level, x, h))
        hidden.append(Latent(real(h), positive(jnp.full_like(h, _START_VARIANCE))))
        noise = layer.noise if layer.noise is not None else positive(jnp.asarray(_START_VARIANCE, x.dtype))
        layers.append(Layer(layer.kernel, layer.mean, layer.z, layer.width, noise))
    inputs = Latent(real(x), positive(jnp.full_like(x, _START_INPUT_VARIANCE))) if latent_inputs else None
    return Beliefs(DeepGP((*layers, model.layers[-1]), model.likelihood, model.skip_inputs), tuple(hidden), inputs)
