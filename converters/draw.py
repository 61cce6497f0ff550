"""Pictures of graphs: layers of neurons, edges coloured by weight, kernels as small images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nfn_graph import NeuronType, WeightGraph, WeightType
from nfn_graph.converters.errors import require
from nfn_graph.converters.layouts import layout_of
from nfn_graph.data import Layout
from nfn_graph.messages import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = "RdBu_r"
_NAN = "#00a651"
_HEIGHT = 10.0  # of a column of neurons, in the units of the picture


def draw(graph: WeightGraph, *, max_neurons: int = 16, channel: int = 0) -> Figure:
    """Draws a network as a figure, which can be shown in a notebook or saved with `savefig`.

    Layers are drawn side by side in the order of the graph's types. The colour of an edge shows its
    weight relative to the largest one of its type. For a kernel, it shows the mean of the taps, and
    some kernels are drawn below. The colour of a neuron shows its first value, usually the bias. In
    layers with more than `max_neurons` neurons, only some are drawn, and a note says how many.

    Args:
        graph: A graph of one network.
        max_neurons: The largest number of neurons of a layer to draw.
        channel: The channel of the graph to draw.

    Example:
        >>> import io
        >>> from torch import nn
        >>> from nfn_graph.converters import draw, from_module
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> draw(from_module(network)).savefig(io.BytesIO())
    """
    layout_of(graph)
    channels = graph[graph.spec.weights[0].key].edge_attr.shape[-1]
    if not 0 <= channel < channels:
        raise UserError(f"Expected a channel from 0 to {channels - 1} (got {channel})")
    if max_neurons < 2:
        raise UserError(f"Expected to show at least 2 neurons (got max_neurons={max_neurons})")
    figures = require("matplotlib.figure", "to draw graphs")
    picture = _Picture(graph, max_neurons, channel)
    width = min(3.2 + 1.55 * len(graph.spec.neurons), 60)
    kernels = any(weight.taps > 1 for weight in graph.spec.weights)
    figure = figures.Figure(figsize=(width, 7.4 if kernels else 5.6), dpi=110)
    axes = figure.add_axes((0.01, 0.02, 0.98 - 0.9 / width, 0.94))
    picture.draw(axes)
    _add_scale(figure, width)
    return figure


class _Picture:
    def __init__(self, graph: WeightGraph, max_neurons: int, channel: int) -> None:
        self.graph = graph
        self.channel = channel
        self.columns = {n.name: i for i, n in enumerate(graph.spec.neurons)}
        self.shown = {
            n.name: _choice(graph[n.name].x.shape[0], max_neurons) for n in graph.spec.neurons
        }
        self.kernel_count: dict[float, int] = {}

    def draw(self, axes: Any) -> None:
        """Draws edges below neurons, and texts around them."""
        right = max(self.columns.values())
        axes.set_xlim(-0.6, right + 0.6)
        axes.axis("off")
        for weight in self.graph.spec.weights:
            self._draw_edges(axes, weight)
        for neuron in self.graph.spec.neurons:
            self._draw_neurons(axes, neuron)
        for weight in self.graph.spec.weights:
            if weight.taps > 1:
                self._draw_kernels(axes, weight)
        note = "squares keep their order, circles may be permuted"
        if any(bool(_wide(store).isnan().any()) for store in self._stores()):
            note += ", green is NaN"
        low = min([-1.9, *(-2.6 - 3.4 * n for n in self.kernel_count.values())])
        axes.set_ylim(low, _HEIGHT + 1.4)
        axes.text(-0.55, low + 0.1, note, ha="left", va="bottom", fontsize=7, color="#555555")

    def _stores(self) -> Iterator[Tensor]:
        for neuron in self.graph.spec.neurons:
            yield self.graph[neuron.name].x
        for weight in self.graph.spec.weights:
            yield self.graph[weight.key].edge_attr

    def _heights(self, name: str) -> Tensor:
        count = len(self.shown[name])
        if count == 1:
            return torch.tensor([_HEIGHT / 2])
        spread = _HEIGHT * min(1.0, 0.35 + 0.65 * count / 12)
        # Neurons of one group, or of one head, are drawn closer together.
        groups = self._groups(name)
        steps = torch.arange(count) + 0.8 * (groups.diff(prepend=groups[:1]) != 0).cumsum(0)
        return _HEIGHT / 2 + spread / 2 - spread * steps / steps[-1]

    def _groups(self, name: str) -> Tensor:
        """Returns the parent of every neuron that is shown."""
        parents = self.graph.spec.neuron[name].parents
        if not parents:
            return torch.zeros(len(self.shown[name]), dtype=torch.long)
        total, groups = (self.graph[n].x.shape[0] for n in (name, parents[0]))
        return self.shown[name] * groups // total

    def _matrix(self, weight: WeightType) -> Tensor:
        """Returns the shown kernels `[targets, sources, taps]`, relative to the largest one.
        Kernels between neurons of different groups, which a weight does not connect, are zero.
        """
        x = _wide(self.graph[weight.key].edge_attr[..., self.channel].detach())
        targets, sources = (self.graph[n].x.shape[0] for n in (weight.target, weight.source))
        groups = max(targets * sources // max(x.shape[0], 1), 1)
        inside = sources // groups
        rows, columns = self.shown[weight.target], self.shown[weight.source]
        is_joined = (rows * groups // targets)[:, None] == (columns * groups // sources)[None, :]
        index = torch.where(is_joined, rows[:, None] * inside + columns[None, :] % inside, 0)
        largest = x.nan_to_num(0.0, 0.0, 0.0).abs().max().double()
        kernels = x[index.reshape(-1)].double().reshape(*index.shape, -1) / (largest or 1.0)
        return torch.where(is_joined[..., None], kernels, 0.0)

    def _draw_edges(self, axes: Any, weight: WeightType) -> None:
        collections = require("matplotlib.collections", "to draw graphs")
        values = self._matrix(weight).mean(-1)
        largest = values.nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
        left, right = self.columns[weight.source], self.columns[weight.target]
        starts, ends = self._heights(weight.source), self._heights(weight.target)
        curves, colours, widths = [], [], []
        for (i, end), (j, start) in (
            (t, s) for t in enumerate(ends.tolist()) for s in enumerate(starts.tolist())
        ):
            value = float(values[i, j]) / largest
            curves.append(_curve(left, start, right, end))
            colours.append(_colour(value))
            widths.append(0.4 + 1.2 * min(abs(value), 1.0) if value == value else 1.6)
        axes.add_collection(
            collections.LineCollection(curves, colors=colours, linewidths=widths, zorder=1)
        )

    def _draw_neurons(self, axes: Any, neuron: NeuronType) -> None:
        x = self.graph[neuron.name].x
        shown = self.shown[neuron.name]
        heights = self._heights(neuron.name)
        position = self.columns[neuron.name]
        colours: list[Any] = ["#f2f2f2"] * len(shown)
        if neuron.taps:
            values = x[:, 0, self.channel].detach().double()
            largest = values.nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
            colours = [_colour(float(values[i]) / largest, 1.0) for i in shown.tolist()]
        axes.scatter(
            [position] * len(shown),
            heights.tolist(),
            s=max(30, 110 - 4 * len(shown)),
            marker="s" if neuron.fixed else "o",
            c=colours,
            edgecolors="#333333",
            linewidths=0.9,
            zorder=3,
        )
        count = x.shape[0]
        note = f"{count} neurons" if count != 1 else "1 neuron"
        if len(shown) < count:
            note = f"{len(shown)} of {count} shown"
            middle = len(shown) // 2
            height = float(heights[middle - 1] + heights[middle]) / 2
            axes.text(position, height, "⋮", ha="center", va="center", fontsize=13, zorder=4)
        if neuron.parents:
            note += f"\nin {' x '.join(neuron.parents)}"
        taps = "no values" if not neuron.taps else f"{neuron.taps} value{'s' * (neuron.taps > 1)}"
        axes.text(position, _HEIGHT + 1.1, neuron.name, ha="center", va="top", fontsize=9)
        axes.text(
            position, -0.45, f"{note}\n{taps}", ha="center", va="top", fontsize=7, color="#555555"
        )

    def _draw_kernels(self, axes: Any, weight: WeightType) -> None:
        """Draws some of the kernels below the gap between their layers."""
        matrix = self._matrix(weight)[:3, :3]
        height, width = _kernel_shape(self.graph.layout, weight)
        rows, columns = matrix.shape[:2]
        # Blank lines between the kernels.
        image = torch.zeros(rows * (height + 1) - 1, columns * (width + 1) - 1, 4)
        for i in range(rows):
            for j in range(columns):
                pixels = torch.tensor([_colour(v, 1.0) for v in matrix[i, j].tolist()])
                top, left = i * (height + 1), j * (width + 1)
                image[top : top + height, left : left + width] = pixels.reshape(height, width, 4)
        centre = (self.columns[weight.source] + self.columns[weight.target]) / 2
        place = self.kernel_count.get(centre, 0)
        self.kernel_count[centre] = place + 1
        # The two axes have different scales: one column is about 4.8 units of height.
        size = 1.0 / max(image.shape[:2])
        half = (image.shape[1] * size / 4.8, image.shape[0] * size)
        middle = -3.2 - 3.4 * place
        axes.imshow(
            image.numpy(),
            extent=(centre - half[0], centre + half[0], middle - half[1], middle + half[1]),
            aspect="auto",
            interpolation="nearest",
            zorder=2,
        )
        style = {"ha": "center", "va": "top", "fontsize": 7, "color": "#555555"}
        name = f"{weight.source} → {weight.target}\n{height} × {width} kernels"
        axes.text(centre, middle - 1.15, name, **style)


def _wide(x: Tensor) -> Tensor:
    """Casts 8-bit floats, for which torch supports few operations, to float32."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _choice(count: int, most: int) -> Tensor:
    """Returns the positions of the neurons to show: all, or some from the first to the last."""
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


def _curve(left: int, start: float, right: int, end: float) -> list[tuple[float, float]]:
    """Returns a straight line between neighbours, otherwise an arc past the columns between."""
    if right - left == 1:
        return [(left, start), (right, end)]
    steps = [i / 24 for i in range(25)]
    if left == right:
        loop = 0.45 if start == end else 0.0
        return [
            (
                left + (0.12 if loop else 0.26) * math.sin(math.pi * t),
                start + (end - start) * t + loop * math.sin(2 * math.pi * t),
            )
            for t in steps
        ]
    lift = 0.9 * (abs(right - left) - 0.4)
    return [
        (left + (right - left) * t, start + (end - start) * t - lift * math.sin(math.pi * t))
        for t in steps
    ]


def _colour(value: float, alpha: float | None = None) -> tuple[float, float, float, float]:
    """Returns the colour of a value between -1 and 1; small weights are faint."""
    colours = require("matplotlib.colors", "to draw graphs")
    if value != value:
        return colours.to_rgba(_NAN)
    value = max(-1.0, min(1.0, value))
    red, green, blue, _ = require("matplotlib", "to draw graphs").colormaps[_COLOURS](
        0.5 + value / 2
    )
    return red, green, blue, 0.12 + 0.78 * abs(value) if alpha is None else alpha


def _kernel_shape(layout: Layout, weight: WeightType) -> tuple[int, int]:
    """Returns the height and width in which the taps of a type are shown.

    Only the number of positions is known after a flatten. Most are square.
    """
    for placement in layout.placements:
        if placement.store == weight.key and placement.taps == weight.taps:
            taken = zip(placement.axes, placement.taken, strict=True)
            sizes = [size for axis, size in taken if axis == "tap"]
            if len(sizes) > 1 or placement.view == placement.shape:
                return math.prod(sizes[:-1]), sizes[-1]
    root = math.isqrt(weight.taps)
    return (root, root) if root * root == weight.taps else (1, weight.taps)


def _add_scale(figure: Any, width: float) -> None:
    cm = require("matplotlib.cm", "to draw graphs")
    colours = require("matplotlib.colors", "to draw graphs")
    scale = figure.add_axes((1 - 0.8 / width, 0.3, 0.14 / width, 0.45))
    bar = figure.colorbar(cm.ScalarMappable(colours.Normalize(-1, 1), _COLOURS), cax=scale)
    bar.set_ticks([-1, 0, 1])
    bar.set_label("relative to the largest of its type", fontsize=7)
    bar.ax.tick_params(labelsize=7)
