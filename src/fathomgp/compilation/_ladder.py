"""Padded lengths: many numbers of rows share one compiled program."""

import numpy as np

#: Up to here lengths are powers of two; beyond, at most an eighth of the rows is padding.
_POWERS_UP_TO = 256
_STEPS_PER_OCTAVE = 8


def power_of_two(count: int, *, smallest: int = 1) -> int:
    """The smallest power of two that is at least ``count`` and at least ``smallest``."""
    return max(smallest, 1 << max(0, count - 1).bit_length())


def padded_length(count: int, *, smallest: int = 1) -> int:
    """The rung of the ladder of shapes on which ``count`` rows stand.

    Powers of two up to 256; beyond, eight rungs to a doubling, so that less than an eighth of the rows is padding.

    Example:
        >>> [padded_length(n) for n in (1, 5, 200, 257, 300, 1000, 1025)]
        [1, 8, 256, 288, 320, 1024, 1152]
    """
    if count <= _POWERS_UP_TO:
        return power_of_two(count, smallest=smallest)
    rung = power_of_two(count) // 2 // _STEPS_PER_OCTAVE
    return max(smallest, -(-count // rung) * rung)


def question_rows(rows: int, *, sizes: tuple[int, ...], largest: int) -> int:
    """Rows per block of a question that is asked row by row: one of ``sizes``, or ``largest`` where rows are many.

    Each size is a program. Up to four blocks of the last size are cheaper than one more program.
    """
    for size in sizes:
        if rows <= size:
            return size
    return sizes[-1] if rows <= 4 * sizes[-1] else largest


def repeat_last_row(x: np.ndarray, rows: int) -> np.ndarray:
    """``x`` and copies of its last row, ``rows`` in all: questions about rows that are asked by themselves."""
    return np.concatenate([x, np.repeat(x[-1:], rows - len(x), axis=0)])
