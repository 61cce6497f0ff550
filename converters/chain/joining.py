"""Connects ordered layers to a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from nfn_graph.converters.chain.names import ASK_FOR_ARCH
from nfn_graph.converters.chain.norms import VectorGroup
from nfn_graph.converters.chain.order import ChainLayer, shown_order
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.data import Layout, Ref
from nfn_graph.messages import UserError
from nfn_graph.run import ENTRYWISE

#: The entries that vary fastest after flattening: positions of a channel, or channels.
FlattenOrder = Literal["channels_first", "channels_last"]


def joined(
    tensors: Mapping[str, Tensor],
    chain: Sequence[ChainLayer],
    scalars: Sequence[VectorGroup],
    channels: int,
    flatten: FlattenOrder | None,
    activation: str | None = None,
) -> Layout:
    """Returns the layout of ordered layers.

    Args:
        tensors: The state dict.
        chain: The layers, with their vectors.
        scalars: Vectors of one entry that act on whole layers.
        channels: The number of channels or features that the first layer reads.
        flatten: The order of entries between a convolution and a linear layer, if known.
        activation: The function between linear layers, if known.
    """
    w = Wiring(tensors)
    x: Value = w.input()
    for layer in chain:
        with w.at(f"'{layer.key}'"):
            for group in (g for g in layer.vectors if g.is_input):
                x = _applied(w, w.ranked(x, layer.spatial + 2), group)
            weight = w.parameter(layer.key)
            bias = None if layer.bias is None else w.parameter(layer.bias)
            if layer.spatial:
                x = w.conv(x, weight, bias, groups=channels if layer.is_depthwise(channels) else 1)
            else:
                x = _flattened(w, x, layer, chain, flatten)
                x = w.linear(x, weight, bias)
            for group in (g for g in layer.vectors if not g.is_input):
                x = _with_vectors(w, x, layer, group, chain, flatten)
        channels = layer.shape[0]
    for group in scalars:
        x = _applied(w, x, group)
    w.output(x)
    _record(w, chain, bool(scalars), activation)
    return w.layout()


def _record(
    w: Wiring, chain: Sequence[ChainLayer], has_scalars: bool, activation: str | None
) -> None:
    """Records what a chain of linear layers computes, if the function between them is known."""
    if activation is None:
        w.tape.lose(
            "a state dict does not show what is between its layers. Pass arch=, or activation= "
            "if they are linear layers with one function between them"
        )
        return
    if has_scalars or any(layer.spatial or layer.vectors for layer in chain):
        raise ConversionError(
            f"Expected linear layers and nothing else with activation='{activation}' (got "
            f"convolutions or norms). {ASK_FOR_ARCH}"
        )
    x = w.tape.input()
    for layer in chain:
        bias = None if layer.bias is None else w.tape.parameter(layer.bias)
        x = w.tape.call("linear", x, w.tape.parameter(layer.key), bias)
        if layer is not chain[-1]:
            x = _activated(w, x, activation)
    w.tape.output(x)


def check_activation(activation: str) -> None:
    """Raises unless a text names a function of one value, with an optional number after a colon."""
    name, _, number = activation.partition(":")
    try:
        arguments = [float(number)] if number and name not in ("sin", "cos") else []
        is_known = ENTRYWISE[name](torch.full((3,), 0.5), *arguments).shape == (3,) and (
            not number or math.isfinite(float(number))
        )
    except (KeyError, TypeError, ValueError, RuntimeError):
        is_known = False
    if not is_known:
        raise UserError(
            f"Expected an activation that takes one value, such as 'relu', or 'sin:30' and "
            f"'leaky_relu:0.2' with a number (got {activation!r})"
        )


def _activated(w: Wiring, x: Ref, activation: str) -> Ref:
    name, _, number = activation.partition(":")
    if name in ("sin", "cos") and number:
        return w.tape.call(name, w.tape.call("mul", x, float(number)))
    return w.tape.call(name, x, *([float(number)] if number else []))


def _with_vectors(
    w: Wiring,
    x: Value,
    layer: ChainLayer,
    group: VectorGroup,
    chain: Sequence[ChainLayer],
    flatten: FlattenOrder | None,
) -> Value:
    channels = x.shape[1] if x.shape else None
    is_flat = group.size != channels and not group.may_be_shared
    if layer.spatial and is_flat and len(x.shape or ()) > 2:
        x = _flat(w, x, group.keys[0], group.size, chain, flatten)
    return _applied(w, x, group)


def _applied(w: Wiring, x: Value, group: VectorGroup) -> Value:
    """Applies the vectors of a norm, or of a PReLU, whose slope may be shared."""
    parameters = [w.parameter(key) for key in group.keys]
    if group.may_be_shared:
        return w.combine(x, parameters[0])
    return w.channelwise(x, parameters, 1)


def _flattened(
    w: Wiring,
    x: Value,
    layer: ChainLayer,
    chain: Sequence[ChainLayer],
    flatten: FlattenOrder | None,
) -> Value:
    """Returns the input of a linear layer, with positions averaged or flattened."""
    rank = len(x.shape or ())
    if layer is chain[0] or rank <= 2:
        return x
    channels, inputs = (x.shape or (0, 0))[1], layer.shape[1]
    if channels == inputs:
        return w.reduce(x, range(2, rank))
    return _flat(w, x, layer.key, inputs, chain, flatten)


def _flat(
    w: Wiring,
    x: Value,
    key: str,
    size: int,
    chain: Sequence[ChainLayer],
    flatten: FlattenOrder | None,
) -> Value:
    _, channels, *positions = x.shape or (0, 0)
    if flatten is None:
        raise ConversionError(
            f"Expected flatten='channels_first' or flatten='channels_last' (got none). If the "
            f"layers are {shown_order(chain)}, the {size} entries of '{key}' are {channels} "
            f"channels times {size // (channels or 1)} positions, in either order. {ASK_FOR_ARCH}, "
            f"if they are not, or if it permutes before it flattens"
        )
    if flatten == "channels_last":
        x = w.permute(x, [0, *range(2, len(positions) + 2), 1])
    return w.flatten(x, 1)
