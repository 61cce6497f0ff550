"""Infers a chain of layers, an MLP or a plain CNN, from the keys and shapes of a state dict.

Shapes determine which weights can follow one another. Numbers in otherwise equal keys (`layers.0`,
`layers.2`) determine their order, unless the order of the file contradicts them. If several
readings remain, the state dict is refused and the readings are listed. Names that indicate another
topology, and tensors that belong to no layer, are refused too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from nfn_graph.converters.chain.joining import FlattenOrder, joined
from nfn_graph.converters.chain.names import ASK_FOR_ARCH, NamedWeight, check_chain, check_names
from nfn_graph.converters.chain.norms import VectorGroup, check_groups
from nfn_graph.converters.chain.order import ChainLayer, NotChained, can_chain, only_order
from nfn_graph.converters.chain.parts import Places, find_parts, listed
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.layout_changes import turned
from nfn_graph.data import Layout

# The largest number of channels of an image.
_IMAGE_CHANNELS = 4


@dataclass(frozen=True)
class Hints:
    """What is known about a chain in addition to its keys and shapes.

    Args:
        flatten: The order of entries between a convolution and a linear layer, if known.
        input_shape: The shape of an input, if known.
        orientation: The axis order of the weights; None to infer it from shapes and names.
        activation: The function between linear layers, if known.
    """

    flatten: FlattenOrder | None = None
    input_shape: tuple[int, ...] | None = None
    orientation: Literal["out_in"] | None = "out_in"
    activation: str | None = None


def read_chain(tensors: Mapping[str, Tensor], hints: Hints) -> Layout:
    """Returns the layout of a state dict that can only be one chain."""
    weights = [key for key, tensor in tensors.items() if tensor.dim() > 1]
    if not weights:
        got = listed(tensors, list(tensors))
        raise ConversionError(f"Expected weights with at least two axes (got {got})")
    check_names(weights)
    if hints.orientation is None:
        _check_orientation(tensors)
    layers, groups = find_parts(tensors)
    floating = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    is_sorted = _are_sorted(tensors, floating)
    chain = only_order(layers, is_sorted)
    channels = _input_channels(chain, hints)
    check_chain(_named(chain, channels))
    places = Places(chain, channels, floating, is_sorted)
    scalars = []
    for group in groups:
        at = places.find(group, [g for g in groups if g.template == group.template])
        if at is None:
            scalars.append(group)
            continue
        behind = chain[max(at - 1, 0)]
        is_flat = group.size != (behind.shape[0] if at else channels)
        check_groups(group, 0 if is_flat else behind.spatial)
        behind.vectors.append(group if at else group.at_input())
    shared = [group for group in groups if group.may_be_shared]
    if len({group.template for group in shared}) > 1:
        raise ConversionError(
            f"Expected names that determine the order of numbers that layers share (got "
            f"{[group.keys[0] for group in shared]}). {ASK_FOR_ARCH}"
        )
    scalars.sort(key=lambda group: group.name.numbers)
    for layer in chain:
        layer.vectors = _in_order(layer.vectors)
    if not is_sorted:
        _check_exchangeable(tensors, _vectors(chain, scalars))
    return joined(tensors, chain, scalars, channels, hints.flatten, hints.activation)


def _in_order(groups: Sequence[VectorGroup]) -> list[VectorGroup]:
    """Orders the groups at one layer by their use; groups of flattened entries come last."""
    ordered = sorted(groups, key=lambda g: (not g.is_input, g.size, g.name.numbers))
    for one, other in pairwise(ordered):
        is_told = one.name.precedes(other.name) or one.name.is_indexed_before(other.name)
        if (one.is_input, one.size) == (other.is_input, other.size) and not is_told:
            raise ConversionError(
                f"Expected names that determine which of '{one.keys[0]}' and '{other.keys[0]}' "
                f"comes first (got both at one layer). {ASK_FOR_ARCH}"
            )
    return ordered


def _are_sorted(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> bool:
    """Whether keys are sorted as text, so that their order is not that of layers.

    The tensors of each dtype are compared separately, because safetensors files sort by dtype
    first.
    """
    by_type: dict[torch.dtype, list[str]] = {}
    for key in keys:
        by_type.setdefault(tensors[key].dtype, []).append(key)
    return all(own == sorted(own) for own in by_type.values())


def _check_orientation(tensors: Mapping[str, Tensor]) -> None:
    """Refuses weights that form a chain as `[..., in, out]`, in addition or exclusively.

    The name `layer.weight` follows torch's convention `[out, in, ...]`.
    """
    weights = {key: tensor for key, tensor in tensors.items() if tensor.dim() > 1}
    is_torch = all(key.rpartition(".")[2] == "weight" for key in weights)
    try:
        is_chain = can_chain(find_parts(tensors)[0])
    except NotChained:
        is_chain = False
    # The last axes of kernels are equal window sizes, which would form a chain by themselves.
    if is_torch and (is_chain or any(tensor.dim() > 2 for tensor in weights.values())):
        return
    try:
        is_turned_chain = can_chain(find_parts(turned(tensors))[0])
    except NotChained:
        is_turned_chain = False
    except ConversionError:  # There are several readings.
        is_turned_chain = True
    if is_turned_chain:
        ways = "both ways" if is_chain else "only as [..., in, out]: they are transposed"
        options = "orientation='in_out'" + (" or orientation='out_in'" if is_chain else "")
        raise ConversionError(
            f"Expected weights that form a chain only as [out, in, ...] (got "
            f"{listed(weights, list(weights))}, which form one {ways}). Pass {options}"
        )


def _vectors(chain: Sequence[ChainLayer], scalars: Sequence[VectorGroup]) -> Iterator[str]:
    """Yields the keys of all vectors in the order of their use."""
    for layer in chain:
        yield from (key for group in layer.vectors if group.is_input for key in group.keys)
        yield from [layer.bias] if layer.bias else []
        yield from (key for group in layer.vectors if not group.is_input for key in group.keys)
    yield from (key for group in scalars for key in group.keys)


def _check_exchangeable(tensors: Mapping[str, Tensor], used: Iterable[str]) -> None:
    """Refuses vectors whose names might be exchanged.

    These are vectors of one role and size whose modules are scattered over the file, or are
    numbered in another order than they are stored.
    """
    order = {key: i for i, key in enumerate(k for k in tensors if tensors[k].is_floating_point())}
    modules: dict[str, list[int]] = {}
    alike: dict[tuple[str, int], list[str]] = {}
    for key, at in order.items():
        module, _, role = key.rpartition(".")
        modules.setdefault(module, []).append(at)
        if tensors[key].dim() < 2:
            alike.setdefault((role, tensors[key].numel()), []).append(key)
    scattered = {m for m, found in modules.items() if found[-1] - found[0] >= len(found)}
    for keys in alike.values():
        apart = [key for key in keys if key.rpartition(".")[0] in scattered]
        if len(keys) > 1 and apart:
            raise ConversionError(
                f"Expected the tensors of a module side by side (got others between '{apart[0]}' "
                f"and those stored with it, and '{keys[keys[0] == apart[0]]}' of its size). "
                f"{ASK_FOR_ARCH}"
            )
    last: dict[tuple[str, int], str] = {}
    for key in used:
        counted = re.sub(r"\d+", "#", key), tensors[key].numel()
        before = last.setdefault(counted, key)
        if order[key] < order[before]:
            raise ConversionError(
                f"Expected vectors of one size in the order of their layers (got '{key}' stored "
                f"before '{before}', although its name comes later). {ASK_FOR_ARCH}"
            )
        last[counted] = key


def _named(chain: Sequence[ChainLayer], channels: int) -> list[NamedWeight]:
    """Returns the weights with their input channels; depthwise layers read all channels."""
    found = []
    for layer in chain:
        inputs = channels if layer.is_depthwise(channels) else layer.shape[1]
        is_square = layer.spatial > 0 and layer.shape[0] == layer.shape[1] > 1
        found.append(NamedWeight(layer.key, inputs, channels := layer.shape[0], is_square))
    return found


def _input_channels(chain: Sequence[ChainLayer], hints: Hints) -> int:
    """Returns the number of channels or features that the first layer reads."""
    first = chain[0]
    inputs, outputs = first.shape[1], first.shape[0]
    shape = hints.input_shape
    if shape is not None:
        if first.spatial:
            has_rank = len(shape) == len(first.shape)
            if has_rank and (inputs == shape[1] or first.is_depthwise(shape[1])):
                return shape[1]
        elif len(shape) > 1 and inputs in (shape[-1], math.prod(shape[1:])):
            return inputs
        raise ConversionError(
            f"Expected an input that '{first.key}' of shape {list(first.shape)} can read (got "
            f"shape {list(shape)})"
        )
    # A depthwise first layer keeps the few channels of an image, or a pointwise layer follows it.
    is_pointwise = len(chain) > 1 and chain[1].spatial and math.prod(chain[1].shape[2:]) == 1
    if first.spatial and inputs == 1 < outputs and (outputs <= _IMAGE_CHANNELS or is_pointwise):
        raise ConversionError(
            f"Expected a known number of input channels (got '{first.key}' of shape "
            f"{list(first.shape)}: a convolution of 1 channel, or a depthwise one of {outputs} "
            f"channels or a divisor of that). Pass an example_input, of which only the shape "
            f"is used. {ASK_FOR_ARCH}, if it is not a chain"
        )
    return inputs
