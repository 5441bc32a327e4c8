"""What the regressor and the classifier share: fit, blocked prediction, saving."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from fathomgp._checks import check_flag, shown
from fathomgp._outputs import check_writable
from fathomgp.compilation import power_of_two, program, question_rows, repeat_last_row
from fathomgp.data import ParquetSource, Standardizer, Targets, read_inputs, read_targets
from fathomgp.diagnostics import convergence
from fathomgp.errors import DataWarning, SettingError
from fathomgp.estimators._faces import (
    JaxModel,
    SamplePaths,
    Units,
    check_slopes,
    path_slope_moments,
    slope_moments,
)
from fathomgp.estimators._noise import frozen_gaussian, read_noise_variance
from fathomgp.estimators._prepare import Prepared, check_stream, prepare_arrays, prepare_stream
from fathomgp.estimators._settings import (
    FIT,
    PRECISIONS,
    PREDICT,
    check_count,
    choose,
    draw_seed,
    find_method,
    key_for,
    tuned_inference,
    tuning_remarks,
)
from fathomgp.fitting import Checkpointing, EarlyStopping, fit_model
from fathomgp.inference import AbstractPosterior
from fathomgp.inference.exact import ExactPosterior
from fathomgp.likelihoods import AbstractLikelihood, likelihood_of_rows
from fathomgp.model import ARCHITECTURES, build_model
from fathomgp.notices import tell
from fathomgp.parameters import cast
from fathomgp.persistence import save_bundle
from fathomgp.precision import double_precision
from fathomgp.predictive import Mixture, Predictive, concatenate_rows

#: Rows predicted at a time: bounds memory, and small requests are padded to few compiled shapes.
_BLOCK = 4096
#: Rows at which the chains of a sampler are compared.
_JUDGED_ROWS = 50
#: Draws of f of which the moments of a deep model's derivatives are taken.
_SLOPES = 200

#: What a fitted estimator holds beyond its parameters: the names that save and load carry, and what they must be.
FITTED: dict[str, Any] = {
    "posterior_": AbstractPosterior,
    "history_": dict[str, np.ndarray | str | float | int | bool],
    "messages_": list[str],
    "fit_seconds_": float,
    "n_iter_": int,
    "n_features_in_": int,
    "feature_names_in_": np.ndarray,
    "target_names_": list[str] | tuple[str, ...] | np.ndarray | None,
    "x_scaler_": Standardizer,
    "y_scaler_": Standardizer,
    "classes_": np.ndarray,
    "_squeeze": bool,
    "_noise_known": bool,
    "_seed": int,
    "_dtype": np.dtype,
}
#: Those that only some estimators hold.
SOMETIMES = {"feature_names_in_", "classes_", "_noise_known"}


class _DeepGPEstimator(BaseEstimator):
    """The machinery; the two public classes add their targets and their predictions."""

    @double_precision
    def _fit(
        self, X: Any, targets: Targets | None, likelihood: AbstractLikelihood, noise: np.ndarray | None = None
    ) -> "_DeepGPEstimator":
        """Fit to numbers, or to a stream, which has its own targets. Nothing is changed unless the fit succeeds."""
        for name, value in self._run_fit(X, targets, likelihood, noise).items():
            setattr(self, name, value)
        return self

    def _run_fit(
        self, X: Any, targets: Targets | None, likelihood: AbstractLikelihood, noise: np.ndarray | None
    ) -> dict[str, Any]:
        """The fitted attributes; ``noise``: known variances of the targets."""
        method, _ = find_method(self.method)
        labels = likelihood.target_kind == "class"
        rows = X.num_data if targets is None else len(X)
        inference = tuned_inference(self.method, self.recipe, labels=labels, num_data=rows, batch_size=self.batch_size)
        tuned = tuning_remarks(self.method, self.recipe, inference)
        seed = self._draw_seed()
        dtype = PRECISIONS[self.precision]
        if targets is None:
            data = prepare_stream(X, likelihood, dtype=dtype, seed=seed)
        else:
            data = prepare_arrays(X, targets, likelihood, dtype=dtype, seed=seed, noise=noise)
        source = data.source
        model = build_model(
            data.sample,
            self._told_likelihood(likelihood, data),
            source.num_outputs,
            recipe=self.recipe,
            depth=method.default_depth if self.depth is None else self.depth,
            num_inducing=self._num_inducing(source.num_data, method.grows) if method.uses_inducing else None,
            hidden_dim=self.hidden_dim,
            kernel=self.kernel,
            architecture=self.architecture,
            separate=inference.separates and not labels,
            priors=self.priors,
            seed=seed,
        )
        # Kernels and likelihoods that users build outside the float64 scope hold float32.
        model = cast(model, np.float32 if self.precision == "single" else np.float64)
        if self.batch_size is not None:
            size = self._batch_size(source.num_data)
            inference = dataclasses.replace(inference, batch_size=size)  # type: ignore[call-arg]
        if method.grows and inference.budget is None:  # type: ignore[attr-defined]
            inference = dataclasses.replace(inference, budget=self.num_inducing)  # type: ignore[call-arg]
        result = fit_model(
            inference,
            model,
            source,
            key=key_for(seed, FIT),
            max_iter=self.max_iter,
            early_stopping=EarlyStopping() if self.early_stopping else None,
            checkpointing=None if self.checkpoint is None else Checkpointing(self.checkpoint),
            callbacks=self.callbacks or (),
            verbose=self.verbose,
        )
        return {
            "posterior_": result.posterior,
            "history_": result.history | self._judge_chains(result.posterior, data.sample[:_JUDGED_ROWS]),
            "messages_": [*tuned, *result.messages],
            "fit_seconds_": result.seconds,
            "n_iter_": max(1, len(result.history.get("step", ()))),
            "target_names_": data.target_names,
            "x_scaler_": data.x_scaler,
            "y_scaler_": data.y_scaler,
            "_squeeze": data.squeeze,
            "_noise_known": noise is not None,
            "_seed": seed,
            "_dtype": np.dtype(dtype),
        }

    def _told_likelihood(self, likelihood: AbstractLikelihood, data: Prepared) -> AbstractLikelihood:
        """The likelihood with what the user says about its noise, in standard units."""
        return likelihood

    def _open_stream(self, stream: ParquetSource, y: Any) -> None:
        """Check a stream and take the names of its inputs."""
        check_stream(stream, y, self.method, find_method(self.method)[0])
        self.n_features_in_ = stream.num_inputs
        self.feature_names_in_ = np.asarray(stream.input_names, dtype=object)

    def _judge_chains(self, posterior: AbstractPosterior, x: np.ndarray) -> dict[str, Any]:
        """R-hat, effective sample size and a verdict, for methods that sample; shown where progress is."""
        judgement = convergence(posterior, x)
        if judgement is None:
            return {}
        if sys.stderr.isatty() if self.verbose is None else self.verbose:
            print(judgement.verdict, file=sys.stderr)
        return {"r_hat": judgement.r_hat, "ess": judgement.ess, "verdict": judgement.verdict}

    def _draw_seed(self) -> int:
        # A checkpoint can only be resumed by a run with the same seed.
        random_state = 0 if self.random_state is None and self.checkpoint is not None else self.random_state
        return draw_seed(random_state)

    @property
    def model_(self):
        """The fitted :class:`~fathomgp.model.DeepGP`, on standardised inputs and outputs."""
        check_is_fitted(self, "posterior_")
        return self.posterior_.model

    @double_precision
    def predict_distribution(self, X: Any, noise_variance: Any = None) -> Predictive:
        """The whole answer: a :class:`~fathomgp.predictive.Predictive` with mean, std, quantiles, log density, ...

        ``noise_variance``: of the rows of X, for a fit that was told those of its rows.
        """
        inputs = self._read(X)
        likelihood = self._likelihood_of(inputs, noise_variance)
        return self._predictive(concatenate_rows([mixture for _, mixture in self._mixtures(inputs)]), likelihood)

    @double_precision
    def to_jax(self) -> JaxModel:
        """A pure JAX function in the units of the data: ``dist = f(x)``, for ``jit``, ``grad`` and ``vmap``.

        ``x`` is rows (N, D) or one row (D,). ``dist`` has ``mean()``, ``variance()``, ``std()``, ``quantile(q)``,
        ``cdf(y)``, ``log_prob(y)``, ``sample(key, n)``, and ``probabilities()`` for labels, see
        :class:`~fathomgp.distribution.Distribution`. All is computed in float64, with JAX's flag off too; answers have
        the dtype of ``x``.

        Example:
            >>> import jax
            >>> import numpy as np
            >>> from fathomgp import DeepGPRegressor
            >>> X = np.linspace(0, 1, 20)[:, None]
            >>> f = DeepGPRegressor(method="exact", random_state=0).fit(X, np.sin(6 * X[:, 0])).to_jax()
            >>> upper = lambda x: f(x).quantile(0.95)
            >>> jax.jit(jax.vmap(jax.grad(upper)))(X).shape
            (20, 1)
        """
        check_is_fitted(self, "posterior_")
        if getattr(self, "_noise_known", False):
            raise SettingError("to_jax needs noise of one size, but this fit was told that of each of its rows.")
        return JaxModel(jax.tree.map(jnp.asarray, self.posterior_), self._units(), self._prediction_key())

    @double_precision
    def sample_paths(self, n: int = 1, random_state: Any = 0) -> SamplePaths:
        """``n`` draws of f (without noise) as one JAX function in the units of the data, for ``jit`` and ``grad``.

        Rows (N, D) give (n, N), or (n, N, P) for several outputs; one row (D,) gives (n,) or (n, P). Draws are whole
        functions: a row has one value, whichever rows are asked beside it. With ``"stride"``, and with kernels without
        random features (periodic, arc-cosine, ...), they are joint over the rows of one call only.

        Args:
            n: the number of draws.
            random_state: decides which functions they are.

        Example:
            >>> import jax
            >>> import numpy as np
            >>> from fathomgp import DeepGPRegressor
            >>> X = np.linspace(0, 1, 20)[:, None]
            >>> model = DeepGPRegressor(method="exact", random_state=0).fit(X, np.sin(6 * X[:, 0]))
            >>> paths = model.sample_paths(3)
            >>> paths(X).shape, jax.jit(paths)(X[0]).shape
            ((3, 20), (3,))
        """
        check_is_fitted(self, "posterior_")
        check_count("n", n)
        if getattr(self, "_noise_known", False) and isinstance(self.posterior_, ExactPosterior):
            raise SettingError(
                "sample_paths of an exact GP needs noise of one size, but this fit was told that of each of its rows: "
                "use method='sgpr'."
            )
        key = jax.random.key(draw_seed(random_state))
        return SamplePaths(jax.tree.map(jnp.asarray, self.posterior_), self._units(), key, int(n))

    @double_precision
    def predict_gradient(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of df/dx at rows, in the units of the data: (N, D), or (N, P, D) for several.

        One layer: a closed form, the derivative of a Gaussian process. Several: moments of 200 draws of f, so that the
        mean has an error of std / 14.

        Example:
            >>> import numpy as np
            >>> from fathomgp import DeepGPRegressor
            >>> X = np.linspace(0, 1, 20)[:, None]
            >>> model = DeepGPRegressor(method="exact", random_state=0).fit(X, 3.0 * X[:, 0])
            >>> mean, std = model.predict_gradient(X[:2])
            >>> mean.round(1).tolist(), std.shape
            ([[3.0], [3.0]], (2, 1))
        """
        inputs = self._read(X)
        posterior = self.posterior_
        check_slopes(posterior)
        block, parts = question_rows(len(inputs), sizes=(16, 256), largest=256), []
        for start in range(0, len(inputs), block):
            rows = inputs[start : start + block]
            x, key = self._padded(rows, block), self._prediction_key()
            deep = posterior.model.depth > 1
            slopes = path_slope_moments(posterior, x, key, _SLOPES) if deep else slope_moments(posterior, x, key)
            parts.append([np.asarray(part, np.float64)[: len(rows)] for part in slopes])
        mean, std = (np.concatenate(part) / np.asarray(self.x_scaler_.scale) for part in zip(*parts, strict=True))
        if posterior.likelihood.target_kind == "real":
            scale = np.asarray(self.y_scaler_.scale)
            mean, std = (part[:, : len(scale)] * scale[:, None] for part in (mean, std))
        return (mean[:, 0], std[:, 0]) if self._squeeze and mean.shape[1] == 1 else (mean, std)

    def _units(self) -> Units:
        inputs, outputs = (jax.tree.map(jnp.asarray, scaler) for scaler in (self.x_scaler_, self.y_scaler_))
        return Units(inputs, outputs, self._squeeze, np.dtype(self._dtype))

    @double_precision
    def log_density(self, X: Any, y: Any, noise_variance: Any = None) -> np.ndarray:
        """``log p(y | x)`` of every row, jointly over several outputs; NaN entries of y are left out."""
        inputs = self._read(X)
        targets = self._encode_targets(y, len(inputs))
        likelihood = self._likelihood_of(inputs, noise_variance)
        return np.concatenate([p.log_density(targets[rows]) for rows, p in self._predictives(inputs, likelihood)])

    def _likelihood_of(self, inputs: np.ndarray, noise_variance: Any, *, needed: bool = True) -> AbstractLikelihood:
        """The likelihood of new rows, with their noise where the fit was told that of its own."""
        likelihood = self.posterior_.likelihood
        if not getattr(self, "_noise_known", False):
            if noise_variance is not None:
                raise SettingError("noise_variance is for a fit that was told it, fit(X, y, noise_variance=...).")
            return likelihood
        if noise_variance is None:
            if needed:
                raise SettingError(
                    "The noise of these rows is not known: pass noise_variance=..., one variance a row in units of y "
                    "squared, or ask predict(X, latent=True) about the function below the noise."
                )
            return likelihood
        scale = np.asarray(self.y_scaler_.scale)
        return frozen_gaussian(read_noise_variance(noise_variance, (len(inputs), len(scale))) / scale**2)

    @double_precision
    def _sample_targets(self, X: Any, n_samples: int, random_state: Any, noise_variance: Any = None) -> np.ndarray:
        """Joint draws of y, as numbers: (N, n_samples), or (N, P, n_samples) for several outputs."""
        count = check_count("n_samples", n_samples)
        inputs = self._read(X)
        key, rows = jax.random.key(draw_seed(random_state)), power_of_two(len(inputs), smallest=16)
        posterior = self._posterior_of(self._likelihood_of(inputs, noise_variance), rows)
        y = posterior.sample_y(self._padded(inputs, rows), key=key, n=count)
        y = np.asarray(y)[:, : len(inputs)]
        outputs = y.shape[2]
        draws = np.asarray(self.y_scaler_.inverse(y.reshape(-1, outputs))).reshape(y.shape)
        draws = np.moveaxis(draws, 0, -1)
        return draws[:, 0] if self._squeeze else draws

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted model to the directory ``path``; :func:`fathomgp.load` reads it. No pickle is involved."""
        check_is_fitted(self, "posterior_")
        params = self.get_params(deep=False)
        params["callbacks"] = None
        params["checkpoint"] = None
        if not isinstance(params["random_state"], (int, np.integer, type(None))):
            params["random_state"] = None
        fitted = {name: vars(self)[name] for name in FITTED if name in vars(self)}
        save_bundle(path, "model", {"estimator": type(self).__name__, "params": params, "fitted": fitted})

    def _check_settings(self) -> None:
        """Refuse settings that make no sense, before any work."""
        method, _ = find_method(self.method)
        choose("precision", self.precision, PRECISIONS)
        if self.precision not in method.precisions:
            allowed = " or ".join(map(repr, method.precisions))
            raise SettingError(f"method={self.method!r} has no precision {self.precision!r}: choose {allowed}.")
        choose("architecture", self.architecture, ARCHITECTURES)
        if self.architecture not in method.architectures:
            raise SettingError(
                f"method={self.method!r} has no architecture {self.architecture!r}: use method='stride', or "
                "architecture='composition'."
            )
        choose("missing", self.missing, ("error", "mask"))
        for name in ("depth", "max_iter", "batch_size"):
            check_count(name, getattr(self, name), optional=True)
        check_count("num_inducing", self.num_inducing)
        if self.batch_size is not None and not method.uses_batches:
            raise SettingError(f"method={self.method!r} sees all rows at every step: leave batch_size=None.")
        check_flag(self.early_stopping, "early_stopping")
        if self.verbose is not None:
            check_flag(self.verbose, "verbose")
        if self.callbacks is not None and not _all_callable(self.callbacks):
            raise SettingError(f"callbacks must be a list of functions, but it is {shown(self.callbacks)}.")
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | os.PathLike):
            raise SettingError(f"checkpoint must name a directory, but it is {shown(self.checkpoint)}.")
        if self.checkpoint is not None:
            check_writable(self.checkpoint, "checkpoint")

    def _num_inducing(self, num_data: int, grows: bool) -> int:
        if self.num_inducing > num_data and not grows:
            message = f"num_inducing is {self.num_inducing} but there are {num_data} rows: {num_data} are used."
            tell(message, DataWarning, stacklevel=5)
        return min(self.num_inducing, num_data)

    def _batch_size(self, num_data: int) -> int:
        if self.batch_size > num_data:
            message = f"batch_size is {self.batch_size} but there are {num_data} rows: every step sees all of them."
            tell(message, DataWarning, stacklevel=5)
        return min(self.batch_size, num_data)

    def _read(self, X: Any) -> np.ndarray:
        """Inputs of a prediction, as the user gave them, checked against those of the fit."""
        check_is_fitted(self, "posterior_")
        return read_inputs(X, estimator=self, reset=False)[0]

    def _encode_targets(self, y: Any, num_rows: int) -> np.ndarray:
        targets = read_targets(y, missing="mask", kind=self.posterior_.likelihood.target_kind, num_rows=num_rows)
        values = np.where(targets.observed, targets.Y, np.nan)
        return values[:, 0] if self._squeeze and values.shape[1] == 1 else values

    @double_precision
    def _blocks(
        self, X: Any, question: Callable[[Predictive], Any], noise_variance: Any = None, *, needed: bool = True
    ) -> list[Any]:
        """Answers block by block; ``needed`` is false for questions to which the noise does not matter."""
        inputs = self._read(X)
        likelihood = self._likelihood_of(inputs, noise_variance, needed=needed)
        return [question(predictive) for _, predictive in self._predictives(inputs, likelihood)]

    def _predictives(self, inputs: np.ndarray, likelihood: AbstractLikelihood) -> Iterator[tuple[slice, Predictive]]:
        for rows, mixture in self._mixtures(inputs):
            yield rows, self._predictive(mixture, likelihood_of_rows(likelihood, rows))

    def _predictive(self, mixture: Mixture, likelihood: AbstractLikelihood) -> Predictive:
        return Predictive(mixture, likelihood, self.y_scaler_.shift, self.y_scaler_.scale, self._squeeze)

    def _posterior_of(self, likelihood: AbstractLikelihood, rows: int) -> AbstractPosterior:
        """The posterior, with the noise of so many rows where each has its own."""
        if likelihood is self.posterior_.likelihood:
            return self.posterior_
        padded = likelihood_of_rows(likelihood, slice(None), rows)
        return eqx.tree_at(lambda posterior: posterior.model.likelihood, self.posterior_, padded)

    def _mixtures(self, inputs: np.ndarray) -> Iterator[tuple[slice, Mixture]]:
        """The latent answer, block by block, on the host."""
        block = _block_rows(len(inputs), getattr(self.posterior_, "num_samples", 1))
        for start in range(0, len(inputs), block):
            rows = slice(start, min(start + block, len(inputs)))
            yield rows, self._mixture(inputs[rows], block)

    @double_precision
    def _mixture(self, inputs: np.ndarray, block: int) -> Mixture:
        mixture = self.posterior_.predict_f(self._padded(inputs, block), key=self._prediction_key())
        means, variances = np.asarray(mixture.means), np.asarray(mixture.variances)
        return Mixture(np.asarray(mixture.log_weights), means[:, : len(inputs)], variances[:, : len(inputs)], None)

    @double_precision
    def _joint_moments(
        self, inputs: np.ndarray, noise_variance: Any = None, *, latent: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Means of y, and its covariances between rows, noise included; or those of f."""
        padded = self._padded(inputs, power_of_two(len(inputs), smallest=16))
        posterior = self._posterior_of(self._likelihood_of(inputs, noise_variance, needed=not latent), len(padded))
        rows = slice(0, len(inputs))
        moments = (latent_joint_moments if latent else joint_moments)(posterior, padded, self._prediction_key())
        outputs = slice(0, len(self.y_scaler_.shift))
        mean = np.asarray(self.y_scaler_.inverse(np.asarray(moments[0])[rows, outputs]))
        covariance = np.asarray(moments[1])[rows, rows, outputs] * np.asarray(self.y_scaler_.scale) ** 2
        return (mean[:, 0], covariance[..., 0]) if self._squeeze else (mean, covariance)

    def _padded(self, inputs: np.ndarray, rows: int) -> jax.Array:
        """Inputs in standard units, the last one repeated: few shapes are ever compiled."""
        x = np.asarray(self.x_scaler_.transform(inputs), self._dtype)
        return jnp.asarray(repeat_last_row(x, rows))

    def _prediction_key(self) -> jax.Array:
        # The same for every call, so that equal questions get equal answers.
        return key_for(self._seed, PREDICT)

    def __getstate__(self) -> dict[str, Any]:
        # Outside a float64 scope JAX would silently halve the precision of its arrays: pickles hold NumPy's.
        state = dict(super().__getstate__())
        if "posterior_" in state:
            state["posterior_"] = jax.tree.map(np.asarray, state["posterior_"])
        return state

    @double_precision
    def __setstate__(self, state: dict[str, Any]) -> None:
        if "posterior_" in state:
            state = {**state, "posterior_": jax.tree.map(jnp.asarray, state["posterior_"])}
        super().__setstate__(state)


@program
def joint_moments(posterior: AbstractPosterior, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of y, and its covariances between rows, in standard units: one program."""
    return posterior.predict_y(x, key=key, full_cov=True).standard_moments()


@program
def latent_joint_moments(posterior: AbstractPosterior, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of f, and its covariances between rows, in standard units."""
    return posterior.predict_f(x, key=key, full_cov=True).joint_moments()


def _all_callable(callbacks: Any) -> bool:
    return isinstance(callbacks, list | tuple) and all(map(callable, callbacks))


def _block_rows(rows: int, samples: int) -> int:
    """Rows per block, one of few sizes: large blocks are smaller where many samples are kept for each row."""
    largest = max(256, _BLOCK // power_of_two(samples // 8 + 1))
    return question_rows(rows, sizes=(16, 64, 256), largest=largest)
