"""Lists on the command line: values with commas between them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fathomgp.errors import SettingError

T = TypeVar("T")


def words(text: str, option: str) -> list[str]:
    """``"a, b"`` as its words; at least one."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise SettingError(f"{option} names nothing: give one value, or several with commas between them.")
    return list(dict.fromkeys(found))


def quantiles(text: str) -> list[float]:
    """Probabilities between 0 and 1."""
    chosen = [_convert(word, float, "--quantiles", "a number") for word in words(text, "--quantiles")]
    for q in chosen:
        if not 0.0 < q < 1.0:
            raise SettingError(f"--quantiles must lie between 0 and 1, but {q:g} does not.")
    return chosen


def splits(text: str) -> list[int]:
    """``"5"`` is the first five splits, ``"0,3"`` (or ``"3,"``) the splits of these numbers, ``"0-4"`` a range of them.

    Example:
        >>> splits("3"), splits("3,"), splits("0-2,5")
        ([0, 1, 2], [3], [0, 1, 2, 5])
    """
    ranges = [_range(word) for word in words(text, "--splits")]
    numbers = [number for one in ranges for number in one]
    counted = "," not in text and "-" not in text.strip()
    if not numbers or min(numbers) < 0 or (counted and numbers == [0]):
        raise SettingError(f"--splits is {text!r}: give how many splits, or the numbers of some (0,1,4 or 0-4).")
    return list(range(numbers[0])) if counted else list(dict.fromkeys(numbers))


def _range(word: str) -> Sequence[int]:
    """``"2-4"`` is 2, 3 and 4; ``"2"`` is 2."""
    first, dash, last = word.partition("-") if not word.startswith("-") else (word, "", "")
    bounds = [_convert(end.strip(), int, "--splits", "a whole number") for end in (first, last if dash else first)]
    return range(bounds[0], bounds[1] + 1)


def one_or_each(text: str | None, option: str, convert: Callable[[str], T]) -> T | Sequence[T] | None:
    """One value for all layers, or one a layer: ``"5"`` or ``"5,3"``."""
    if text is None:
        return None
    values = [_convert(word.strip(), convert, option, "a whole number") for word in text.split(",")]
    return values[0] if len(values) == 1 else values


def _convert(word: str, convert: Callable[[str], T], option: str, kind: str) -> T:
    try:
        return convert(word)
    except ValueError:
        raise SettingError(f"{option} holds {word!r}, which is not {kind}.") from None
