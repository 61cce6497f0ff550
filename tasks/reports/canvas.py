"""What all figures share: colours, style, panels, and files that do not depend on the time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nfn_graph.converters.errors import require
from nfn_graph.converters.files.atomic import replacing

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
    """As many colours; a scale if they are too many to have names."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    scale = require("matplotlib", "to draw figures").colormaps["viridis"]
    return [scale(0.95 * i / (count - 1)) for i in range(count)]


def figure_style() -> Any:
    """Within it, figures look alike."""
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
