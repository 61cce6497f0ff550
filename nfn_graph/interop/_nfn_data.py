"""Converts specs and weight-space features of the published package to ours and back."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from nfn_graph.data import Batch, Layout, WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, WeightKey


def spec_from_nfn(network_spec: Any) -> NetworkSpec:
    """Converts a published `NetworkSpec` to a spec of this package.

    Example:
        >>> import torch
        >>> from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
        >>> from nfn_graph.interop.nfn import spec_from_nfn
        >>> features = WeightSpaceFeatures([torch.randn(8, 1, 3, 2)], [torch.randn(8, 1, 3)])
        >>> print(spec_from_nfn(network_spec_from_wsfeat(features)))
        NetworkSpec(input[2]:0, output[3]:1 | input->output:1)
    """
    shapes = [tuple(int(n) for n in array.shape) for array in network_spec.weight_spec]
    if not shapes or any(len(shape) < 2 for shape in shapes):
        raise UserError(f"Expected a weight_spec of shapes [out, in, ...] (got {shapes})")
    inputs, outputs = shapes[0][1], shapes[-1][0]
    return NetworkSpec.chain(
        len(shapes),
        taps=[math.prod(shape[2:]) for shape in shapes],
        # The published spec has -1 for a size that it does not depend on.
        input_size=inputs if inputs > 0 else None,
        output_size=outputs if outputs > 0 else None,
    )


def batch_from_nfn(features: Any) -> Batch:
    """Converts published `WeightSpaceFeatures` to a batch of graphs.

    Args:
        features: Weights `[B, C, out, in, ...]` and biases `[B, C, out]`.

    Returns:
        A batch of `B` graphs with `C` channels, through which gradients flow.

    Example:
        >>> import torch
        >>> from nfn.common import WeightSpaceFeatures
        >>> from nfn_graph.interop.nfn import batch_from_nfn
        >>> features = WeightSpaceFeatures([torch.randn(8, 1, 3, 2)], [torch.randn(8, 1, 3)])
        >>> batch_from_nfn(features).num_graphs
        8
    """
    weights, biases = list(features.weights), list(features.biases)
    for name, tensors, least in (("weights", weights, 4), ("biases", biases, 3)):
        shapes = [tuple(x.shape) for x in tensors]
        if not shapes or any(len(s) < least or s[:2] != shapes[0][:2] for s in shapes):
            raise UserError(
                f"Expected {name} with at least {least} axes, and with the same batch and channel "
                f"sizes (got {shapes})"
            )
    if biases[0].shape[:2] != weights[0].shape[:2]:
        raise UserError(
            f"Expected biases with the batch and channel sizes of the weights, "
            f"{tuple(weights[0].shape[:2])} (got {tuple(biases[0].shape[:2])})"
        )
    networks, channels = weights[0].shape[:2]
    first = WeightGraph.from_tensors([w[0, 0] for w in weights], [b[0, 0] for b in biases])
    types = first.spec.weights
    stores: dict[Key, Tensor] = {w.key: _rows(x, 2) for w, x in zip(types, weights, strict=True)}
    stores |= {w.target: _rows(x, 1) for w, x in zip(types, biases, strict=True)}
    inputs = networks * weights[0].shape[3]
    stores[types[0].source] = weights[0].new_empty(inputs, 0, channels)
    return Batch.from_stores([first.layout] * networks, stores)


def to_nfn(networks: WeightGraph | WeightFeatures) -> Any:
    """Converts a graph, a batch or features to published `WeightSpaceFeatures`.

    The networks must be chains with a bias in every layer, and have the same sizes because the
    published package stacks them. For a mixed batch, use `to_nfn(batch[i])`.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.interop.nfn import to_nfn
        >>> to_nfn(WeightGraph.from_tensors([torch.ones(3, 2)], [torch.ones(3)])).weights[0].shape
        torch.Size([1, 1, 3, 2])
    """
    try:
        from nfn.common import WeightSpaceFeatures  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "Expected the package 'nfn' for WeightSpaceFeatures (got none installed). "
            "Use: pip install nfn==0.1.2"
        ) from error
    graph = networks if isinstance(networks, WeightGraph) else networks.to_graph()
    features, layouts = graph.features(), graph.layouts
    _check_chain(graph.spec)
    shapes = {frozenset(layout.sizes.items()) for layout in layouts}
    if len(shapes) > 1:
        raise UserError(
            f"Expected networks of one size (got {len(shapes)} sizes). Use to_nfn(batch[i])."
        )
    sizes = {name: size for name, (size,) in shapes.pop()}
    weights, biases = [], []
    for weight in graph.spec.weights:
        size = (sizes[weight.target], sizes[weight.source])
        kernel = _kernel(layouts[0], weight.key, weight.taps)
        x = features[weight.key].reshape(len(layouts), *size, *kernel, -1)
        bias = features[weight.target].reshape(len(layouts), size[0], -1)
        weights.append(x.movedim(-1, 1))
        biases.append(bias.movedim(-1, 1))
    return WeightSpaceFeatures(weights, biases)


def _rows(x: Tensor, axes: int) -> Tensor:
    """Reshapes `[B, C, neurons..., taps...]` to `[rows, taps, C]`."""
    rows = math.prod((len(x), *x.shape[2 : 2 + axes]))
    return x.movedim(1, -1).reshape(rows, -1, x.shape[1])


def _check_chain(spec: NetworkSpec) -> None:
    names = [spec.weights[0].source, *(w.target for w in spec.weights)]
    is_chain = [w.source for w in spec.weights] == names[:-1] and len(set(names)) == len(names)
    taps = [spec.neuron[name].taps for name in names]
    if not is_chain or len(names) != len(spec.neurons) or taps != [0] + [1] * len(spec.weights):
        raise UserError(f"Expected a chain of layers with a bias in each (got {spec})")


def _kernel(layout: Layout, key: WeightKey, taps: int) -> tuple[int, ...]:
    """The sizes of the kernel axes of the tensor that a weight came from."""
    for placement in layout.placements:
        if placement.store == key and placement.axes[:2] == ("target", "source"):
            return placement.shape[2:]
    if taps == 1:
        return ()
    raise UserError(
        f"Expected a graph that knows the kernel size of {key} (got one that was not made from "
        f"tensors, with {taps} taps)"
    )
