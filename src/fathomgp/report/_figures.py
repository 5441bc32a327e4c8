"""The interactive figures of the page, in plotly. Colours of text, grid and paper are the page's, not the figure's."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fathomgp.plots import (
    BLUE,
    GREY,
    LEVELS,
    PALETTE,
    SKY,
    VERMILION,
    Answer,
    as_column,
    bulk_range,
    calibration,
    history_columns,
    intervals,
)
from fathomgp.report._page import plain

MAX_POINTS = 1000
"""More rows than this are thinned: a picture does not gain by them, and the page grows."""

MAX_INTERVALS = 150
MAX_BARS = 25


def fit_panels(
    x: Any, answers: Mapping[str, Answer], *, data: tuple[Any, Any] | None = None, truth: Any = None
) -> list[Any]:
    """One figure a method over the same axes: mean, bands, data and truth along one input."""
    x = as_column(x, "x")
    order = np.argsort(x)
    reach = _reach(answers, data)
    panels = []
    for i, (name, answer) in enumerate(answers.items()):
        traces = _bands(x[order], answer, order, colour_of(i))
        traces += _points_and_truth(x[order], order, data, truth)
        figure = _figure(traces, "x", "y", height=280, title=name)
        panels.append(figure.update_layout(showlegend=False).update_yaxes(range=reach))
    return panels


def calibration_curve(answers: Mapping[str, Answer], y: Any) -> Any:
    """Nominal against empirical coverage of the central intervals, one line a method."""
    levels = np.linspace(0.0, 1.0, 21)[1:-1]
    curves = {name: calibration(answer, y, levels) for name, answer in answers.items()}
    _, _, margin = next(iter(curves.values()))
    traces = [_band(levels, levels - margin, levels + margin, GREY, 0.18, "chance")]
    traces += [_line([0, 1], [0, 1], GREY, "honest", dash="dash", width=1.0)]
    for i, (name, (_, covered, _)) in enumerate(curves.items()):
        dash = ("solid", "dot", "dashdot")[i // len(PALETTE) % 3]
        traces.append(_line(levels, covered, colour_of(i), name, dash=dash))
    figure = _figure(traces, "nominal coverage", "empirical coverage", height=380)
    return figure.update_xaxes(range=[0, 1]).update_yaxes(range=[0, 1])


def predicted_vs_observed(y: Any, answer: Answer, *, level: float = 0.95, title: str = "", colour: str = BLUE) -> Any:
    """Predicted means with error bars against the observations."""
    y, mean, lower, upper = _rows(y, answer, level)
    keep = thinned(len(y), MAX_POINTS)
    y, mean, lower, upper = y[keep], mean[keep], lower[keep], upper[keep]
    up, down = np.maximum(upper - mean, 0.0), np.maximum(mean - lower, 0.0)
    bars = {"array": up, "arrayminus": down, "color": _faded(colour, 0.45), "thickness": 1, "width": 0}
    ends = [y.min(), y.max()]
    dots = {"type": "scatter", "x": y, "y": mean, "mode": "markers", "name": "held-out rows", "error_y": bars}
    dots["marker"] = {"color": colour, "size": 6}
    perfect = _line(ends, ends, GREY, "perfect", dash="dash", width=1.0)
    figure = _figure([dots, perfect], "observed", "predicted", height=380, title=title)
    return figure.update_layout(showlegend=False)


def sorted_intervals(y: Any, answer: Answer, level: float = 0.95) -> Any:
    """Held-out rows in the order of their predicted means: the interval of each, and what was observed."""
    y, mean, lower, upper = _rows(y, answer, level)
    order = np.argsort(mean)[thinned(len(y), MAX_INTERVALS)]
    y, mean, lower, upper = y[order], mean[order], lower[order], upper[order]
    place = np.arange(1, len(y) + 1)
    gaps = np.full(len(y), np.nan)
    ends = np.stack([lower, upper, gaps], 1).ravel()
    inside = (lower <= y) & (y <= upper)
    traces = [_line(np.repeat(place, 3), ends, SKY, f"{100 * level:g} % interval", width=3.0)]
    traces.append(_line(place, mean, BLUE, "mean", width=1.5))
    for chosen, colour, name in ((inside, GREY, "observed, inside"), (~inside, VERMILION, "observed, outside")):
        traces.append(_dots(place[chosen], y[chosen], colour, name, size=6))
    return _figure(traces, "held-out rows, sorted by predicted mean", "y", height=360)


def objective_history(history: Mapping[str, Any]) -> Any:
    """The objective against the step; the range follows the bulk of the values (double click for all of them)."""
    step, objective = history_columns(history)
    keep = thinned(len(step), 2 * MAX_POINTS)
    trace = _line(step[keep], objective[keep], BLUE, "objective", width=1.5)
    trace["mode"] = "lines" if len(keep) > 2 else "lines+markers"
    figure = _figure([trace], "step", "objective", height=320).update_layout(showlegend=False)
    return figure.update_yaxes(range=list(bulk_range(objective)))


def relevance_bars(lengthscales: Any, names: list[str]) -> Any:
    """One over each input's lengthscale, the largest first: how fast the function changes along it."""
    lengthscales = as_column(lengthscales, "lengthscales")
    order = np.argsort(lengthscales)[:MAX_BARS][::-1]
    bars = {"type": "bar", "orientation": "h", "x": 1.0 / lengthscales[order], "marker": {"color": BLUE}}
    bars |= {"y": [plain(names[i]) for i in order], "customdata": lengthscales[order]}
    bars["hovertemplate"] = "%{y}: lengthscale %{customdata:.3g}<extra></extra>"
    figure = _figure([bars], "1 / lengthscale", "", height=110 + 24 * len(order))
    return figure.update_layout(showlegend=False, bargap=0.35).update_yaxes(type="category", showgrid=False)


def colour_of(method: int) -> str:
    """The colour of the method with this number, the same in every figure."""
    return PALETTE[method % len(PALETTE)]


def thinned(count: int, most: int) -> np.ndarray:
    """At most ``most`` of ``count`` positions, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _figure(traces: list[dict[str, Any]], x: str, y: str, *, height: int, title: str = "") -> Any:
    import plotly.graph_objects as go

    axis = {"automargin": True, "showline": True, "ticks": "outside", "zeroline": False}
    layout: dict[str, Any] = {"template": "none", "height": height, "font": {"size": 13}, "hovermode": "closest"}
    layout |= {"xaxis": axis | {"title": {"text": x}, "showgrid": False}, "yaxis": axis | {"title": {"text": y}}}
    layout |= {"margin": {"l": 56, "r": 18, "t": 44, "b": 48}}
    layout |= {"legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}}
    if title:
        layout["title"] = {"text": plain(title), "x": 0.5, "font": {"size": 15}}
    return go.Figure(traces, layout)


def _bands(x: np.ndarray, answer: Answer, order: np.ndarray, colour: str) -> list[dict[str, Any]]:
    levels = sorted(LEVELS, reverse=True)
    ends = zip(levels, intervals(answer, levels), strict=True)
    bands = [_band(x, low[order], high[order], colour, 0.22, f"{100 * level:g} %") for level, (low, high) in ends]
    return [*bands, _line(x, as_column(answer.mean(), "mean")[order], colour, "mean")]


def _points_and_truth(x: np.ndarray, order: np.ndarray, data: Any, truth: Any) -> list[dict[str, Any]]:
    traces = []
    if data is not None:
        keep = thinned(len(data[0]), MAX_POINTS)
        inputs, outputs = (as_column(values, "data")[keep] for values in data)
        traces.append(_dots(inputs, outputs, GREY, "data", size=4))
    if truth is not None:
        traces.append(_line(x, as_column(truth, "truth")[order], GREY, "truth", dash="dash", width=1.5))
    return traces


def _reach(answers: Mapping[str, Answer], data: Any) -> list[float]:
    """One range for all panels, so that they can be compared."""
    ends = [end for answer in answers.values() for end in intervals(answer, [max(LEVELS)])[0]]
    ends += [] if data is None else [as_column(data[1], "data")]
    low, high = min(np.nanmin(end) for end in ends), max(np.nanmax(end) for end in ends)
    margin = 0.04 * (high - low)
    return [float(low - margin), float(high + margin)]


def _rows(y: Any, answer: Answer, level: float) -> tuple[np.ndarray, ...]:
    """Observation, mean and interval of the rows that were observed."""
    y = as_column(y, "y")
    ((lower, upper),) = intervals(answer, [level])
    seen = np.isfinite(y)
    return y[seen], as_column(answer.mean(), "mean")[seen], lower[seen], upper[seen]


def _band(x: Any, lower: Any, upper: Any, colour: str, opacity: float, name: str) -> dict[str, Any]:
    outline = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([lower, upper[::-1]])}
    fill = {"fill": "toself", "fillcolor": _faded(colour, opacity), "line": {"width": 0}}
    return {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "name": plain(name)} | outline | fill


def _line(x: Any, y: Any, colour: str, name: str, *, dash: str = "solid", width: float = 2.2) -> dict[str, Any]:
    line = {"color": colour, "dash": dash, "width": width}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": plain(name), "line": line}


def _dots(x: Any, y: Any, colour: str, name: str, *, size: int) -> dict[str, Any]:
    marker = {"color": colour, "size": size}
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "name": plain(name), "marker": marker}


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
