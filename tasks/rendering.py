"""Images of SIRENs that are weight graphs: many networks at once, with gradients.

Networks of one shape are computed together; nothing is padded, so every image is what the
network alone would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nfn_graph import NetworkSpec, WeightFeatures, WeightGraph
from nfn_graph.data import Layout, Placement, Shape
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, WeightKey
from nfn_graph.tasks.zoo.optimisers import Parameters
from nfn_graph.tasks.zoo.siren import pixel_grid, siren_forward


def render_graphs(graph: WeightGraph, size: tuple[int, int], w0: Tensor, offset: Tensor) -> Tensor:
    """The images that SIRENs hold, differentiable in their weights.

    Args:
        graph: One network or a batch, of any widths and depths. With several channels, each holds
            the weights of a network, and the image is the mean of their images.
        size: Height and width of the images.
        w0: `[networks]`, the frequency factor of each.
        offset: `[networks]`, what is added to the outputs of each.

    Returns:
        `[networks, outputs, height, width]`.
    """
    raw, layouts = graph.features(), graph.layouts
    grid = pixel_grid(*size, raw.dtype).to(raw.device)
    groups: dict[tuple[NetworkSpec, Shape, float, float], list[int]] = {}
    numbers = zip(layouts, w0.tolist(), offset.tolist(), strict=True)
    for i, (layout, factor, shift) in enumerate(numbers):
        groups.setdefault((layout.spec, layout.shape, factor, shift), []).append(i)
    images, order = [], []
    for (_, _, factor, shift), members in groups.items():
        parameters = _stacked(raw, layouts, members)
        shown = siren_forward(parameters, grid, factor, shift)
        images.append(shown.unflatten(0, (len(members), raw.channels)).mean(1))
        order += members
    found = torch.cat(images) if len(images) > 1 else images[0]
    if len(groups) > 1:
        found = found[torch.tensor(order, device=raw.device).argsort()]
    return found.unflatten(-1, size)


def joined_networks(graph: WeightGraph) -> WeightGraph:
    r"""One SIREN that shows the mean of the images of several, which are the channels of a graph.

    .. math:: \frac{1}{k} \sum_{c=1}^k f_c(x)

    Their hidden neurons stand beside each other, so its hidden layers are `k` times as wide and
    block diagonal; the last weights are divided by `k`, the last biases are the mean. It is a
    network like any other, with the tensor names of the original.

    Args:
        graph: One network (not a batch) with a channel for each of the networks to join.
    """
    layout = graph.layout
    if not isinstance(layout, Layout):
        raise TypeError("Expected one network (got a batch; take batch[i] of it)")
    siren_layers(layout.spec)
    if any(p.view != p.shape or not p.is_whole for p in layout.placements):
        raise UserError("Expected tensors that hold one layer each (got others)")
    raw = graph.features()
    count, free = raw.channels, {n.name for n in layout.spec.neurons if not n.fixed}
    stores: dict[Key, Tensor] = {}
    for name, x in raw.neurons.items():
        joined = x.movedim(-1, 0).flatten(0, 1) if name in free else x.mean(-1)
        stores[name] = joined.unsqueeze(-1)
    for key, x in raw.weights.items():
        blocks = x.movedim(-1, 0).reshape(count, layout.num_rows(key[2]), layout.num_rows(key[0]))
        if key[0] not in free:
            weight = blocks.flatten(0, 1) if key[2] in free else blocks.mean(0)
        elif key[2] in free:
            weight = torch.block_diag(*blocks)
        else:
            weight = blocks.transpose(0, 1).flatten(1) / count
        stores[key] = weight.reshape(-1, 1, 1)
    sizes = zip(layout.spec.neurons, layout.shape.sizes, strict=True)
    shape = layout.shape._replace(
        sizes=tuple(tuple(n * (count if t.name in free else 1) for n in own) for t, own in sizes),
    )
    placements = tuple(_widened(p, free, count) for p in layout.placements)
    return graph.rebuilt(replace(layout, shape=shape, placements=placements, before=None), stores)


def _widened(placement: Placement, free: set[str], count: int) -> Placement:
    """The placement of a tensor whose hidden layers have more neurons."""
    store = placement.store
    ends = {"neuron": store, "source": store[0], "target": store[-1]}
    shape = tuple(
        n * (count if ends.get(axis) in free else 1)
        for n, axis in zip(placement.shape, placement.axes, strict=True)
    )
    return replace(placement, shape=shape, view=shape, stop=shape)


def siren_layers(spec: NetworkSpec) -> list[WeightKey]:
    """The layers of a SIREN that reads the two coordinates of an image, the first one first."""
    after = {weight.source: weight.key for weight in spec.weights}
    before = {weight.target: weight.key for weight in spec.weights}
    first = [n for n in spec.neurons if n.name not in before]
    is_chain = len(after) == len(before) == len(spec.weights) == len(spec.neurons) - 1
    is_dense = all(w.taps == 1 and spec.neuron[w.target].taps == 1 for w in spec.weights)
    if not (is_chain and is_dense and len(first) == 1 and first[0].size == 2):
        raise UserError(
            f"Expected a SIREN of an image: dense layers with biases, one after the other, the "
            f"first of which reads 2 coordinates (got {spec})"
        )
    keys = [after[first[0].name]]
    while keys[-1][2] in after:
        keys.append(after[keys[-1][2]])
    return keys


def _stacked(raw: WeightFeatures, layouts: Sequence[Layout], members: Sequence[int]) -> Parameters:
    """The parameters of networks of one shape along a first axis, every channel by itself."""
    own = layouts[members[0]]
    parameters: Parameters = {}
    for i, key in enumerate(siren_layers(own.spec)):
        outputs, inputs = own.num_rows(key[2]), own.num_rows(key[0])
        weight = _rows(raw.weights[key], key, layouts, members)
        parameters[f"layers.{i}.weight"] = _by_channel(weight, outputs * inputs).unflatten(
            -1, (outputs, inputs)
        )
        bias = _rows(raw.neurons[key[2]], key[2], layouts, members)
        parameters[f"layers.{i}.bias"] = _by_channel(bias, outputs)
    return parameters


def _by_channel(rows: Tensor, count: int) -> Tensor:
    """Rows `[networks * count, 1, channels]` as `[networks * channels, count]`."""
    return rows.view(-1, count, rows.shape[-1]).transpose(1, 2).flatten(0, 1)


def _rows(x: Tensor, key: Key, layouts: Sequence[Layout], members: Sequence[int]) -> Tensor:
    """The rows of some networks, one after the other."""
    if len(members) == len(layouts):
        return x
    counts = [layout.num_rows(key) if key in layout.spec.types else 0 for layout in layouts]
    # One split and one cat: the gradient of every slice alone would be as large as `x`.
    parts = x.split(counts)
    return torch.cat([parts[i] for i in members])
