"""Whether a sampler can be believed: ArviZ trees, R-hat, effective sample sizes, and a verdict in words.

The inducing values of a deep GP have symmetries (two layers can flip signs together), so that chains may disagree about
them and yet agree about every prediction. The verdict therefore looks at what is predicted: the latent functions at
some inputs, and the energy. STRIDE keeps only the last place of every particle, and of its path the log likelihood and
the distance from the prior's mean: each particle is a chain, and these two are what is looked at. Its particles begin
at one point, so the verdict says what it rests on. The distance is the slower of the two: it grows from nothing at the
start to that of a draw of the prior.

Example:
    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(2, 100, 3))  # chains, draws, quantities
    >>> describe_chains(draws).verdict[:18]
    'The chains agree: '
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fathomgp.compilation import program
from fathomgp.errors import DataError, SettingError
from fathomgp.inference import SampledPosterior, STRIDEPosterior
from fathomgp.precision import double_precision

#: Above this R-hat chains disagree. The usual 1.01 asks for far more draws than predictions need.
_TOLERABLE_R_HAT = 1.1
#: Fewer independent draws than this make a rough mixture.
_ENOUGH_DRAWS = 40
#: Kurtosis tests need so many values.
_SMALLEST_SAMPLE = 20


@dataclasses.dataclass(frozen=True)
class Convergence:
    """What the draws say about themselves.

    Attributes:
        r_hat: the largest rank-normalised split R-hat of the quantities looked at; NaN when there are too few draws.
        ess: the smallest effective sample size.
        draws: all draws, of all chains.
        verdict: one sentence or two.
    """

    r_hat: float
    ess: float
    draws: int
    verdict: str


@double_precision
def to_arviz(posterior: SampledPosterior | STRIDEPosterior, x: Any = None, *, seed: int = 0) -> Any:
    """The draws as an ArviZ DataTree with the dimensions (chain, draw).

    SGHMC: group ``posterior`` holds ``v1``, ``v2``, ... (whitened inducing values of each layer) and, at inputs ``x``
    on the model's own scale, ``f`` (means of the latent functions); ``sample_stats`` holds the energy a datum.

    STRIDE: a particle is a chain, and its draws are the last steps with frozen step sizes; ``posterior`` holds their
    ``log_likelihood`` and ``distance`` (|w|^2 a white variable), ``sample_stats`` their ``acceptance_rate``.
    """
    from arviz_base import from_dict

    if isinstance(posterior, STRIDEPosterior):
        if x is not None:
            raise SettingError("STRIDE keeps only the last place of its particles, so there is no f draw by draw.")
        log_likelihood, distance, acceptance = _settled_steps(posterior)
        values = {"log_likelihood": log_likelihood} | ({} if distance is None else {"distance": distance})
        return from_dict({"posterior": values, "sample_stats": {"acceptance_rate": acceptance}})
    values = {f"v{level + 1}": np.asarray(v) for level, v in enumerate(posterior.v)}
    dims = {f"v{level + 1}": [f"inducing_{level + 1}", f"output_{level + 1}"] for level in range(len(posterior.v))}
    if x is not None:
        values["f"] = latent_draws(posterior, x, seed=seed)
        dims["f"] = ["row", "latent"]
    statistics = {"energy": np.asarray(posterior.energy)}
    return from_dict({"posterior": values, "sample_stats": statistics}, dims=dims)


def convergence(posterior: Any, x: Any, *, seed: int = 0) -> Convergence | None:
    """R-hat, effective sample size and verdict of a fit, judged at inputs ``x``; ``None`` where nothing was sampled."""
    if isinstance(posterior, STRIDEPosterior):
        return _judge_particles(posterior)
    if not isinstance(posterior, SampledPosterior):
        return None
    f = latent_draws(posterior, x, seed=seed)
    energy = np.asarray(posterior.energy)[:, :, None]
    judgement = describe_chains(np.concatenate([f.reshape(*f.shape[:2], -1), energy], axis=2))
    return dataclasses.replace(judgement, verdict=" ".join((judgement.verdict, *posterior.doubts())))


def describe_chains(
    quantities: np.ndarray, *, longer: str = "burn_in and sampling", more: str = "draws and sampling"
) -> Convergence:
    """The verdict on quantities (chains, draws, K).

    ``longer`` and ``more`` name the settings that a verdict advises to raise: where chains have not settled, and where
    their draws are few.
    """
    from arviz_stats.base import array_stats

    chains, draws = quantities.shape[:2]
    if draws < 8:
        verdict = f"Too few draws to judge the chains: {draws} of each. Raise {more}."
        return Convergence(float("nan"), float("nan"), chains * draws, verdict)
    # A single chain is compared with itself: its second half with its first.
    several = quantities if chains > 1 else quantities[0, draws % 2 :].reshape(2, draws // 2, -1)
    r_hat = float(np.max(array_stats.rhat(several, chain_axis=0, draw_axis=1)))
    ess = float(np.min(array_stats.ess(quantities, chain_axis=0, draw_axis=1)))
    return Convergence(r_hat, ess, chains * draws, _verdict(r_hat, ess, chains, chains * draws, longer, more))


@double_precision
def latent_draws(posterior: SampledPosterior, x: Any, *, seed: int = 0) -> Float[np.ndarray, "chains draws N Q"]:
    """Means of the latent functions at ``x``, one a draw."""
    dtype = posterior.model.layers[0].z.raw.dtype if posterior.model.layers[0].z is not None else jnp.float64
    means = _latent_means(posterior, jnp.asarray(x, dtype), jax.random.key(seed))
    return np.asarray(means).reshape(*posterior.energy.shape, *means.shape[1:])


def kurtosis_p_values(draws: np.ndarray, *, count: int = 100, seed: int = 0) -> np.ndarray:
    """p-values of the hypothesis that a coordinate's draws are Gaussian, for ``count`` coordinates chosen at random.

    The kurtosis test of Anscombe and Glynn (1983) assumes independent draws, so each chain is first thinned to the
    effective sample size that it has by itself. Between chains nothing is asked: were the posterior Gaussian, settled
    chains would agree, and chains that sit in different modes are what the test is there to find. Chains that are too
    short to settle look the same: judge them by their R-hat, see :func:`coordinate_r_hat`.

    Args:
        draws: (chains, draws, ...): several layers' inducing values, for instance, flattened and joined.
        count: coordinates to test, at most as many as there are.
        seed: of the choice.
    """
    from arviz_stats.base import array_stats
    from scipy.stats import kurtosistest

    flat = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(flat.shape[2], min(count, flat.shape[2]), replace=False)
    alone = [array_stats.ess(chain[None], chain_axis=0, draw_axis=1) for chain in flat[:, :, chosen]]
    sizes = np.minimum(np.asarray(alone), flat.shape[1])
    values = [_thin(flat[:, :, column], size) for column, size in zip(chosen, sizes.T, strict=True)]
    return np.array([kurtosistest(value).pvalue for value in values])


def coordinate_r_hat(draws: np.ndarray, *, count: int = 100, seed: int = 0) -> np.ndarray:
    """R-hat of the coordinates that :func:`kurtosis_p_values` tests with the same ``count`` and ``seed``."""
    from arviz_stats.base import array_stats

    flat = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
    chosen = np.random.default_rng(seed).choice(flat.shape[2], min(count, flat.shape[2]), replace=False)
    return np.asarray(array_stats.rhat(flat[:, :, chosen], chain_axis=0, draw_axis=1))


def _thin(draws: Float[np.ndarray, "chains draws"], sizes: Float[np.ndarray, " chains"]) -> np.ndarray:
    """About ``sizes`` evenly spaced draws of each chain, all chains together."""
    steps = np.ceil(draws.shape[1] / np.maximum(sizes, 1.0)).astype(int)
    thinned = np.concatenate([chain[step // 2 :: step] for chain, step in zip(draws, steps, strict=True)])
    if len(thinned) < _SMALLEST_SAMPLE:
        raise DataError(
            f"Only {len(thinned)} of {draws.size} draws are independent, but a test of Gaussianity needs "
            f"{_SMALLEST_SAMPLE}: run more sampling steps or more chains."
        )
    return thinned


def _judge_particles(posterior: STRIDEPosterior) -> Convergence:
    """The verdict on STRIDE's particles, and what it rests on."""
    log_likelihood, distance, _ = _settled_steps(posterior)
    kept = [log_likelihood] if distance is None else [log_likelihood, distance]
    judged = describe_chains(np.stack(kept, axis=2), longer="moves and rounds", more="moves")
    seen = "log likelihood" if distance is None else "log likelihood and distance from the prior's mean"
    basis = (
        f"This rests on the particles' {seen} over the last {log_likelihood.shape[1]} moves. All particles began at "
        "one point, the shallow model: their agreement says nothing of explanations that none of them has reached."
    )
    return dataclasses.replace(judged, verdict=f"{judged.verdict} {basis}")


def _settled_steps(posterior: STRIDEPosterior) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Log likelihoods, distances and acceptances (particles, steps) since step sizes were frozen."""
    trace = posterior.trace
    kept = np.isfinite(np.asarray(trace.acceptance)).all(axis=0)
    distance = None if trace.distance is None else np.asarray(trace.distance)[:, kept]
    return np.asarray(trace.log_likelihood)[:, kept], distance, np.asarray(trace.acceptance)[:, kept]


def _verdict(r_hat: float, ess: float, chains: int, draws: int, longer: str, more: str) -> str:
    figures = f"R-hat is at most {r_hat:.2f}, {draws} draws are worth at least {ess:.0f} independent ones."
    if chains > 1 and r_hat > _TOLERABLE_R_HAT:
        return (
            f"The chains disagree: {figures} They sit in different explanations of the data, or were too short to "
            f"settle; the pooled answer covers what each of them found. Raise {longer}."
        )
    if r_hat > _TOLERABLE_R_HAT:
        return f"The chain still drifts: {figures} Raise {longer}, and run several chains."
    if ess < _ENOUGH_DRAWS:
        return f"The chains agree, but their draws are few: {figures} Raise {more}."
    return f"The chains agree: {figures}" if chains > 1 else f"The chain looks settled: {figures}"


@program
def _latent_means(posterior: SampledPosterior, x: Array, key: Array) -> Array:
    return jnp.asarray(posterior.predict_f(x, key=key).means)
