"""One self-contained HTML page: text, tables and interactive figures, readable offline, by day, by night and on paper.

:class:`Report` is the page; :func:`fit_report` and :func:`demo_report` fill it for ``fathomgp fit`` and
``fathomgp demo``.
"""

from fathomgp.report._page import Report as Report
from fathomgp.report.demo_report import CurveSection as CurveSection
from fathomgp.report.demo_report import ScoreSection as ScoreSection
from fathomgp.report.demo_report import demo_report as demo_report
from fathomgp.report.fit_report import fit_report as fit_report
