"""``fathomgp fit``: from a table to a saved model, a summary and a page to look at."""

import signal
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fathomgp._outputs import check_writable
from fathomgp.cli._console import note, show_pairs
from fathomgp.cli._parse import one_or_each, words
from fathomgp.errors import SettingError

#: With fewer rows than this none is held out by default: the fit needs them more.
_FEW_ROWS = 10


def fit(
    data: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file of numbers; a directory or glob of Parquet files is streamed.")
    ],
    target: Annotated[str, typer.Option(help="The column to predict; several with commas between them.")],
    out: Annotated[Path, typer.Option(help="The directory for the model and its report.")],
    task: Annotated[
        str | None, typer.Option(help="regression or classification; without it, text and yes/no are classified.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="How to fit: exact, sgpr, ...")] = None,
    depth: Annotated[int | None, typer.Option(help="The number of GP layers.")] = None,
    num_inducing: Annotated[int | None, typer.Option(help="Inducing points a layer.")] = None,
    hidden_dim: Annotated[
        str | None, typer.Option(help="Width of the inner layers: one, or one a layer (5,3).")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="rbf, matern32, linear, ...: one, or one a layer.")] = None,
    likelihood: Annotated[str | None, typer.Option(help="The noise: gaussian, student_t, ...; softmax, ...")] = None,
    max_iter: Annotated[int | None, typer.Option(help="At most so many steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step, for methods that use batches.")] = None,
    precision: Annotated[str | None, typer.Option(help="double, ...")] = None,
    missing: Annotated[
        str | None, typer.Option(help="What an empty target means: error, or mask (not measured).")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="The name of the initial values.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A directory: save the fit there, and resume from it.")
    ] = None,
    random_state: Annotated[int, typer.Option(help="The seed of the split and of the fit.")] = 0,
    test_fraction: Annotated[
        float, typer.Option(help="The share of rows held out to score the model. 0 fits to every row, without scores.")
    ] = 0.1,
    skip_nan: Annotated[
        bool, typer.Option("--skip-nan", help="Streams: leave rows with NaN out instead of refusing them.")
    ] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Streams: join the job that Slurm, Open MPI or Kubernetes started.")
    ] = False,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, with --distributed.")] = None,
    processes: Annotated[int | None, typer.Option(help="How many processes, with --distributed.")] = None,
    rank: Annotated[int | None, typer.Option(help="The number of this one, from 0, with --distributed.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that --out holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no summary.")] = False,
) -> None:
    """Fit a Gaussian process to a table.

    The directory --out gets the model and report.html. The saved model is the one that was scored: it has not seen the
    held-out rows. Use --test-fraction 0 to fit to all of them.
    """
    from fathomgp.cli._streams import is_stream, leaving_when_lost, open_stream
    from fathomgp.data import check_seed, read_table
    from fathomgp.fitting import is_first_process, start_distributed

    given: dict[str, Any] = {
        "method": method,
        "depth": depth,
        "num_inducing": num_inducing,
        "hidden_dim": one_or_each(hidden_dim, "--hidden-dim", int),
        "kernel": one_or_each(kernel, "--kernel", str),
        "likelihood": likelihood,
        "max_iter": max_iter,
        "batch_size": batch_size,
        "precision": precision,
        "missing": missing,
        "recipe": recipe,
        "checkpoint": checkpoint,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    _check_directory(out, force=force)
    check_seed(random_state, "--random-state")
    _check_fraction(test_fraction)
    targets = words(target, "--target")
    shared = {"random_state": random_state, "verbose": False if quiet else None}
    if distributed or coordinator or processes or rank is not None:
        if not is_stream(data):
            raise SettingError(f"--distributed needs a stream, but {data} is one file: name a directory.")
        start_distributed(coordinator, processes, rank)
        # Of several processes none may end by itself with what it has: the others would wait for it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_stream(data):
        with leaving_when_lost():
            stream = open_stream(
                data, targets, test_fraction=test_fraction, seed=random_state, skip_nan=skip_nan, quiet=quiet
            )
            estimator = _stream_class(task)(**{"method": "dsvi"} | settings, **shared).fit(stream)
        if is_first_process():
            X_test, y_test = _held_out_frames(stream)
            _finish(estimator, data, out, X_test, y_test, rows=stream.num_data + len(X_test), quiet=quiet)
        return
    X, y = read_table(data, target=targets[0] if len(targets) == 1 else targets)
    estimator = _estimator_class(task, y)(**settings, **shared)
    _check_cells(estimator, X, y, data.name)
    train, test = _hold_out(y, test_fraction, random_state, labels=_classifies(estimator))
    estimator.fit(X.iloc[train], y.iloc[train])
    _finish(estimator, data, out, X.iloc[test], y.iloc[test], rows=len(X), quiet=quiet)


def _finish(estimator: Any, data: Path, out: Path, X_test: Any, y_test: Any, *, rows: int, quiet: bool) -> None:
    """Write the model and its report, and say so."""
    estimator.save(out)
    summary, page = _write_report(estimator, data, out, X_test, y_test, rows=rows)
    if not quiet:
        show_pairs(summary, title=f"{data.name}: {', '.join(estimator.target_names_)}")
        typer.echo(f"Model:  {out}\nReport: {page}")


def _stream_class(task: str | None) -> Any:
    """Numbers are taken as numbers unless the user says that they are labels."""
    return _estimator_class(task or "regression", None)


def _held_out_frames(stream: Any) -> tuple[Any, Any]:
    import pandas as pd

    X, y = stream.held_out()
    targets = pd.DataFrame(y.reshape(len(X), -1), columns=list(stream.target_names))
    return pd.DataFrame(X, columns=list(stream.input_names)), targets.iloc[:, 0] if stream.squeeze else targets


def _estimator_class(task: str | None, y: Any) -> Any:
    from fathomgp.estimators import DeepGPClassifier, DeepGPRegressor

    if task not in (None, "regression", "classification"):
        raise SettingError(f"--task is {task!r}: choose regression or classification.")
    labels = task == "classification" if task is not None else _looks_like_labels(y)
    return DeepGPClassifier if labels else DeepGPRegressor


def _looks_like_labels(y: Any) -> bool:
    """Whether a target is text or yes/no. Text with a number in it is a misprint, for the regressor to refuse."""
    import pandas as pd

    if y.ndim == 2 or y.dtype.kind in "iuf":
        return False
    return y.dtype.kind == "b" or bool(pd.to_numeric(y.astype(object), errors="coerce").isna().all())


def _check_directory(out: Path, *, force: bool) -> None:
    """Refuse a place where the model cannot go, before any work."""
    from fathomgp.persistence import bundle_exists

    if out.exists() and not out.is_dir():
        raise SettingError(f"--out is {out}, which is a file: name a directory.")
    check_writable(out, "--out")
    held = "a model" if bundle_exists(out, "model") else "a report" if (out / "report.html").exists() else None
    if held is not None and not force:
        raise SettingError(f"--out {out} holds {held} already: name another directory, or add --force to replace it.")


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise SettingError(f"--test-fraction must be at least 0 and below 1, but it is {fraction:g}.")


def _check_cells(estimator: Any, X: Any, y: Any, name: str) -> None:
    """Refuse what cannot be fitted or scored while all rows are together, before any work."""
    from fathomgp.data import read_inputs, read_labels, read_targets

    read_inputs(X, name=name, min_rows=1)
    if _classifies(estimator):
        read_labels(y, missing=estimator.missing)
    else:
        read_targets(y, missing=estimator.missing, more=True)


def _classifies(estimator: Any) -> bool:
    from sklearn.base import is_classifier

    return is_classifier(estimator)


def _hold_out(y: Any, fraction: float, seed: int, *, labels: bool) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows; the test set is empty when none is asked for or there are too few rows.

    A label that only test rows have goes to the training rows: no model could know it.
    """
    from fathomgp.data import random_split

    rows = len(y)
    if fraction > 0.0 and rows < _FEW_ROWS:
        note(f"{rows} rows are too few to hold some out: the model is fitted to all of them and not scored.")
        fraction = 0.0
    if fraction == 0.0:
        return np.arange(rows), np.arange(0)
    train, test = random_split(rows, fraction, seed)
    if labels:
        unknown = (y.iloc[test].notna() & ~y.iloc[test].isin(y.iloc[train])).to_numpy()
        train, test = np.sort(np.concatenate([train, test[unknown]])), test[~unknown]
    return train, test


def _write_report(
    estimator: Any, data: Path, out: Path, X_test: Any, y_test: Any, *, rows: int
) -> tuple[dict[str, Any], Path]:
    """The summary of a fit, and the page that shows it."""
    from fathomgp.cli._describe import describe_fit, lengthscales
    from fathomgp.cli._scores import class_scores, named_scores
    from fathomgp.report import fit_report

    summary = describe_fit(estimator, rows=rows, held_out=len(X_test))
    answer = estimator.predict_distribution(X_test) if len(X_test) else None
    names = estimator.target_names_
    classes = getattr(estimator, "classes_", None)
    scores: list[dict[str, float]] = []
    if answer is not None:
        scores = named_scores(answer, y_test) if classes is None else class_scores(answer, y_test, classes)
    drawn = answer is not None and len(names) == 1 and classes is None
    pictures = {"y_test": y_test, "predictive": answer} if drawn else {}
    page = fit_report(
        title=f"{', '.join(names)} from {data.name}",
        summary=summary,
        path=out / "report.html",
        history=estimator.history_,
        scores=[{"target": name} | row for name, row in zip(names, scores, strict=False)],
        feature_names=list(estimator.feature_names_in_),
        lengthscales=lengthscales(estimator),
        messages=estimator.messages_,
        model_path=out,
        labels=classes is not None,
        **pictures,
    )
    for name, row in zip(names, scores, strict=False):
        prefix = f"{name}: " if len(names) > 1 else ""
        summary |= {f"{prefix}{score}": value for score, value in row.items()}
    return summary, page
