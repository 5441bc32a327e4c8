"""Models that earlier releases saved are read, and answer as they did."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import DeepGPClassifier, load
from fathomgp.persistence import load_bundle

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/answers.npz"))
#: One of each kind of posterior.
QUICK = {"0.1/exact", "0.1/dsvi", "0.1/sghmc", "0.1/stride", "0.1/aep"}
#: Answers that a deliberate change has moved further than rounding: how far they may be off, and why.
CHANGED: dict[str, tuple[float, str]] = {
    "0.1/dsvi-single": (1e-3, "float32 rounds differently from program to program"),
}

pytestmark = pytest.mark.usefixtures("flag_off")


def read(name):
    if name.endswith("gplvm"):  # the estimator has no save of its own
        with jax.enable_x64(True):
            return load_bundle(GOLDEN / name, "model")["posterior"]
    return load(GOLDEN / name)


def answers_of(model, X):
    """As golden/make.py asks, in the words of today."""
    if not hasattr(model, "random_state"):
        with jax.enable_x64(True):
            mixture = model.predict_f(jnp.asarray(X[:, :1]), key=jax.random.key(0))
            return {"mean": np.asarray(mixture.mean()), "std": np.sqrt(np.asarray(mixture.variance()))}
    if isinstance(model, DeepGPClassifier):
        return {"probabilities": model.predict_proba(X)}
    mean, std = model.predict(X, return_std=True)
    return {"mean": mean, "std": std, "quantiles": model.predict_quantiles(X, [0.05, 0.5, 0.95])}


def test_there_is_one_of_every_kind():
    made = set(runpy.run_path(str(GOLDEN / "make.py"), run_name="golden")["MODELS"])
    assert {name.split("/")[1] for name in NAMES if name.startswith("0.1/")} == made
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_model_is_read(name):
    assert read(name) is not None


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_golden_models_answer_as_they_did(name):
    kept = dict(np.load(GOLDEN / name / "answers.npz"))
    found = answers_of(read(name), kept.pop("X"))
    assert found.keys() == kept.keys()
    tolerance = CHANGED.get(name, (1e-6, ""))[0]
    for part, expected in kept.items():
        np.testing.assert_allclose(found[part], expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow
def test_an_online_gp_of_the_first_release_learns_on():
    """It kept Q where today's keep a root of it: what a next row teaches is what a refreshed one learns."""
    model = load(GOLDEN / "0.1/sequential")
    state = model.posterior_.state
    for gp, layer in zip(state.gps, state.model.layers, strict=True):
        with jax.enable_x64(True):
            active = np.asarray(gp.active)
            K = np.asarray(layer.kernel(jnp.asarray(gp.x)))[np.ix_(active, active)]
            V = np.asarray(gp.root)[np.ix_(active, active)]
            delta = gp.delta * np.diag(np.diag(K))
            np.testing.assert_allclose(V.T @ V @ (K + delta), np.eye(active.sum()), atol=1e-5)
    rows = np.load(GOLDEN / "0.1/sequential/answers.npz")["X"]
    assert np.isfinite(model.partial_fit(rows, np.sin(rows[:, 0])).predict(rows)).all()
