"""Where the learned inputs of a model lie, or what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nfn_graph import Batch, Probe, WeightGraph
from nfn_graph.tasks.reports.canvas import COLOURS, INK, figure_style, panels_of, save_figure
from nfn_graph.tasks.zoo.siren import pixel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN, _COLUMNS = 48, 12
# Networks whose outputs are the background of their probes, and pixels of its sides.
_NETWORKS, _SIDE = 64, 48


@torch.no_grad()
def draw_probes(path: Path, model: nn.Module, graphs: Sequence[WeightGraph]) -> Figure | None:
    """Draws the inputs of a model's probe; nothing if it has none.

    Args:
        path: The PNG.
        model: The model.
        graphs: Networks that it reads, for the background of points in an image.
    """
    found = next((part for part in model.modules() if isinstance(part, Probe)), None)
    if found is None:
        return None
    inputs = found.inputs.detach().cpu()
    if inputs.dim() == 4 and inputs.shape[1] in (1, 3):
        return probe_images(path, inputs)
    if inputs.dim() != 2 or not 2 <= inputs.shape[1] <= 3:
        return None
    background = None
    if inputs.shape[1] == 2:
        batch = Batch.from_data_list(graphs[:_NETWORKS]).to(found.inputs.device)
        shown = batch.run(pixel_grid(_SIDE, _SIDE, found.inputs.dtype).T)
        background = shown.std(0, correction=0).mean(-1).view(_SIDE, _SIDE).cpu()
    return probe_points(path, inputs, background)


def probe_images(path: Path, inputs: Tensor) -> Figure:
    """The first probes of networks that read images, all on one scale.

    Args:
        path: The PNG.
        inputs: `[probes, 1 or 3, height, width]`.
    """
    shown = inputs[:_SHOWN]
    reach = float(shown.abs().quantile(0.99))
    with figure_style():
        figure, panels = panels_of(len(shown), (0.8, 0.8), min(_COLUMNS, len(shown)))
        for axes, image in zip(panels, shown, strict=True):
            if len(image) == 1:
                drawn = axes.imshow(image[0].numpy(), cmap="RdBu_r", vmin=-reach, vmax=reach)
            else:
                axes.imshow((image / (2 * reach) + 0.5).clamp(0, 1).permute(1, 2, 0).numpy())
            axes.set_axis_off()
        if shown.shape[1] == 1:
            figure.colorbar(drawn, ax=panels, shrink=0.6, label="value of a pixel")
        return save_figure(figure, path)


def probe_points(path: Path, inputs: Tensor, background: Tensor | None = None) -> Figure:
    """Probes of networks that read coordinates, seen along every axis but two.

    Args:
        path: The PNG.
        inputs: `[probes, 2 or 3]`; the first two coordinates are row and column of an image.
        background: `[rows, columns]`, how much the outputs of networks differ at each place.
    """
    pairs = list(combinations(range(inputs.shape[1]), 2))
    with figure_style():
        figure, panels = panels_of(len(pairs), (4.6, 4.0), columns=3)
        for axes, (down, across) in zip(panels, pairs, strict=True):
            if background is not None:
                image = axes.imshow(background.numpy(), cmap="Greys", extent=(-1, 1, 1, -1))
                label = "standard deviation of the outputs"
                figure.colorbar(image, ax=axes, shrink=0.8, label=label)
            axes.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], color=INK, linewidth=0.8)
            x, y = inputs[:, across].tolist(), inputs[:, down].tolist()
            axes.scatter(x, y, s=12, color=COLOURS[1], linewidths=0)
            reach = max(1.05, 1.05 * float(inputs.abs().max()))
            axes.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")
            axes.grid(visible=False)
            axes.set(xlabel=f"coordinate {across + 1}", ylabel=f"coordinate {down + 1}")
        return save_figure(figure, path)
