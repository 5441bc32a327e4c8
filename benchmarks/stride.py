"""STRIDE beside the figures of its paper (Latz et al. 2025): times, tables and pictures, resumable row by row.

    python benchmarks/stride.py timing             energy, the paper's settings; published: 1069 s on 32 cores
    python benchmarks/stride.py exchange           the M step beside naive evaluations of F_V, in one run
    python benchmarks/stride.py samplers           effective samples a second of the three E-step kernels
    python benchmarks/stride.py table              cross-validation on energy, concrete, boston (figures 4 and 5);
                                                   --particles 25 --moves 200 takes a quarter of the time;
                                                   --target bound follows F_V, the library's default, and
                                                   --recipe default has hidden layers of its own: see below
    python benchmarks/stride.py toy                the one-dimensional example (figure 3)
    python benchmarks/stride.py fashion            Fashion-MNIST labels as numbers, 30 principal components (table 1);
                                                   --rounds 4 --moves 50 takes a twentieth of the time

Results go to ``results/stride_*.csv``; rows that are there are not run again. Hidden layers are the paper's (mean 0,
variance 1: the recipe ``latz2025``), or the library's with ``--recipe default`` (centred on the values at which the
last layer is stationary, with the variance 0.1). The paper's kernels are isotropic;
``--ard`` gives every input its own length scale, for sparse GP regression and STRIDE alike. The published VAE features
of Fashion-MNIST are not available: principal components stand in, so its errors are not the paper's.
"""

import argparse
import functools
import os
import pathlib
import resource
import time
import warnings

import numpy as np

from fathomgp import DeepGPRegressor
from fathomgp.bench import ResultFile
from fathomgp.data import k_fold, load_dataset, random_split, step_function, step_truth
from fathomgp.inference import SGPR, STRIDE
from fathomgp.kernels import RBF, Matern32
from fathomgp.likelihoods import Gaussian
from fathomgp.metrics import evaluate
from fathomgp.parameters import freeze
from fathomgp.precision import double_precision

#: Variances of hidden layers by recipe.
INNER = {"latz2025": 1.0, "default": 0.1}
#: Section 4.2: 10 EM iterations of 400 moves, 5 exchanges among 500 candidates, 50 particles; hyperparameters kept.
PAPER = {"particles": 50, "rounds": 10, "moves": 400, "exchanges": 5, "candidates": 500, "target": "evidence"}
COLUMNS = [
    *("GP", "sparse GP", "comp standard", "comp exact", "comp aca", "comp sparse"),
    *("conv standard", "conv exact", "conv aca", "conv sparse"),
]
SCORES = ("smse", "rmse", "log_density", "crps", "coverage_95", "mnll")
RESULTS = pathlib.Path("results")


def kernels(inputs, depth, *, ard, inner=INNER["latz2025"], kind=RBF):
    """One kernel a layer: hidden ones with the variance ``inner``."""
    lengthscale = np.full(inputs, np.sqrt(inputs)) if ard else np.sqrt(inputs)
    return [*[kind(lengthscale, inner)] * (depth - 1), kind(lengthscale)]


@double_precision
def estimator(name, inputs, *, m=50, ard=False, depth=2, settings=PAPER, recipe="latz2025", seed=0):
    """One of the columns of figure 4."""
    common = {"random_state": seed, "verbose": False, "recipe": recipe}
    if name in ("GP", "sparse GP"):
        method = "exact" if name == "GP" else SGPR(inducing="greedy")
        return DeepGPRegressor(method, kernel=kernels(inputs, 1, ard=ard)[0], num_inducing=m, **common)
    joined, hidden = name.split()
    architecture = {"comp": "composition", "conv": "convolution", "inj": "injective"}[joined]
    how = {"standard": True, "hidden": "exact"} if hidden == "standard" else {"hidden": hidden}
    kernel = kernels(inputs, depth, ard=ard, inner=INNER[recipe])
    method = STRIDE(**(settings | how))
    return DeepGPRegressor(method, depth=depth, num_inducing=m, kernel=kernel, architecture=architecture, **common)


@double_precision
def fit_and_score(model, X, y, train, test):
    """Scores of the test rows, and the seconds of both fits and answers."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X[train], y[train])
    trained = time.perf_counter()
    model.predict(X[test])
    model_ready = time.perf_counter()
    mean = model.predict(X[test])
    answered = time.perf_counter()
    scores = evaluate(model.predict_distribution(X[test]), y[test])
    noise = float(np.mean(model.posterior_.likelihood.variance.value)) * float(model.y_scaler_.scale[0]) ** 2
    scores["mnll"] = 0.5 * np.log(2 * np.pi * noise) + 0.5 * np.mean((y[test] - mean) ** 2) / noise
    times = {"seconds": trained - began, "predict_seconds": answered - model_ready}
    return {name: float(f"{scores[name]:.6g}") for name in SCORES} | {k: float(f"{v:.4g}") for k, v in times.items()}


def run(file, key, make, X, y, train, test):
    """One row of a table, unless it is there."""
    row = file.find(key)
    if row is None:
        row = key | fit_and_score(make(), X, y, train, test)
        file.append(row)
    print({name: row[name] for name in (*key, "smse", "log_density", "coverage_95", "seconds")}, flush=True)
    return row


def table(args):
    columns = ("dataset", "fold", "method", "depth", "ard", "recipe", "target", "particles", "moves", "rounds")
    settings = PAPER | {name: getattr(args, name) for name in ("particles", "moves", "rounds", "target")}
    file = ResultFile(RESULTS / "stride_table.csv", (*columns, *SCORES, "seconds", "predict_seconds"), columns)
    for dataset in args.datasets.split(","):
        data = load_dataset(dataset)
        X, y = data.X.astype(float), data.Y[:, 0].astype(float)
        for fold, (train, test) in enumerate(k_fold(len(X), 10, seed=0)[: args.folds]):
            for name in args.methods.split(","):
                depth = 1 if "GP" in name else args.depth
                chains = (args.recipe, args.target, args.particles, args.moves, args.rounds)
                chains = ("", "", 0, 0, 0) if depth == 1 else chains
                key = dict(zip(columns, (dataset, fold, name, depth, int(args.ard), *chains), strict=True))
                how = {"ard": args.ard, "depth": depth, "settings": settings, "recipe": args.recipe}
                make = lambda name=name, X=X, how=how: estimator(name, X.shape[1], **how)  # noqa: E731
                run(file, key, make, X, y, train, test)
    picture(file.rows, "smse", "stride_smse.png")
    picture(file.rows, "mnll", "stride_mnll.png")


def timing(args):
    columns = ("hidden", "cores")
    file = ResultFile(RESULTS / "stride_timing.csv", (*columns, *SCORES, "seconds", "predict_seconds"), columns)
    data = load_dataset("energy")
    X, y = data.X.astype(float), data.Y[:, 0].astype(float)
    train, test = k_fold(len(X), 10, seed=0)[0]
    for hidden in args.hidden.split(","):
        key = {"hidden": hidden, "cores": len(os.sched_getaffinity(0))}
        row = run(file, key, lambda hidden=hidden: estimator(f"comp {hidden}", X.shape[1]), X, y, train, test)
        print(f"{hidden}: {row['seconds']} s to train, {row['predict_seconds']} s to predict", flush=True)


def seconds(call, repeats=10):
    """The median time of a call, compiled before."""
    import jax

    jax.block_until_ready(call(0))
    times = []
    for i in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call(i))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def exchange(args):
    """One exchange among 500 candidates, and what the same number of evaluations of F_V would take."""
    import jax
    import jax.numpy as jnp

    from fathomgp.data import ArraySource
    from fathomgp.fitting._loop import _ONE_CORE, _side_by_side
    from fathomgp.inference._stride_exchange import Share
    from fathomgp.inference._stride_exchange import exchange as swap
    from fathomgp.inference._stride_hidden import held
    from fathomgp.inference._stride_top import Top, bound
    from fathomgp.likelihoods import Gaussian
    from fathomgp.model import build_model

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(700, 8))
        batch = ArraySource(x, rng.normal(size=(700, 1))).everything()
        model = build_model(x, Gaussian(0.01), 1, depth=2, num_inducing=50)
        inputs = jnp.asarray(x[None] + 0.1 * rng.normal(size=(50, 700, 8)))
        inducing, top = jnp.arange(50, dtype=jnp.int32), Top("collapsed", True)
        cores = len(os.sched_getaffinity(0))
        shares = [Share(jnp.asarray(number, jnp.int32), cores) for number in range(cores)]

        @functools.partial(jax.jit, **_ONE_CORE)
        def part(key, share):
            each = lambda function: jax.lax.map(function, inputs)  # noqa: E731
            return swap(model, top, batch, each, inducing, 500, key=key, share=share)

        fast = lambda key: _side_by_side(functools.partial(part, key), shares)  # noqa: E731
        # The library's fastest F_V of all particles at once, compiled: the same linear algebra, without the updates.
        one = jax.jit(lambda inducing: bound(model, top, batch, held(inputs), inducing))
        ours = seconds(lambda i: fast(jax.random.key(i)))
        naive = seconds(lambda i: one(inducing + i)) * 550
        print(f"exchange {ours:.3f} s; 550 evaluations of F_V for 50 particles {naive:.1f} s; {naive / ours:.0f}x")


def samplers(args):
    """Effective samples of the log likelihood a second, on one fold of energy, from the last E step."""
    from arviz_stats import ess, rhat

    data = load_dataset("energy")
    X, y = data.X.astype(float), data.Y[:, 0].astype(float)
    train, _ = k_fold(len(X), 10, seed=0)[0]
    for name in ("pcn", "slice", "mala"):
        settings = PAPER | {"sampler": name, "moves": 400, "rounds": 3, "particles": 20}
        model = estimator("comp aca", X.shape[1], settings=settings)
        ticks = []
        model.callbacks = [lambda info, ticks=ticks: ticks.append((info["phase"], info["step"], info["seconds"]))]
        model.fit(X[train], y[train])
        trace = np.asarray(model.posterior_.trace.log_likelihood)[:, -200:]
        last = [t for t in ticks if t[0] == "E"][-40:]
        pace = (last[-1][2] - last[0][2]) / max(last[-1][1] - last[0][1], 1)
        size = float(ess(trace))
        print(
            f"{name}: {1e3 * pace:.1f} ms a step, ESS {size:.0f} of {trace.size}, {size / (200 * pace):.2f} a second, "
            f"R-hat {float(rhat(trace)):.2f}, acceptance {np.mean(model.history_['acceptance'][-200:]):.2f}",
            flush=True,
        )


def toy(args):
    """The noise is known, as in the paper's section 4.1, which fits a variance and a length scale alone.

    Particles follow F_V, the library's default; ``--target evidence`` is the paper's.
    """
    columns = ("seed", "method", "m", "depth", "target")
    file = ResultFile(RESULTS / "stride_toy.csv", (*columns, "smse", "seconds"), columns)
    grid = np.linspace(0, 1, 1000)[:, None]
    truth = step_truth(grid[:, 0])
    settings = PAPER | {"particles": 10, "moves": 1000, "candidates": 200, "target": args.target}
    jobs = [("GP", 0, 1)] + [("sparse GP", m, 1) for m in args.m] + [("STRIDE", m, 3) for m in args.m]
    jobs += [("STRIDE", 20, depth) for depth in args.depths if depth != 3]
    for seed in range(args.first, args.first + args.seeds):
        X, y = step_function(seed=seed)
        known = freeze(Gaussian(0.02**2 / np.var(y)))
        for method, m, depth in jobs:
            target = args.target if method == "STRIDE" else ""
            key = {"seed": seed, "method": method, "m": m, "depth": depth, "target": target}
            if file.find(key) is not None:
                continue
            if method == "STRIDE":
                how = STRIDE(**settings, hidden="exact" if depth == 2 else "aca", rank=60)
                model = DeepGPRegressor(
                    how, depth=depth, num_inducing=m, kernel="matern32", architecture="injective", random_state=seed
                )
            else:
                how = "exact" if method == "GP" else SGPR(inducing="greedy")
                model = DeepGPRegressor(how, num_inducing=max(m, 1), kernel=Matern32(), random_state=seed)
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.set_params(verbose=False, likelihood=known).fit(X, y)
            seconds = time.perf_counter() - began
            smse = float(np.mean((model.predict(grid) - truth) ** 2) / np.var(truth))
            file.append(key | {"smse": float(f"{smse:.5g}"), "seconds": float(f"{seconds:.3g}")})
            print(key, f"SMSE {smse:.5f}, {seconds:.0f} s", flush=True)
    toy_picture([row for row in file.rows if int(row["seed"]) < 5 and row["target"] in ("", "bound")])


def toy_picture(rows):
    """Like figure 3: SMSE over the number of inducing points (depth 3) and over the depth (m = 20)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    for ax, axis, held in zip(figure.subplots(1, 2), ("m", "depth"), (("depth", 3), ("m", 20)), strict=True):
        deep = [row for row in rows if row["method"] == "STRIDE" and int(row[held[0]]) == held[1]]
        places = sorted({int(row[axis]) for row in deep})
        for method in ("GP", "sparse GP", "STRIDE"):
            chosen = deep if method == "STRIDE" else [row for row in rows if row["method"] == method]
            if method == "sparse GP" and axis == "depth":
                chosen = [row for row in chosen if int(row["m"]) == 20]
            constant = method == "GP" or (method == "sparse GP" and axis == "depth")
            scores = [[float(r["smse"]) for r in chosen if constant or int(r[axis]) == place] for place in places]
            mean, spread = (np.array([f(part) for part in scores if part]) for f in (np.mean, np.std))
            at = [place for place, part in zip(places, scores, strict=True) if part]
            ax.plot(at, mean, "o-", label=method)
            ax.fill_between(at, mean - 2 * spread, mean + 2 * spread, alpha=0.2)
        ax.set(xlabel="inducing points" if axis == "m" else "layers", ylabel="SMSE", xticks=places, yscale="log")
        ax.minorticks_off()
        ax.set_yticks([0.01, 0.02, 0.05, 0.1], ["0.01", "0.02", "0.05", "0.1"])
        ax.legend()
    figure.savefig(RESULTS / "stride_toy.png", dpi=120)


def fashion(args):
    columns = ("split", "method", "m", "n", "rounds", "moves")
    extra = (*SCORES, "seconds", "predict_seconds", "gigabytes")
    file = ResultFile(RESULTS / "stride_fashion.csv", (*columns, *extra), columns)
    data = load_dataset("fashion_mnist")
    images, y = data.X.reshape(len(data.X), -1).astype(float), data.Y[:, 0].astype(float)
    features = principal_components(images, 30)
    settings = PAPER | {"particles": 10, "exchanges": 3, "candidates": 1000, "rank": 50, "hidden": "aca"}
    settings |= {"rounds": args.rounds, "moves": args.moves}
    for split in range(args.splits):
        train, test = random_split(len(y), 0.1, seed=split)
        train = train[: args.rows] if args.rows else train
        for m in args.m:
            for name in ("sparse GP", "comp aca"):
                chains = (0, 0) if name == "sparse GP" else (args.rounds, args.moves)
                key = dict(zip(columns, (split, name, m, len(train), *chains), strict=True))
                if file.find(key) is not None:
                    continue
                row = key | fit_and_score(estimator(name, 30, m=m, settings=settings), features, y, train, test)
                row["gigabytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
                file.append(row)
                print(row, flush=True)
    fashion_picture(file.rows)


def fashion_picture(rows):
    """Like figures 6 to 8: errors, training times and prediction times over the number of inducing points."""
    from matplotlib.figure import Figure

    largest = max(int(row["n"]) for row in rows)
    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    panels = {"smse": "SMSE", "seconds": "seconds to train", "predict_seconds": "seconds to predict 7,000 rows"}
    for ax, (score, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for method, name in {"sparse GP": "sparse GP regression", "comp aca": "STRIDE"}.items():
            chosen = [row for row in rows if row["method"] == method and int(row["n"]) == largest and row[score]]
            places = sorted({int(row["m"]) for row in chosen})
            scores = [[float(row[score]) for row in chosen if int(row["m"]) == place] for place in places]
            mean, spread = (np.array([f(part) for part in scores]) for f in (np.mean, np.std))
            ax.errorbar(places, mean, 2 * spread, fmt="o-", capsize=3, label=name)
        ax.set(xlabel="inducing points", ylabel=label, xticks=places)
        if score != "smse":
            ax.set_ylim(bottom=0)
        ax.legend()
    figure.savefig(RESULTS / "stride_fashion.png", dpi=120)


def principal_components(images, count):
    images = images - images.mean(axis=0)
    _, vectors = np.linalg.eigh(images.T @ images)
    return images @ vectors[:, ::-1][:, :count]


def picture(rows, score, name):
    """Like figures 4 and 5: means and two standard deviations over the folds, a panel a dataset, a colour a method."""
    from matplotlib.figure import Figure

    order = lambda row: (int(row["depth"]), COLUMNS.index(row["method"]), row["target"] == "bound")  # noqa: E731
    panels, rows = list(dict.fromkeys(row["dataset"] for row in rows)), sorted(rows, key=order)
    colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(map(label_of, rows)))}
    figure = Figure(figsize=(4.0 * len(panels), 3.8), layout="constrained")
    for ax, dataset in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        groups = {}
        for row in rows:
            if row["dataset"] == dataset:
                groups.setdefault(label_of(row), []).append(float(row[score]))
        for place, (label, scores) in enumerate(groups.items()):
            ax.errorbar([place], [np.mean(scores)], [2 * np.std(scores)], fmt="o", capsize=3, color=colours[label])
        ax.set_xticks(range(len(groups)), groups, rotation=60, ha="right")
        ax.set(title=dataset, ylabel=score.upper())
        ax.grid(axis="y", alpha=0.3)
    figure.savefig(RESULTS / name, dpi=120)


def label_of(row):
    """What a row's method is called in a picture."""
    layers = f", {row['depth']} layers" if int(row["depth"]) > 2 else ""
    own = ", own priors" if row["recipe"] == "default" else ""
    return (
        row["method"]
        + layers
        + own
        + (", F_V" if row["target"] == "bound" else "")
        + (" ARD" if int(row["ard"]) else "")
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    for function, settings in {
        timing: {"hidden": "exact,aca,sparse"},
        exchange: {},
        samplers: {},
        table: {
            "datasets": "energy,concrete,boston",
            "methods": ",".join(COLUMNS),
            "folds": 10,
            "depth": 2,
            "particles": PAPER["particles"],
            "moves": PAPER["moves"],
            "rounds": PAPER["rounds"],
            "target": PAPER["target"],
            "recipe": "latz2025",
        },
        toy: {"first": 0, "seeds": 5, "m": "10,20,30,40,50", "depths": "2,3,4,5", "target": "bound"},
        fashion: {
            "splits": 2,
            "m": "25,50,75,100,125",
            "rows": 0,
            "rounds": PAPER["rounds"],
            "moves": PAPER["moves"],
        },
    }.items():
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(run=function)
        for name, default in settings.items():
            kind = int if isinstance(default, int) else numbers if name in ("m", "depths") else str
            command.add_argument(f"--{name}", type=kind, default=kind(default))
        if function is table:
            command.add_argument("--ard", action="store_true")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
