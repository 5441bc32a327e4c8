"""The page: a title and a row of blocks, written to one HTML file that needs nothing else."""

import base64
import html
import importlib.resources
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fathomgp._outputs import replacing
from fathomgp.errors import SettingError
from fathomgp.report._tables import Table, build_pairs, build_table


@dataclass(frozen=True)
class Block:
    """A piece of the page that is plain text: ``heading``, ``text``, ``warning`` or ``code``."""

    kind: str
    text: str


@dataclass(frozen=True)
class Figures:
    """Plotly figures as JSON, side by side where the screen is wide enough."""

    figures: tuple[str, ...]
    caption: str
    kind: str = "figures"


@dataclass(frozen=True)
class Image:
    """A picture as a data address."""

    source: str
    caption: str
    kind: str = "image"


@dataclass(frozen=True)
class Report:
    """A page as a value: every ``with_...`` returns a longer page, :meth:`write` puts it on disk.

    All text is plain text: what looks like HTML is shown, not obeyed. An empty line in a text begins a new paragraph.

    Example:
        >>> page = Report("Yacht", "ten splits").with_text("Deep GPs, compared.")
        >>> page = page.with_table([{"method": "exact", "RMSE": 0.4}, {"method": "sgpr", "RMSE": 0.5}], "Held-out rows",
        ...                        best={"RMSE": "lowest"})
        >>> "<title>Yacht</title>" in page.html()
        True
    """

    title: str
    subtitle: str = ""
    blocks: tuple[Block | Table | Figures | Image, ...] = ()

    def with_heading(self, text: str) -> "Report":
        """Begin a section."""
        return self._with(Block("heading", text))

    def with_text(self, text: str) -> "Report":
        """Add paragraphs."""
        return self._with(Block("text", text))

    def with_warning(self, text: str) -> "Report":
        """Add a sentence that must not be overlooked."""
        return self._with(Block("warning", text))

    def with_code(self, text: str) -> "Report":
        """Add lines of code."""
        return self._with(Block("code", text))

    def with_table(
        self, rows: Sequence[Mapping[str, Any]], caption: str = "", best: Mapping[str, str | float] | None = None
    ) -> "Report":
        """Add a table, a row for each mapping of column to value.

        ``best`` names columns and what is best there: ``"lowest"``, ``"highest"``, or a number to come nearest to.
        """
        return self._with(build_table(rows, caption, best or {}))

    def with_pairs(self, pairs: Mapping[str, Any], caption: str = "") -> "Report":
        """Add a table of names and values."""
        return self._with(build_pairs(pairs, caption))

    def with_figure(self, *figures: Any, caption: str = "") -> "Report":
        """Add a plotly figure, or several side by side."""
        if not figures:
            raise SettingError("with_figure needs at least one plotly figure.")
        # "<" can only stand inside a JSON string, where its escape means the same and cannot end the script element.
        return self._with(Figures(tuple(figure.to_json().replace("<", "\\u003c") for figure in figures), caption))

    def with_image(self, figure: Any, caption: str = "") -> "Report":
        """Add a matplotlib figure, as vector graphics inside the page."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
        return self._with(Image(f"data:image/svg+xml;base64,{encoded}", caption))

    def html(self) -> str:
        """The whole page."""
        self._refuse_empty_sections()
        from jinja2 import Environment

        source = importlib.resources.files("fathomgp.report").joinpath("page.html.jinja").read_text("utf-8")
        template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
        return template.render(page=self, plotly_js=self._plotly_js())

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path``: the old file or the new one stands there, never half of one."""
        target, text = Path(path), self.html()
        with replacing(target) as part:
            part.write_text(text, "utf-8")
        return target

    def _with(self, block: Block | Table | Figures | Image) -> "Report":
        if isinstance(block, Block) and not block.text.strip():
            raise SettingError(f"A {block.kind} of the report is empty. Give it some text, or leave it out.")
        return replace(self, blocks=(*self.blocks, block))

    def _refuse_empty_sections(self) -> None:
        if not self.blocks:
            raise SettingError(
                f"The report {self.title!r} is empty. Add a text, a table or a figure before writing it."
            )
        for block, following in zip(self.blocks, (*self.blocks[1:], None), strict=True):
            if block.kind == "heading" and (following is None or following.kind == "heading"):
                name = block.text if isinstance(block, Block) else ""
                raise SettingError(f"The section {name!r} is empty. Add a text, a table or a figure to it.")

    def _plotly_js(self) -> str:
        if not any(block.kind == "figures" for block in self.blocks):
            return ""
        from plotly.offline import get_plotlyjs

        return get_plotlyjs()


def plain(text: str) -> str:
    """``text`` for a label inside a plotly figure, where a few HTML tags would otherwise be obeyed."""
    return html.escape(text, quote=False)
