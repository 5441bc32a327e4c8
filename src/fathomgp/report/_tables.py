"""Tables as values: cells formatted column by column, the best of a column marked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from fathomgp.errors import DataError, SettingError

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """What one cell shows."""

    text: str
    numeric: bool = False
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table ready to be drawn; ``header`` is empty for a list of names and values."""

    header: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str
    kind: str = "table"


def build_table(rows: Sequence[Mapping[str, Any]], caption: str, best: Mapping[str, str | float]) -> Table:
    """A table with a row for each mapping.

    Args:
        rows: column name to value; the first row gives the order of the columns, a missing value shows as a dash.
        caption: the sentence above the table.
        best: columns to compare: ``"lowest"``, ``"highest"``, or the number to come nearest to. Values that print
            alike are equally good.
    """
    if not rows:
        raise DataError(f"The table {caption!r} has no rows. Give it at least one, or leave it out.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column([row.get(name) for row in rows], best.get(name)) for name in names]
    header = tuple(Cell(name, numeric=column[0].numeric) for name, column in zip(names, columns, strict=True))
    return Table(header, tuple(zip(*columns, strict=True)), caption)


def build_pairs(pairs: Mapping[str, Any], caption: str) -> Table:
    """A table of names and values, without a header."""
    if not pairs:
        raise DataError(f"The table {caption!r} has no rows. Give it at least one, or leave it out.")
    rows = tuple((Cell(name), Cell(_text(value, _decimals([value])))) for name, value in pairs.items())
    return Table((), rows, caption)


def _column(values: list[Any], goal: str | float | None) -> list[Cell]:
    decimals = _decimals(values)
    texts = [_text(value, decimals) for value in values]
    numeric = all(value is None or _is_number(value) for value in values)
    winners = _winners(values, texts, goal)
    return [Cell(text, numeric, text in winners) for text in texts]


def _winners(values: list[Any], texts: list[str], goal: str | float | None) -> set[str]:
    if goal is None:
        return set()
    scored = [(_loss(value, goal), text) for value, text in zip(values, texts, strict=True) if _is_finite(value)]
    least = min((loss for loss, _ in scored), default=0.0)
    return {text for loss, text in scored if len(scored) > 1 and math.isclose(loss, least, rel_tol=1e-9)}


def _loss(value: Any, goal: str | float) -> float:
    if goal == "lowest":
        return float(value)
    if goal == "highest":
        return -float(value)
    if isinstance(goal, str):
        raise SettingError(f"The best of a column is 'lowest', 'highest' or a number to come near to, not {goal!r}.")
    return abs(float(value) - goal)


def _decimals(values: list[Any]) -> int:
    """Decimals that show three digits of the column's middle number and two of its smallest, at most four."""
    powers = sorted(math.floor(math.log10(abs(value))) for value in values if _is_finite(value) and value != 0)
    return min(4, max(0, 2 - powers[len(powers) // 2], 1 - powers[0])) if powers else 2


def _text(value: Any, decimals: int) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool) or not _is_number(value):
        return str(value)
    if not _is_finite(value):
        return MISSING if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, Integral):
        return f"{int(value):,}".replace("-", "−")
    plain = value == 0 or 1e-3 <= abs(value) < 1e6
    return (f"{float(value):.{decimals}f}" if plain else f"{float(value):.3g}").replace("-", "−")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
