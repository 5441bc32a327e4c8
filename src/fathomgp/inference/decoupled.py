"""Decoupled deep GPs: many points for the mean, few for the variance (Havasi et al. 2018, section 5).

A layer's variance costs M^2 a row and output, its mean only M. So the mean gets a set of points of its own. Two ways of
doing that, both whitened, with A_b = Lb^-1 k(Zb, x) for the variance's points Zb in either:

    var(x) = k(x, x) - |A_b|^2 + |T^T A_b|^2

    lifted       mean(x) = A_a^T nu + m(x)                      A_a = La^-1 k(Za, x)
    orthogonal   mean(x) = A_b^T m~ + A_c^T nu + m(x)           A_c = Lc^-1 [k(Za, x) - k(Za, Zb) k(Zb, Zb)^-1 k(Zb, x)]

    KL = 1/2 (|nu|^2 + |m~|^2 + |T|^2 - 2 sum log |T_ii| - M_b)         summed over outputs and layers

The lifted one (after Cheng and Boots 2017) is DSVI when both sets coincide. In the orthogonal one (after Salimbeni et
al. 2018) Lc Lc^T is what k(Za, Za) has left once Zb is known: the Cholesky factor of both sets together is
[Lb, 0; ., Lc], so this is DSVI on both sets with q(v) = N([m~; nu], [T T^T, 0; 0, I]): a proper variational bound, and
DSVI itself when Za is empty.

The bound, the blocks of rows, the natural gradient of the last layer's (m~, T) and the schedule are those of DSVI. At
any inputs the mean is k(x, Za) times weights that are computed once a step.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fathomgp.compilation import program
from fathomgp.data import AbstractSource, Batch
from fathomgp.errors import SettingError
from fathomgp.inference._base import Phase
from fathomgp.inference._descent import AbstractDescent, DescentState, longer, natural_size
from fathomgp.inference._layered import LayeredPosterior
from fathomgp.inference._streaming import path_noise
from fathomgp.inference.dsvi import (
    DSVIInfo,
    calm_start,
    expected_log_likelihood,
    initial_q,
    kl_divergence,
    natural_step,
    num_start_rows,
    shallow_start,
    start_remarks,
    streamed_loss,
)
from fathomgp.likelihoods import Gaussian
from fathomgp.linalg import JitterReport, check_factor, inverse_lower, safe_cholesky, transposed_product
from fathomgp.model import (
    Conditional,
    DeepGP,
    MeanTerm,
    Whitened,
    condition_on,
    kmeans_centres,
    prepare_all,
    project,
)
from fathomgp.parameters import all_finite, real
from fathomgp.tags import tagged

PARAMETERISATIONS = ("orthogonal", "lifted")


class DecoupledQ(eqx.Module):
    """q(f) of a layer.

    Attributes:
        base: on the whitened values at the variance's points Zb; its mean stays 0 in the lifted parameterisation.
        points: Za, the points of the mean.
        nu: their whitened weights, one column an output.
    """

    base: Whitened
    points: Float[Array, "Ma D"]
    nu: Float[Array, "Ma P"]


@tagged("method/decoupled")
class Decoupled(AbstractDescent):
    """Decoupled doubly stochastic variational inference.

    With the model's M inducing points a layer, the mean gets 3 M and the variance M / 2 by default: 300 and 50 for the
    usual 100, at about the price of the coupled 100.

    Attributes:
        parameterisation: "orthogonal" or "lifted".
        mean_inducing: points of the mean; ``None`` for 3 M. No more than there are distinct rows.
        variance_inducing: points of the variance; ``None`` for M / 2.
        steps: how many; ``None``: 2,000, and up to 8,000 where data fill more than ten batches.
        batch_size, learning_rate, natural, num_samples, test_samples, shallow_start, start_rows, inner_root: as in
            DSVI.
        points_rows: rows that k-means looks at for both sets of points, at the most.
    """

    parameterisation: str = eqx.field(static=True, default="orthogonal")
    mean_inducing: int | None = eqx.field(static=True, default=None)
    variance_inducing: int | None = eqx.field(static=True, default=None)
    steps: int | None = eqx.field(static=True, default=None)
    batch_size: int = eqx.field(static=True, default=1024)
    learning_rate: float = eqx.field(static=True, default=0.01)
    natural: float = eqx.field(static=True, default=0.1)
    num_samples: int = eqx.field(static=True, default=1)
    test_samples: int = eqx.field(static=True, default=100)
    shallow_start: bool = eqx.field(static=True, default=True)
    start_rows: int | str = eqx.field(static=True, default="auto")
    points_rows: int = eqx.field(static=True, default=5000)
    inner_root: float = eqx.field(static=True, default=0.01)

    def __check_init__(self):
        if self.parameterisation not in PARAMETERISATIONS:
            raise SettingError(
                f"parameterisation={self.parameterisation!r} is unknown: choose 'orthogonal' or 'lifted'."
            )
        self._check("mean_inducing", "variance_inducing", "num_samples", "test_samples", "points_rows")
        num_start_rows(self.start_rows)

    def usual_steps(self, batches: int) -> int:
        """How many steps data that fill so many batches need."""
        return longer(2000, batches)

    def init(self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray) -> DescentState:
        """Spread both sets of points by k-means; start the last layer from the shallow GP if asked."""
        key_points, key_start = jax.random.split(key)
        model, points = self._place_points(model, data, key=key_points)
        model, q = self._first_q(model, points, data, key=key_start)
        return self._start(model, q)

    def step(
        self, phase: Phase, state: DescentState, batch: Batch, *, key: PRNGKeyArray
    ) -> tuple[DescentState, DSVIInfo]:
        """One natural-gradient step on the last layer's (m~, T) and one Adam step on all else."""
        condition = functools.partial(condition_with_kl, parameterisation=self.parameterisation)
        loss, (model_gradient, q_gradient) = streamed_loss(
            state.model, state.q, batch, key=key, num_samples=self.num_samples, condition=condition
        )
        new = self._descend(state, model_gradient, _lower(q_gradient), decay=True)
        fine = jnp.asarray(True)
        if self.natural > 0.0:
            base, fine = natural_step(state.q[-1].base, q_gradient[-1].base, natural_size(self.natural, state, batch))
            new = eqx.tree_at(lambda one: one.q[-1].base, new, base)
        objective = (loss.data + loss.kl) / batch.num_data
        ok = jnp.isfinite(objective) & fine & all_finite((new.model, new.q))
        return new, DSVIInfo(objective, ok, jnp.asarray(False), loss.jitter, loss.kl / batch.num_data)

    def remarks(self, model: DeepGP, data: AbstractSource, plan: tuple[Phase, ...]) -> tuple[str, ...]:
        """How many rows points and hyperparameters start from, where these are not all."""
        remarks = start_remarks(self, model, data)
        if data.num_data <= self.points_rows:
            return remarks
        points = f"Both sets of points are centres of {self.points_rows} of the {data.num_data} rows: points_rows sets"
        return (*remarks, f"{points} how many.")

    def posterior(self, state: DescentState, data: AbstractSource | None) -> LayeredPosterior:
        """The mixture over sample paths, as DSVI's."""
        posterior, reports = decoupled_posterior(state.model, state.q, self.test_samples, self.parameterisation)
        for report in reports:
            check_factor(report, "The covariance of a layer's inducing points")
        return posterior

    def _place_points(
        self, model: DeepGP, data: AbstractSource, *, key: PRNGKeyArray
    ) -> tuple[DeepGP, list[Float[Array, "Ma _"]]]:
        """The model with the variance's points for its inducing inputs, and the mean's points of every layer."""
        seed = int(jax.random.bits(key, dtype=jnp.uint32))
        x = np.asarray(data.subset(self.points_rows, seed=seed)[0], np.float64)
        size = model.layers[0].num_inducing
        variance = kmeans_centres(x, self.variance_inducing or max(1, size // 2), seed=seed)
        mean = kmeans_centres(x, self.mean_inducing or 3 * size, seed=seed)
        if self.parameterisation == "orthogonal":
            # A point of both sets adds nothing: its part of Lc is zero.
            mean = mean[~np.isin(_row_bytes(mean), _row_bytes(variance))]
        layers = tuple(
            dataclasses.replace(layer, z=real(np.asarray(z)))
            for layer, z in zip(model.layers, _push(model, variance), strict=True)
        )
        return dataclasses.replace(model, layers=layers), _push(model, mean)

    def _first_q(
        self, model: DeepGP, points: list[Array], data: AbstractSource, *, key: PRNGKeyArray
    ) -> tuple[DeepGP, tuple[DecoupledQ, ...]]:
        base = initial_q(model, inner_root=self.inner_root)
        nu = [jnp.zeros((len(at), layer.width), at.dtype) for at, layer in zip(points, model.layers, strict=True)]
        if self.shallow_start and isinstance(model.likelihood, Gaussian):
            rows = num_start_rows(self.start_rows)
            if self.parameterisation == "lifted":
                model, points[-1], nu[-1] = _lifted_start(model, points[-1], data, key=key, rows=rows)
            else:
                model, last = shallow_start(model, data, key=key, fit_means=False, rows=rows)
                model, inner = calm_start(model, base[:-1], last, self.inner_root)
                base = (*inner, last)
        return model, tuple(DecoupledQ(*parts) for parts in zip(base, points, nu, strict=True))


# --- the bound --------------------------------------------------------------------------------------------------------


def decoupled_elbo(
    model: DeepGP,
    q: tuple[DecoupledQ, ...],
    batch: Batch,
    *,
    key: PRNGKeyArray,
    parameterisation: str,
    num_samples: int = 1,
) -> Float[Array, ""]:
    """The bound, estimated from a batch: plainly, for tests and for whoever wants to differentiate it."""
    conditionals, _ = condition_all(model, q, parameterisation)
    rows = (batch.x, batch.y, batch.observed, batch.weight)
    noise = path_noise(model, len(batch.x), num_samples, key=key)
    return batch.scale * expected_log_likelihood(model, conditionals, rows, noise) - decoupled_kl(q)


def decoupled_kl(q: tuple[DecoupledQ, ...]) -> Float[Array, ""]:
    """DSVI's KL of the variance's points, and ``1/2 |nu|^2``."""
    squares = sum((jnp.sum(layer.nu**2) for layer in q), start=jnp.zeros((), q[0].nu.dtype))
    return kl_divergence(tuple(layer.base for layer in q)) + 0.5 * squares


def condition_all(
    model: DeepGP, q: tuple[DecoupledQ, ...], parameterisation: str
) -> tuple[list[Conditional], list[JitterReport]]:
    """q(f) of every layer, and what the factorisations had to say."""
    whiteners = prepare_all(model.layers)
    reports = [whitener.report for whitener in whiteners]
    parts = list(zip(model.layers, whiteners, q, strict=True))
    if len(q[0].points) == 0:
        return [condition_on(layer, whitener, one.base) for layer, whitener, one in parts], reports
    covariances = [layer.kernel(one.points) for layer, _, one in parts]
    crosses = [project(layer, whitener, one.points) for layer, whitener, one in parts]
    if parameterisation == "orthogonal":
        covariances = [K - transposed_product(A, A) for K, A in zip(covariances, crosses, strict=True)]
    factor = safe_cholesky(jnp.stack(covariances))
    weights = [inverse.T @ one.nu for inverse, one in zip(inverse_lower(factor.lower), q, strict=True)]
    reports += [jax.tree.map(lambda leaf, level=level: leaf[level], factor.report) for level in range(len(q))]
    conditionals = []
    for (layer, whitener, one), cross, weight in zip(parts, crosses, weights, strict=True):
        # The mean's points also reach Zb: the orthogonal set takes that share out again, the lifted one has no m~.
        mean = one.base.mean - cross @ weight if parameterisation == "orthogonal" else jnp.zeros_like(one.base.mean)
        conditional = condition_on(layer, whitener, Whitened(mean, one.base.root))
        conditionals.append(dataclasses.replace(conditional, extra=MeanTerm(one.points, weight)))
    return conditionals, reports


def condition_with_kl(
    model: DeepGP, q: tuple[DecoupledQ, ...], parameterisation: str
) -> tuple[list[Conditional], Float[Array, ""], list[JitterReport]]:
    """:func:`condition_all`, with the KL in the middle."""
    conditionals, reports = condition_all(model, q, parameterisation)
    return conditionals, decoupled_kl(q), reports


@program
def decoupled_posterior(
    model: DeepGP, q: tuple[DecoupledQ, ...], num_samples: int, parameterisation: str
) -> tuple[LayeredPosterior, list[JitterReport]]:
    """What is asked for predictions, and what the factorisations had to say."""
    conditionals, reports = condition_all(model, q, parameterisation)
    return LayeredPosterior(model, tuple(conditionals), num_samples), reports


# --- pieces -----------------------------------------------------------------------------------------------------------


def _lifted_start(
    model: DeepGP, points: Float[Array, "Ma D"], data: AbstractSource, *, key: PRNGKeyArray, rows: int
) -> tuple[DeepGP, Float[Array, "Ma D"], Float[Array, "Ma P"]]:
    """The shallow start on the mean's points: kernel, noise, where the points end, and the mean's weights."""
    last = model.layers[-1]
    wide = dataclasses.replace(model, layers=(*model.layers[:-1], dataclasses.replace(last, z=real(points))))
    fitted, optimal = shallow_start(wide, data, key=key, fit_means=False, rows=rows)
    z = fitted.layers[-1].z
    assert z is not None
    layers = (*fitted.layers[:-1], dataclasses.replace(fitted.layers[-1], z=last.z))
    return dataclasses.replace(fitted, layers=layers), z.value, optimal.mean


def _push(model: DeepGP, centres: np.ndarray) -> list[Float[Array, "M _"]]:
    """Points in the input space of every layer, mapped through the means of the layers before it."""
    dtype = model.layers[0].z.raw.dtype if model.layers[0].z is not None else jnp.float64
    x = h = jnp.asarray(centres, dtype)
    points = []
    for level, layer in enumerate(model.layers):
        points.append(model.layer_input(level, x, h))
        h = layer.mean(points[-1])
    return points


def _row_bytes(rows: np.ndarray) -> np.ndarray:
    """Every row as one value that can be compared."""
    return np.array([row.tobytes() for row in np.ascontiguousarray(rows)], dtype=object)


def _lower(q: tuple[DecoupledQ, ...]) -> tuple[DecoupledQ, ...]:
    """Gradients of lower-triangular roots."""
    return tuple(eqx.tree_at(lambda one: one.base.root, layer, jnp.tril(layer.base.root)) for layer in q)
