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
    """``"5"`` is the first five splits, ``"0,3"`` (or ``"3,"``) the splits of these numbers.

    Example:
        >>> splits("3"), splits("3,")
        ([0, 1, 2], [3])
    """
    numbers = [_convert(word, int, "--splits", "a whole number") for word in words(text, "--splits")]
    if min(numbers) < 0 or (numbers == [0] and "," not in text):
        raise SettingError(f"--splits is {text!r}: give how many splits, or the numbers of some (0,1,4).")
    return numbers if "," in text else list(range(numbers[0]))


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
