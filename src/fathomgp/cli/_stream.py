"""``fathomgp stream``: predict every row before learning it, for as long as rows come."""

import contextlib
import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import typer

from fathomgp.cli._console import note
from fathomgp.cli._parse import one_or_each, words
from fathomgp.errors import DataError, SettingError

#: Rows learned between two checkpoints.
_CHECKPOINT_ROWS = 1000


def stream(
    data: Annotated[str, typer.Argument(help="A CSV file with column names, or - for standard input.")],
    target: Annotated[str, typer.Option(help="The column to predict; several with commas between them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The answers, a line a row: a .csv file.")],
    model: Annotated[Path, typer.Option(help="The directory of the model: the checkpoint, resumed if it is there.")],
    warm_up: Annotated[int, typer.Option(help="Rows that fix scales and hyperparameters; they get no answer.")] = 100,
    block: Annotated[int | None, typer.Option(help="Rows at a time: 1 from standard input, 256 from files.")] = None,
    depth: Annotated[int | None, typer.Option(help="The number of GP layers; 1 is the online GP.")] = None,
    num_inducing: Annotated[int | None, typer.Option(help="The budget: active inputs a layer.")] = None,
    hidden_dim: Annotated[str | None, typer.Option(help="Width of the inner layers.")] = None,
    kernel: Annotated[str | None, typer.Option(help="rbf, matern32, linear, ...: one, or one a layer.")] = None,
    likelihood: Annotated[str | None, typer.Option(help="The noise: gaussian, heteroscedastic, ...")] = None,
    forgetting: Annotated[float, typer.Option(help="Below 1, old rows count less and less: 0.999, ...")] = 1.0,
    random_state: Annotated[int, typer.Option(help="The seed.")] = 0,
) -> None:
    """Learn from a table row by row, and predict each row before it is learned.

    Columns of the answers: mean, std and log_density (for several targets, means and stds with their names in front and
    one joint log density). An empty target is not measured: its row is predicted. Stopped and started again with the
    same arguments, the command goes on after the last checkpoint.
    """
    targets = words(target, "--target")
    if warm_up < 10:
        raise SettingError(f"--warm-up is {warm_up}: scales and hyperparameters need 10 rows or more.")
    size = block or (1 if data == "-" else 256)
    given: dict[str, Any] = {
        "depth": depth,
        "num_inducing": num_inducing,
        "hidden_dim": one_or_each(hidden_dim, "--hidden-dim", int),
        "kernel": one_or_each(kernel, "--kernel", str),
        "likelihood": likelihood,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    session = _Session(model, out, targets, forgetting, settings, random_state)
    with _open(data) as lines, session:
        blocks = _blocks(lines, size, skip=session.rows, first=0 if session.started else warm_up)
        for table in blocks:
            session.take(table)
    typer.echo(f"{session.rows:,} rows: {out}\nModel: {model}")


class _Session:
    """A stream under way: the estimator, its file of answers, and checkpoints.

    The estimator itself counts the rows it has met; the file of answers has one line a row. So the model's own bundle
    is the checkpoint, and a file of answers that is ahead of it is cut.
    """

    def __init__(
        self, model: Path, out: Path, targets: list[str], forgetting: float, settings: dict[str, Any], seed: int
    ):
        from fathomgp.persistence import bundle_exists

        self.model, self.out, self.targets = model, out, targets
        self.forgetting, self.settings, self.seed = forgetting, settings, seed
        self.estimator: Any = None
        self.offset, self.saved = 0, 0
        self.file: Any = None
        self.started = bundle_exists(model, "model")
        if self.started:
            self._resume()

    @property
    def rows(self) -> int:
        """Rows of this stream that were learned."""
        return 0 if self.estimator is None else int(self.estimator.posterior_.state.seen) - self.offset

    def __enter__(self) -> "_Session":
        self.out.parent.mkdir(parents=True, exist_ok=True)
        kept = (
            self.out.read_text().splitlines(keepends=True)[: self.rows + 1] if self.rows and self.out.exists() else []
        )
        self.file = open(self.out, "w")
        self.file.writelines(kept or [",".join(self._columns()) + "\n"])
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.file.close()
        if self.estimator is not None and self.rows > self.saved:
            self._save()

    def take(self, table: Any) -> None:
        """Predict the rows of a table, learn them, and write the answers."""
        from fathomgp.cli._files import take_targets

        X = table.drop(columns=[name for name in self.targets if name in table.columns])
        y = take_targets(table, self.targets, "The stream")
        if self.estimator is None:
            self._begin(X, y)
            answers = np.full((len(X), len(self._columns())), np.nan)
        else:
            found = self.estimator._predict_then_learn(X, y, predict=True)
            pairs = np.stack([found["mean"], found["std"]], axis=2).reshape(len(X), -1)
            answers = np.concatenate([pairs, found["log_density"][:, None]], axis=1)
        for row in answers:
            self.file.write(",".join("" if np.isnan(value) else repr(float(value)) for value in row) + "\n")
        self.file.flush()
        if self.rows - self.saved >= _CHECKPOINT_ROWS:
            self._save()

    def _begin(self, X: Any, y: Any) -> None:
        from fathomgp.estimators import DeepGPRegressor
        from fathomgp.inference import Sequential

        method = Sequential(forgetting=self.forgetting)
        estimator = DeepGPRegressor(method, missing="mask", random_state=self.seed, verbose=False, **self.settings)
        self.estimator = estimator.partial_fit(X, y)
        self._save()

    def _resume(self) -> None:
        from fathomgp.estimators import load
        from fathomgp.inference import SequentialPosterior
        from fathomgp.persistence import bundle_exists, load_bundle, save_bundle

        self.estimator = load(self.model)
        if not isinstance(self.estimator.posterior_, SequentialPosterior):
            raise SettingError(f"{self.model} holds a model that cannot learn on: fit it with --method sequential.")
        if not bundle_exists(self.model, "stream"):  # a model of fathomgp fit: its own rows are not part of this stream
            save_bundle(self.model, "stream", {"offset": int(self.estimator.posterior_.state.seen)})
        self.offset = load_bundle(self.model, "stream")["offset"]
        self.saved = self.rows
        if self.rows:
            note(f"Going on after row {self.rows:,}, the last checkpoint.")

    def _save(self) -> None:
        from fathomgp.persistence import bundle_exists, save_bundle

        if not bundle_exists(self.model, "stream"):
            save_bundle(self.model, "stream", {"offset": 0})
        self.estimator.save(self.model)
        self.saved = self.rows

    def _columns(self) -> list[str]:
        if len(self.targets) == 1:
            return ["mean", "std", "log_density"]
        return [f"{name}_{kind}" for name in self.targets for kind in ("mean", "std")] + ["log_density"]


def _open(data: str) -> contextlib.AbstractContextManager[TextIO]:
    if data == "-":
        return contextlib.nullcontext(sys.stdin)
    if not Path(data).is_file():
        raise DataError(f"There is no file {data}: check the path, or give - for standard input.")
    return open(data)


def _blocks(lines: TextIO, size: int, *, skip: int, first: int) -> Iterator[Any]:
    """Tables of ``size`` rows (the first one of ``first``, if any), without the rows to ``skip``."""
    import pandas as pd

    header = lines.readline()
    if not header.strip():
        raise DataError("The stream is empty: give a line of column names, then rows.")
    rows = itertools.islice((line for line in lines if line.strip()), skip, None)
    count = skip
    while chunk := list(itertools.islice(rows, first or size)):
        first = 0
        try:
            yield pd.read_csv(io.StringIO(header + "".join(chunk)))
        except pd.errors.ParserError as error:
            raise DataError(f"The rows from number {count + 1} on cannot be read: {error}.") from None
        count += len(chunk)
