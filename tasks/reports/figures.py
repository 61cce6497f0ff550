"""The figures of a report, written as PNG: scatter plots, curves, confusion matrices, bars.

Every function also returns its `matplotlib.figure.Figure`. The same input gives the same bytes,
because neither the time nor the machine goes into a file.
"""

from __future__ import annotations

import csv
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nfn_graph.converters.errors import require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.messages import UserError
from nfn_graph.tasks.reports.runs import BACKGROUND, metric_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

# Okabe and Ito's colours, which differ for colour-blind readers too; black is kept for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
INK = "#333333"
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.parse_math": False,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
}
_DPI = 160


def colours_of(count: int) -> list[Any]:
    """Returns `count` colours, from a continuous scale if there are too many for the palette."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    scale = require("matplotlib", "to draw figures").colormaps["viridis"]
    return [scale(0.95 * i / (count - 1)) for i in range(count)]


def figure_style() -> Any:
    """A context in which all figures have the same style."""
    return require("matplotlib", "to draw figures").rc_context(_STYLE)


def panels_of(
    count: int, size: tuple[float, float], columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, each of a size in inches, at most `columns` in a row."""
    columns = min(count, columns or count)
    rows = math.ceil(count / columns)
    figures = require("matplotlib.figure", "to draw figures")
    figure = figures.Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, panels


def show_picture(axes: Axes, picture: Tensor) -> None:
    """Draws a picture `[1 or 3, height, width]`, within [0, 1]."""
    image = picture.detach().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(image.squeeze(2) if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=1)


def save_figure(figure: Figure, path: Path) -> Figure:
    """Writes a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        # The version of matplotlib would be in the file otherwise.
        figure.savefig(temporary, format="png", dpi=_DPI, metadata={"Software": None})
    return figure


_MANY_CLASSES = 20


def scatter(
    path: Path,
    true: Sequence[float],
    predicted: Sequence[float],
    *,
    title: str,
    groups: Sequence[str] | None = None,
    tau: float | None = None,
    r2: float | None = None,
) -> Figure:
    """Predicted against true values, with the diagonal on which a perfect model would be.

    Args:
        path: The PNG.
        true: One value per network.
        predicted: One value per network.
        title: The title, to which tau and R² are added.
        groups: A name per network, such as its width; each has its colour.
        tau: Kendall's tau, if known.
        r2: The coefficient of determination, if known.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import scatter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     figure = scatter(Path(folder, "a.png"), [0.1, 0.9], [0.2, 0.8], title="Networks")
        >>> figure.axes[0].get_title()
        'Networks'
    """
    if not len(true) == len(predicted) == len(true if groups is None else groups):
        raise UserError(
            f"Expected as many true values as predictions and groups (got {len(true)}, "
            f"{len(predicted)} and {'none' if groups is None else len(groups)})"
        )
    with figure_style():
        figure, (axes,) = panels_of(1, (5.2, 5.0))
        names = sorted(set(groups or [""]), key=_natural)
        for name, colour in zip(names, colours_of(len(names)), strict=True):
            chosen = [k for k in range(len(true)) if groups is None or groups[k] == name]
            x, y = [true[k] for k in chosen], [predicted[k] for k in chosen]
            axes.scatter(x, y, s=18, color=colour, alpha=0.65, linewidths=0, label=_short(name))
        finite = [float(v) for v in (*true, *predicted) if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        margin = 0.04 * (high - low) or 0.5
        limits = (low - margin, high + margin)
        axes.plot(limits, limits, color=INK, linewidth=1, linestyle="--", zorder=1)
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="true", ylabel="predicted")
        measures = (("tau", tau), ("R²", r2))
        shown = ", ".join(f"{name} {x:.3f}" for name, x in measures if x is not None)
        axes.set_title(f"{title}\n{shown}" if shown else title)
        if groups is not None:
            # Below the axes, where it hides no networks.
            figure.legend(loc="outside lower center", markerscale=1.4, ncols=min(len(names), 5))
        return save_figure(figure, path)


def curves(
    path: Path, columns: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str
) -> Figure:
    """Learning curves: losses on one panel, other metrics on a second one.

    Args:
        path: The PNG.
        columns: For every logged name, such as `validation/tau`, its epochs and values; see
            `read_curves`.
        title: The title.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import curves
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     columns = {"train/loss": ([0, 1], [0.7, 0.5])}
        ...     figure = curves(Path(folder, "curves.png"), columns, title="Two epochs")
        >>> figure.axes[0].get_ylabel()
        'loss'
    """
    losses = {name: xy for name, xy in columns.items() if name.split("/")[-1] == "loss"}
    others = {name: xy for name, xy in columns.items() if name not in losses}
    drawn = [(kind, part) for kind, part in (("loss", losses), ("metric", others)) if part]
    if not drawn:
        raise UserError("Expected at least one column to draw learning curves of (got none)")
    ticker = require("matplotlib.ticker", "to draw figures")
    with figure_style():
        figure, panels = panels_of(len(drawn), (4.6, 3.5))
        for axes, (kind, part) in zip(panels, drawn, strict=True):
            lines = zip(part.items(), colours_of(len(part)), strict=True)
            for (name, (epochs, values)), colour in lines:
                marker = "o" if len(epochs) == 1 else None
                axes.plot(epochs, values, color=colour, label=name, marker=marker, lw=1.6)
            axes.set(xlabel="epoch", ylabel=kind)
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            lowest = min((y for _, ys in part.values() for y in ys if y == y), default=0.0)
            if kind == "metric" and lowest < -1:
                # R² of an untrained model may be hundreds below zero.
                highest = max(y for _, ys in part.values() for y in ys if y == y)
                axes.set_ylim(-1.05, max(highest, 0) + 0.1)
                axes.set_ylabel("metric (not shown below -1)")
            axes.legend()
        figure.suptitle(title, fontweight="bold", fontsize=11, color=INK)
        return save_figure(figure, path)


def read_curves(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """The columns of a run's `logs/metrics.csv`, each with the epochs in which it has a value.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import read_curves
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.csv")
        ...     _ = path.write_text("epoch,train/loss\\n0,0.7\\n1,0.5\\n")
        ...     print(read_curves(path))
        {'train/loss': ([0.0, 1.0], [0.7, 0.5])}
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name in ("epoch", "step") or not value or not row.get("epoch"):
                    continue
                epochs, values = found.setdefault(name, ([], []))
                epochs.append(float(row["epoch"]))
                values.append(float(value))
    return found


def confusion(
    path: Path, matrix: Sequence[Sequence[int]], classes: Sequence[str], *, title: str = ""
) -> Figure:
    """A confusion matrix: a row per true class, coloured by its share of that row.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import confusion
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     figure = confusion(Path(folder, "a.png"), [[3, 1], [0, 4]], ["a", "b"])
        >>> figure.axes[0].get_xlabel()
        'predicted'
    """
    count = len(classes)
    if len(matrix) != count or any(len(row) != count for row in matrix):
        raise UserError(
            f"Expected a confusion matrix of {count} rows and columns, one per class (got rows "
            f"of {[len(row) for row in matrix]})"
        )
    shares = [[x / (sum(row) or 1) for x in row] for row in matrix]
    names = [_short(name) for name in classes]
    size = min(2.0 + 0.28 * count + 0.06 * max(map(len, names), default=0), 12)
    with figure_style():
        figure, (axes,) = panels_of(1, (size + 0.6, size))
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(count), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(count), names)
        axes.set(xlabel="predicted", ylabel="true", title=title)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for i, row in enumerate(matrix if count <= _MANY_CLASSES else ()):
            for j, x in enumerate(row):
                ink = "white" if shares[i][j] > 0.55 else "#bbbbbb" if x == 0 else INK
                axes.text(j, i, str(x), ha="center", va="center", color=ink, fontsize=7.5)
        figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
        return save_figure(figure, path)


def bars(path: Path, table: Sequence[Mapping[str, Any]]) -> Figure:
    """Means with standard errors for every model, a panel per metric, each seed as a dot.

    Args:
        path: The PNG.
        table: Rows as from `compare`: `label`, `part`, `metric`, `mean`, `standard_error`
            (None for a single seed) and `values`, one for each seed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import bars
        >>> row = {"label": "nfn-np", "part": "test", "metric": "tau", "mean": 0.8}
        >>> row |= {"standard_error": None, "values": [0.8]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     figure = bars(Path(folder, "bars.png"), [row])
        >>> figure.axes[0].get_title()
        'Kendall tau'
    """
    rows = [r for r in table if r["part"] != "run" and r["metric"] not in BACKGROUND]
    if not rows:
        raise UserError("Expected at least one metric to draw (got none)")
    keys = ("label", "part", "metric")
    labels, parts, metrics = (list(dict.fromkeys(row[key] for row in rows)) for key in keys)
    colours = colours_of(len(labels))
    with figure_style():
        # Wide enough for the numbers; narrow panels stand in pairs.
        width = min(max(4.4, 1.0 + 0.55 * len(labels) * len(parts)), 9.0)
        figure, panels = panels_of(len(metrics), (width, 3.2), columns=2 if width < 5 else 1)
        for axes, metric in zip(panels, metrics, strict=True):
            chosen = [row for row in rows if row["metric"] == metric]
            for row in chosen:
                _bar(axes, row, parts.index(row["part"]), labels.index(row["label"]), colours)
            axes.set_xticks(range(len(parts)), map(_short, parts))
            axes.set_title(metric_name(metric))
            axes.grid(visible=False, axis="x")
            axes.axhline(0, color="#999999", linewidth=0.8)
            axes.margins(y=0.12)
        patches = require("matplotlib.patches", "to draw figures")
        handles = [patches.Patch(color=colour, alpha=0.8) for colour in colours]
        names = [_short(label, 70) for label in labels]
        in_a_row = max(1, min(len(labels), 70 // max(map(len, names))))
        figure.legend(handles, names, loc="outside lower center", ncols=in_a_row)
        return save_figure(figure, path)


def progress(
    path: Path,
    groups: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    name: str,
    *,
    evaluating: Collection[str] = (),
) -> Figure:
    """A validation metric against the seconds of training, one colour per model.

    The line of a model is the mean over its seeds. With several seeds, thin lines show each of
    them, and the mean ends with the shortest.

    Args:
        path: The PNG.
        groups: The label of every model with the seconds and the values of each of its runs.
        name: The name of the metric.
        evaluating: The labels of models that evaluate the network, whose lines are dashed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import progress
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     runs = {"nfn-np": [([1.0, 2.0], [0.5, 0.7])]}
        ...     figure = progress(Path(folder, "progress.png"), runs, "tau")
        >>> figure.axes[0].get_ylabel()
        'Kendall tau, validation networks'
    """
    if not groups:
        raise UserError("Expected at least one model to draw (got none)")
    ticker = require("matplotlib.ticker", "to draw figures")
    lines = require("matplotlib.lines", "to draw figures")
    with figure_style():
        figure, (axes,) = panels_of(1, (6.4, 4.0))
        handles = []
        for (label, runs), colour in zip(groups.items(), colours_of(len(groups)), strict=True):
            dashes = "--" if label in evaluating else "-"
            for seconds, values in runs if len(runs) > 1 else ():
                axes.plot(seconds, values, color=colour, ls=dashes, lw=0.7, alpha=0.5, label="_")
            mean = [
                [sum(at) / len(runs) for at in zip(*column, strict=False)]
                for column in zip(*runs, strict=True)
            ]
            shown = {"color": colour, "ls": dashes, "lw": 2.0, "label": textwrap.fill(label, 80)}
            handles += axes.plot(*mean, **shown, marker="o" if len(mean[0]) == 1 else None)
        if any(label in evaluating for label in groups):
            kinds = {"-": "reads weights", "--": "evaluates the network"}
            handles += [lines.Line2D([], [], color=INK, ls=k, label=v) for k, v in kinds.items()]
        axes.set(
            xscale="log",
            xlabel="seconds of training",
            ylabel=f"{metric_name(name)}, validation networks",
        )
        # 10, 20, 50, 100, ... instead of powers of ten, which a short axis has none of.
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        # Labels that differ in their last option only are not cut, or they would be the same.
        text = [line for handle in handles for line in str(handle.get_label()).split("\n")]
        in_a_row = max(1, min(len(handles), 90 // (max(map(len, text)) + 8)))
        figure.legend(handles=handles, loc="outside lower center", ncols=in_a_row, handlelength=2.6)
        # The legend takes no room from the lines.
        figure.set_figheight(3.6 + 0.2 * math.ceil(len(text) / in_a_row))
        return save_figure(figure, path)


def _bar(axes: Axes, row: Mapping[str, Any], part: int, place: int, colours: list[Any]) -> None:
    width = 0.82 / len(colours)
    x = part + (place - (len(colours) - 1) / 2) * width
    # A missing error draws no whiskers, unlike an error of zero.
    error = row["standard_error"]
    bar = axes.bar(x, row["mean"], width * 0.9, color=colours[place], alpha=0.8)
    if error is not None:
        axes.errorbar(x, row["mean"], yerr=error, color=INK, capsize=3, linewidth=1.2)
    values = list(row["values"])
    spread = [x + width * 0.5 * ((i + 0.5) / len(values) - 0.5) for i in range(len(values))]
    axes.scatter(spread, values, s=11, color="white", edgecolors=INK, linewidths=0.8, zorder=3)
    axes.bar_label(bar, [f"{row['mean']:.3g}"], label_type="center", fontsize=8, color="black")


def _short(text: str, longest: int = 24) -> str:
    """A name that leaves room for the figure."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers within names by their value: width 8 comes before width 16."""
    return [(int(x) if x.isdecimal() else -1, x) for x in re.split(r"(\d+)", name)]
