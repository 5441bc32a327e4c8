"""``fathomgp predict``: means, standard deviations and quantiles, or class probabilities, for the rows of a table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fathomgp.cli._console import note
from fathomgp.cli._parse import quantiles as parse_quantiles
from fathomgp.errors import DataError, SettingError


def predict(
    model: Annotated[Path, typer.Argument(help="The directory that fathomgp fit wrote.")],
    data: Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file with the model's input columns.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The predictions: a .csv or .parquet file.")],
    quantiles: Annotated[str, typer.Option(help="Probabilities of the quantile columns.")] = "0.05,0.5,0.95",
) -> None:
    """Predict the target for every row of a table.

    Columns: mean, std (of a new observation, noise included) and a column a quantile; for several targets their names
    come first. For labels: label, and p_<class>, the probability of each class. Rows keep their order. Any number of
    rows passes through in blocks.
    """
    from fathomgp.cli._files import ColumnMatcher, TableWriter, read_blocks
    from fathomgp.estimators import load

    levels = parse_quantiles(quantiles)
    if out.resolve() == data.resolve():
        raise SettingError(f"-o {out} would overwrite the data: name another file.")
    writer, estimator = TableWriter(out), load(model)
    inputs = ColumnMatcher(estimator, note)
    rows = 0
    with writer:
        for block in read_blocks(data):
            writer.write(_predict_block(estimator, inputs(block), levels, first=rows))
            rows += len(block)
    typer.echo(f"{rows:,} predictions: {out}")


def _predict_block(estimator: Any, X: Any, levels: list[float], *, first: int) -> Any:
    """The answers for a block of rows; complaints count rows from the block's first."""
    import numpy as np
    import pandas as pd

    try:
        answer = estimator.predict_distribution(X)
    except DataError as error:
        if first == 0:
            raise
        raise DataError(f"In the rows from number {first} on, which counts as 0 here: {error}") from error
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
