"""Further values of the weights, such as gradients or masks, as channels of their features.

The channels of a type share one tensor in the widest of their dtypes, and are restored bit for bit.
A hardware cast makes signalling NaNs quiet, so :func:`cast` restores their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.converters.checkpoint import as_tensor
from nfn_graph.converters.errors import ConversionError
from nfn_graph.data import Layout, WeightGraph, gather_tensors
from nfn_graph.messages import UserError
from nfn_graph.spec import Key


class _Format(NamedTuple):
    """The bit layout of a floating-point type: sign, exponent (all ones for a NaN), fraction."""

    integer: torch.dtype
    bits: int
    fraction: int

    @property
    def exponent(self) -> int:
        return (1 << (self.bits - 1)) - (1 << self.fraction)


# float8_e5m2 is the only 8-bit type with more than one NaN per sign.
_FORMATS = {
    torch.float8_e5m2: _Format(torch.int8, 8, 2),
    torch.float16: _Format(torch.int16, 16, 10),
    torch.bfloat16: _Format(torch.int16, 16, 7),
    torch.float32: _Format(torch.int32, 32, 23),
    torch.float64: _Format(torch.int64, 64, 52),
}


def promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Returns the type that holds the values of both. torch does not promote 8-bit types."""
    if first == second:
        return first
    wide = [
        torch.float32 if x.is_floating_point and x.itemsize == 1 else x for x in (first, second)
    ]
    return torch.promote_types(*wide)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a tensor to another type and keeps the leading bits of the fractions of NaNs."""
    if tensor.dtype == dtype:
        return tensor
    values = tensor.to(dtype)
    if tensor.dtype not in _FORMATS or dtype not in _FORMATS or tensor.is_meta:
        return values
    with torch.no_grad():
        odd = tensor.isnan()
        if bool(odd.any()):
            own, other = _FORMATS[tensor.dtype], _FORMATS[dtype]
            # Copied as integers, because torch copies 16-bit floats by casting them.
            whole = values.contiguous().view(other.integer).clone()
            whole[odd] = _cast_nan(tensor.contiguous().view(own.integer)[odd], own, other)
            values = whole.view(dtype)
    return values


def _cast_nan(nan: Tensor, own: _Format, other: _Format) -> Tensor:
    """Converts the bits of NaNs to another format."""
    bits = nan.to(torch.int64)
    fraction = bits & ((1 << own.fraction) - 1)
    shift = other.fraction - own.fraction
    fraction = fraction << shift if shift >= 0 else fraction >> -shift
    # A NaN with an empty fraction would become an infinity.
    fraction = torch.where(fraction == 0, 1 << (other.fraction - 1), fraction)
    magnitude = (fraction | other.exponent).to(other.integer)
    lowest = torch.tensor(-(1 << (other.bits - 1)), dtype=other.integer, device=nan.device)
    return torch.where(bits < 0, magnitude | lowest, magnitude)


#: The name of the weights themselves among the channels.
WEIGHTS = "weights"

#: Values by name and key. None, as for a weight without a gradient, counts as no value.
Channels = Mapping[str, Mapping[str, Any]]


def add_channels(graph: WeightGraph, channels: Channels) -> None:
    """Adds channels to the features of a graph, and their names to its layout."""
    if WEIGHTS in channels:
        raise UserError(
            f"Expected a channel name other than that of the weights themselves (got '{WEIGHTS}')"
        )
    layout: Layout = graph.layout
    tensors = {name: _tensors(name, values) for name, values in channels.items()}
    extra = [
        gather_tensors(layout, widened(layout, _filled(layout, name, values)))
        for name, values in tensors.items()
    ]
    for neuron in layout.spec.neurons:
        node = graph[neuron.name]
        node.x = _with_channels(node.x, [stores.get(neuron.name) for stores in extra])
    for weight in layout.spec.weights:
        edge = graph[weight.key]
        edge.edge_attr = _with_channels(edge.edge_attr, [stores[weight.key] for stores in extra])
    graph.layout = layout.noting(
        channels={
            name: {key: t.dtype for key, t in values.items()} for name, values in tensors.items()
        }
    )


def _tensors(name: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the values of a channel as tensors, without those that are None."""
    if not isinstance(values, Mapping):
        raise ConversionError(
            f"Expected values of channel '{name}' by key (got {type(values).__name__})"
        )
    found = {}
    for key, value in values.items():
        what = f"'{key}' of channel '{name}'"
        tensor = as_tensor(what, value)
        if isinstance(tensor, Tensor):
            found[key] = tensor
        elif value is not None:
            raise ConversionError(f"Expected a tensor as {what} (got {type(value).__name__})")
    return found


def channel_index(graph: WeightGraph, layout: Layout, channel: str | None) -> int:
    """Returns the position of a channel among the features; 0 for the weights themselves."""
    count = graph[layout.spec.weights[0].key].edge_attr.shape[-1]
    names = list(layout.channels)
    if channel not in (None, WEIGHTS, *names):
        raise UserError(
            f"Expected a channel of the graph, one of {[WEIGHTS, *names]} (got {channel!r})"
        )
    is_own = channel is None or channel == WEIGHTS
    if count != 1 + len(names) and (count != 1 or not is_own):
        raise ConversionError(
            f"Expected features with {1 + len(names)} channel(s) as the graph was made "
            f"(got {count}). Reduce them to one channel first"
        )
    return 0 if is_own else 1 + names.index(str(channel))


def widened(layout: Layout, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Casts tensors that share a store to the widest of their types, with NaNs bit for bit."""
    if len({tensors[p.keys[0]].dtype for p in layout.placements}) == 1:
        return tensors
    dtypes: dict[Key, torch.dtype] = {}
    for p in layout.placements:
        dtype = tensors[p.keys[0]].dtype
        dtypes[p.store] = promoted(dtypes.get(p.store, dtype), dtype)
    found = dict(tensors)
    for p in layout.placements:
        first = p.keys[0]
        found[first] = cast(found[first], promoted(found[first].dtype, dtypes[p.store]))
    return found


def _filled(layout: Layout, name: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a channel's values for every placed tensor, with zeros for missing ones."""
    filled: dict[str, Tensor] = {}
    for placement in layout.placements:
        given = next((key for key in placement.keys if key in values), None)
        value = torch.zeros(placement.shape) if given is None else values[given]
        if tuple(value.shape) != placement.shape:
            raise ConversionError(
                f"Expected '{given}' of channel '{name}' of shape {placement.shape} "
                f"(got {tuple(value.shape)})"
            )
        if value.is_complex():
            raise ConversionError(f"Expected real values of '{given}' (got {value.dtype})")
        filled[placement.keys[0]] = cast(
            value if value.is_floating_point() else value.to(torch.float64),
            promoted(placement.dtype, value.dtype),
        )
    unknown = [key for key in values if key not in layout.placed]
    if unknown:
        raise ConversionError(
            f"Expected values of channel '{name}' for weights of the network (got {unknown[:5]})"
        )
    return filled


def _with_channels(own: Tensor, extra: list[Tensor | None]) -> Tensor:
    """Appends channels to features; a layer without taps has none to append."""
    parts = [own, *(own if x is None else x for x in extra)]
    dtype = reduce(promoted, [part.dtype for part in parts])
    return torch.cat([cast(part, dtype) for part in parts], -1)
