"""Pictures on disk."""

import os
import pathlib
from typing import Any

from fathomgp._outputs import replacing


def save_figure(figure: Any, path: str | os.PathLike[str], dpi: int = 150) -> pathlib.Path:
    """Write a matplotlib figure: the old file or the new one stands there, never half of one."""
    path = pathlib.Path(path)
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:] or "png", dpi=dpi, facecolor="white")
    return path
