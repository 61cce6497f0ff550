"""A sheet of edited pictures: the original above, then the edited one, then the target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nfn_graph.tasks.reports.canvas import figure_style, panels_of, save_figure, show_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = ("original", "edited", "target")


def edit_sheet(path: Path, original: Tensor, edited: Tensor, target: Tensor) -> Figure:
    """Draws a column for every network.

    Args:
        path: The PNG.
        original: `[count, 1 or 3, height, width]`, shown within [0, 1].
        edited: The same pictures after the edit.
        target: What the edit was to give.
    """
    columns = len(original)
    with figure_style():
        figure, panels = panels_of(3 * columns, (0.95, 0.95), columns=columns)
        for row, (name, pictures) in enumerate(zip(_ROWS, (original, edited, target), strict=True)):
            for column, picture in enumerate(pictures):
                axes = panels[row * columns + column]
                show_picture(axes, picture)
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
                axes.grid(visible=False)
                if column == 0:
                    axes.set_ylabel(name)
        return save_figure(figure, path)
