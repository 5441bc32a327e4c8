"""DeepGPRegressor: deep Gaussian processes for real-valued targets, the scikit-learn way."""

from typing import Any

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin

from fathomgp._checks import check_flag
from fathomgp.data import ParquetSource, Targets, read_inputs, read_targets
from fathomgp.errors import DataError, SettingError
from fathomgp.estimators._base import _DeepGPEstimator
from fathomgp.estimators._noise import check_noise, check_noise_of_rows, read_noise_variance, with_noise
from fathomgp.estimators._prepare import Prepared
from fathomgp.estimators._settings import PRECISIONS, find_method
from fathomgp.estimators._streaming import LearnsOn
from fathomgp.likelihoods import AbstractLikelihood, likelihood_from_name
from fathomgp.notices import keeps_notices
from fathomgp.precision import double_precision
from fathomgp.predictive import Predictive


class DeepGPRegressor(MultiOutputMixin, RegressorMixin, LearnsOn, _DeepGPEstimator):
    """Regression with honest error bars: exact, sparse or deep Gaussian processes behind one face.

    Inputs and targets are standardised inside; every answer is in the units of ``y``.

    Args:
        method: how to fit: ``"exact"`` (all data, O(N^3)), ``"sgpr"`` (inducing points, O(N M^2)), ``"dsvi"`` (deep,
            stochastic variational inference), ``"sghmc"`` (deep, sampling), ``"aep"`` (deep, deterministic expectation
            propagation), ``"meanfield"`` (deep, the classic baseline), ``"stride"`` (deep, Monte Carlo EM),
            ``"sequential"`` (deep, row by row, goes on with ``partial_fit``), or an inference object such as
            ``Exact(restarts=5)``.
        depth: the number of GP layers; ``None`` is the method's own (1 for exact and sgpr, 2 for the deep ones).
        num_inducing: inducing points a layer, for the methods that use them.
        hidden_dim: width of the inner layers: one number, or one a layer; as many as inputs (at most 30) by default.
        kernel: a name (``"rbf"``, ``"matern32"``, ``"linear"``, ...) or a kernel object; one, or one a layer.
        architecture: how layers are joined: ``"composition"``; with ``"stride"`` also ``"convolution"`` (hidden layers
            are local length scales) and ``"injective"`` (a monotone warping of one input).
        likelihood: ``"gaussian"``, or a likelihood object.
        noise: the size of Gaussian noise: ``"learn"``; a number, its variance in units of ``y`` squared, which the fit
            leaves as it is; or ``"none"`` for data without noise (computer codes): the fit goes through them, with the
            smallest nugget that factorises (1e-10 of the variance of y, 1e-6 with inducing points). Methods decoupled,
            meanfield and sequential always learn it.
        max_iter: at most so many optimiser steps a start; ``None`` leaves it to the method.
        batch_size: rows a step, for the methods that use batches.
        precision: ``"double"``; ``"mixed"`` (dsvi: data in float32, M x M algebra in float64: faster); ``"single"``.
        missing: what NaN in ``y`` means: ``"error"`` refuses it, ``"mask"`` takes it as not measured.
        recipe: the name of the initial values, see :data:`fathomgp.model.RECIPES`.
        priors: of hyperparameters: ``"weak"`` (see :func:`fathomgp.model.weak_priors`; for one layer: deep models and
            the papers' recipes have none),
            ``None``, or a mapping such as ``{"lengthscale": LogNormal(0.0, 1.0), "noise": None}``.
        early_stopping: whether a fit may end before its last step when its objective stands still.
        checkpoint: a directory; the fit saves itself there every minute and resumes from there if it was interrupted.
        callbacks: functions called during the fit with a dictionary (phase, step, steps, total, objective, seconds, and
            posterior: a function that gives what was learned so far).
        random_state: a seed; the same seed gives the same fit.
        verbose: progress bar: ``True``, ``False``, or ``None`` for "on a terminal only".

    Attributes:
        posterior_: what was learned, on standardised inputs and outputs.
        model_: the fitted model.
        history_: one array a figure (objective, jitter, ...), one entry a step; of methods that sample also ``r_hat``,
            ``ess`` and a ``verdict`` in words.
        messages_: the warnings of the fit, and what settings left to the method came to, as sentences.
        n_iter_: the number of steps.
        n_features_in_: the number of inputs.
        feature_names_in_: their names, when X had any.

    Example:
        >>> import numpy as np
        >>> from fathomgp import DeepGPRegressor
        >>> X = np.linspace(0, 1, 30)[:, None]
        >>> model = DeepGPRegressor(method="exact", random_state=0).fit(X, np.sin(6 * X[:, 0]))
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((30,), (30,))
    """

    def __init__(
        self,
        method: Any = "dsvi",
        *,
        depth: Any = None,
        num_inducing: Any = 100,
        hidden_dim: Any = None,
        kernel: Any = "rbf",
        architecture: Any = "composition",
        likelihood: Any = "gaussian",
        noise: Any = "learn",
        max_iter: Any = None,
        batch_size: Any = None,
        precision: Any = "double",
        missing: Any = "error",
        recipe: Any = "default",
        priors: Any = "weak",
        early_stopping: Any = False,
        checkpoint: Any = None,
        callbacks: Any = None,
        random_state: Any = None,
        verbose: Any = None,
    ):
        self.method = method
        self.depth = depth
        self.num_inducing = num_inducing
        self.hidden_dim = hidden_dim
        self.kernel = kernel
        self.architecture = architecture
        self.likelihood = likelihood
        self.noise = noise
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.precision = precision
        self.missing = missing
        self.recipe = recipe
        self.priors = priors
        self.early_stopping = early_stopping
        self.checkpoint = checkpoint
        self.callbacks = callbacks
        self.random_state = random_state
        self.verbose = verbose

    @keeps_notices
    @double_precision
    def fit(self, X: Any, y: Any = None, noise_variance: Any = None) -> "DeepGPRegressor":
        """Fit to inputs (N, D) and targets (N,) or (N, P): arrays, lists, or pandas, polars and pyarrow tables.

        ``noise_variance``, (N,) or (N, P), is the known variance of the Gaussian noise of every row, in units of ``y``
        squared (methods exact, sgpr and dsvi). It is not learned; new rows need theirs too, but for their
        mean and for ``predict(X, latent=True)``. Cross-validation takes it as ``params={"noise_variance": ...}``.

        Data larger than memory: ``fit(ParquetSource("trips/", "duration"))``; the source holds the target.
        """
        self._check_settings()
        likelihood = self._likelihood()
        if noise_variance is not None:
            check_noise_of_rows(self.noise, likelihood, self.method, find_method(self.method)[0])
        if isinstance(X, ParquetSource):
            if noise_variance is not None:
                raise SettingError("A stream has no noise_variance: hand over arrays, or one number, noise=...")
            self._open_stream(X, y)
            return self._fit(X, None, likelihood)
        inputs, _ = read_inputs(X, estimator=self, reset=True)
        targets = read_targets(y, missing=self.missing, kind=likelihood.target_kind, num_rows=len(inputs))
        likelihood.check_targets(np.where(targets.observed, targets.Y, np.nan))
        noise = None
        if noise_variance is not None:
            noise = read_noise_variance(noise_variance, targets.Y.shape, targets.observed)
        return self._fit(inputs, targets, likelihood, noise)

    def _first_block(self, X: Any, y: Any, classes: Any) -> "DeepGPRegressor":
        if classes is not None:
            raise SettingError("classes is for labels, but this is a regressor: leave it out.")
        return self.fit(X, y)

    def _read_more_targets(self, y: Any, num_rows: int) -> Targets:
        likelihood = self.posterior_.likelihood
        targets = read_targets(y, missing=self.missing, kind=likelihood.target_kind, num_rows=num_rows, more=True)
        likelihood.check_targets(np.where(targets.observed, targets.Y, np.nan))
        return targets

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        latent: bool = False,
        noise_variance: Any = None,
    ) -> Any:
        """Means of y, with standard deviations or covariances between rows of y (noise included) if asked for.

        ``latent=True`` answers about f, the function below the noise, instead: in the units of ``y`` for real targets;
        for counts f is the logarithm of the rate. A fit that was told the noise variances of its rows needs those of
        new ones, ``noise_variance``, for standard deviations and covariances of y.
        """
        return_std, return_cov = check_flag(return_std, "return_std"), check_flag(return_cov, "return_cov")
        latent = check_flag(latent, "latent")
        if return_std and return_cov:
            raise SettingError("return_std and return_cov exclude each other: ask for one of the two.")
        if return_cov:
            return self._joint_moments(self._read(X), noise_variance, latent=latent)
        mean_of = self._latent_mean if latent else Predictive.mean
        std_of = self._latent_std if latent else Predictive.std
        if return_std:
            ask = lambda predictive: (mean_of(predictive), std_of(predictive))  # noqa: E731
            blocks = self._blocks(X, ask, noise_variance, needed=not latent)
            return np.concatenate([mean for mean, _ in blocks]), np.concatenate([std for _, std in blocks])
        # Noise has no mean.
        return np.concatenate(self._blocks(X, mean_of, noise_variance, needed=False))

    def _latent_mean(self, predictive: Predictive) -> np.ndarray:
        return self._first_latents(predictive.latent_mean())

    def _latent_std(self, predictive: Predictive) -> np.ndarray:
        return self._first_latents(predictive.latent_std())

    def _first_latents(self, answer: np.ndarray) -> np.ndarray:
        """One latent function an output: the first ones, in the shape of y."""
        if answer.ndim == 1:
            return answer
        return answer[:, 0] if self._squeeze else answer[:, : len(self.y_scaler_.shift)]

    def predict_quantiles(self, X: Any, q: float | list[float] | np.ndarray, noise_variance: Any = None) -> np.ndarray:
        """Quantiles of y: one row of answers a quantile when ``q`` is a list, like ``numpy.quantile``."""
        blocks = self._blocks(X, lambda predictive: predictive.quantile(q), noise_variance)
        return np.concatenate(blocks, axis=0 if np.ndim(q) == 0 else 1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, noise_variance: Any = None) -> np.ndarray:
        """Joint draws of y at the rows of X: (N, n_samples), or (N, P, n_samples) for several outputs."""
        return self._sample_targets(X, n_samples, random_state, noise_variance)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The coefficient of determination, averaged over outputs; targets are read as :meth:`fit` does."""
        rows = len(self._read(X))
        Y, outputs = read_targets(y, num_rows=rows, more=True).Y, len(self.y_scaler_.shift)
        if Y.shape[1] != outputs:
            raise DataError(f"y has {Y.shape[1]} outputs, but the fit had {outputs}.")
        return super().score(X, Y, sample_weight)

    def _likelihood(self) -> AbstractLikelihood:
        likelihood = self.likelihood
        if not isinstance(likelihood, AbstractLikelihood):
            likelihood = likelihood_from_name(likelihood)
        if likelihood.target_kind == "class":
            raise SettingError(f"likelihood={self.likelihood!r} is for labels: use DeepGPClassifier.")
        check_noise(self.noise, likelihood, self.method, find_method(self.method)[0])
        return likelihood

    def _told_likelihood(self, likelihood: AbstractLikelihood, data: Prepared) -> AbstractLikelihood:
        method, _ = find_method(self.method)
        return with_noise(likelihood, self.noise, data, PRECISIONS[self.precision], method)
