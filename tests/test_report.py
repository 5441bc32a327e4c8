import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from fathomgp.errors import DataError, SettingError
from fathomgp.report import CurveSection, Report, ScoreSection, demo_report, fit_report
from fathomgp.report import _figures as figures

PLOTLY_BANNER = "* plotly.js v"


class Normal:
    def __init__(self, mean, std):
        self._mean, self._std = np.asarray(mean, float), np.asarray(std, float)

    def mean(self):
        return self._mean

    def std(self):
        return self._std

    def interval(self, level):
        reach = stats.norm.ppf(0.5 + level / 2) * self._std
        return self._mean - reach, self._mean + reach


class Addresses(HTMLParser):
    """Collects what the browser would load, and checks that elements are nested as they should be."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, page):
        super().__init__()
        self.loaded, self.open, self.scripts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data


@pytest.fixture
def held_out(rng):
    mean = rng.normal(size=60)
    return mean + rng.normal(size=60), Normal(mean, np.ones(60))


@pytest.fixture
def curve():
    x = np.linspace(0.0, 1.0, 20)
    answers = {"exact": Normal(x, np.full(20, 0.2)), "sgpr": Normal(x**2, np.full(20, 0.1))}
    return CurveSection("A step", "One jump.", x, answers, data=(x, x), truth=x)


ROWS = [
    {"method": "exact", "RMSE": 0.31, "log density": -1.25, "coverage": 0.93, "seconds": 2.5},
    {"method": "sgpr", "RMSE": 0.42, "log density": float("nan"), "coverage": 0.97, "seconds": 1.5},
    {"method": "dsvi", "RMSE": 0.31, "log density": -0.75, "coverage": 0.99, "seconds": 31.0},
]


def cells(page):
    """Rows of the page's tables, the best values marked by a star."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    marked = [re.sub(r"<strong[^>]*>(.*?)</strong>", r"*\1", row) for row in rows]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in marked]


def test_the_demo_page_needs_nothing_from_outside(curve, held_out, tmp_path):
    y, answer = held_out
    section = ScoreSection("Diabetes", "Real data.", ROWS, {"exact": answer}, y)
    page = demo_report([curve, section], tmp_path / "new" / "report.html").read_text("utf-8")
    parsed = Addresses(page)
    assert parsed.loaded == []
    assert page.count(PLOTLY_BANNER) == 1
    own = page.replace(next(script for script in parsed.scripts if PLOTLY_BANNER in script), "")
    assert not re.search(r"@import|url\(|https?://", own)
    assert "default-src 'none'" in own
    assert len(page) < 8e6
    assert os.listdir(tmp_path / "new") == ["report.html"]


def test_the_fit_page_tells_the_whole_story(held_out, tmp_path):
    y, answer = held_out
    path = fit_report(
        title="concrete",
        summary={"method": "sgpr", "rows": 1030, "noise": 0.1234},
        path=tmp_path / "report.html",
        history={"step": np.arange(5), "objective": np.arange(5.0)},
        scores=[{"rows": "held out", "RMSE": 1.25, "CRPS": 0.5}],
        y_test=y,
        predictive=answer,
        feature_names=["age", "water"],
        lengthscales=[0.5, 4.0],
        messages=["The jitter was raised."],
        model_path="kept/model",
    )
    page = path.read_text("utf-8")
    plots = [json.loads(script) for script in Addresses(page).scripts if script.startswith("{")]
    assert len(plots) == 5
    assert plots[-1]["data"][0]["y"] == ["water", "age"]
    for part in ("What was fitted", "1,030", "The jitter was raised.", "load(&#39;kept/model&#39;)", "1.25"):
        assert part in page
    assert "fathomgp predict kept/model new.csv" in page


def test_the_fit_page_leaves_out_what_is_not_given(tmp_path):
    page = fit_report(title="t", summary={"method": "exact"}, path=tmp_path / "r.html").read_text("utf-8")
    assert "How good it is" not in page
    assert PLOTLY_BANNER not in page


def test_the_fit_page_refuses_halves(held_out, tmp_path):
    y, _ = held_out
    with pytest.raises(DataError, match="y_test and predictive belong together"):
        fit_report(title="t", summary={"a": 1}, path=tmp_path / "r.html", y_test=y)
    with pytest.raises(DataError, match="2 lengthscales but 1 feature names"):
        fit_report(title="t", summary={"a": 1}, path=tmp_path / "r.html", lengthscales=[1, 2], feature_names=["a"])
    assert os.listdir(tmp_path) == []


def test_text_is_shown_and_not_obeyed(curve):
    nasty = '</script><script>alert("x")</script>'
    page = Report(nasty, nasty).with_heading(nasty).with_text(nasty).with_warning(nasty).with_code(nasty)
    page = page.with_table([{nasty: nasty}], nasty).with_pairs({nasty: nasty}, nasty)
    panels = figures.fit_panels(curve.x, {nasty: curve.answers["exact"]})
    scripts = Addresses(page.with_figure(*panels, caption=nasty).html()).scripts
    assert len(scripts) == 3  # plotly, one figure, the drawing
    assert not any("alert" in script for script in scripts if not script.startswith("{"))
    figure = json.loads(next(script for script in scripts if script.startswith("{")))
    assert figure["layout"]["title"]["text"].startswith("&lt;/script&gt;")


def test_the_best_values_are_marked():
    best = {"RMSE": "lowest", "log density": "highest", "coverage": 0.95, "seconds": "lowest"}
    assert cells(Report("t").with_table(ROWS, "Scores", best).html()) == [
        ["method", "RMSE", "log density", "coverage", "seconds"],
        ["exact", "*0.310", "−1.25", "*0.930", "2.50"],
        ["sgpr", "0.420", "–", "*0.970", "*1.50"],
        ["dsvi", "*0.310", "*−0.75", "0.990", "31.00"],
    ]


def test_cells_read_well():
    values = {"a": 3, "b": 1234567, "c": None, "d": float("inf"), "e": 1.5e-9, "f": True, "g": 0.0, "h": -12345.678}
    shown = [row[1] for row in cells(Report("t").with_pairs(values).html())]
    assert shown == ["3", "1,234,567", "–", "∞", "1.5e−09", "True", "0.00", "−12346"]


def test_a_single_row_has_no_best_and_a_bad_goal_is_refused():
    assert '<strong class="best">' not in Report("t").with_table(ROWS[:1], "", {"RMSE": "lowest"}).html()
    with pytest.raises(SettingError, match="'lowest', 'highest' or a number to come near to, not 'least'"):
        Report("t").with_table(ROWS, "", {"RMSE": "least"})


def test_emptiness_is_refused(curve, tmp_path):
    with pytest.raises(SettingError, match="The report 'Nothing' is empty"):
        Report("Nothing").write(tmp_path / "r.html")
    with pytest.raises(SettingError, match="The section 'First' is empty"):
        Report("t").with_heading("First").with_heading("Second").with_text("words").html()
    with pytest.raises(SettingError, match="The section 'Last' is empty"):
        Report("t").with_text("words").with_heading("Last").html()
    with pytest.raises(SettingError, match="A text of the report is empty"):
        Report("t").with_text("  ")
    with pytest.raises(DataError, match="The table 'Scores' has no rows"):
        Report("t").with_table([], "Scores")
    with pytest.raises(SettingError, match="at least one section"):
        demo_report([], tmp_path / "r.html")
    with pytest.raises(SettingError, match="The section 'Real' is empty"):
        demo_report([ScoreSection("Real", "words", [])], tmp_path / "r.html")
    with pytest.raises(SettingError, match="The section 'Curve' is empty"):
        demo_report([CurveSection("Curve", "words", curve.x, {})], tmp_path / "r.html")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    page = Report("old").with_text("words")
    page.write(path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        page.with_text("more").write(path)
    assert path.read_text("utf-8") == page.html()
    assert os.listdir(tmp_path) == ["report.html"]


def test_matplotlib_pictures_are_inside_the_page_and_leak_nothing():
    import matplotlib.pyplot as plt

    from fathomgp.plots import critical_difference

    page = Report("Ranks").with_image(critical_difference({"a": 1.2, "b": 1.8}, 9).figure, "Average ranks")
    (source,) = Addresses(page.html()).loaded
    assert source.startswith("data:image/svg+xml;base64,")
    assert plt.get_fignums() == []


def test_a_report_is_a_value():
    page = Report("t")
    assert page.with_text("words").blocks != ()
    assert page.blocks == ()


def test_large_sets_are_thinned(rng):
    y = rng.normal(size=5000)
    answer = Normal(np.zeros(5000), np.ones(5000))
    assert len(figures.predicted_vs_observed(y, answer).data[0].x) == figures.MAX_POINTS
    shown = figures.sorted_intervals(y, answer).data
    assert len(shown[2].x) + len(shown[3].x) == figures.MAX_INTERVALS
    assert list(figures.thinned(5, 3)) == [0, 2, 4]
    assert list(figures.thinned(1, 3)) == [0]


def test_panels_share_one_range_and_missing_outputs_are_skipped(curve):
    panels = figures.fit_panels(curve.x, curve.answers, data=curve.data, truth=curve.truth)
    assert panels[0].layout.yaxis.range == panels[1].layout.yaxis.range
    y = np.where(np.arange(20) < 5, np.nan, curve.x)
    assert len(figures.predicted_vs_observed(y, curve.answers["exact"]).data[0].x) == 15
