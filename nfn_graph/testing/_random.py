"""Networks of any spec with random weights."""

from __future__ import annotations

import math
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
    layout = Layout(spec, _shape(spec, sizes or {}))
    shapes = {
        key: (layout.num_rows(key), type_.taps, channels) for key, type_ in spec.types.items()
    }
    return WeightGraph().rebuilt(
        layout,
        {key: torch.randn(x, dtype=dtype, generator=generator) for key, x in shapes.items()},
    )


def _shape(spec: NetworkSpec, sizes: Mapping[str, int | tuple[int, ...]]) -> Shape:
    selves = {w.source for w in spec.weights if spec.is_self(w)}
    layers: dict[str, tuple[int, ...]] = {}
    for i, neuron in enumerate(spec.neurons):
        width = neuron.size or (4 if neuron.name in selves else 2 + i % 2)
        size = sizes.get(neuron.name, (2, 3) if neuron.role else width)
        layers[neuron.name] = size if isinstance(size, tuple) else (size,)
        inside = math.prod(sum(layers[parent]) for parent in neuron.parents)
        if len(neuron.parents) == 1:
            layers[neuron.name] = (sum(layers[neuron.name]) * inside,)
        elif len(neuron.parents) == 2:
            layers[neuron.name] = (inside // shared_neurons(spec, layers, *neuron.parents),)
    blocks = []
    for weight in spec.weights:
        count = len(layers[weight.source])
        if weight.source == weight.target and count > 1:
            blocks.append(tuple((i + 1, i) for i in range(count - 1)))
        else:
            blocks.append(((0, count - 1),))
    return Shape(tuple(layers.values()), tuple(blocks))
