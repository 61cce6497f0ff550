"""Images of SIRENs that are weight graphs: many networks at once, with gradients.

Networks of one shape are computed together; nothing is padded, so every image is what the
network alone would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nfn_graph import NetworkSpec, WeightFeatures, WeightGraph
from nfn_graph.data import Layout, Shape
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, WeightKey
from nfn_graph.tasks.zoo.optimisers import Parameters
from nfn_graph.tasks.zoo.siren import pixel_grid, siren_forward


def render_graphs(graph: WeightGraph, size: tuple[int, int], w0: Tensor, offset: Tensor) -> Tensor:
    """The images that SIRENs hold, differentiable in their weights.

    Args:
        graph: One network or a batch, of any widths and depths.
        size: Height and width of the images.
        w0: `[networks]`, the frequency factor of each.
        offset: `[networks]`, what is added to the outputs of each.

    Returns:
        `[networks, outputs, height, width]`.
    """
    raw, layouts = graph.features(), graph.layouts
    if raw.channels != 1:
        raise UserError(f"Expected one channel, the weights (got {raw.channels})")
    grid = pixel_grid(*size, raw.dtype).to(raw.device)
    groups: dict[tuple[NetworkSpec, Shape, float, float], list[int]] = {}
    numbers = zip(layouts, w0.tolist(), offset.tolist(), strict=True)
    for i, (layout, factor, shift) in enumerate(numbers):
        groups.setdefault((layout.spec, layout.shape, factor, shift), []).append(i)
    images, order = [], []
    for (_, _, factor, shift), members in groups.items():
        parameters = _stacked(raw, layouts, members)
        images.append(siren_forward(parameters, grid, factor, shift))
        order += members
    found = torch.cat(images) if len(images) > 1 else images[0]
    if len(groups) > 1:
        found = found[torch.tensor(order, device=raw.device).argsort()]
    return found.unflatten(-1, size)


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
    """The parameters of networks of one shape along a first axis."""
    own = layouts[members[0]]
    parameters: Parameters = {}
    for i, key in enumerate(siren_layers(own.spec)):
        outputs, inputs = own.num_rows(key[2]), own.num_rows(key[0])
        weight = _rows(raw.weights[key], key, layouts, members)
        parameters[f"layers.{i}.weight"] = weight.view(-1, outputs, inputs)
        bias = _rows(raw.neurons[key[2]], key[2], layouts, members)
        parameters[f"layers.{i}.bias"] = bias.view(-1, outputs)
    return parameters


def _rows(x: Tensor, key: Key, layouts: Sequence[Layout], members: Sequence[int]) -> Tensor:
    """The rows of some networks, one after the other."""
    if len(members) == len(layouts):
        return x
    counts = [layout.num_rows(key) if key in layout.spec.types else 0 for layout in layouts]
    # One split and one cat: the gradient of every slice alone would be as large as `x`.
    parts = x.split(counts)
    return torch.cat([parts[i] for i in members])
