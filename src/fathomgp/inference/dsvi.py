"""Doubly stochastic variational inference (Salimbeni and Deisenroth 2017).

Every layer keeps M inducing values with a Gaussian q; the layers' q are independent, the layers' functions are not.
With f^L drawn through the layers (15), the bound (17) is

    ELBO = sum_i E_q(f_i^L)[log p(y_i | f_i^L)] - sum_l KL[q(V^l) || p(V^l)],

estimated from a minibatch and one sample path a row: twice stochastic, unbiased both times. The last layer is not
sampled: its Gaussian goes into the likelihood's expectation in closed form or by quadrature. Depth 1 is the sparse
variational GP of Hensman et al. (2013), without sampling noise.

The inducing values are whitened, v = Lz^-1 u, so that the prior is N(0, I). The last layer's q follows natural
gradients, which are exact for Gaussian noise (gamma = 1 in one layer solves for q in one step); all else follows Adam.
Where Adam moves a q whose outputs have a kernel each, it is parameterised as a noisy observation would inform it
(:class:`~fathomgp.model.Informed`): half the work with the data.

A step splits in two. What has no data axis (factors, inverses, KL: M x M) is done once, in the precision of the
parameters. What has one streams through in blocks of rows, in the precision of the data, and hands back only M x M
cotangents: memory does not grow with the batch.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fathomgp.compilation import RUN_ONCE, padded_length, program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import AbstractInfo, Phase, rows_or_auto
from fathomgp.inference._descent import AbstractDescent, DescentState, longer, lower_roots, natural_size
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.inference._lbfgs import lbfgs_minimise
from fathomgp.inference._streaming import (
    Noise,
    Rows,
    last_moments,
    num_paths,
    path_noise,
    rows_a_block,
    rows_of,
    stream_sum,
)
from fathomgp.inference.sgpr import collapsed_elbo_and_jitter, optimal_q
from fathomgp.kernels import AbstractKernel
from fathomgp.likelihoods import Gaussian, with_known_noise
from fathomgp.linalg import check_factor, inverse_lower, safe_cholesky
from fathomgp.means import AbstractMean
from fathomgp.model import (
    Composition,
    Conditional,
    DeepGP,
    Informed,
    Layer,
    Whitened,
    condition_on,
    condition_on_informed,
    moments,
    prepare_all,
)
from fathomgp.parameters import Parameter, all_finite, cast, partition, real
from fathomgp.priors import log_prior
from fathomgp.tags import tagged

#: q(v) of a layer.
Q = Whitened | Informed

#: How the q that Adam moves is parameterised, and what one layer does after its shallow start.
PARAMETERISATIONS = ("auto", "whitened")
ONE_LAYER = ("auto", "collapsed", "stochastic")
#: Rows and L-BFGS steps of the shallow start, at the most, unless a setting says otherwise.
_START_ROWS = 2000
_START_STEPS = 300
#: L-BFGS steps where the model has one layer: the start is then the whole fit, if it has seen all rows.
_ALONE_STEPS = 500
#: Rows that each weight of a narrow layer's mean needs, to be fitted with it.
_ROWS_A_WEIGHT = 10


class DSVIInfo(AbstractInfo):
    """The figures of a step, per datum: minus the bound and the priors; and ``kl``, all of that that sees no data."""

    objective: Float[Array, ""]
    ok: Bool[Array, ""]
    done: Bool[Array, ""]
    jitter: Float[Array, ""]
    kl: Float[Array, ""]


@tagged("method/dsvi")
class DSVI(AbstractDescent):
    """Doubly stochastic variational inference; with one layer, the sparse variational GP.

    Attributes:
        steps: how many; ``None``: 1,000 where data fill up to ten batches, else 150 for each batch, up to 6,000; fewer
            for one layer, see ``one_layer``.
        batch_size: rows a step; data with fewer rows are used whole.
        learning_rate: Adam's; it is reached within a hundred steps, and falls to a hundredth along a cosine over the
            last half of all steps.
        natural: step size of the natural gradient on the last layer's q, and on Gaussian noise after a shallow start;
            0 leaves both to Adam too. It falls to B / N, if that is less, over the last half of the steps, so that q
            ends as an average over the data.
        num_samples: sample paths a row in training.
        test_samples: sample paths a prediction: components of the answer.
        shallow_start: whether the last layer starts from a fitted one-layer sparse GP (Gaussian noise only), so that
            the deep model begins where the shallow one ends.
        start_rows: rows that the shallow start looks at, at the most; ``"auto"`` is 2,000.
        inner_root: standard deviation of the inner layers' q at the start (that of the noise where a noisy observation
            informs q: the same when it is small), in units of the prior's. At 1 the inner layers are noise that
            training switches off for good; the paper's 1e-5 costs hundreds of nats of KL first.
        parameterisation: of the q that Adam moves. ``"whitened"`` is N(m, T T^T); ``"auto"`` is what a noisy
            observation would leave (:class:`~fathomgp.model.Informed`) where every output has a k(Z, x) of its own, for
            half the work, and ``"whitened"`` elsewhere. Where q starts as the prior, the former starts with half its
            variance.
        one_layer: what one layer with Gaussian noise does after its shallow start, which has found the best bound on
            the rows that it has seen. ``"stochastic"`` takes all steps, ``"collapsed"`` none; ``"auto"`` is the latter
            where it has seen all rows, and takes half the steps where not. Steps that were asked for are always taken,
            and in float32, where the collapsed bound is not exact enough, ``"auto"`` is ``"stochastic"``.
        decay: whether step sizes rise and fall at all.
    """

    separates: ClassVar[bool] = True
    steps: int | None = eqx.field(static=True, default=None)
    batch_size: int = eqx.field(static=True, default=1024)
    learning_rate: float = eqx.field(static=True, default=0.01)
    natural: float = eqx.field(static=True, default=0.1)
    num_samples: int = eqx.field(static=True, default=1)
    test_samples: int = eqx.field(static=True, default=100)
    shallow_start: bool = eqx.field(static=True, default=True)
    start_rows: int | str = eqx.field(static=True, default="auto")
    inner_root: float = eqx.field(static=True, default=0.01)
    decay: bool = eqx.field(static=True, default=True)
    parameterisation: str = eqx.field(static=True, default="auto")
    one_layer: str = eqx.field(static=True, default="auto")

    def __check_init__(self):
        self._check("num_samples", "test_samples")
        for name, choices in (("parameterisation", PARAMETERISATIONS), ("one_layer", ONE_LAYER)):
            if getattr(self, name) not in choices:
                options = ", ".join(map(repr, choices))
                raise SettingError(f"{name}={getattr(self, name)!r} is unknown: choose one of {options}.")
        self._num_start_rows()

    def usual_steps(self, batches: int) -> int:
        """How many steps data that fill so many batches need.

        1,500 instead of 1,000 gain 0.02 nats on concrete and kin8nm, 0.005 on power, and nothing on boston and energy.
        """
        return 1000 if batches <= 10 else longer(1500, batches)

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> DescentState:
        """Start q at the prior's mean; the last layer's from the shallow start if asked."""
        prior = initial_q(model, inner_root=self.inner_root)
        inner, last = self._inform(model.layers[:-1], prior[:-1]), prior[-1:]
        if self.shallow_start and isinstance(model.likelihood, Gaussian):
            model, fitted = shallow_start(model, data, key=key, rows=self._num_start_rows())
            model, calm = calm_start(model, prior[:-1], fitted, self.inner_root)
            inner, last = self._inform(model.layers[:-1], calm), (fitted,)
        elif self.natural == 0.0:
            last = self._inform(model.layers[-1:], last)
        return self._start(model, (*inner, *last))

    def sketch(self, model: DeepGP, data: AbstractSource) -> DescentState | None:
        """The start without the shallow one; the last layer's q has another form there if Adam moves it."""
        return None if self.natural == 0.0 else without_shallow_start(self, model, data)

    def step(
        self, phase: Phase, state: DescentState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[DescentState, DSVIInfo]:
        """One natural-gradient step on the last layer's q and one Adam step on all else."""
        loss, gradient = streamed_loss(state.model, state.q, batch, key=key, num_samples=self.num_samples)
        model_gradient, q_gradient = gradient
        new = self._descend(state, model_gradient, lower_roots(q_gradient), decay=self.decay)
        fine = jnp.asarray(True)
        if self.natural > 0.0:
            size = natural_size(self.natural, state, batch, decay=self.decay)
            last, fine = natural_step(state.q[-1], q_gradient[-1], size)
            new = dataclasses.replace(new, q=(*new.q[:-1], last))
            if self.shallow_start:  # without it, noise would take in what no function has explained yet
                new = dataclasses.replace(new, model=natural_noise(new.model, state.model, model_gradient, batch, size))
        done = jnp.asarray(False)
        if self._takes_fewer(phase, state.model):
            done, moves = state.steps + 1 >= state.horizon, state.horizon > 0
            new, fine = jax.tree.map(lambda new, old: jnp.where(moves, new, old), new, state), fine | ~moves
        objective = (loss.data + loss.kl) / batch.num_data
        ok = jnp.isfinite(objective) & fine & all_finite((new.model, new.q))
        return new, DSVIInfo(objective, ok, done, loss.jitter, loss.kl / batch.num_data)

    def enter(self, phase: Phase, state: DescentState, data: AbstractSource, *, key: PRNGKeyArray) -> DescentState:
        """Tell the schedule how many steps there will be: fewer where the shallow start is most of the fit."""
        steps = phase.steps
        if self._takes_fewer(phase, state.model):
            steps = 0 if self._collapses(data.num_data) else steps // 2
        return eqx.tree_at(lambda s: s.horizon, state, jnp.asarray(steps, jnp.int32))

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """What one layer leaves to the shallow start, or how many rows that has seen."""
        if not self._takes_fewer(plan[0], model):
            return start_remarks(self, model, data)
        rows = min(self._num_start_rows(), data.num_data)
        if not self._collapses(data.num_data):
            steps = plan[0].steps // 2
            return (
                f"One layer starts from sparse GP regression on {rows} rows and takes {steps} steps from there: "
                "one_layer says how many.",
            )
        seen = f"all {rows}" if rows == data.num_data else f"{rows} of the {data.num_data}"
        return (
            f"One layer with Gaussian noise: sparse GP regression on {seen} rows has found their best bound, so DSVI "
            "takes no steps of its own. Set one_layer='stochastic' for stochastic steps.",
        )

    def _num_start_rows(self) -> int:
        return num_start_rows(self.start_rows)

    def _takes_fewer(self, phase: Phase, model: DeepGP) -> bool:
        """Whether one layer leaves steps that nobody asked for to the shallow start: the same model's optimum."""
        started = model.depth == 1 and self.shallow_start and isinstance(model.likelihood, Gaussian)
        if not (started and phase.usual) or self.one_layer == "stochastic":
            return False
        z = model.layers[0].z
        return self.one_layer == "collapsed" or (z is not None and z.raw.dtype == jnp.float64)

    def _collapses(self, num_data: int) -> bool:
        """Whether it leaves all of them."""
        return self.one_layer == "collapsed" or num_data <= self._num_start_rows()

    def _inform(self, layers: tuple[Layer, ...], q: tuple[Any, ...]) -> tuple[Any, ...]:
        """Q as Adam should see it: informed by a noisy observation where every output has a k(Z, x) of its own."""
        own = (self.parameterisation == "auto" and (layer.separate or layer.width == 1) for layer in layers)
        return tuple(Informed(one.mean, one.root) if alone else one for one, alone in zip(q, own, strict=True))

    def posterior(self, state: DescentState, data: AbstractSource | None) -> LayeredPosterior:
        """The mixture (18) over sample paths."""
        posterior, reports = _posterior(state.model, state.q, self.test_samples)
        for level, report in enumerate(reports):
            check_factor(report, f"The covariance of layer {level + 1}'s inducing points")
        return posterior


# --- the bound --------------------------------------------------------------------------------------------------------


def elbo(model: DeepGP, q: tuple[Q, ...], batch: Batch, *, key: PRNGKeyArray, num_samples: int = 1) -> Float[Array, ""]:
    """The bound (17), estimated from a batch: plainly, for tests and for whoever wants to differentiate it."""
    conditionals, kl, _ = condition_with_kl(model, q)
    rows = rows_of(batch)
    noise = path_noise(model, len(batch.x), num_samples, key=key)
    return batch.scale * expected_log_likelihood(model, conditionals, rows, noise) - kl


def expected_log_likelihood(
    model: DeepGP, conditionals: list[Conditional], rows: Rows, noise: Noise
) -> Float[Array, ""]:
    """``sum_i E_q(f_i^L)[log p(y_i | f_i^L)]`` over rows (x, y, observed, weight), along one or more sample paths."""
    x, *rest = rows
    mean, variance = last_moments(model, conditionals, x, noise)
    y, observed, weight, *known = (jnp.repeat(part, num_paths(noise), axis=0) for part in rest)
    figures = with_known_noise(model.likelihood, *known).expected_log_prob(mean, variance, y)
    return jnp.sum(jnp.where(observed, figures, 0.0) * weight[:, None]) / num_paths(noise)


def kl_divergence(q: tuple[Whitened, ...]) -> Float[Array, ""]:
    """``sum_l KL[N(m, T T^T) || N(0, I)] = 1/2 sum (|m|^2 + |T|^2 - 2 sum log |T_ii| - M)``."""

    def one(q: Whitened) -> Float[Array, ""]:
        diagonal = jnp.diagonal(q.root, axis1=1, axis2=2)
        return 0.5 * (jnp.sum(q.mean**2) + jnp.sum(q.root**2) - jnp.sum(jnp.log(diagonal**2)) - diagonal.size)

    return sum((one(layer) for layer in q), start=jnp.zeros((), q[0].mean.dtype))


def informed_kl(q: Informed, R: Float[Array, "P M M"]) -> Float[Array, ""]:
    """``KL[N(R^T mu, I - R^T R) || N(0, I)] = 1/2 (|R^T mu|^2 - |R|^2) - sum log |T_ii| - sum log R_ii``."""
    mean = jnp.einsum("pnm,np->mp", R, q.mean)
    logs = jnp.log(jnp.diagonal(q.root, axis1=1, axis2=2) ** 2) + jnp.log(jnp.diagonal(R, axis1=1, axis2=2) ** 2)
    return 0.5 * (jnp.sum(mean**2) - jnp.sum(R**2) - jnp.sum(logs))


class Loss(eqx.Module):
    """Minus the bound's first term, its second one less the log density of priors, and the jitter they needed."""

    data: Float[Array, ""]
    kl: Float[Array, ""]
    jitter: Float[Array, ""]


def streamed_loss(
    model: DeepGP, q: Any, batch: Batch, *, key: PRNGKeyArray, num_samples: int, condition: Any = None
) -> tuple[Loss, Any]:
    """Minus the bound, and its gradient with respect to the model and q.

    The pull-back of the M x M part is taken once, with cotangents summed over blocks of rows. ``condition`` makes the
    layers' q(f), and the KL, of the model and another kind of q (decoupled ones).
    """
    condition = condition or condition_with_kl
    dtype = batch.x.dtype
    learned, constant = partition(model)

    def without_data(learned: DeepGP, q: Any) -> tuple[Any, Float[Array, ""]]:
        conditionals, kl, reports = condition(eqx.combine(learned, constant), q)
        jitter = jnp.max(jnp.stack([jnp.max(report.jitter) for report in reports]))
        return (cast(conditionals, dtype), kl - log_prior(learned)), jitter

    (conditionals, kl), pull, jitter = jax.vjp(without_data, learned, q, has_aux=True)

    def with_data(learned: DeepGP, conditionals: Any, rows: Rows, noise: Noise) -> Float[Array, ""]:
        return expected_log_likelihood(cast(eqx.combine(learned, constant), dtype), conditionals, rows, noise)

    gradient_of_block = functools.partial(jax.value_and_grad(with_data, (0, 1)), learned, conditionals)
    noise = path_noise(model, len(batch.x), num_samples, key=key)
    sums = stream_sum(gradient_of_block, batch, noise, rows_a_block(conditionals, num_samples))
    value, (direct, cotangent) = jax.tree.map(lambda leaf: -batch.scale.astype(leaf.dtype) * leaf, sums)
    model_gradient, q_gradient = pull((cotangent, jnp.ones_like(kl)))
    model_gradient = jax.tree.map(jnp.add, model_gradient, direct)
    return Loss(value.astype(kl.dtype), kl, jitter), (model_gradient, q_gradient)


def natural_step(
    q: Whitened, gradient: Whitened, gamma: Float[Array, ""], curvature: Float[Array, "P M M"] | None = None
) -> tuple[Whitened, Bool[Array, ""]]:
    """A natural-gradient step on q(v) = N(m, S), and whether its precision had a factor.

    ``gradient`` is that of minus the bound with respect to m and to the unconstrained root T. Without the KL's share,
    that of E, minus the expected log likelihood, remains: its slope g in m, and its curvature H = 2 dE/dS = dE/dT T^-1.
    With the KL term in closed form the step is

        S^-1 <- (1 - gamma) S^-1 + gamma (I + H),        m <- m - gamma S (m + g)

    A likelihood that is not log-concave (robust-max, Student-t) may have an H under which the precision would fall to
    nothing or below, and m jump. Where it would lose more than half of its first term, |H|, of the same eigenvectors,
    stands for H: the step is as long as the curvature allows, whatever its sign.

    Where another objective than a bound is descended, S^-1 may not be its ``curvature`` in m: that stands for it then.
    """
    gradient = jax.tree.map(jnp.subtract, gradient, eqx.filter_grad(lambda q: kl_divergence((q,)))(q))
    m, g, size = q.mean.T[:, :, None], gradient.mean.T[:, :, None], q.root.shape[-1]
    inverse = inverse_lower(q.root)
    H = gradient.root @ inverse
    H = 0.5 * (H + jnp.swapaxes(H, 1, 2))
    kept, unit = (1.0 - gamma) * (jnp.swapaxes(inverse, 1, 2) @ inverse), jnp.eye(size, dtype=m.dtype)[None]
    trial = jax.lax.linalg.cholesky(0.5 * kept + gamma * (unit + H), symmetrize_input=False)
    tame = jnp.all(jnp.isfinite(jnp.diagonal(trial, axis1=1, axis2=2)), axis=1)
    H = jax.lax.cond(jnp.all(tame), lambda: H, lambda: jnp.where(tame[:, None, None], H, _absolute(H)))
    precision = kept + gamma * (unit + H)
    # Factorised from the last row up, so that the root of its inverse is lower triangular.
    factor = safe_cholesky(precision[:, ::-1, ::-1], jitter=0.0)
    root = jnp.swapaxes(inverse_lower(factor.lower), 1, 2)[:, ::-1, ::-1]
    half = jnp.swapaxes(root, 1, 2) if curvature is None else inverse_lower(safe_cholesky(curvature, jitter=0.0).lower)
    mean = m - gamma * jnp.swapaxes(half, 1, 2) @ (half @ (m + g))
    return Whitened(mean[:, :, 0].T, root), jnp.all(factor.ok)


def natural_noise(new: DeepGP, old: DeepGP, gradient: DeepGP, batch: Batch, gamma: Float[Array, ""]) -> DeepGP:
    """``new`` with the Gaussian noise that a natural step from ``old`` gives, if it is learned.

    With e = E_q[(y - f)^2], averaged over the rows (read off the gradient), that step is

        s2 <- (1 - gamma) s2 + gamma e:

    noise follows the residuals within 1 / gamma steps, up or down. Adam would move it by a hundredth a step, and where
    data have next to no noise, residuals a thousand times as large fill its memory first.
    """
    if not isinstance(old.likelihood, Gaussian) or not old.likelihood.variance.trainable:
        return new
    assert isinstance(gradient.likelihood, Gaussian)
    variance, slope = old.likelihood.variance, gradient.likelihood.variance.raw
    noise, lower = variance.value, variance.lower or 0.0
    seen = jnp.where(batch.observed, batch.weight[:, None], 0.0).astype(noise.dtype)
    count = batch.scale.astype(noise.dtype) * (jnp.sum(seen) if noise.ndim == 0 else jnp.sum(seen, axis=0))
    # d(minus the bound)/d raw = (s2 - lower) count (s2 - e) / (2 s2^2)
    residual = noise - 2.0 * noise**2 * slope / ((noise - lower) * count)
    follow = (1.0 - gamma) * noise + gamma * residual
    raw = jnp.log(jnp.maximum(follow - lower, 1e-3 * (noise - lower)))
    return eqx.tree_at(lambda model: model.likelihood.variance.raw, new, jnp.where(count > 0, raw, variance.raw))


def _absolute(H: Float[Array, "P M M"]) -> Float[Array, "P M M"]:
    """``|H|``: the absolute values of its eigenvalues; NaN where H is not finite."""
    values, vectors = jnp.linalg.eigh(H, symmetrize_input=False)
    return (vectors * jnp.abs(values)[:, None, :]) @ jnp.swapaxes(vectors, 1, 2)


# --- starts -----------------------------------------------------------------------------------------------------------


def initial_q(model: DeepGP, *, inner_root: float = 1.0) -> tuple[Whitened, ...]:
    """The prior in the last layer; in the others the prior's mean with ``inner_root`` times its deviation."""

    def start(level: int, layer: Layer) -> Whitened:
        if layer.z is None:
            raise SettingError("This algorithm needs inducing inputs, but a layer has none: set num_inducing.")
        size, dtype = layer.num_inducing, layer.z.raw.dtype
        scale = 1.0 if level == model.depth - 1 else inner_root
        # By NumPy: every shape of an array operation outside a compiled function is a program to compile.
        root = np.tile(scale * np.eye(size)[None], (layer.width, 1, 1))
        return Whitened(jnp.asarray(np.zeros((size, layer.width)), dtype), jnp.asarray(root, dtype))

    return tuple(start(level, layer) for level, layer in enumerate(model.layers))


def inputs_at_means(model: DeepGP, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
    """What the last layer sees where every inner layer is at its mean."""
    h = x
    for level, layer in enumerate(model.layers[:-1]):
        h = layer.mean(model.layer_input(level, x, h))
    return model.layer_input(model.depth - 1, x, h)


def shallow_start(
    model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray, fit_means: bool = True, rows: int = _START_ROWS
) -> tuple[DeepGP, Whitened]:
    """Fit the last layer alone, as a collapsed sparse GP on what the inner layers' means make of the inputs.

    Where an inner layer is narrower than the inputs, its mean decides which of them the model sees at all: if it is
    learned, it is fitted too. Returns the model with that last layer and noise, and the layer's optimal q: the deep
    model then starts from the shallow one's solution instead of having to find it again.
    """
    seed = int(jax.random.bits(key, dtype=jnp.uint32))
    subset = data.subset(rows, seed=seed)
    dtype = model.layers[-1].z.raw.dtype if model.layers[-1].z is not None else jnp.float64
    count = len(subset[0])
    x, y, observed = (_padded_rows(part) for part in subset)
    known = data.noise_of_subset(rows, seed=seed)
    noise = None if known is None else _as(_padded_rows(known), dtype)
    effort = (_ALONE_STEPS, 1e-6) if model.depth == 1 and data.num_data <= rows else (_START_STEPS, 1e-5)
    fit_means = fit_means and _narrow_means(model, count, x.shape[1]) != ()
    rows_there: Any = np.asarray(count, dtype)
    seen = (_as(x, dtype), _as(y, dtype), _as(observed, bool), noise)
    return _shallow_start(model, *seen, rows_there, fit_means, effort)


def _as(part: np.ndarray, dtype: Any) -> Any:
    """On the host in this type, so that no conversion is compiled."""
    return np.asarray(part, dtype)


def _padded_rows(part: np.ndarray) -> np.ndarray:
    """The first row again and again, but False for what was measured, up to the ladder's length."""
    extra = padded_length(len(part), smallest=16) - len(part)
    filler = np.zeros_like(part[:1]) if part.dtype == bool else part[:1]
    return np.concatenate([part, np.repeat(filler, extra, axis=0)])


def calm_start(
    model: DeepGP, inner: tuple[Whitened, ...], last: Whitened, inner_root: float
) -> tuple[DeepGP, tuple[Whitened, ...]]:
    """After a shallow start, inner layers that are as sure as the noise asks.

    Their q has ``inner_root`` times the prior's deviation, and the last layer's slopes turn that into a variance of the
    outputs. Where noise is less, training would first raise the noise and then take thousands of steps to give back the
    inner layers' KL. There the inner kernels' variances start so small that the prior itself leaves no more than the
    noise, and q starts as the prior: the deep model is the shallow one, and deepens from there.
    """
    if model.depth == 1 or not all(_has_height(layer.kernel) for layer in model.layers[:-1]):
        return model, inner
    share, root = _calm(model, last, inner_root)
    raw = [_height(layer.kernel).raw + jnp.log(share) for layer in model.layers[:-1]]
    model = eqx.tree_at(lambda m: [_height(layer.kernel).raw for layer in m.layers[:-1]], model, raw)
    return model, tuple(Whitened(q.mean, q.root * (root / inner_root)) for q in inner)


@program
def _calm(model: DeepGP, last: Whitened, inner_root: float) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What the inner kernels' variances are to be multiplied by, and q's deviation in units of the prior's."""
    layer, width = model.layers[-1], model.layers[-2].width
    assert layer.z is not None
    assert isinstance(model.likelihood, Gaussian)
    conditional = condition_on(layer, prepare_all((layer,))[0], last)
    slopes = jax.vmap(jax.jacrev(lambda x: moments(layer, conditional, x[None])[0][0]))(layer.z.value)
    heights = jnp.stack([jnp.mean(_height(one.kernel).value) for one in model.layers[:-1]])
    passed_on = jnp.mean(jnp.sum(slopes[:, :, :width] ** 2, axis=2)) * jnp.sum(heights)
    allowed = jnp.mean(model.likelihood.variance.value) / passed_on
    calm = allowed < inner_root**2
    return jnp.where(calm, allowed, 1.0), jnp.where(calm, 1.0, inner_root)


def _height(kernel: Any) -> Parameter:
    return kernel.variance


def _has_height(kernel: AbstractKernel) -> bool:
    """Whether the kernel's variance is a parameter of its own, to be learned."""
    variance = getattr(kernel, "variance", None)
    return isinstance(variance, Parameter) and variance.trainable and variance.lower == 0.0


def num_start_rows(setting: int | str) -> int:
    """How many rows a shallow start looks at, at the most."""
    return rows_or_auto("start_rows", setting, _START_ROWS)


def start_remarks(inference: Any, model: DeepGP, data: AbstractSource) -> tuple[str, ...]:
    """How many rows a shallow start has seen, where these are not all."""
    rows = num_start_rows(inference.start_rows)
    if not (inference.shallow_start and isinstance(model.likelihood, Gaussian)) or data.num_data <= rows:
        return ()
    return (
        f"The last layer starts from sparse GP regression on {rows} of the {data.num_data} rows: "
        "start_rows sets how many.",
    )


def without_shallow_start(inference: Any, model: DeepGP, data: AbstractSource) -> Any | None:
    """A state as from the shallow start, without its work; ``None`` where there is none."""
    if not (inference.shallow_start and isinstance(model.likelihood, Gaussian)):
        return None
    return dataclasses.replace(inference, shallow_start=False).init(model, data, key=jax.random.key(0))


@program
def _shallow_start(
    model: DeepGP,
    x: Array,
    y: Array,
    observed: Array,
    noise: Array | None,
    count: Array,
    fit_means: bool,
    effort: tuple[int, float],
) -> tuple[DeepGP, Whitened]:
    """``count``: rows that are not padding; ``effort``: L-BFGS steps at the most, and the gain that ends them."""
    batch = Batch(
        x=inputs_at_means(model, x),
        y=y,
        observed=observed,
        weight=(jnp.arange(len(x), dtype=count.dtype) < count).astype(x.dtype),
        index=jnp.arange(len(x), dtype=jnp.int32),
        num_data=count,
        noise=noise,
    )

    def seen(means: tuple[AbstractMean, ...]) -> Batch:
        """What the last layer learns from."""
        if not means:
            return batch
        return eqx.tree_at(lambda batch: batch.x, batch, inputs_at_means(_with_means(model, means), x))

    def objective(parts: tuple[tuple[AbstractMean, ...], DeepGP]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        value, jitter = collapsed_elbo_and_jitter(parts[1], seen(parts[0]), shared=False)
        return -(value + log_prior(parts)) / batch.num_data, jitter

    start = (_inner_means(model) if fit_means else (), DeepGP(model.layers[-1:], model.likelihood))
    means, fitted = lbfgs_minimise(objective, start, max_steps=effort[0], tolerance=effort[1])
    inner = _place_inducing(_with_means(model, means), x, count).layers[:-1] if means else model.layers[:-1]
    deep = DeepGP((*inner, *fitted.layers), fitted.likelihood, model.skip_inputs, model.architecture)
    return deep, optimal_q(fitted, seen(means))


def _inner_means(model: DeepGP) -> tuple[AbstractMean, ...]:
    return tuple(layer.mean for layer in model.layers[:-1])


def _narrow_means(model: DeepGP, num_rows: int, num_inputs: int) -> tuple[AbstractMean, ...]:
    """The inner layers' means, if they lose inputs, are learned, and there are rows enough to fit them."""
    means = _inner_means(model)
    weights = sum(leaf.size for leaf in jax.tree.leaves(partition(means)[0]))
    passed_on = model.skip_inputs or not isinstance(model.architecture, Composition)
    loses = not passed_on and any(layer.width < num_inputs for layer in model.layers[:-1])
    return means if loses and 0 < weights * _ROWS_A_WEIGHT <= num_rows else ()


def _with_means(model: DeepGP, means: tuple[AbstractMean, ...]) -> DeepGP:
    """The model with these means in its inner layers."""
    return eqx.tree_at(lambda m: [layer.mean for layer in m.layers[:-1]], model, list(means))


def _place_inducing(model: DeepGP, x: Float[Array, "N D"], count: Float[Array, ""]) -> DeepGP:
    """Inducing inputs of the layers between the first and the last, at what the means make of some rows."""
    h = x
    for level in range(1, model.depth - 1):
        h = model.layers[level - 1].mean(h)
        z = model.layers[level].z
        assert z is not None
        shape = z.shape
        rows = h[jnp.arange(math.prod(shape[:-1])) % count.astype(jnp.int32)].reshape(shape)
        model = eqx.tree_at(lambda m, level=level: m.layers[level].z, model, real(rows))
    return model


# --- pieces -----------------------------------------------------------------------------------------------------------


def condition_all(
    model: DeepGP, q: tuple[Whitened, ...], *, jitter: float | None = None
) -> tuple[list[Conditional], list[Any]]:
    """q(f) of every layer, and what the factorisations of k(Z, Z) had to say."""
    whiteners = prepare_all(model.layers, jitter=jitter)
    conditionals = [condition_on(*parts) for parts in zip(model.layers, whiteners, q, strict=True)]
    return conditionals, [whitener.report for whitener in whiteners]


#: The same as a program.
compiled_conditions = program(condition_all)


def condition_with_kl(model: DeepGP, q: tuple[Q, ...]) -> tuple[list[Conditional], Float[Array, ""], list[Any]]:
    """:func:`condition_all` for both kinds of q, with the KL, which shares the factors of the informed ones."""
    whiteners = prepare_all(model.layers)
    conditionals, kl = [], jnp.zeros((), q[0].mean.dtype)
    for layer, whitener, one in zip(model.layers, whiteners, q, strict=True):
        if isinstance(one, Informed):
            R = one.shrinkage()
            conditionals.append(condition_on_informed(layer, whitener, one.mean, R))
            kl = kl + informed_kl(one, R)
        else:
            conditionals.append(condition_on(layer, whitener, one))
            kl = kl + kl_divergence((one,))
    return conditionals, kl, [whitener.report for whitener in whiteners]


@program(options=RUN_ONCE)
def _posterior(model: DeepGP, q: tuple[Q, ...], num_samples: int) -> tuple[LayeredPosterior, list[Any]]:
    whitened = tuple(one.whitened() if isinstance(one, Informed) else one for one in q)
    conditionals, reports = condition_all(model, whitened)
    return LayeredPosterior(model, tuple(conditionals), num_samples), reports
