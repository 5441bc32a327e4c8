"""GPLVM: latent inputs of unlabelled data, the scikit-learn way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from fathomgp._checks import check_flag
from fathomgp.compilation import power_of_two, repeat_last_row
from fathomgp.data import ArraySource, Standardizer, read_inputs
from fathomgp.estimators._settings import FIT, check_count, draw_seed, key_for
from fathomgp.fitting import fit_model
from fathomgp.inference import LatentInputsPosterior, MeanField, infer_inputs
from fathomgp.likelihoods import Gaussian
from fathomgp.means import pca
from fathomgp.model import build_model
from fathomgp.parameters import cast
from fathomgp.precision import double_precision

#: A start that believes in the data: with more noise the latent coordinates have nothing to explain and fall to zero.
_START_NOISE = 0.01


class GPLVM(TransformerMixin, BaseEstimator):
    """The Bayesian Gaussian process latent variable model: a nonlinear, probabilistic principal component analysis.

    Every row gets a Gaussian over a few latent coordinates; a (deep) GP maps these to the columns. The start is PCA.

    Args:
        n_components: latent coordinates.
        depth: GP layers from the latent coordinates to the data; 1 is the Bayesian GP-LVM.
        num_inducing: inducing points a layer.
        hidden_dim: width of the inner layers, for depths above 1; as many as latent coordinates by default.
        kernel: a name or a kernel object.
        max_iter: at most so many evaluations of the bound; ``None``: 400.
        random_state: a seed.
        verbose: progress bar: ``True``, ``False``, or ``None`` for "on a terminal only".

    Attributes:
        embedding_: the latent coordinates' means, one row a datum.
        embedding_std_: their standard deviations.
        posterior_: what was learned, on standardised columns.
        history_: one array a figure, one entry a step.

    Example:
        >>> import numpy as np
        >>> angle = np.linspace(0, 3, 40)[:, None]
        >>> Y = np.concatenate([np.cos(angle), np.sin(angle), np.cos(2 * angle)], axis=1)
        >>> GPLVM(1, num_inducing=10, max_iter=20, random_state=0).fit_transform(Y).shape
        (40, 1)

    References:
        Titsias and Lawrence (2010), Bayesian Gaussian process latent variable model. AISTATS.
    """

    def __init__(
        self,
        n_components: Any = 2,
        *,
        depth: Any = 1,
        num_inducing: Any = 50,
        hidden_dim: Any = None,
        kernel: Any = "rbf",
        max_iter: Any = None,
        random_state: Any = None,
        verbose: Any = None,
    ):
        self.n_components = n_components
        self.depth = depth
        self.num_inducing = num_inducing
        self.hidden_dim = hidden_dim
        self.kernel = kernel
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    @double_precision
    def fit(self, X: Any, y: Any = None) -> "GPLVM":
        """Find the latent coordinates of the rows of ``X``; ``y`` is ignored."""
        for name in ("n_components", "depth", "num_inducing"):
            check_count(name, getattr(self, name))
        check_count("max_iter", self.max_iter, optional=True)
        if self.verbose is not None:
            check_flag(self.verbose, "verbose")
        Y, _ = read_inputs(X, estimator=self, reset=True)
        seed = draw_seed(self.random_state)
        self.scaler_ = Standardizer.fit(Y)
        scaled = np.asarray(self.scaler_.transform(Y))
        self.pca_ = pca(scaled, self.n_components)
        start = np.asarray(self.pca_(jnp.asarray(scaled)))
        self._spread = start.std(axis=0)
        start = start / self._spread
        model = build_model(
            start,
            Gaussian(_START_NOISE),
            scaled.shape[1],
            depth=self.depth,
            num_inducing=min(self.num_inducing, len(start)),
            hidden_dim=self.hidden_dim,
            kernel=self.kernel,
            priors=None,  # the latent inputs' own prior sets the scale; short lengthscales tell which of them matter
            seed=seed,
        )
        result = fit_model(
            MeanField(latent_inputs=True),
            cast(model, np.float64),
            ArraySource(start, scaled),
            key=key_for(seed, FIT),
            max_iter=self.max_iter,
            verbose=self.verbose,
        )
        assert isinstance(result.posterior, LatentInputsPosterior)
        self.posterior_, self.history_ = result.posterior, result.history
        self.embedding_ = np.asarray(self.posterior_.means)[: len(start)]
        self.embedding_std_ = np.sqrt(np.asarray(self.posterior_.variances))[: len(start)]
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit, and return the latent coordinates."""
        return self.fit(X, y).embedding_

    @double_precision
    def transform(self, X: Any) -> np.ndarray:
        """Latent coordinates of new rows, whose bounds are maximised one by one with the functions held."""
        check_is_fitted(self, "posterior_")
        Y, _ = read_inputs(X, estimator=self, reset=False)
        scaled = np.asarray(self.scaler_.transform(Y))
        padded = repeat_last_row(scaled, power_of_two(len(Y), smallest=16))
        start = padded @ np.asarray(self.pca_.weights.value) / self._spread[None]
        observed = np.broadcast_to((np.arange(len(padded)) < len(Y))[:, None], padded.shape)
        return np.asarray(infer_inputs(self.posterior_, *map(jnp.asarray, (padded, observed, start)))[0])[: len(Y)]

    @double_precision
    def inverse_transform(self, X: Any) -> np.ndarray:
        """The data's columns expected at latent coordinates."""
        check_is_fitted(self, "posterior_")
        x = np.asarray(X, np.float64)
        padded = repeat_last_row(x, power_of_two(len(x), smallest=16))
        mixture = self.posterior_.predict_f(jnp.asarray(padded), key=jax.random.key(0))
        return np.asarray(self.scaler_.inverse(np.asarray(mixture.mean())))[: len(x)]
