"""Figures of the contents of networks and of what models do to them: pictures, masks, probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nfn_graph import Batch, Probe, WeightGraph
from nfn_graph.tasks.reports.figures import (
    COLOURS,
    INK,
    figure_style,
    panels_of,
    save_figure,
    show_picture,
)
from nfn_graph.tasks.zoo.siren import pixel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = ("original", "edited", "target")
_PICTURES_IN_A_ROW, _PROBES_IN_A_ROW = 8, 12
# The most weights of a layer and the most probes that are drawn.
_MOST_POINTS, _MOST_PROBES = 4000, 48
# The networks whose outputs are the background of their probes, and the pixels of its sides.
_NETWORKS, _SIDE = 64, 48


def edit_sheet(path: Path, original: Tensor, edited: Tensor, target: Tensor) -> Figure:
    """Draws a column for every network.

    Args:
        path: The PNG.
        original: `[count, 1 or 3, height, width]`, shown within [0, 1].
        edited: The same pictures after the edit.
        target: The target pictures.
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


def gallery(path: Path, pictures: Tensor, captions: Sequence[str], right: Sequence[bool]) -> Figure:
    """Draws pictures in a grid.

    Args:
        path: The PNG.
        pictures: `[count, 1 or 3, height, width]`, shown within [0, 1].
        captions: One caption per picture.
        right: Whether each caption is true; the colour says so.
    """
    with figure_style():
        columns = min(_PICTURES_IN_A_ROW, len(captions))
        figure, panels = panels_of(len(captions), (0.95, 1.1), columns=columns)
        for axes, picture, caption, is_right in zip(panels, pictures, captions, right, strict=True):
            show_picture(axes, picture)
            axes.set_axis_off()
            axes.set_title(caption, color=COLOURS[2] if is_right else COLOURS[1], fontsize=7)
        return save_figure(figure, path)


def score_plot(
    path: Path, layers: Mapping[str, tuple[Tensor, Tensor, Tensor]], *, title: str
) -> Figure:
    """Draws a point for every weight, in another colour where the winning ticket keeps it.

    Args:
        path: The PNG.
        layers: For every layer, initial weights, scores and whether each weight is kept.
        title: The title.
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
    shown = inputs[:_MOST_PROBES]
    reach = float(shown.abs().quantile(0.99))
    with figure_style():
        figure, panels = panels_of(len(shown), (0.8, 0.8), min(_PROBES_IN_A_ROW, len(shown)))
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
        background: `[rows, columns]`, the standard deviation of the outputs at each place.
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
