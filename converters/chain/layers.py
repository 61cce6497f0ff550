"""The chain of layers that keys and shapes of a state dict tell of: an MLP or a plain CNN.

Shapes decide which weights can follow one another; numbers in keys that are otherwise the
same (`layers.0`, `layers.2`) decide their order. The order of the keys in the dict says
nothing. What is left open is refused with the possible readings, and so are names that state
another topology.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nfn_graph.converters.chain.names import Name, stem
from nfn_graph.converters.chain.norms import VectorGroup, check_groups, find_layer
from nfn_graph.converters.chain.order import ChainLayer, only_order
from nfn_graph.converters.chain.topology import (
    ASK_FOR_ARCH,
    NamedWeight,
    check_chain,
    check_names,
)
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.data import Layout

#: Which entries run fastest where positions are flattened: those of a channel, or the channels.
FlattenOrder = Literal["channels_first", "channels_last"]

# Images have at most so many channels.
_IMAGE_CHANNELS = 4


@dataclass(frozen=True)
class Hints:
    """What is known of a chain beside its keys and shapes.

    Args:
        flatten: The order of entries where a convolution meets a linear layer, if known.
        input_shape: The shape of an input, if known.
        depthwise: The keys of depthwise kernels; None if only shapes tell.
        is_chain: Whether the network is known to be a chain, whatever its names say.
    """

    flatten: FlattenOrder | None = None
    input_shape: tuple[int, ...] | None = None
    depthwise: frozenset[str] | None = None
    is_chain: bool = False


def chain_layout(tensors: Mapping[str, Tensor], hints: Hints) -> Layout:
    """The layout of the chain that a state dict can only be."""
    weights = [key for key, tensor in tensors.items() if tensor.dim() > 1]
    if not weights:
        raise ConversionError(f"Expected weights with at least two axes (got {_listed(tensors)})")
    if not hints.is_chain:
        check_names(weights)
    layers, groups = _parts(tensors)
    chain = only_order(layers)
    channels = _input_channels(chain, hints)
    if not hints.is_chain:
        check_chain(_named(chain, channels))
    scalars = []
    shapes = [(layer.name, layer.shape) for layer in chain]
    shapes[0] = (chain[0].name, (chain[0].shape[0], channels))
    for group in groups:
        if group.size == 1 and not any(layer.shape[0] == 1 for layer in chain):
            scalars.append(group)
            continue
        at = find_layer(group, shapes, [g for g in groups if g.template == group.template])
        behind = chain[max(at - 1, 0)]
        is_flat = group.size != (behind.shape[0] if at else channels)
        check_groups(group, 0 if is_flat else behind.spatial)
        behind.vectors.append(group if at else group.at_input())
    return _wired(tensors, chain, scalars, channels, hints.flatten)


def _named(chain: Sequence[ChainLayer], channels: int) -> list[NamedWeight]:
    """The weights with the channels they read: all of them, if one by one."""
    found = []
    for layer in chain:
        inputs = channels if layer.is_depthwise(channels) else layer.shape[1]
        is_square = layer.spatial > 0 and layer.shape[0] == layer.shape[1] > 1
        found.append(NamedWeight(layer.key, inputs, channels := layer.shape[0], is_square))
    return found


def _input_channels(chain: Sequence[ChainLayer], hints: Hints) -> int:
    """How many channels or features the first layer reads."""
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
    if hints.depthwise is not None:
        return outputs if first.key in hints.depthwise else inputs
    # A depthwise layer at the input keeps the few channels of an image, or a pointwise one follows.
    is_pointwise = len(chain) > 1 and chain[1].spatial and math.prod(chain[1].shape[2:]) == 1
    if first.spatial and inputs == 1 < outputs and (outputs <= _IMAGE_CHANNELS or is_pointwise):
        raise ConversionError(
            f"Expected to know the channels of the input (got '{first.key}' of shape "
            f"{list(first.shape)}: a convolution of 1 channel, or a depthwise one of {outputs} "
            f"channels or a divisor of that). Give an example_input, of which only the shape "
            f"counts. {ASK_FOR_ARCH}, if it is no chain"
        )
    return inputs


def _wired(
    tensors: Mapping[str, Tensor],
    chain: Sequence[ChainLayer],
    scalars: Sequence[VectorGroup],
    channels: int,
    flatten: FlattenOrder | None,
) -> Layout:
    w = Wiring(tensors)
    x: Value = w.input()
    before: ChainLayer | None = None
    for layer in chain:
        with w.at(f"'{layer.key}'"):
            inputs = [g for g in layer.vectors if g.is_input]
            for group in sorted(inputs, key=lambda g: g.name.numbers):
                x = w.channelwise(
                    w.ranked(x, layer.spatial + 2), [w.parameter(k) for k in group.keys], 1
                )
            weight = w.parameter(layer.key)
            bias = None if layer.bias is None else w.parameter(layer.bias)
            if layer.spatial:
                x = w.conv(x, weight, bias, groups=channels if layer.is_depthwise(channels) else 1)
            else:
                x = _flattened(w, x, layer, before, flatten)
                x = w.linear(x, weight, bias)
            for group in sorted(layer.vectors, key=lambda g: (g.size, g.name.numbers)):
                if not group.is_input:
                    x = _with_vectors(w, x, layer, group, flatten)
        before, channels = layer, layer.shape[0]
    for group in scalars:
        for key in group.keys:
            x = w.combine(x, w.parameter(key))
    w.output(x)
    return w.layout()


def _with_vectors(
    w: Wiring, x: Value, layer: ChainLayer, group: VectorGroup, flatten: FlattenOrder | None
) -> Value:
    channels = x.shape[1] if x.shape else None
    if layer.spatial and group.size != channels and len(x.shape or ()) > 2:
        x = _flat(w, x, layer.spatial, flatten, group.keys[0], group.size, channels or 1)
    return w.channelwise(x, [w.parameter(key) for key in group.keys], 1)


def _flattened(
    w: Wiring, x: Value, layer: ChainLayer, before: ChainLayer | None, flatten: FlattenOrder | None
) -> Value:
    """The input of a linear layer, whose positions are gone or flattened."""
    rank = len(x.shape or ())
    if before is None or rank <= 2:
        return x
    channels, inputs = (x.shape or (0, 0))[1], layer.shape[1]
    if channels == inputs:
        return w.reduce(x, range(2, rank))
    return _flat(w, x, rank - 2, flatten, layer.key, inputs, channels or 1)


def _flat(
    w: Wiring,
    x: Value,
    spatial: int,
    flatten: FlattenOrder | None,
    key: str,
    size: int,
    channels: int,
) -> Value:
    if flatten is None:
        raise ConversionError(
            f"Expected flatten='channels_first' or flatten='channels_last' (got none). The "
            f"{size} entries of '{key}' are {channels} channels times {size // channels} "
            f"positions, in either order. {ASK_FOR_ARCH}, if it permutes before it flattens"
        )
    if flatten == "channels_last":
        x = w.permute(x, [0, *range(2, spatial + 2), 1])
    return w.flatten(x, 1)


def _parts(tensors: Mapping[str, Tensor]) -> tuple[list[ChainLayer], list[VectorGroup]]:
    """The weights with their biases, and the vectors of norms and the like by module."""
    layers: list[ChainLayer] = []
    vectors: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        if tensor.is_complex() or (tensor.dim() > 1 and not tensor.is_floating_point()):
            raise ConversionError(
                f"Expected floating-point weights (got '{key}' of {tensor.dtype})"
            )
        if 0 in tensor.shape:
            raise ConversionError(
                f"Expected tensors with entries (got '{key}' of shape {list(tensor.shape)})"
            )
        if tensor.dim() > 1:
            layers.append(ChainLayer(key, tuple(tensor.shape), Name.of(stem(key))))
        elif tensor.is_floating_point():
            module, _, leaf = key.rpartition(".")
            vectors.setdefault(module or leaf, []).append(key)
    groups = []
    for module, keys in vectors.items():
        left = [key for key in keys if not _pair_bias(key, module, tensors, layers)]
        sizes = {tensors[key].numel() for key in left}
        if len(sizes) > 1 or (left and "." not in left[0]):
            for key in left:
                _pair_by_size(key, tensors, layers)
        elif left:
            groups.append(VectorGroup.of(module, left, sizes.pop()))
    return layers, groups


def _pair_bias(
    key: str, module: str, tensors: Mapping[str, Tensor], layers: Sequence[ChainLayer]
) -> bool:
    """Gives a vector to the weight of its module, or of its name but for the role."""
    size = tensors[key].numel()
    own = [n for n in layers if "." in key and n.key.rpartition(".")[0] == module]
    if len(own) != 1:
        own = [n for n in layers if stem(n.key) == stem(key)]
    if len(own) != 1 or own[0].bias is not None:
        return False
    if own[0].shape[0] != size:
        raise ConversionError(
            f"Expected '{key}' to have {own[0].shape[0]} entries, the outputs of "
            f"'{own[0].key}' (got {size})"
        )
    own[0].bias = key
    return True


def _pair_by_size(key: str, tensors: Mapping[str, Tensor], layers: Sequence[ChainLayer]) -> None:
    size = tensors[key].numel()
    fitting = [n for n in layers if n.bias is None and n.shape[0] == size]
    if len(fitting) != 1:
        raise ConversionError(
            f"Expected one weight that the vector '{key}' of {size} entries can belong to "
            f"(got {[n.key for n in fitting] or 'none'}). {ASK_FOR_ARCH}"
        )
    fitting[0].bias = key


def _listed(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"'{key}' {list(t.shape)}" for key, t in list(tensors.items())[:5]]
    return f"{len(tensors)} tensors: {', '.join(shown)}" if shown else "no tensors"
