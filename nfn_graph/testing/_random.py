"""Networks of any spec with random weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nfn_graph.data import Layout, WeightGraph
from nfn_graph.data._layout_checks import shared_neurons
from nfn_graph.messages import UserError
from nfn_graph.spec import NetworkSpec, Shape


def random_graph(
    spec: NetworkSpec,
    sizes: Mapping[str, int | tuple[int, ...]] | None = None,
    channels: int = 1,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> WeightGraph:
    """Makes a graph of a spec with normally distributed values.

    Args:
        spec: The types.
        sizes: The number of neurons of every type; for a nested type, the number inside one parent;
            for a role type, the sizes of its layers, which follow one another. The sizes of fixed
            types and of pairs of two parents are known. By default, small sizes at which all orbits
            are distinct.
        channels: The number of channels of the features.
        dtype: The dtype of the features.
        generator: The random generator, for reproducible values.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> random_graph(spec, {"hidden1": 4}, channels=3)["hidden1"].x.shape
        torch.Size([4, 1, 3])
    """
    unknown = [name for name in sizes or {} if name not in spec.neuron]
    if unknown:
        raise UserError(f"Expected sizes of {list(spec.neuron)} (got one of {unknown[0]!r})")
    shape = _shape(spec, sizes or {})
    graph = WeightGraph()
    graph.layout = layout = Layout(spec, shape)
    for neuron in spec.neurons:
        count = layout.num_rows(neuron.name)
        shape_x = (count, neuron.taps, channels)
        graph[neuron.name].x = torch.randn(shape_x, dtype=dtype, generator=generator)
    for weight in spec.weights:
        shape_x = (layout.num_rows(weight.key), weight.taps, channels)
        graph[weight.key].edge_attr = torch.randn(shape_x, dtype=dtype, generator=generator)
    return graph


def _shape(spec: NetworkSpec, sizes: Mapping[str, int | tuple[int, ...]]) -> Shape:
    selves = {w.source for w in spec.weights if spec.is_self(w)}
    layers: dict[str, tuple[int, ...]] = {}
    for i, neuron in enumerate(spec.neurons):
        default: int | tuple[int, ...] = neuron.size or (4 if neuron.name in selves else 2 + i % 2)
        if neuron.role:
            default = (2, 3)
        size = sizes.get(neuron.name, default)
        layers[neuron.name] = size if isinstance(size, tuple) else (size,)
        if len(neuron.parents) == 1:
            layers[neuron.name] = (sum(layers[neuron.name]) * sum(layers[neuron.parents[0]]),)
        elif len(neuron.parents) == 2:
            first, second = neuron.parents
            pairs = sum(layers[first]) * sum(layers[second])
            layers[neuron.name] = (pairs // shared_neurons(spec, layers, first, second),)
    blocks = []
    for weight in spec.weights:
        targets, sources = len(layers[weight.target]), len(layers[weight.source])
        if weight.source == weight.target and targets > 1:
            blocks.append(tuple((i + 1, i) for i in range(targets - 1)))
        else:
            blocks.append(((0, sources - 1),))
    return Shape(tuple(layers.values()), tuple(blocks))
