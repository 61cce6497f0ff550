"""A sheet of pictures, each with what it was taken for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nfn_graph.tasks.reports.figures import COLOURS, _panels, _save, _style

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
    shown = pictures.detach().cpu().clamp(0, 1).permute(0, 2, 3, 1).numpy()
    with _style():
        columns = min(_COLUMNS, len(captions))
        figure, panels = _panels(len(captions), (0.95, 1.1), columns=columns)
        for axes, picture, caption, is_right in zip(panels, shown, captions, right, strict=True):
            image = picture.squeeze(2) if picture.shape[2] == 1 else picture
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
            axes.set_title(caption, color=COLOURS[2] if is_right else COLOURS[1], fontsize=7)
        return _save(figure, path)
