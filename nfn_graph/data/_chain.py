"""The layout of a chain of layers, an MLP or a plain CNN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nfn_graph.data._layout import Layout, Placement, PlacementAxis
from nfn_graph.messages import UserError
from nfn_graph.spec import NetworkSpec, Shape
from nfn_graph.spec._checks import check_unique


def chain_layout(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    keys: Sequence[tuple[str, str]] | None = None,
) -> tuple[Layout, dict[str, Tensor]]:
    """The layout of a chain, and its tensors by name; see `WeightGraph.from_tensors`."""
    biases = [None] * len(weights) if biases is None else list(biases)
    keys = [(f"{i}.weight", f"{i}.bias") for i in range(len(weights))] if keys is None else keys
    _check_chain(weights, biases, keys)
    tensors: dict[str, Tensor] = {}
    for weight, bias, (weight_key, bias_key) in zip(weights, biases, keys, strict=True):
        tensors |= {weight_key: weight} | ({} if bias is None else {bias_key: bias})
    kinds = tuple((key, tuple(x.shape), x.dtype) for key, x in tensors.items())
    return _layout_of(kinds), tensors


@lru_cache(maxsize=256)  # Thousands of networks of one kind share a layout.
def _layout_of(kinds: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> Layout:
    """The layout of a chain, from the names, shapes and dtypes of its tensors."""
    layers: list[list[tuple[str, Tensor]]] = []
    for key, shape, dtype in kinds:
        like = torch.empty(shape, dtype=dtype, device="meta")
        if like.dim() > 1:
            layers.append([(key, like)])
        else:
            layers[-1].append((key, like))
    weights = [tensors[0][1] for tensors in layers]
    spec = NetworkSpec.chain(
        len(weights),
        taps=[w.shape[2:].numel() for w in weights],
        biases=[len(tensors) > 1 for tensors in layers],
        input_size=weights[0].shape[1],
        output_size=weights[-1].shape[0],
    )
    placements = []
    for ((key, weight), *bias), type_ in zip(layers, spec.weights, strict=True):
        kernel: list[PlacementAxis] = ["tap"] * (weight.dim() - 2)
        axes: list[PlacementAxis] = ["target", "source", *kernel]
        placements.append(Placement.whole(key, weight, type_.key, axes))
        placements += [Placement.whole(k, b, type_.target, ("neuron",)) for k, b in bias]
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    shapes = Shape(tuple((n,) for n in sizes), (((0, 0),),) * len(weights))
    return Layout(spec, shapes, tuple(placements))


def _check_chain(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], keys: Sequence[tuple[str, str]]
) -> None:
    if not weights:
        raise UserError("Expected at least one weight tensor (got none)")
    if len(biases) != len(weights) or len(keys) != len(weights):
        raise UserError(
            f"Expected equal numbers of weights, biases and keys (got {len(weights)} weights, "
            f"{len(biases)} biases, {len(keys)} keys)"
        )
    check_unique([name for pair in keys for name in pair], "tensors")
    for i, (weight, bias, key) in enumerate(zip(weights, biases, keys, strict=True)):
        if weight.dim() < 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise UserError(
                f"Expected '{key[0]}' to be a floating-point tensor [out, in, ...] "
                f"(got {list(weight.shape)} of {weight.dtype})"
            )
        if i and weight.shape[1] != weights[i - 1].shape[0]:
            raise UserError(
                f"Expected '{key[0]}' to have {weights[i - 1].shape[0]} inputs, the outputs "
                f"of '{keys[i - 1][0]}' (got {weight.shape[1]})"
            )
        if bias is not None and (
            tuple(bias.shape) != (weight.shape[0],) or not bias.is_floating_point()
        ):
            raise UserError(
                f"Expected '{key[1]}' to be a floating-point tensor [{weight.shape[0]}] "
                f"(got {list(bias.shape)} of {bias.dtype})"
            )
