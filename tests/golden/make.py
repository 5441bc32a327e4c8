"""Write the golden models of a release: small fitted models of every kind, and what they answered when they were saved.

    PYTHONPATH=<the release's src> python tests/golden/make.py tests/golden/0.1

Run it once, with the code of the release itself; ``tests/test_golden.py`` loads what it wrote with the code of today.
A model is a directory: what ``save`` wrote, and ``answers.npz`` with inputs and answers. Models that are already there
are left alone, so that a new kind can be added later.
"""

import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from fathomgp import DeepGPClassifier, DeepGPRegressor
from fathomgp.estimators import GPLVM
from fathomgp.inference import (
    AEP,
    DSVI,
    SGHMC,
    SGPR,
    STRIDE,
    Decoupled,
    Exact,
    LatentInputsPosterior,
    MeanField,
    Sequential,
)
from fathomgp.kernels import RBF, Constant, Linear, Matern32, NeuralNetwork, Periodic, White
from fathomgp.likelihoods import StudentT
from fathomgp.persistence import save_bundle

QUANTILES = (0.05, 0.5, 0.95)
ROWS = 24
COMMON = {"num_inducing": 5, "random_state": 3, "verbose": False}


def inputs() -> np.ndarray:
    return np.random.default_rng(1).uniform(-1.5, 1.5, size=(ROWS, 2))


def curve(X: np.ndarray) -> np.ndarray:
    return np.sin(2.0 * X[:, 0]) + 0.5 * X[:, -1] ** 2 + 0.1 * np.random.default_rng(2).normal(size=len(X))


def two_outputs(X: np.ndarray) -> np.ndarray:
    """The second output is missing in some rows."""
    y = np.stack([curve(X), 3.0 - 2.0 * curve(X) ** 2], axis=1)
    y[::5, 1] = np.nan
    return y


def counts(X: np.ndarray) -> np.ndarray:
    return np.round(np.exp(curve(X)))


def three_classes(X: np.ndarray) -> np.ndarray:
    return np.array(["low", "middle", "high"])[np.digitize(curve(X), [0.0, 0.8])]


def two_classes(X: np.ndarray) -> np.ndarray:
    return (curve(X) > 0.4).astype(int)


def three_columns(X: np.ndarray) -> tuple[np.ndarray]:
    return (np.stack([curve(X), curve(X) ** 2, X[:, 0]], axis=1),)


def few(algorithm: type, **settings):
    """An algorithm with as few steps as fill all parts of its state."""
    usual = {
        Exact: {"restarts": 0},
        SGPR: {},
        DSVI: {"steps": 20, "test_samples": 4},
        Decoupled: {"steps": 20, "test_samples": 4},
        SGHMC: {"burn_in": 20, "sampling": 12, "draws": 3, "chains": 2},
        STRIDE: {"particles": 3, "rounds": 2, "moves": 6, "exchanges": 1, "candidates": 4, "shallow_rounds": 1},
        Sequential: {"num_particles": 8, "test_samples": 4, "learning_particles": 3},
        AEP: {"steps": 20},
        MeanField: {"steps": 20},
    }[algorithm]
    return algorithm(**{**usual, **settings})


def regressor(method, **settings) -> DeepGPRegressor:
    return DeepGPRegressor(method, **{**COMMON, **settings})


def classifier(method, **settings) -> DeepGPClassifier:
    return DeepGPClassifier(method, **{**COMMON, **settings})


def sum_of_kernels():
    return RBF(jnp.array([0.7, 1.5]), 1.3) + Linear(0.4, 0.2) * Constant(0.5) + White(0.01)


def other_kernels():
    return Periodic(1.1, active_dims=(0,)) * Matern32(1.4, 2.0, active_dims=(1,)) + NeuralNetwork(jnp.ones(2))


#: Every model: an unfitted estimator and what makes its targets.
MODELS = {
    "exact": lambda: (regressor(few(Exact)), curve),
    "exact-kernels": lambda: (regressor(few(Exact), kernel=sum_of_kernels()), curve),
    "exact-two-outputs": lambda: (regressor(few(Exact), missing="mask", kernel="matern32"), two_outputs),
    "sgpr": lambda: (regressor(few(SGPR)), curve),
    "sgpr-kernels": lambda: (regressor(few(SGPR, inducing="fixed"), kernel=other_kernels()), curve),
    "dsvi": lambda: (regressor(few(DSVI), depth=2), curve),
    "dsvi-single": lambda: (regressor(few(DSVI), depth=2, precision="single", hidden_dim=1), curve),
    "dsvi-student-t": lambda: (
        regressor(few(DSVI), depth=2, recipe="salimbeni2017", likelihood=StudentT(), kernel="matern52"),
        curve,
    ),
    "dsvi-poisson": lambda: (regressor(few(DSVI), depth=1, likelihood="poisson"), counts),
    "dsvi-two-outputs": lambda: (regressor(few(DSVI), depth=3, hidden_dim=[2, 1], missing="mask"), two_outputs),
    "decoupled": lambda: (regressor(few(Decoupled), depth=2), curve),
    "sghmc": lambda: (regressor(few(SGHMC), depth=2), curve),
    "stride": lambda: (regressor(few(STRIDE), depth=2), curve),
    "stride-convolution": lambda: (regressor(few(STRIDE, hidden="exact"), depth=2, architecture="convolution"), curve),
    "stride-injective": lambda: (
        regressor(few(STRIDE, hidden="sparse"), depth=3, architecture="injective", recipe="latz2025"),
        curve,
    ),
    "sequential": lambda: (regressor(few(Sequential), depth=2), curve),
    "sequential-heteroscedastic": lambda: (regressor(few(Sequential), depth=1, likelihood="heteroscedastic"), curve),
    "aep": lambda: (regressor(few(AEP), depth=2), curve),
    "meanfield": lambda: (regressor(few(MeanField), depth=2), curve),
    "classes-dsvi": lambda: (classifier(few(DSVI), depth=2), three_classes),
    "classes-softmax": lambda: (classifier(few(DSVI), depth=1, likelihood="softmax"), three_classes),
    "classes-aep": lambda: (classifier(few(AEP), depth=2), two_classes),
    "classes-sghmc": lambda: (classifier(few(SGHMC), depth=2), two_classes),
    "gplvm": lambda: (GPLVM(n_components=1, num_inducing=4, max_iter=20, random_state=3), three_columns),
}


def asked() -> np.ndarray:
    """Inputs within the data and beyond them."""
    return np.concatenate([inputs()[:4], [[0.1, -0.2], [3.0, 2.5]]])


def answers(model, X: np.ndarray) -> dict[str, np.ndarray]:
    """What a fitted model says of rows, by name."""
    if isinstance(model, LatentInputsPosterior):
        with jax.enable_x64(True):
            mixture = model.predict_f(jnp.asarray(X[:, :1]), key=jax.random.key(0))
            return {"mean": np.asarray(mixture.mean()), "std": np.sqrt(np.asarray(mixture.variance()))}
    if isinstance(model, DeepGPClassifier):
        return {"probabilities": model.predict_proba(X)}
    mean, std = model.predict(X, return_std=True)
    return {"mean": mean, "std": std, "quantiles": model.predict_quantiles(X, list(QUANTILES))}


def main(directory: pathlib.Path) -> None:
    for name, build in MODELS.items():
        if (directory / name / "answers.npz").exists():
            continue
        model, targets = build()
        columns = 1 if name.endswith("injective") else 2  # a monotone map has one input
        X, rows = inputs()[:, :columns], asked()[:, :columns]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(*targets(X)) if isinstance(model, GPLVM) else model.fit(X, targets(X))
        if isinstance(model, GPLVM):  # the estimator has no save of its own
            model = model.posterior_
            save_bundle(directory / name, "model", {"posterior": model})
        else:
            model.save(directory / name)
        np.savez_compressed(directory / name / "answers.npz", X=rows, **answers(model, rows))
        print(name, sum(file.stat().st_size for file in (directory / name).iterdir()), "bytes", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
