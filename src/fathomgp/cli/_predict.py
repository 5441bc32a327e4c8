"""``fathomgp predict``: means, standard deviations and quantiles, or class probabilities, for the rows of a table."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fathomgp._outputs import refuse_inputs
from fathomgp.cli._console import note
from fathomgp.cli._files import TableWriter
from fathomgp.cli._parse import quantiles as parse_quantiles
from fathomgp.data import check_suffix, read_blocks
from fathomgp.errors import SettingError

#: Rows in memory at a time.
BLOCK_ROWS = 16_384


def predict(
    model: Annotated[Path, typer.Argument(help="The directory that fathomgp fit wrote.")],
    data: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file with the model's inputs, or a directory of Parquet files.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The predictions: a .csv or .parquet file, or a directory.")],
    quantiles: Annotated[str, typer.Option(help="Probabilities of the quantile columns.")] = "0.05,0.5,0.95",
) -> None:
    """Predict the target for every row of a table.

    Columns: mean, std (of a new observation, noise included) and a column a quantile; for several targets their names
    come first. For labels: label, and p_<class>, the probability of each class. Rows keep their order. Any number of
    rows passes through in blocks. A directory of Parquet files becomes a directory of as many with the same names.
    """
    from fathomgp.cli._files import ColumnMatcher
    from fathomgp.estimators import load

    levels = parse_quantiles(quantiles)
    refuse_inputs("-o", out, [data, *model.glob("*")])
    with _files(data, out) as pairs:
        estimator = load(model)
        inputs = ColumnMatcher(estimator, note)
        rows = sum(_predict_file(estimator, inputs, here, there, levels) for here, there in pairs)
    typer.echo(f"{rows:,} predictions: {out}")


def _predict_file(estimator: Any, inputs: Any, data: Path, out: Path, levels: list[float]) -> int:
    """The predictions of one file; how many they are."""
    rows = 0
    with TableWriter(out) as writer:
        for block in read_blocks(data, BLOCK_ROWS):
            writer.write(_predict_block(estimator, inputs(block), levels))
            rows += len(block)
    return rows


@contextlib.contextmanager
def _files(data: Path, out: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Input and output files. A directory of outputs appears under its name when it is complete, or not at all."""
    from fathomgp.cli._streams import is_stream
    from fathomgp.data import find_files

    if not is_stream(data):
        check_suffix(out)
        yield [(data, out)]
        return
    if out.suffix or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise SettingError(f"-o {out} must be an empty or new directory, because {data} names many files.")
    files, part = find_files(str(data)), out.with_name(f".{out.name}.{os.getpid()}.part")
    root = data if data.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    try:
        yield [(file, part / file.relative_to(root)) for file in files]
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _predict_block(estimator: Any, X: Any, levels: list[float]) -> Any:
    """The answers for a block of rows."""
    import numpy as np
    import pandas as pd

    answer = estimator.predict_distribution(X)
    if hasattr(estimator, "classes_"):
        return _class_columns(answer.probabilities(), estimator.classes_)
    figures = {"mean": answer.mean(), "std": answer.std()}
    figures |= {f"q{level:g}": values for level, values in zip(levels, answer.quantile(levels), strict=True)}
    if np.ndim(figures["mean"]) == 1:
        return pd.DataFrame(figures)
    outputs = figures["mean"].shape[1]
    names = estimator.target_names_ or [f"y{p + 1}" for p in range(outputs)]
    return pd.DataFrame({f"{names[p]}_{kind}": figures[kind][:, p] for p in range(outputs) for kind in figures})


def _class_columns(probabilities: Any, classes: Any) -> Any:
    import pandas as pd

    columns = {f"p_{name}": probabilities[:, k] for k, name in enumerate(classes)}
    return pd.DataFrame({"label": classes[probabilities.argmax(axis=1)]} | columns)
