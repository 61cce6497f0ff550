"""A sheet of pictures, each with what it was taken for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nfn_graph.tasks.reports.canvas import (
    COLOURS,
    figure_style,
    panels_of,
    save_figure,
    show_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 8


def gallery(path: Path, pictures: Tensor, captions: Sequence[str], right: Sequence[bool]) -> Figure:
    """Draws pictures in a grid.

    Args:
        path: The PNG.
        pictures: `[count, 1 or 3, height, width]`, shown within [0, 1].
        captions: One for each.
        right: Whether each caption is true; the colour says so.
    """
    with figure_style():
        columns = min(_COLUMNS, len(captions))
        figure, panels = panels_of(len(captions), (0.95, 1.1), columns=columns)
        for axes, picture, caption, is_right in zip(panels, pictures, captions, right, strict=True):
            show_picture(axes, picture)
            axes.set_axis_off()
            axes.set_title(caption, color=COLOURS[2] if is_right else COLOURS[1], fontsize=7)
        return save_figure(figure, path)
