"""The three uses of a sequential deep GP in Wang et al. (2016), as models that start well.

Regression and classification start from :func:`fathomgp.model.build_model`. The two others start from a principal
component analysis: inner functions from the scores, the last layer from the components, so that the untrained model is
already the linear one and the layers learn what that misses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from fathomgp.data import ArraySource
from fathomgp.errors import SettingError
from fathomgp.inference._base import rows_or_auto
from fathomgp.inference._sequential_start import START_ROWS
from fathomgp.inference.dsvi import shallow_start
from fathomgp.inference.exact import gaussian_noise
from fathomgp.kernels import kernel_from_name
from fathomgp.likelihoods import Gaussian, HeteroscedasticGaussian
from fathomgp.means import AbstractMean, Linear, Zero, linear_map
from fathomgp.model import DeepGP, Layer, kmeans_centres
from fathomgp.parameters import positive, real

#: Rounds in which missing outputs are filled in by the components found so far.
_FILLING_ROUNDS = 20
#: Rounds of Fisher scoring for noise that varies.
_NOISE_ROUNDS = 30


def dynamical_prior(
    x: Float[np.ndarray, "N D"],
    y: Float[np.ndarray, "N P"],
    observed: Bool[np.ndarray, "N P"] | None = None,
    *,
    latent_dim: int,
    num_inducing: int = 100,
    kernel: str = "matern32",
    decoder: str = "rbf",
    heteroscedastic: bool = False,
    start_rows: int | str = "auto",
    key: PRNGKeyArray,
) -> DeepGP:
    """Few smooth functions of time (or place) behind many outputs: for series, and for outputs that go missing.

    The first layer is fitted to the scores of the outputs' principal components, the second, whose mean are the
    components, to the outputs given the scores. Use ``Sequential(shallow_start=False, inner_scale=1)``, and
    :meth:`SequentialPosterior.fill_in` for outputs that are missing in rows where others are known.

    Args:
        x: standardised inputs, time for instance.
        y: standardised outputs, 0 where missing.
        observed: which outputs were measured; all by default.
        latent_dim: the number of inner functions.
        num_inducing: the budget a layer.
        kernel: of the first layer.
        decoder: kernel of what the outputs are beyond the components; ``"linear"`` where rows are few for it.
        heteroscedastic: whether each output's noise varies.
        start_rows: rows that hyperparameters are fitted to, at the most; ``"auto"`` is 2,000.
        key: of the subsets that hyperparameters start from.
    """
    observed = np.ones(y.shape, bool) if observed is None else observed
    if not 1 <= latent_dim <= y.shape[1]:
        raise SettingError(f"latent_dim must lie between 1 and the {y.shape[1]} outputs, but it is {latent_dim}.")
    scores, components = principal_components(y, observed, latent_dim)
    first_key, last_key = jax.random.split(key)
    rows, all_scores = rows_or_auto("start_rows", start_rows, START_ROWS), np.ones(scores.shape, bool)
    first = _fitted_layer(x, scores, all_scores, kernel, Zero(latent_dim), num_inducing, rows, first_key)
    mean = Linear(jnp.asarray(components))
    last = _fitted_layer(scores, y, observed, decoder, mean, num_inducing, rows, last_key)
    residuals = y - scores @ components
    model = _joined(first, last, components, residuals, observed)
    if not heteroscedastic:
        return model
    noise = gaussian_noise(model, 1)[0]
    slopes, levels = log_linear_noise(scores, components, residuals, observed, noise=float(noise))
    return with_heteroscedastic_noise(model, slopes=slopes, levels=levels)


def _joined(
    first: DeepGP,
    last: DeepGP,
    components: Float[np.ndarray, "K P"],
    residuals: Float[np.ndarray, "N P"],
    observed: Bool[np.ndarray, "N P"],
) -> DeepGP:
    """The deep model from the layer of the scores and the layer of the outputs given the scores.

    What no smooth function of x explains of the scores is noise of each row's own. K scores that were computed from a
    row's P outputs leave P - K of its numbers free to show the outputs' noise, so that the fitted one grows by
    P / (P - K); where none is left free, all noise is the outputs' own.
    """
    count, outputs = components.shape
    smooth, rough = first.layers[0], last.layers[0]
    inner = gaussian_noise(first, 1)[0]
    if count == outputs:
        return DeepGP((smooth, rough), Gaussian(inner * np.sum(components**2) / outputs))
    layer = Layer(smooth.kernel, smooth.mean, smooth.z, smooth.width, positive(inner, name="layer noise"))
    decoder = Linear(jnp.asarray(_without_noise(components, residuals, observed)))
    decode = Layer(rough.kernel, decoder, rough.z, rough.width)
    return DeepGP((layer, decode), Gaussian(gaussian_noise(last, 1)[0] * (outputs / (outputs - count))))


def reconstruction(
    x: Float[np.ndarray, "N D"],
    *,
    latent_dim: int,
    num_inducing: int = 100,
    start_rows: int | str = "auto",
    key: PRNGKeyArray,
) -> DeepGP:
    """Inputs that are their own outputs through a narrow layer: for dimensionality reduction and denoising.

    The inner layer's mean are the first principal components of ``x``, the last layer's leads back. Use it with
    ``Sequential(shallow_start=False, inner_scale=1)``, and with ``averaged_covariance=True`` where inputs are many.
    ``start_rows`` is as in :func:`dynamical_prior`.
    """
    rows = rows_or_auto("start_rows", start_rows, START_ROWS)
    encoder = linear_map(x, latent_dim)
    scores = np.asarray(encoder(jnp.asarray(x)))
    decoder = Linear(encoder.weights.value.T)
    last = _fitted_layer(scores, x, np.ones(x.shape, bool), "rbf", decoder, num_inducing, rows, key)
    rough = kernel_from_name("rbf", x.shape[1], lengthscale=float(np.sqrt(x.shape[1])), variance=0.01, ard=False)
    first = Layer(rough, encoder, real(kmeans_centres(x, num_inducing)), latent_dim)
    return DeepGP((first, last.layers[0]), last.likelihood)


def with_heteroscedastic_noise(
    model: DeepGP,
    *,
    slopes: Float[np.ndarray, "K P"] | None = None,
    levels: Float[np.ndarray, " P"] | None = None,
) -> DeepGP:
    """The model with noise that varies: its last layer gets a log noise an output.

    Args:
        model: a deep GP with Gaussian noise.
        slopes: mean of the log noises, a linear function of the last layer's inputs; flat by default. It needs a last
            layer whose mean is linear.
        levels: the log noises that they vary around; the fitted one by default.
    """
    last, likelihood = model.layers[-1], model.likelihood
    if not isinstance(likelihood, Gaussian):
        raise SettingError(
            f"Only Gaussian noise can be made to vary, but the likelihood is {type(likelihood).__name__}."
        )
    mean: AbstractMean = Zero(2 * last.width)
    if isinstance(last.mean, Linear):
        weights = last.mean.weights.value
        trend = jnp.zeros_like(weights) if slopes is None else jnp.asarray(slopes, weights.dtype)
        mean = Linear(jnp.concatenate([weights, trend], axis=1))
    elif slopes is not None:
        raise SettingError(f"slopes need a last layer with a linear mean, but it has a {type(last.mean).__name__}.")
    layer = Layer(last.kernel, mean, last.z, 2 * last.width, last.noise)
    fitted = jnp.log(jnp.broadcast_to(likelihood.variance.value, (last.width,)))
    offset = fitted if levels is None else jnp.asarray(levels, fitted.dtype)
    return DeepGP((*model.layers[:-1], layer), HeteroscedasticGaussian(offset), model.skip_inputs, model.architecture)


def log_linear_noise(
    scores: Float[np.ndarray, "N K"],
    components: Float[np.ndarray, "K P"],
    residuals: Float[np.ndarray, "N P"],
    observed: Bool[np.ndarray, "N P"],
    *,
    noise: float,
) -> tuple[Float[np.ndarray, "K P"], Float[np.ndarray, " P"]]:
    r"""Noise that grows or falls with the scores: slopes b and levels o of ``log s2 = o + scores b``, for each output.

    Fisher scoring for residuals r ~ N(0, s2): least squares for the working response log s2 + r^2/s2 - 1, of which the
    middle part is cut at 20. Scores that were computed from the outputs take a share of their noise along,
    :math:`h_p = \sum_k V_{kp}^2` with V the directions of the components: residuals show 1 - h of it, and count as so
    many rows. Slopes have the prior N(0, I/K), levels one that is worth ten rows of ``noise``: an output that is a
    component of its own, or was never observed, has that noise.
    """
    count, outputs = components.shape
    design = np.concatenate([scores, np.ones((len(scores), 1))], axis=1)
    directions = components / np.maximum(np.linalg.norm(components, axis=1, keepdims=True), 1e-12)
    left = np.clip(1.0 - np.sum(directions**2, axis=0), 0.0, 1.0)
    square = np.where(observed, residuals, 0.0) ** 2 / np.maximum(left, 1e-2)
    prior = np.diag([2.0 * count] * count + [10.0])  # a working response has variance 2
    start = np.array([0.0] * count + [np.log(noise)])
    coefficients = np.tile(start[:, None], (1, outputs))
    for _ in range(_NOISE_ROUNDS):
        log_noise = design @ coefficients
        response = log_noise + np.minimum(square / np.exp(log_noise), 20.0) - 1.0
        for p in range(outputs):
            seen = design[observed[:, p]]
            precision = left[p] * seen.T @ seen + prior
            shift = left[p] * seen.T @ response[observed[:, p], p] + prior @ start
            coefficients[:, p] = np.linalg.solve(precision, shift)
    return coefficients[:-1], coefficients[-1]


def principal_components(
    y: Float[np.ndarray, "N P"], observed: Bool[np.ndarray, "N P"], count: int
) -> tuple[Float[np.ndarray, "N K"], Float[np.ndarray, "K P"]]:
    """Scores of unit variance and components with ``scores @ components`` near ``y``; missing outputs are filled in.

    Filling in and decomposing take turns, which is maximum likelihood with the noise neglected.
    """
    filled = np.where(observed, y, 0.0)
    for _ in range(1 if observed.all() else _FILLING_ROUNDS):
        U, S, V = np.linalg.svd(filled, full_matrices=False)
        scores = U[:, :count] * np.sqrt(len(y))
        components = (S[:count, None] / np.sqrt(len(y))) * V[:count]
        filled = np.where(observed, y, scores @ components)
    return scores, components


def _without_noise(
    components: Float[np.ndarray, "K P"], residuals: Float[np.ndarray, "N P"], observed: Bool[np.ndarray, "N P"]
) -> Float[np.ndarray, "K P"]:
    """The components of probabilistic PCA: ``sqrt(1 - s2 / l)`` times the usual ones.

    With l a component's variance and s2 the mean of those left out, noise s2 then gives the outputs the covariance of
    the data, so that some of them say as much about the others as they should (Tipping and Bishop 1999).
    """
    count, outputs = components.shape
    noise = np.sum(residuals**2 * observed) / np.sum(observed) * outputs / (outputs - count)
    strength = np.sum(components**2, axis=1, keepdims=True)
    return components * np.sqrt(np.maximum(1.0 - noise / np.maximum(strength, 1e-12), 0.0))


def _fitted_layer(
    x: np.ndarray,
    y: np.ndarray,
    observed: np.ndarray,
    kernel: str,
    mean: AbstractMean,
    num_inducing: int,
    rows: int,
    key: PRNGKeyArray,
) -> DeepGP:
    """One layer with the hyperparameters of a sparse GP on at most so many of these rows.

    One lengthscale for all inputs: of a few noisy scores, one each overfits.
    """
    start = kernel_from_name(kernel, x.shape[1], lengthscale=float(np.sqrt(x.shape[1])), ard=False)
    z = real(kmeans_centres(x, min(num_inducing, len(x))))
    layer = Layer(start, mean, z, y.shape[1])
    return shallow_start(DeepGP((layer,), Gaussian(0.1)), ArraySource(x, y, observed), key=key, rows=rows)[0]
