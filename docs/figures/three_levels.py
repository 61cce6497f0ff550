"""Draws `three_levels.png`, the picture of the README: `python docs/figures/three_levels.py`."""

import io
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import nn

from nfn_graph import WeightGraph
from nfn_graph.converters import draw, from_module

DPI = 170
INK, SOFT = "#222222", "#666666"
LEVELS = [
    ("network", "what no permutation moves", "#f6e5c4"),
    ("neurons", "biases, norms: one row per node", "#d9e9d5"),
    ("weights", "one row per edge, its taps", "#d6e4f0"),
]


def matrices(axes: Axes, network: nn.Sequential) -> None:
    """The tensors of a network, as a checkpoint keeps them."""
    top = 0.0
    for key, value in network.state_dict().items():
        rows = value.detach().reshape(len(value), -1)
        rows = rows.T if value.dim() == 1 else rows
        height, width = rows.shape
        axes.imshow(
            (rows / value.abs().max()).numpy(),
            cmap="RdBu_r",
            vmin=-1,
            vmax=1,
            extent=(0, width, top - height, top),
        )
        for i in range(height + 1):
            axes.plot([0, width], [top - i] * 2, color=SOFT, linewidth=0.4)
        for j in range(width + 1):
            axes.plot([j] * 2, [top - height, top], color=SOFT, linewidth=0.4)
        axes.text(width + 0.4, top - height / 2, key, va="center", fontsize=8.5, color=INK)
        top -= height + 0.8
    axes.set(xlim=(-0.3, 9.6), ylim=(top, 0.4), aspect="equal")


def graph_picture(graph: WeightGraph, width: float, height: float) -> np.ndarray:
    """What `draw` makes of a graph, without its scale of colours, as pixels."""
    figure = draw(graph)
    figure.set_size_inches(width, height)
    figure.axes[1].remove()
    figure.axes[0].set_position((0.0, 0.0, 1.0, 1.0))
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI)
    file.seek(0)
    return matplotlib.image.imread(file)


def levels(axes: Axes) -> None:
    """Three levels, means going up and messages coming down."""
    for i, (name, what, colour) in enumerate(LEVELS):
        y = 2 * (2 - i)
        box = FancyBboxPatch(
            (0, y), 8, 1.05, boxstyle="round,pad=0.06,rounding_size=0.2", fc=colour, ec=SOFT, lw=0.8
        )
        axes.add_patch(box)
        axes.text(0.25, y + 0.72, name, fontsize=10.5, weight="bold", va="center", color=INK)
        axes.text(0.25, y + 0.27, what, fontsize=8.5, va="center", color=INK)
        if i == 2:
            continue
        style = {"arrowstyle": "-|>", "color": INK, "lw": 1.3}
        axes.annotate("", (1.2, y - 0.08), (1.2, y - 0.87), arrowprops=style)
        axes.annotate("", (5.0, y - 0.87), (5.0, y - 0.08), arrowprops=style)
        axes.text(1.5, y - 0.48, "means", fontsize=9, va="center", color=INK)
        axes.text(5.3, y - 0.48, "messages", fontsize=9, va="center", color=INK)
    axes.set(xlim=(-0.2, 8.3), ylim=(-0.75, 5.5))


def three_levels() -> Figure:
    """A network, its graph, and where a layer works on it."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    figure = Figure(figsize=(10.4, 4.1), facecolor="white")
    left, middle, right = (
        figure.add_axes(place)
        for place in ((0.01, 0.02, 0.2, 0.85), (0.21, 0.0, 0.45, 0.87), (0.69, 0.02, 0.3, 0.85))
    )
    for axes, title in (
        (left, "a network: tensors"),
        (middle, "its graph: neurons and weights"),
        (right, "a layer: three levels"),
    ):
        axes.axis("off")
        place = axes.get_position()
        figure.text(place.x0 + place.width / 2, 0.94, title, ha="center", fontsize=11.5, color=INK)
    matrices(left, network)
    middle.imshow(graph_picture(from_module(network), 10.4 * 0.45, 4.1 * 0.87), aspect="auto")
    levels(right)
    return figure


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png")
    # No date or version in the file: the same picture is the same bytes.
    three_levels().savefig(path, dpi=DPI, metadata={"Software": None})
