"""The page that ``fathomgp demo`` writes: every method side by side, with words for someone who is new to them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathomgp.errors import SettingError
from fathomgp.plots import Answer
from fathomgp.report._figures import calibration_curve, colour_of, fit_panels, predicted_vs_observed
from fathomgp.report._page import Report
from fathomgp.report.fit_report import CALIBRATION_CAPTION, PREDICTED_CAPTION

BEST: dict[str, str | float] = {
    "RMSE": "lowest",
    "log density": "highest",
    "coverage": 0.95,
    "CRPS": "lowest",
    "seconds": "lowest",
}
"""The columns of a score table that are compared, and what is best there."""

SCORES_CAPTION = (
    "Scores on rows that no method has seen; the best of each column is bold. RMSE: the size of a typical error. "
    "Log density: how probable the model thought what happened. Coverage: the share of rows inside their 95 % "
    "intervals. CRPS: error and honesty in one number."
)

PANELS_CAPTION = (
    "Each panel is one method: the line is its mean, the dark band holds 50 % and the light band 95 % of what it "
    "expects to observe. Dots are the data, the dashed line is the truth."
)

INTRODUCTION = """\
A Gaussian process is a way to learn a curve or surface from examples and to say, at every point, how sure it is. \
It usually assumes that the function is about equally smooth everywhere.

A deep Gaussian process feeds the output of one Gaussian process into the next. The first layers bend the inputs, so \
the whole can be flat here and steep there. Real data often ask for that, and a single layer cannot say it.

The bands are the point of it. A 95 % band should hold about 95 of 100 new observations: where there are few data it \
ought to widen, where there are many it ought to tighten. Bands that are too narrow mislead; bands that are too wide \
say little."""

NEXT_STEPS = """\
fathomgp fit data.csv --target y --out model/
fathomgp predict model/ new.csv -o predictions.csv"""

ADVICE = """\
The fit writes a page like this one about your data. Begin with the default method. Add layers while the log density \
of held-out rows improves, and stop when it does not."""


@dataclass(frozen=True)
class CurveSection:
    """A data set with one input, where every method's curve can be looked at.

    Attributes:
        heading: the name of the data set.
        text: what it is and what to look for.
        x: the inputs where the methods were asked.
        answers: method to answer at ``x``.
        data: the observed inputs and outputs.
        truth: the true function at ``x``.
        scores: a row for each method, as column to value; the columns of ``BEST`` are compared.
    """

    heading: str
    text: str
    x: Any
    answers: Mapping[str, Answer]
    data: tuple[Any, Any] | None = None
    truth: Any = None
    scores: Sequence[Mapping[str, Any]] = ()

    def add_to(self, page: Report) -> Report:
        """The page with this section at its end."""
        if not self.answers:
            raise SettingError(f"The section {self.heading!r} is empty: give it the answer of at least one method.")
        panels = fit_panels(self.x, self.answers, data=self.data, truth=self.truth)
        page = page.with_heading(self.heading).with_text(self.text).with_figure(*panels, caption=PANELS_CAPTION)
        return page.with_table(self.scores, SCORES_CAPTION, BEST) if self.scores else page


@dataclass(frozen=True)
class ScoreSection:
    """A data set with any number of inputs: a table of scores, and the calibration of every method.

    Attributes:
        heading: the name of the data set.
        text: what it is and what to look for.
        scores: a row for each method, as column to value; the columns of ``BEST`` are compared.
        answers: method to answer at the held-out rows.
        y_test: the outputs of the held-out rows.
    """

    heading: str
    text: str
    scores: Sequence[Mapping[str, Any]]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    y_test: Any = None

    def add_to(self, page: Report) -> Report:
        """The page with this section at its end."""
        if not self.scores:
            raise SettingError(f"The section {self.heading!r} is empty: give it the scores of at least one method.")
        page = page.with_heading(self.heading).with_text(self.text).with_table(self.scores, SCORES_CAPTION, BEST)
        if not self.answers or self.y_test is None:
            return page
        panels = [
            predicted_vs_observed(self.y_test, answer, title=name, colour=colour_of(i))
            for i, (name, answer) in enumerate(self.answers.items())
        ]
        caption = f"{PREDICTED_CAPTION} {CALIBRATION_CAPTION}"
        return page.with_figure(*panels, calibration_curve(self.answers, self.y_test), caption=caption)


def demo_report(sections: Sequence[CurveSection | ScoreSection], path: str | os.PathLike[str]) -> Path:
    """Write the page with a section for each data set, and return its path."""
    if not sections:
        raise SettingError("The demo report is empty: give it at least one section.")
    page = Report("Deep Gaussian processes, side by side", "Written by fathomgp demo on this machine, from scratch.")
    page = page.with_heading("What you are looking at").with_text(INTRODUCTION)
    for section in sections:
        page = section.add_to(page)
    page = page.with_heading("What to do next").with_text("Fit your own table, and ask it about new rows:")
    page = page.with_code(NEXT_STEPS).with_text(ADVICE)
    return page.write(path)
