"""The layout of a chain of layers, an MLP or a plain CNN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nfn_graph.data._layout import Layout, Placement, PlacementAxis
from nfn_graph.messages import UserError
from nfn_graph.spec import NetworkSpec, Shape
from nfn_graph.spec._checks import check_unique

# The name, shape and dtype of a weight and, if the layer has one, of its bias.
_Layer = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def chain_layout(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    keys: Sequence[tuple[str, str]] | None = None,
) -> tuple[Layout, dict[str, Tensor]]:
    """The layout of a chain, and its tensors by name; see `WeightGraph.from_tensors`."""
    biases = [None] * len(weights) if biases is None else biases
    keys = [(f"{i}.weight", f"{i}.bias") for i in range(len(weights))] if keys is None else keys
    if not weights:
        raise UserError("Expected at least one weight tensor (got none)")
    if len(biases) != len(weights) or len(keys) != len(weights):
        raise UserError(
            f"Expected equal numbers of weights, biases and keys (got {len(weights)} weights, "
            f"{len(biases)} biases, {len(keys)} keys)"
        )
    check_unique([name for pair in keys for name in pair], "tensors")
    tensors: dict[str, Tensor] = {}
    layers: list[_Layer] = []
    for i, (weight, bias, key) in enumerate(zip(weights, biases, keys, strict=True)):
        if weight.dim() < 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise UserError(
                f"Expected '{key[0]}' to be a floating-point tensor [out, in, ...] "
                f"(got {list(weight.shape)} of {weight.dtype})"
            )
        if i and weight.shape[1] != len(weights[i - 1]):
            raise UserError(
                f"Expected '{key[0]}' to have {len(weights[i - 1])} inputs, the outputs "
                f"of '{keys[i - 1][0]}' (got {weight.shape[1]})"
            )
        if bias is not None and (list(bias.shape) != [len(weight)] or not bias.is_floating_point()):
            raise UserError(
                f"Expected '{key[1]}' to be a floating-point tensor [{len(weight)}] "
                f"(got {list(bias.shape)} of {bias.dtype})"
            )
        layer = {key[0]: weight} if bias is None else {key[0]: weight, key[1]: bias}
        layers.append(tuple((name, tuple(x.shape), x.dtype) for name, x in layer.items()))
        tensors |= layer
    return _layout_of(tuple(layers)), tensors


@lru_cache(maxsize=256)  # Thousands of networks of one kind share a layout.
def _layout_of(layers: tuple[_Layer, ...]) -> Layout:
    shapes = [shape for (_, shape, _), *_ in layers]
    sizes = [shapes[0][1], *(shape[0] for shape in shapes)]
    spec = NetworkSpec.chain(
        len(layers),
        taps=[math.prod(shape[2:]) for shape in shapes],
        biases=[len(layer) > 1 for layer in layers],
        input_size=sizes[0],
        output_size=sizes[-1],
    )
    placements = []
    for layer, weight in zip(layers, spec.weights, strict=True):
        for key, shape, dtype in layer:
            like = torch.empty(shape, dtype=dtype, device="meta")
            kernel: list[PlacementAxis] = ["tap"] * (len(shape) - 2)
            placements.append(
                Placement.whole(key, like, weight.key, ["target", "source", *kernel])
                if len(shape) > 1
                else Placement.whole(key, like, weight.target, ["neuron"])
            )
    blocks = (((0, 0),),) * len(layers)
    return Layout(spec, Shape(tuple((n,) for n in sizes), blocks), tuple(placements))
