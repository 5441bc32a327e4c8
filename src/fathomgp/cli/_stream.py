"""``fathomgp stream``: predict every row before learning it, for as long as rows come."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import typer

from fathomgp._outputs import refuse_inputs, replacing
from fathomgp.cli._console import note
from fathomgp.cli._files import check_csv
from fathomgp.cli._parse import one_or_each, words
from fathomgp.data import CsvFile, check_seed, open_csv
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
    if block is not None and block < 1:
        raise SettingError(f"--block must be at least 1, but it is {block}.")
    check_seed(random_state, "--random-state")
    check_csv(out, "-o")
    refuse_inputs("-o", out, [0 if data == "-" else data, *model.glob("*")])
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
    with _open(data) as table, session:
        table.skip(session.rows)
        first = None if session.started else warm_up
        while (rows := table.take(first or size)) is not None:
            session.take(rows)
            first = None
    typer.echo(f"{session.rows:,} rows: {out}\nModel: {model}")


class _Session:
    """A stream under way: the estimator, its file of answers, and checkpoints.

    The estimator itself counts the rows it has met; the file of answers has one line per row. So the model's own
    bundle is the checkpoint. Answers are on disk before their rows are saved as learned: a file that is ahead of the
    model is cut at a resume, and one that is behind it has lost what nobody can give again, so it is refused.
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
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if self.file is not None:
            self._save()
            self.file.close()

    def take(self, table: Any) -> None:
        """Predict the rows of a table, learn them, write the answers, and save now and then."""
        from fathomgp.cli._files import take_targets

        X = table.drop(columns=[name for name in self.targets if name in table.columns])
        y = take_targets(table, self.targets, "The stream")
        before = None if self.estimator is None else self.estimator.posterior_
        try:
            self._write(self._begin(X, y) if before is None else self._learn(X, y))
        except BaseException:  # what is saved must not be ahead of the answers
            if before is None:
                self.estimator = None
            else:
                self.estimator.posterior_ = before
            raise
        if before is None or self.rows - self.saved >= _CHECKPOINT_ROWS:
            self._save()

    def _learn(self, X: Any, y: Any) -> np.ndarray:
        found = self.estimator._predict_then_learn(X, y, predict=True)
        pairs = np.stack([found["mean"], found["std"]], axis=2).reshape(len(X), -1)
        return np.concatenate([pairs, found["log_density"][:, None]], axis=1)

    def _write(self, answers: np.ndarray) -> None:
        if self.file is None:
            self.file = self._open_answers()
        for row in answers:
            self.file.write(",".join("" if np.isnan(value) else repr(float(value)) for value in row) + "\n")
        self.file.flush()

    def _open_answers(self) -> TextIO:
        """The file of answers, which holds those up to the checkpoint and no more."""
        kept = self.saved + 1 if self.saved else 0
        with replacing(self.out) as part, part.open("w", encoding="utf-8") as file:
            if kept:
                with self.out.open(encoding="utf-8") as old:
                    file.writelines(itertools.islice(old, kept))
            else:
                file.write(",".join(self._columns()) + "\n")
        return self.out.open("a", encoding="utf-8")

    def _begin(self, X: Any, y: Any) -> np.ndarray:
        from fathomgp.estimators import DeepGPRegressor
        from fathomgp.inference import Sequential

        method = Sequential(forgetting=self.forgetting)
        estimator = DeepGPRegressor(method, missing="mask", random_state=self.seed, verbose=False, **self.settings)
        self.estimator = estimator.partial_fit(X, y)
        return np.full((len(X), len(self._columns())), np.nan)

    def _resume(self) -> None:
        from fathomgp.estimators import load
        from fathomgp.inference import SequentialPosterior
        from fathomgp.persistence import bundle_exists, check_type, load_bundle, save_bundle

        self.estimator = load(self.model)
        if not isinstance(self.estimator.posterior_, SequentialPosterior):
            raise SettingError(f"{self.model} holds a model that cannot learn on: fit it with --method sequential.")
        if not bundle_exists(self.model, "stream"):  # a model of fathomgp fit: its own rows are not part of this stream
            save_bundle(self.model, "stream", {"offset": int(self.estimator.posterior_.state.seen)})
        marks = load_bundle(self.model, "stream")
        check_type(marks, dict[str, int], f"{self.model}, its stream")
        self.offset = marks.get("offset", 0)
        self.saved = self.rows
        if self.rows:
            self._check_answers()
            note(f"Going on after row {self.rows:,}, the last checkpoint.")

    def _check_answers(self) -> None:
        """Refuse to go on when answers that were written are not there any more."""
        start_afresh = f"put the file back, or name another --model to start afresh (this one is {self.model})"
        answers = 0
        if self.out.exists():
            with self.out.open(encoding="utf-8", errors="replace") as file:
                if file.readline().rstrip("\n") != ",".join(self._columns()):
                    raise SettingError(f"-o {self.out} holds no answers of this stream: {start_afresh}.")
                answers = sum(line.endswith("\n") for line in itertools.islice(file, self.rows))
        if answers < self.rows:
            raise SettingError(
                f"-o {self.out} holds {answers:,} answers, but the model has met {self.rows:,} rows of this stream: "
                f"{start_afresh}."
            )

    def _save(self) -> None:
        from fathomgp.persistence import save_bundle

        if self.rows == self.saved:
            return
        os.fsync(self.file.fileno())
        if not self.started:
            save_bundle(self.model, "stream", {"offset": 0})
            self.started = True
        self.estimator.save(self.model)
        self.saved = self.rows

    def _columns(self) -> list[str]:
        if len(self.targets) == 1:
            return ["mean", "std", "log_density"]
        return [f"{name}_{kind}" for name in self.targets for kind in ("mean", "std")] + ["log_density"]


@contextlib.contextmanager
def _open(data: str) -> Iterator[CsvFile]:
    if data == "-":
        table = CsvFile(sys.stdin.buffer, "standard input")
        try:
            yield table
        finally:
            table.close()
        return
    if not Path(data).is_file():
        raise DataError(f"There is no file {data}: check the path, or give - for standard input.")
    check_csv(Path(data), "The stream")
    with open_csv(Path(data)) as (table, _):
        yield table
