"""What a campaign of faults finds: how a call ended, and rows that grow in a file."""

import contextlib
import pathlib
import signal
import time
import traceback
import warnings

from fathomgp.bench import ResultFile
from fathomgp.errors import FathomError

COLUMNS = ("campaign", "cases", "lost", "raw", "hung", "executed", "hours")


class Hung(BaseException):
    """A call took longer than any honest one."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raise :class:`Hung` in the main thread after so many seconds."""

    def stop(number, frame):
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ending(call, *, seconds=60, fine=()):
    """``"fine"``, ``"refused"`` (a sentence), ``"raw"`` (any other error) or ``"hung"``; and what was said.

    ``fine`` are exceptions that a campaign raises itself where it has seen enough.
    """
    try:
        with warnings.catch_warnings(), time_limit(seconds):
            warnings.simplefilter("ignore")
            call()
    except fine:
        return "fine", ""
    except FathomError as error:
        return ("refused" if str(error).strip() else "raw"), str(error)
    except Hung:
        return "hung", "".join(traceback.format_exc(limit=-6))
    except (Exception, SystemExit):
        return "raw", "".join(traceback.format_exc(limit=-6))
    return "fine", ""


class Tally:
    """Counts of one campaign, appended to the results as a row per part, so that it goes on where it stopped.

    Args:
        campaign: its name.
        out: the CSV file of all campaigns. What was found is told in words in a .log file beside it.
    """

    def __init__(self, campaign, out):
        self.campaign, self.out = campaign, pathlib.Path(out)
        self.results = ResultFile(out, COLUMNS, ("campaign",))
        self.began, self.counts = time.monotonic(), dict.fromkeys(COLUMNS[1:-1], 0)

    @property
    def done(self):
        """Cases in the file."""
        return sum(int(row["cases"]) for row in self.rows)

    @property
    def rows(self):
        return [row for row in self.results.rows if row["campaign"] == self.campaign]

    def add(self, kind, case, said):
        """Count one case; what is not as it should be is told in the log."""
        self.counts["cases"] += 1
        if kind in self.counts:
            self.counts[kind] += 1
            with open(self.out.with_suffix(".log"), "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"--- {self.campaign}: {kind}: {case}\n{said}\n")

    def write(self):
        """Append what was counted since the last row."""
        hours = round((time.monotonic() - self.began) / 3600.0, 4)
        self.results.append({"campaign": self.campaign, **self.counts, "hours": hours})
        self.began, self.counts = time.monotonic(), dict.fromkeys(self.counts, 0)
