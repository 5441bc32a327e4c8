"""DeepGPClassifier: deep Gaussian processes for labels, the scikit-learn way."""

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin

from fathomgp.data import ParquetSource, Targets, read_inputs, read_labels
from fathomgp.errors import SettingError
from fathomgp.estimators._base import _DeepGPEstimator
from fathomgp.estimators._prepare import stream_classes
from fathomgp.estimators._settings import METHODS, choose, find_method
from fathomgp.estimators._streaming import LearnsOn
from fathomgp.likelihoods import AbstractClassLikelihood, AbstractLikelihood, Bernoulli, RobustMax, Softmax
from fathomgp.notices import keeps_notices
from fathomgp.precision import double_precision

_NAMES = ("auto", "bernoulli", "robustmax", "softmax")


class DeepGPClassifier(ClassifierMixin, LearnsOn, _DeepGPEstimator):
    """Classification with honest probabilities: sparse or deep Gaussian processes behind one face.

    Two classes share one latent function, squashed by the probit; several have one each. Inputs are standardised
    inside. Labels may be text, whole numbers or booleans.

    Args:
        method: how to fit: ``"dsvi"`` (stochastic variational inference), ``"decoupled"``, ``"aep"`` (expectation
            propagation), ``"sghmc"`` (sampling), ``"stride"``, ``"sequential"`` (row by row, goes on with
            ``partial_fit``), or an inference object such as ``DSVI(steps=5000)``.
        depth: the number of GP layers; ``None`` is the method's own (2 for dsvi).
        num_inducing: inducing points a layer.
        hidden_dim: width of the inner layers: one number, or one a layer; as many as inputs (at most 30) by default.
        kernel: a name (``"rbf"``, ``"matern32"``, ``"linear"``, ...) or a kernel object; one, or one a layer.
        architecture: how layers are joined: ``"composition"``; with ``"stride"`` also ``"convolution"`` (hidden layers
            are local length scales) and ``"injective"`` (a monotone warping of one input).
        likelihood: ``"auto"`` (Bernoulli for two classes, softmax for several), ``"bernoulli"``, ``"softmax"``,
            ``"robustmax"``, or a likelihood object.
        max_iter: at most so many optimiser steps; ``None`` leaves it to the method.
        batch_size: rows a step, for the methods that use batches.
        precision: ``"double"``; ``"mixed"`` (dsvi: data in float32, M x M algebra in float64: faster); ``"single"``.
        missing: what NaN or None in ``y`` means: ``"error"`` refuses it, ``"mask"`` takes it as an unknown label.
        recipe: the name of the initial values, see :data:`fathomgp.model.RECIPES`.
        priors: of hyperparameters: ``"weak"`` (see :func:`fathomgp.model.weak_priors`; for one layer: deep models and
            the papers' recipes have none),
            ``None``, or a mapping such as ``{"lengthscale": LogNormal(0.0, 1.0), "noise": None}``.
        early_stopping: whether a fit may end before its last step when its objective stands still.
        checkpoint: a directory; the fit saves itself there every minute and resumes from there if it was interrupted.
        callbacks: functions called during the fit with a dictionary (phase, step, steps, objective, seconds).
        random_state: a seed; the same seed gives the same fit.
        verbose: progress bar: ``True``, ``False``, or ``None`` for "on a terminal only".

    Attributes:
        classes_: the labels, sorted: the order of the columns of :meth:`predict_proba`.
        posterior_: what was learned, on standardised inputs.
        model_: the fitted model.
        history_: one array a figure (objective, jitter, ...), one entry a step.
        messages_: the warnings of the fit, and what settings left to the method came to, as sentences.
        n_iter_: the number of steps.
        n_features_in_: the number of inputs.
        feature_names_in_: their names, when X had any.

    Example:
        >>> import numpy as np
        >>> from fathomgp import DeepGPClassifier
        >>> X = np.linspace(-1, 1, 20)[:, None]
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> model = DeepGPClassifier(depth=1, num_inducing=10, max_iter=100, random_state=0).fit(X, y)
        >>> model.predict([[-0.9], [0.9]]).tolist(), model.predict_proba(X).shape
        (['left', 'right'], (20, 2))
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
        likelihood: Any = "auto",
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
    def fit(self, X: Any, y: Any = None) -> "DeepGPClassifier":
        """Fit to inputs (N, D) and labels (N,): arrays, lists, or pandas, polars and pyarrow tables.

        Data larger than memory: ``fit(ParquetSource("collisions/", "label"))``; labels are then numbers.
        """
        return self._first_block(X, y, None)

    def _first_block(self, X: Any, y: Any, classes: Any) -> "DeepGPClassifier":
        """Fit; ``classes`` may name labels that y does not have yet."""
        self._check_settings()
        self._check_method()
        if isinstance(X, ParquetSource):
            self._open_stream(X, y)
            classes = stream_classes(X)
            self._fit(X, None, self._likelihood(len(classes)))
            self.classes_ = classes
            return self
        inputs, _ = read_inputs(X, estimator=self, reset=True)
        known = None if classes is None else np.unique(np.asarray(classes))
        targets, classes = read_labels(y, missing=self.missing, num_rows=len(inputs), classes=known)
        self._fit(inputs, targets, self._likelihood(len(classes)))
        self.classes_ = classes
        return self

    def _read_more_targets(self, y: Any, num_rows: int) -> Targets:
        return read_labels(y, missing=self.missing, num_rows=num_rows, classes=self.classes_)[0]

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of every row."""
        winners = self.predict_proba(X).argmax(axis=1)
        return self.classes_[winners]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, (N, K) in the order of ``classes_``, averaged over all that was learned."""
        return np.concatenate(self._blocks(X, lambda predictive: predictive.probabilities()))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of :meth:`predict_proba`."""
        return np.log(self.predict_proba(X))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Joint draws of labels at the rows of X: (N, n_samples)."""
        draws = self._sample_targets(X, n_samples, random_state).astype(int)
        return self.classes_[draws]

    def _encode_targets(self, y: Any, num_rows: int) -> np.ndarray:
        targets, _ = read_labels(y, missing="mask", num_rows=num_rows, classes=self.classes_)
        return np.where(targets.observed, targets.Y, np.nan)[:, 0]

    def _check_method(self) -> None:
        if not find_method(self.method)[0].classifies:
            able = ", ".join(repr(name) for name, method in METHODS.items() if method.classifies)
            raise SettingError(f"method={self.method!r} needs Gaussian noise and cannot classify: choose {able}.")

    def _likelihood(self, num_classes: int) -> AbstractClassLikelihood:
        chosen = self.likelihood
        if isinstance(chosen, AbstractClassLikelihood):
            if chosen.num_classes != num_classes:
                raise SettingError(f"{chosen!r} is for {chosen.num_classes} classes, but y has {num_classes}.")
            return chosen
        if isinstance(chosen, AbstractLikelihood):
            raise SettingError(f"likelihood={chosen!r} is for numbers, not for labels: use DeepGPRegressor.")
        name = choose("likelihood", chosen, _NAMES)
        if name == "bernoulli" and num_classes > 2:
            raise SettingError(f"likelihood='bernoulli' is for 2 classes, but y has {num_classes}: choose 'auto'.")
        if name == "bernoulli" or (name == "auto" and num_classes == 2):
            return Bernoulli()
        return RobustMax(num_classes) if name == "robustmax" else Softmax(num_classes)
