"""The score of a mask against the initial value of the weight, a panel for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nfn_graph.tasks.reports.canvas import COLOURS, figure_style, panels_of, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 4000


def score_plot(
    path: Path, layers: Mapping[str, tuple[Tensor, Tensor, Tensor]], *, title: str
) -> Figure:
    """Draws a point for every weight, in another colour where the winning ticket keeps it.

    Args:
        path: The PNG.
        layers: For every layer, initial weights, scores and whether each weight is kept.
        title: What is shown.
    """
    with figure_style():
        figure, panels = panels_of(len(layers), (3.4, 3.0), columns=3)
        for axes, (name, columns) in zip(panels, layers.items(), strict=True):
            step = max(1, len(columns[0]) // _MOST_POINTS)
            initial, scores, kept = (x.detach().cpu()[::step] for x in columns)
            parts = ((~kept, "pruned", COLOURS[6]), (kept, "kept", COLOURS[1]))
            for chosen, label, colour in parts:
                axes.scatter(
                    initial[chosen].tolist(),
                    scores[chosen].tolist(),
                    s=5,
                    color=colour,
                    alpha=0.5,
                    linewidths=0,
                    label=f"{label} by IMP",
                )
            axes.set(xlabel="initial weight", ylabel="score (logit)", title=name)
        panels[0].legend(markerscale=2)
        figure.suptitle(title, fontweight="bold", fontsize=11)
        return save_figure(figure, path)
