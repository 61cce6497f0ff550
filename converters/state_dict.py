"""From a state dict to a graph and back, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nfn_graph.converters.chain import chain_layout
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.prefixes import PREFIXES, find_state_dict, strip_prefixes
from nfn_graph.converters.pytorch import trace
from nfn_graph.graph import WeightGraph
from nfn_graph.layout import Layout, gather_tensors, scatter_tensors
from nfn_graph.spec import WeightKey

FlattenOrder = Literal["channels_first", "channels_last"]
Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]

_MOST_CACHED = 64
_chains: dict[tuple[Signature, FlattenOrder | None], Layout] = {}
_archs: weakref.WeakKeyDictionary[nn.Module, dict[Signature, Layout]] = weakref.WeakKeyDictionary()


def from_state_dict(
    state_dict: Mapping[str, Any],
    *,
    arch: nn.Module | None = None,
    flatten: FlattenOrder | None = None,
    example_input: Any = None,
    channels: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> WeightGraph:
    """The weight graph of a checkpoint without its module.

    A chain of layers, an MLP or a plain CNN with or without norms, is inferred from keys and
    shapes, in whatever order the keys come. Weights are taken as torch stores them,
    `[out, in, ...]`. Where several readings are possible, they are listed in the error. The
    prefixes of DDP (`module.`), `torch.compile` (`_orig_mod.`) and Lightning (a `state_dict`
    inside) are understood. The graph may share the memory of the tensors.

    Args:
        state_dict: Tensors by key, or a checkpoint that holds such a mapping.
        arch: The network, on the meta device if it is large: its computation is followed
            instead. It is read once and taken to stay as it is.
        flatten: Which entries run fastest where a convolution meets a linear layer:
            the positions of a channel (`"channels_first"`, as `nn.Flatten` does) or the
            channels of a position (`"channels_last"`).
        example_input: An input of `arch`, or a tuple of inputs, where shapes decide; see
            :func:`from_module`.
        channels: Further values for the weights, by name: gradients, masks, optimiser
            moments, other networks of the same shapes. They become channels of the features
            after the weights themselves; keys without a value are filled with zeros.
    """
    if flatten not in (None, "channels_first", "channels_last"):
        raise ValueError(
            f"Expected flatten to be 'channels_first' or 'channels_last' (got {flatten!r})"
        )
    found = find_state_dict(state_dict)
    signature = tuple((key, t.shape, t.dtype) for key, t in found.items() if isinstance(t, Tensor))
    known: dict[Any, Layout]
    name: Any
    if arch is None:
        known, name = _chains, (signature, flatten)
    else:
        known, name = _archs.setdefault(arch, {}), (signature, _shapes(example_input))
    layout = known.get(name)
    if arch is None:
        _check_apart(found)
    if layout is None:
        tensors = {key: found[key] for key, _, _ in signature}
        layout = (
            chain_layout(tensors, flatten)
            if arch is None
            else _arch_layout(arch, tensors, example_input)
        )
        if len(known) >= _MOST_CACHED:
            known.clear()
        known[name] = layout
    return build_graph(layout, found, channels)


def _shapes(example: Any) -> Any:
    """What a layout depends on of an example input."""
    if isinstance(example, Tensor):
        return tuple(example.shape)
    if isinstance(example, (list, tuple)):
        return tuple(_shapes(item) for item in example)
    return repr(example)


def build_graph(
    layout: Layout,
    tensors: Mapping[str, Any],
    channels: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> WeightGraph:
    """The graph of tensors whose places are known; what is no feature is carried along."""
    carried = {key: tensors[key] for key in tensors if key not in layout.placed}
    for placement in layout.placements:
        _check_tied(placement.keys, tensors)
    layout = layout.noting(carried=carried, keys=tuple(tensors))
    if not channels:
        return WeightGraph.from_placements(layout, tensors)
    filled = {name: _filled(layout, name, values) for name, values in channels.items()}
    layout = layout.noting(
        channels={
            name: {key: t.dtype for key, t in values.items()} for name, values in channels.items()
        },
    )
    graph = WeightGraph.from_placements(layout, tensors)
    extra = [gather_tensors(layout, values) for values in filled.values()]
    for neuron in layout.spec.neurons:
        node = graph[neuron.name]
        node.x = _with_channels(node.x, [stores.get(neuron.name) for stores in extra])
    for weight in layout.spec.weights:
        edge = graph[weight.key]
        edge.edge_attr = _with_channels(edge.edge_attr, [stores[weight.key] for stores in extra])
    return graph


def to_state_dict(graph: WeightGraph, channel: str | None = None) -> dict[str, Any]:
    """The checkpoint of a graph: its keys in their order, shapes, dtypes, buffers, all bits.

    Args:
        graph: A graph made by a converter; its values may have changed since.
        channel: One of the further channels that the graph was made with, by name; the
            weights themselves if None.
    """
    if len(graph.layouts) != 1 or not isinstance(graph.layout, Layout):
        raise ValueError("Expected one network (got a batch; take batch[i] of it)")
    layout = graph.layout
    if not layout.placements:
        raise ConversionError(
            "Expected a graph that was made from tensors (got one without placements)"
        )
    at = _channel_index(graph, layout, channel)
    stores: dict[str | WeightKey, Tensor] = {
        **{key: graph[key].x[..., at : at + 1] for key in layout.spec.neuron},
        **{key: graph[key].edge_attr[..., at : at + 1] for key in layout.spec.weight},
    }
    if channel is not None:
        dtypes = layout.channels[channel]
        own = [next((dtypes[k] for k in p.keys if k in dtypes), p.dtype) for p in layout.placements]
        placements = [replace(p, dtype=d) for p, d in zip(layout.placements, own, strict=True)]
        layout = replace(layout, placements=tuple(placements), carried={}, keys=tuple(dtypes))
    found: dict[str, Any] = {
        key: tensor.squeeze(-1) for key, tensor in scatter_tensors(layout, stores).items()
    }
    found.update(layout.carried)
    return {key: found[key] for key in layout.keys or found}


def to_module(graph: WeightGraph, module: nn.Module) -> nn.Module:
    """Loads the weights of a graph into a module, which is returned."""
    state_dict = strip_prefixes(to_state_dict(graph), module.state_dict().keys())
    on_meta = any(tensor.is_meta for tensor in module.state_dict().values())
    try:
        module.load_state_dict(state_dict, assign=on_meta)
    except RuntimeError as error:
        raise ConversionError(
            f"Expected a module with the tensors of the graph (got {type(module).__name__}: "
            f"{error})"
        ) from error
    return module


def _arch_layout(arch: nn.Module, tensors: Mapping[str, Tensor], example_input: Any) -> Layout:
    """The layout of a module for a checkpoint with its keys, perhaps behind a prefix."""
    expected = arch.state_dict()
    stripped = strip_prefixes(tensors, expected.keys())
    names = dict(zip(stripped, tensors, strict=True))
    missing = [key for key in expected if key not in stripped]
    unknown = [key for key in stripped if key not in expected]
    if missing or unknown:
        raise ConversionError(
            f"Expected the keys of {type(arch).__name__} (got a state dict without "
            f"{missing[:5] or 'none of them missing'}, and with unknown {unknown[:5]}). "
            f"Prefixes {PREFIXES} are handled"
        )
    for key, tensor in stripped.items():
        if tensor.shape != expected[key].shape:
            raise ConversionError(
                f"Expected '{key}' of shape {tuple(expected[key].shape)} as in "
                f"{type(arch).__name__} (got {tuple(tensor.shape)})"
            )
    layout = trace(arch, example_input)
    placements = []
    for p in layout.placements:
        tensor = stripped[p.keys[0]]
        if not tensor.is_floating_point():
            raise ConversionError(
                f"Expected floating-point weights (got '{p.keys[0]}' of {tensor.dtype})"
            )
        keys = tuple(names[key] for key in p.keys)
        placements.append(replace(p, keys=keys, dtype=tensor.dtype))
    return replace(layout, placements=tuple(placements), carried={}, keys=())


def _check_apart(tensors: Mapping[str, Any]) -> None:
    """Without a module, nobody knows whether a shared tensor is used once or twice."""
    seen: dict[int, str] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and not tensor.is_meta:
            first = seen.setdefault(tensor.data_ptr(), key)
            if first != key:
                raise ConversionError(
                    f"Expected tensors of their own (got '{first}' and '{key}' in the same "
                    f"memory: one layer under two names, or one weight used twice). Give the "
                    f"network as arch"
                )


def _check_tied(keys: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    """One tensor under several keys must have one value."""
    for key in keys[1:]:
        first, other = tensors[keys[0]], tensors[key]
        if other is not first and not (other.is_meta or torch.equal(first, other)):
            raise ConversionError(
                f"Expected '{key}' to be the same tensor as '{keys[0]}', with which the "
                f"network shares it (got other values)"
            )


def _filled(layout: Layout, name: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A channel's values for every placed tensor, zeros where it has none."""
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
        filled[placement.keys[0]] = (
            value if value.is_floating_point() else value.to(torch.float64)
        ).to(torch.promote_types(placement.dtype, value.dtype))
    unknown = [key for key in values if key not in layout.placed]
    if unknown:
        raise ConversionError(
            f"Expected values of channel '{name}' for weights of the network (got {unknown[:5]})"
        )
    return filled


def _with_channels(own: Tensor, extra: list[Tensor | None]) -> Tensor:
    """Features with further channels; a layer without taps has none to add."""
    return torch.cat([own, *(own if x is None else x for x in extra)], -1)


def _channel_index(graph: WeightGraph, layout: Layout, channel: str | None) -> int:
    count = graph[layout.spec.weights[0].key].edge_attr.shape[-1]
    names = list(layout.channels)
    if channel is not None and channel not in names:
        raise ValueError(f"Expected a channel of the graph, one of {names} (got {channel!r})")
    if count != 1 + len(names) and (count != 1 or channel is not None):
        raise ConversionError(
            f"Expected features with {1 + len(names)} channel(s) as the graph was made "
            f"(got {count}). Reduce them to one channel first"
        )
    return 0 if channel is None else 1 + names.index(channel)
