"""Pictures with matplotlib: fits, calibration, residuals, histories and the critical-difference diagram.

Every function draws on ``ax`` (a new figure when it is ``None``) and returns it. The figures are plain
``matplotlib.figure.Figure`` objects: no window, no global state, nothing to close. Show one in a notebook with
``ax.figure``, keep it with ``ax.figure.savefig("fit.png")``.

Example:
    >>> ax = critical_difference({"exact": 2.8, "DGP 2": 1.7, "DGP 3": 1.5}, num_datasets=10)
    >>> ax.figure.savefig("ranks.png")  # doctest: +SKIP
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from fathomgp.errors import DataError, SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#b5679b", "#d08c00", "#56b4e9"
"""The colours of Okabe and Ito, told apart by every kind of colour vision; the pale ones a little darker."""

PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
"""One colour a method, in the order of drawing."""

GREY = "#7a828a"
"""Data and references: legible on white and on black."""

LEVELS = (0.5, 0.95)
"""The central intervals that are drawn by default."""


@runtime_checkable
class Answer(Protocol):
    """What the pictures ask of a predictive distribution over N rows with one output."""

    def mean(self) -> Any:
        """Means, one a row."""

    def std(self) -> Any:
        """Standard deviations, one a row."""

    def interval(self, level: float) -> Any:
        """The lower and the upper ends of the central intervals."""


def plot_1d(
    x: Any,
    predictive: Answer,
    *,
    data: tuple[Any, Any] | None = None,
    truth: Any = None,
    inducing: Any = None,
    samples: Any = None,
    levels: Sequence[float] = LEVELS,
    ax: Any = None,
) -> "Axes":
    """The mean with shaded central intervals along one input.

    Args:
        x: the N inputs where ``predictive`` was asked, in any order.
        predictive: the answer.
        data: the observed inputs and outputs.
        truth: the N values of the true function.
        inducing: inducing inputs, drawn as ticks on the lower edge.
        samples: S functions, shape (S, N).
        levels: the probabilities of the intervals.
        ax: where to draw.
    """
    ax = _axes(ax)
    x = as_column(x, "x")
    order = np.argsort(x)
    _bands(ax, x[order], predictive, order, sorted(levels, reverse=True))
    if samples is not None:
        ax.plot(x[order], np.asarray(samples).T[order], color=BLUE, lw=0.6, alpha=0.5)
    if truth is not None:
        ax.plot(x[order], as_column(truth, "truth")[order], color=VERMILION, lw=1.3, ls="--", label="truth")
    ax.plot(x[order], as_column(predictive.mean(), "mean")[order], color=BLUE, lw=1.8, label="mean")
    if data is not None:
        ax.plot(*map(as_column, data, ("x", "y")), ".", color=GREY, ms=4, zorder=1, label="data")
    if inducing is not None:
        _inducing_ticks(ax, as_column(inducing, "inducing"))
    ax.set(xlabel="x", ylabel="y")
    _legend_above(ax)
    return ax


def plot_2d(x: Any, predictive: Answer, *, data: Any = None, inducing: Any = None, axes: Any = None) -> Any:
    """Mean and standard deviation over two inputs, as two filled contour panels.

    Args:
        x: the inputs, shape (N, 2), on a grid or scattered.
        predictive: the answer at ``x``.
        data: observed inputs, shape (n, 2), drawn as dots.
        inducing: inducing inputs, shape (M, 2), drawn as crosses.
        axes: the two axes to draw on.

    Returns:
        The two axes.
    """
    x = np.asarray(x, float)
    if x.ndim != 2 or x.shape[1] != 2:
        raise DataError(f"plot_2d needs x of shape (N, 2), but it is {x.shape}. Use plot_1d for one input.")
    axes = _figure(10.0, 4.0).subplots(1, 2, sharex=True, sharey=True) if axes is None else axes
    panels = [("mean", predictive.mean(), "viridis"), ("standard deviation", predictive.std(), "cividis")]
    for ax, (name, values, colours) in zip(axes, panels, strict=True):
        contours = ax.tricontourf(x[:, 0], x[:, 1], as_column(values, name), levels=14, cmap=colours)
        ax.figure.colorbar(contours, ax=ax)
        if data is not None:
            ax.plot(*np.asarray(data).T, ".", color="white", ms=3, alpha=0.7)
        if inducing is not None:
            ax.plot(*np.asarray(inducing).T, "x", color=VERMILION, ms=6, mew=1.6)
        ax.set(title=name, xlabel="x1", ylabel="x2")
    return axes


def plot_calibration(predictive: Answer, y: Any, *, ax: Any = None) -> "Axes":
    """The share of observations inside the central intervals against the interval's probability.

    An honest answer follows the diagonal; above it the intervals are too wide, below it too narrow. The grey band is
    where 95 % of the honest answers fall, given the number of observations.
    """
    ax = _axes(ax, width=4.4, height=4.2)
    levels = np.linspace(0.0, 1.0, 41)[1:-1]
    nominal, covered, margin = calibration(predictive, y, levels)
    ax.fill_between(nominal, nominal - margin, nominal + margin, color=GREY, alpha=0.2, lw=0, label="chance")
    ax.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
    ax.plot(nominal, covered, color=BLUE, lw=1.8, label="observed")
    ax.set(xlabel="nominal coverage", ylabel="empirical coverage", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(frameon=False, loc="upper left")
    return ax


def plot_predicted_vs_observed(y: Any, predictive: Answer, *, level: float = 0.95, ax: Any = None) -> "Axes":
    """Predicted means with their intervals against the observations; the diagonal is perfection."""
    ax = _axes(ax, width=4.8, height=4.4)
    y, mean = as_column(y, "y"), as_column(predictive.mean(), "mean")
    ((lower, upper),) = intervals(predictive, [level])
    ends = np.array([np.nanmin(y), np.nanmax(y)])
    # The mean of a skewed answer may lie outside a narrow interval: a bar has no negative length.
    bars = np.maximum([mean - lower, upper - mean], 0.0)
    ax.errorbar(y, mean, bars, fmt="o", ms=3.5, color=BLUE, ecolor=SKY, elinewidth=0.8, alpha=0.8)
    ax.plot(ends, ends, color=GREY, lw=1, ls="--", zorder=3)
    ax.set(xlabel="observed", ylabel=f"predicted, with {_percent(level)} interval")
    return ax


def plot_residuals(y: Any, predictive: Answer, *, ax: Any = None) -> "Axes":
    """Standardised residuals against the predicted means: structure here is what the model has missed."""
    ax = _axes(ax)
    mean = as_column(predictive.mean(), "mean")
    residuals = (as_column(y, "y") - mean) / as_column(predictive.std(), "std")
    ax.axhspan(-2, 2, color=GREY, alpha=0.12, lw=0)
    ax.axhline(0, color=GREY, lw=1, ls="--")
    ax.plot(mean, residuals, ".", color=BLUE, ms=5, alpha=0.8)
    ax.set(xlabel="predicted mean", ylabel="(observed - mean) / std")
    return ax


def plot_history(history: Mapping[str, Any], *, ax: Any = None) -> "Axes":
    """The objective against the step. The range follows the bulk of the values: the first steps may fall outside."""
    ax = _axes(ax)
    step, objective = history_columns(history)
    ax.plot(step, objective, color=BLUE, lw=1.4, marker="o" if len(step) < 3 else None)
    ax.set(xlabel="step", ylabel="objective", ylim=bulk_range(objective))
    return ax


def plot_layers(x: Any, values: Sequence[Any], *, axes: Any = None) -> Any:
    """Inside a deep GP along one input: draws of every layer, a panel a layer, their mean in black.

    Args:
        x: the N inputs, in any order.
        values: one array (S, N, outputs) a layer, as a posterior's ``propagate`` returns them.
        axes: one axes object a layer.
    """
    x = as_column(x, "x")
    order = np.argsort(x)
    axes = _figure(4.0 * len(values), 3.2).subplots(1, len(values), squeeze=False)[0] if axes is None else axes
    for level, (ax, draws) in enumerate(zip(axes, values, strict=True)):
        draws = np.asarray(draws, float)[:, order]
        for output in range(draws.shape[2]):
            colour = PALETTE[output % len(PALETTE)]
            ax.plot(x[order], draws[:20, :, output].T, color=colour, lw=0.5, alpha=0.4)
            ax.plot(x[order], draws[:, :, output].mean(axis=0), color="black", lw=1.4)
        ax.set(title=f"layer {level + 1}", xlabel="x")
    return axes


def nemenyi_critical_difference(num_methods: int, num_datasets: int, alpha: float = 0.05) -> float:
    r"""The difference of average ranks that the Nemenyi test calls significant.

    $$ CD = q_\alpha \sqrt{k (k + 1) / (6 N)} $$

    for $k$ methods on $N$ data sets, with $q_\alpha$ the studentised range quantile divided by $\sqrt 2$.

    Example:
        >>> round(nemenyi_critical_difference(5, 30), 3)
        1.114

    Reference: Demsar (2006), Statistical comparisons of classifiers over multiple data sets, JMLR 7.
    """
    from scipy.stats import studentized_range

    if num_methods < 2 or num_datasets < 1:
        raise SettingError(
            f"Ranks are compared between 2 or more methods on 1 or more data sets, "
            f"but there are {num_methods} methods and {num_datasets} data sets."
        )
    if not 0.0 < alpha < 1.0:
        raise SettingError(f"alpha must lie between 0 and 1, but it is {alpha:g}. The usual value is 0.05.")
    quantile = float(studentized_range.ppf(1.0 - alpha, num_methods, np.inf)) / math.sqrt(2.0)
    return quantile * math.sqrt(num_methods * (num_methods + 1) / (6.0 * num_datasets))


def critical_difference(
    ranks: Mapping[str, float | int], num_datasets: int, alpha: float = 0.05, *, ax: Any = None
) -> "Axes":
    """Demsar's diagram of average ranks: the best method on the right, bars join methods that no test tells apart.

    Args:
        ranks: the average rank of each method; 1 is the best.
        num_datasets: the number of data sets (or splits, when they count as such) behind the averages.
        alpha: the significance level of the Nemenyi test.
        ax: where to draw.
    """
    difference = nemenyi_critical_difference(len(ranks), num_datasets, alpha)
    names = sorted(ranks, key=lambda name: ranks[name])
    values = [float(ranks[name]) for name in names]
    if not all(1.0 <= value <= len(names) for value in values):
        raise DataError(f"Average ranks of {len(names)} methods lie between 1 and {len(names)}, but they are {values}.")
    bars = _indistinguishable(values, difference)
    rows = math.ceil(len(names) / 2)
    ax = _axes(ax, width=7.5, height=1.3 + 0.3 * (rows + 0.6 * len(bars)))
    ax.set(xlim=(len(names) + 0.05, 0.95), ylim=(-(1.2 + 0.6 * len(bars) + rows), 2.2))
    ax.set_axis_off()
    _rank_axis(ax, len(names), difference)
    for level, (first, last) in enumerate(bars):
        height = -0.6 * (level + 1)
        ax.plot([values[first] - 0.04, values[last] + 0.04], [height] * 2, color="black", lw=3.5, solid_capstyle="butt")
    _rank_labels(ax, names, values, top=-(1.2 + 0.6 * len(bars)))
    return ax


def as_column(values: Any, name: str) -> np.ndarray:
    """``values`` as a flat float array; a second axis of length one is dropped, a longer one is refused."""
    array = np.asarray(values, float)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.size == 0:
        raise DataError(f"{name} must hold one number a row for at least one row, but its shape is {array.shape}.")
    return array


def intervals(predictive: Answer, levels: Sequence[float]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The lower and upper ends of the central interval at each of ``levels``."""
    ends = [predictive.interval(float(level)) for level in levels]
    return [(as_column(lower, "lower end"), as_column(upper, "upper end")) for lower, upper in ends]


def calibration(predictive: Answer, y: Any, levels: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nominal coverage, empirical coverage, and the half-width of the 95 % band that chance alone would give.

    Rows whose ``y`` is missing (NaN) are left out.
    """
    y, levels = as_column(y, "y"), np.asarray(levels, float)
    seen = np.isfinite(y)
    if not seen.any():
        raise DataError("Calibration needs at least one observed value in y, but all of them are missing.")
    inside = [(lower <= y) & (y <= upper) for lower, upper in intervals(predictive, levels.tolist())]
    covered = np.array([np.mean(row[seen]) for row in inside])
    return levels, covered, 1.96 * np.sqrt(levels * (1.0 - levels) / seen.sum())


def plot_chains(posterior: Any, x: Any = None, *, kind: str = "trace", seed: int = 0) -> Any:
    """A sampler's chains through ArviZ: the latent function at the rows of ``x``, one panel a row.

    Of STRIDE's particles, which keep only their last places, it shows the log likelihoods.

    Args:
        posterior: the ``posterior_`` of a fit with ``method="sghmc"`` or ``"stride"``.
        x: for SGHMC, a few inputs on the model's own scale (standardised, if an estimator made the fit).
        kind: ``"trace"`` (values draw by draw), ``"rank"`` (flat where chains agree) or ``"autocorrelation"``.
        seed: of the noise between the layers.

    Returns:
        The matplotlib figure.
    """
    functions = {"trace": "plot_trace", "rank": "plot_rank", "autocorrelation": "plot_autocorr"}
    if kind not in functions:
        raise SettingError(f"kind={kind!r} is unknown: choose one of {', '.join(map(repr, functions))}.")
    import arviz_plots
    import matplotlib.pyplot as plt

    from fathomgp.diagnostics import to_arviz

    draw = getattr(arviz_plots, functions[kind])
    tree = to_arviz(posterior, x, seed=seed)
    wanted = "f" if "f" in tree["posterior"] else "log_likelihood"
    if wanted not in tree["posterior"]:
        raise DataError("plot_chains shows the latent function at the rows of x: pass a few inputs as x.")
    collection = draw(tree, var_names=[wanted], backend="matplotlib")
    figure = collection.viz["figure"].item()
    plt.close(figure)  # pyplot need not remember it: the figure lives on without
    return figure


def history_columns(history: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The finite entries of ``step`` and ``objective``."""
    missing = {"step", "objective"} - set(history)
    if missing:
        raise DataError(f"The history lacks {sorted(missing)}; it has {sorted(history)}.")
    step, objective = as_column(history["step"], "step"), as_column(history["objective"], "objective")
    finite = np.isfinite(objective)
    if not finite.any():
        raise DataError("The history holds no finite objective, so there is nothing to draw.")
    return step[finite], objective[finite]


def bulk_range(values: np.ndarray) -> tuple[float, float]:
    """A drawing range for ``values`` that the few extreme ones cannot stretch by more than the bulk's own width."""
    low, high = np.quantile(values, [0.1, 0.9])
    width = high - low
    low, high = max(values.min(), low - width), min(values.max(), high + width)
    margin = 0.05 * (high - low) or 0.05 * max(abs(high), 1.0)
    return float(low - margin), float(high + margin)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _axes(ax: Any, width: float = 6.4, height: float = 3.6) -> Any:
    ax = _figure(width, height).add_subplot() if ax is None else ax
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _bands(ax: Any, x: np.ndarray, predictive: Answer, order: np.ndarray, levels: Sequence[float]) -> None:
    for i, (level, (lower, upper)) in enumerate(zip(levels, intervals(predictive, levels), strict=True)):
        shade = 0.18 + 0.12 * i  # the narrower, the darker
        ax.fill_between(x, lower[order], upper[order], color=BLUE, alpha=shade, lw=0, label=_percent(level))


def _legend_above(ax: Any) -> None:
    ax.legend(frameon=False, ncols=6, fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)


def _inducing_ticks(ax: Any, inducing: np.ndarray) -> None:
    feet = np.full(inducing.shape, 0.0)
    transform = ax.get_xaxis_transform()
    ax.plot(inducing, feet, "|", color="black", ms=12, mew=1.2, transform=transform, clip_on=False, label="inducing")


def _percent(level: float) -> str:
    return f"{100 * level:g} %"


def _indistinguishable(values: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The longest runs (first, last) of sorted ranks that lie within the critical difference, none inside another."""
    runs: list[tuple[int, int]] = []
    for first, value in enumerate(values):
        last = max(i for i, other in enumerate(values) if other - value <= difference)
        if last > first and (not runs or last > runs[-1][1]):
            runs.append((first, last))
    return runs


def _rank_axis(ax: Any, num_methods: int, difference: float) -> None:
    ax.plot([1, num_methods], [0, 0], color="black", lw=1)
    for rank in range(1, num_methods + 1):
        ax.plot([rank, rank], [0, 0.25], color="black", lw=1)
        ax.text(rank, 0.4, str(rank), ha="center", va="bottom")
    end = max(num_methods - difference, 1)
    fits = difference <= num_methods - 1  # else the bar ends with the axis, dashed
    ax.plot([num_methods, end], [1.5, 1.5], color="black", lw=1.5, ls="-" if fits else "--", marker="|", ms=8)
    ax.annotate(f"CD = {difference:.2f}", (end, 1.5), xytext=(6, 0), textcoords="offset points", va="center")


def _rank_labels(ax: Any, names: Sequence[str], values: Sequence[float], top: float) -> None:
    """Better half to the right, worse half to the left, so that no two lines cross."""
    better = len(names) // 2
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        right = i < better
        height = top - (i if right else len(names) - 1 - i)
        edge = 0.95 if right else len(names) + 0.05
        ax.plot([value, value, edge], [0, height, height], color=GREY, lw=0.9)
        side = {"ha": "left", "xytext": (4, 0)} if right else {"ha": "right", "xytext": (-4, 0)}
        text = f"{name} ({value:.2f})"
        ax.annotate(text, (edge, height), va="center", textcoords="offset points", annotation_clip=False, **side)
