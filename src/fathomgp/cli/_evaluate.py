"""``fathomgp evaluate``: how good a model is on rows whose target is known."""

from pathlib import Path
from typing import Annotated

import typer

from fathomgp.cli._console import note, show_table
from fathomgp.cli._parse import words
from fathomgp.errors import SettingError


def evaluate(
    model: Annotated[Path, typer.Argument(help="The directory that fathomgp fit wrote.")],
    data: Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file with inputs and target.")],
    target: Annotated[
        str | None, typer.Option(help="The target column, if it has another name than at the fit.")
    ] = None,
) -> None:
    """Score a model on rows that it has not seen.

    RMSE, MAE and CRPS are in the units of the target, lower is better; log density: higher is better; coverage is
    the share of rows inside their central intervals; SMSE is the squared error as a share of the target's variance.
    Of labels: accuracy, the mean log probability of the true label, the Brier score and the area under the ROC curve.
    """
    from fathomgp.cli._files import ColumnMatcher, take_targets
    from fathomgp.cli._scores import class_scores, named_scores
    from fathomgp.data import read_blocks
    from fathomgp.estimators import load

    estimator = load(model)
    names = words(target, "--target") if target is not None else list(estimator.target_names_ or ())
    if not names:
        raise SettingError(f"{model} does not know the name of its target: give it with --target.")
    (table,) = read_blocks(data)
    y = take_targets(table, names, data.name)
    X = ColumnMatcher(estimator, note)(table.drop(columns=names))
    answer = estimator.predict_distribution(X)
    if len(names) != len(answer.shift):
        raise SettingError(
            f"The model has {len(answer.shift)} targets, but --target names {len(names)}: name them all."
        )
    classes = getattr(estimator, "classes_", None)
    outputs = named_scores(answer, y) if classes is None else class_scores(answer, y, classes)
    rows = [{"score": score} | {name: o[score] for name, o in zip(names, outputs, strict=True)} for score in outputs[0]]
    show_table(rows, title=f"{data.name}: {len(table):,} rows")
