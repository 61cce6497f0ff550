"""Converts a state dict to a graph and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from nfn_graph.converters.chain import FlattenOrder, Hints, check_activation
from nfn_graph.converters.channels import (
    WEIGHTS,
    Channels,
    add_channels,
    cast,
    channel_index,
    promoted,
    widened,
)
from nfn_graph.converters.checkpoint import Keys, find_state_dict
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families import Heads
from nfn_graph.converters.keras.arch_names import arch_names, has_keras_tensors
from nfn_graph.converters.keras.keys import is_numbered
from nfn_graph.converters.layout_changes import Orientation, leave_out, turned, turned_back
from nfn_graph.converters.layouts import find_layout, layout_of, shapes_of
from nfn_graph.converters.pytorch.tensors import check_module, unwrapped_module
from nfn_graph.data import Layout, WeightGraph, scatter_tensors
from nfn_graph.messages import UserError
from nfn_graph.spec import Key


def from_state_dict(
    state_dict: Mapping[str, Any],
    *,
    arch: nn.Module | None = None,
    flatten: FlattenOrder | None = None,
    orientation: Orientation | None = None,
    key: str | None = None,
    activation: str | None = None,
    heads: int | Heads | None = None,
    example_input: Any = None,
    channels: Channels | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> WeightGraph:
    """Builds the weight graph of a checkpoint without its module.

    A chain of layers (an MLP or a plain CNN, with or without norms) is inferred from keys and
    shapes. Every layer of a chain reads the one before it and nothing else, and every
    floating-point tensor must belong to the chain. Numbers in otherwise equal keys number the
    layers. The order of the keys decides nothing by itself. If shapes leave a choice, however, it
    must not contradict the names, unless the keys are sorted as text. Three cases are refused:

    - names that suggest something else (residual blocks, embeddings, gates, recurrence, attention,
      transposed convolutions, parallel branches),
    - numbered modules with several weights that return as many neurons as they read, since there
      may be an addition around them,
    - convolutions of a decoder or a generator with equal numbers of inputs and outputs, since they
      may be transposed.

    A first convolution `[n, 1, ...]` is assumed to read one channel, unless `n` is at most 4 or a
    1 x 1 convolution follows: it might then be depthwise and read `n` channels. If several
    readings are possible, the error lists them.

    Two vectors without running statistics after a convolution may belong to a GroupNorm, which
    restricts the permutations of its channels. They are refused, unless their name indicates
    another norm (`ln`, `bn`, `instance_norm`) or the number of channels is prime. After a linear
    layer they are assumed to belong to a LayerNorm or a BatchNorm, unless their name contains `gn`
    or `group`. Operations without parameters, such as a norm without them, leave no trace in a
    checkpoint; pass `arch` if there are any.

    Well-known transformers (BERT, GPT-2, Llama, ViT, `nn.TransformerEncoder`) are recognised by
    their names; `heads` is the number of their attention heads.

    A checkpoint may contain the state dict under `state_dict`, `model_state_dict` or `model` (the
    first of these that exists, which may be nested), or as its only mapping of tensors, which may
    be the one entry of a list. Everything beside it is left out. The prefixes of DDP (`module.`)
    and `torch.compile` (`_orig_mod.`) are recognised. With `arch`, its keys may follow any one
    prefix (`encoder.`), and tensors without the prefix are carried along. NumPy arrays are
    converted to tensors. The graph may share memory with the tensors.

    Args:
        state_dict: Tensors by key, or a checkpoint that holds such a mapping.
        arch: The network, on the meta device if it is large. Its computation is followed instead.
            It is read once and must not be changed afterwards.
        flatten: The entries that vary fastest where a convolution is followed by a linear layer:
            the positions of a channel (`"channels_first"`, as in `nn.Flatten`) or the channels of a
            position (`"channels_last"`).
        orientation: The axis order of weights, if shapes and names do not determine it:
            `[out, in, ...]` as in torch (`"out_in"`), or `[..., in, out]` as in NumPy, JAX and
            TensorFlow programs (`"in_out"`).
        key: The name of the network in a checkpoint that holds several: the name of a mapping, or
            the prefix of its keys. It is not needed if `arch` fits only one of them.
        activation: The function between the linear layers of a chain, such as `"relu"`, so that the
            graph can be run; with `arch`, it is found in the code. A number may follow a colon: the
            factor inside a sine (`"sin:30"` for a SIREN), or the parameter of a function, such as
            the slope of `"leaky_relu:0.2"`.
        heads: The number of attention heads, for well-known transformers without `arch`.
        example_input: An input of `arch`, or a tuple of inputs, if the result depends on shapes;
            see :func:`from_module`. For a chain, its shape determines how many channels a first
            convolution `[n, 1, ...]` reads.
        channels: Further values for the weights, by name: gradients, masks, optimiser moments, or
            other networks of the same shapes. They become channels of the features after the
            weights themselves. Keys without a value, or with None, are filled with zeros.
        only: Patterns such as `"encoder.*"`. Tensors whose keys match none of them are left out of
            the graph and carried along, so that they can be restored. By default all tensors are
            used.
        exclude: Patterns of tensors to leave out, such as `"*embeddings*"`.

    Example:
        >>> from torch import nn
        >>> from nfn_graph.converters import from_state_dict
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> from_state_dict(network.state_dict())["hidden1"].x.shape
        torch.Size([4, 1, 1])
    """
    if flatten not in (None, *get_args(FlattenOrder)):
        raise UserError(
            f"Expected flatten to be 'channels_first' or 'channels_last' (got {flatten!r})"
        )
    if orientation not in (None, *get_args(Orientation)):
        raise UserError(f"Expected orientation to be 'out_in' or 'in_out' (got {orientation!r})")
    if activation is not None:
        check_activation(activation)
    if isinstance(heads, int):
        heads = Heads(heads)
    if heads is not None and heads.queries < 1:
        raise UserError(f"Expected a positive number of heads (got {heads.queries})")
    if arch is not None:
        check_module(arch, "arch")
    found = find_state_dict(state_dict, key, arch)
    hints = Hints(
        flatten,
        None if arch is not None else _input_shape(example_input),
        orientation="out_in" if orientation else None,
        activation=None if arch is not None else activation,
    )
    if orientation == "in_out":
        layout = turned_back(find_layout(turned(found), arch, hints, example_input), found)
    else:
        layout = find_layout(found, arch, hints, example_input, heads)
    return build_graph(leave_out(layout, list(found), only, exclude), found, channels)


def _input_shape(example_input: Any) -> tuple[int, ...] | None:
    """Returns the shape of the single input of a chain."""
    if example_input is None:
        return None
    shape = shapes_of(example_input[0] if isinstance(example_input, tuple) else example_input)
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ConversionError(
            f"Expected a tensor as example_input of a chain of layers "
            f"(got {type(example_input).__name__})"
        )
    return shape


def build_graph(
    layout: Layout, tensors: Mapping[str, Any], channels: Channels | None = None
) -> WeightGraph:
    """Builds the graph of tensors with a known layout. Other tensors are carried along."""
    carried = {key: tensors[key] for key in tensors if key not in layout.placed}
    for placement in layout.placements:
        if len(placement.keys) > 1:
            _check_tied(placement.keys, tensors)
    layout = layout.noting(carried=carried, keys=tuple(tensors))
    graph = WeightGraph.from_placements(layout, widened(layout, tensors))
    if channels:
        add_channels(graph, channels)
    return graph


def without(graph: WeightGraph, only: Sequence[str], exclude: Sequence[str]) -> WeightGraph:
    """Leaves tensors out of a graph, which carries them along instead."""
    if not only and not exclude:
        return graph
    layout = layout_of(graph)
    if layout.channels or layout.before is not None or layout.aside:
        raise ConversionError(
            "Expected a graph as it was converted for only= and exclude= (got one with further "
            "channels, after a transform, or with tensors already left out)"
        )
    tensors = to_state_dict(graph)
    return build_graph(leave_out(layout, list(tensors), only, exclude), tensors)


def to_state_dict(graph: WeightGraph, channel: str | None = None) -> dict[str, Any]:
    """Restores the checkpoint of a graph: keys in their order, shapes, dtypes, buffers, all bits.

    Args:
        graph: A graph made by a converter; its values may have changed since.
        channel: The name of a further channel of the graph; None or `"weights"` for the weights
            themselves.

    Example:
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module, to_state_dict
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> list(to_state_dict(from_module(network)))
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    layout = layout_of(graph)
    if not layout.placements:
        raise ConversionError(
            "Expected a graph that was made from tensors (got one without placements)"
        )
    at = channel_index(graph, layout, channel)
    stores: dict[Key, Tensor] = {
        **{key: graph[key].x[..., at : at + 1] for key in layout.spec.neuron},
        **{key: graph[key].edge_attr[..., at : at + 1] for key in layout.spec.weight},
    }
    keys = layout.keys or None
    if channel is not None and channel != WEIGHTS:
        dtypes = layout.channels[channel]
        own = [next((dtypes[k] for k in p.keys if k in dtypes), p.dtype) for p in layout.placements]
        placements = [replace(p, dtype=d) for p, d in zip(layout.placements, own, strict=True)]
        layout, keys = replace(layout, placements=tuple(placements), carried={}), tuple(dtypes)
    found: dict[str, Any] = _scattered(layout, stores)
    found.update(layout.carried)
    return {key: found[key] for key in (found if keys is None else keys)}


def _scattered(layout: Layout, stores: dict[Key, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a graph in their own types, with the bits of NaNs preserved."""
    wide = layout
    if any(stores[p.store].dtype != p.dtype for p in layout.placements):
        # A tensor may be spread over several stores, so all of them are cast to one type.
        dtype = stores[layout.placements[0].store].dtype
        for store in {p.store for p in layout.placements}:
            dtype = promoted(dtype, stores[store].dtype)
        stores = {key: cast(store, dtype) for key, store in stores.items()}
        wide = replace(layout, placements=tuple(replace(p, dtype=dtype) for p in layout.placements))
    tensors = {key: x.squeeze(-1) for key, x in scatter_tensors(wide, stores).items()}
    if wide is not layout:
        casted = {p.keys[0]: cast(tensors[p.keys[0]], p.dtype) for p in layout.placements}
        tensors = {key: casted[p.keys[0]] for p in layout.placements for key in p.keys}
    return tensors


def to_module(graph: WeightGraph, module: nn.Module) -> nn.Module:
    """Loads the weights of a graph into a module and returns the module.

    Example:
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module, to_module
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> other = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> to_module(from_module(network), other)[0].weight.equal(network[0].weight)
        True
    """
    check_module(module, "module")
    state_dict = to_state_dict(graph)
    network = module
    if not Keys(state_dict, module.state_dict()).fit:
        network = unwrapped_module(module)
    own = network.state_dict()
    keys = Keys(state_dict, own)
    if keys.fit:
        state_dict = {key: _like(own[key], state_dict[name]) for key, name in keys.names.items()}
    elif has_keras_tensors(layout_of(graph), state_dict):
        state_dict = _torch_tensors(state_dict, network)
    on_meta = any(tensor.is_meta for tensor in own.values())
    try:
        network.load_state_dict(state_dict, assign=on_meta)
    except RuntimeError as error:
        raise ConversionError(
            f"Expected a module with the tensors of the graph (got {type(module).__name__}: "
            f"{error})"
        ) from error
    return module


def _like(own: Tensor, value: Any) -> Any:
    """Gives a counter of one entry the shape that the module has for it."""
    is_counter = isinstance(value, Tensor) and not value.is_floating_point()
    return value.reshape(own.shape) if is_counter and value.numel() == own.numel() == 1 else value


def _torch_tensors(tensors: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Renames the tensors of a Keras file for a module, whose batch counters are added."""
    is_ordered = not any(is_numbered(key) for key in tensors)
    names = arch_names(module, tensors, tensors, is_ordered)
    counters = {k: x for k, x in module.state_dict().items() if not x.is_floating_point()}
    return {**counters, **{t.name: t.view(tensors[key]) for key, t in names.items()}}


def _check_tied(keys: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    """Raises unless a tensor has the same values under all of its keys."""
    for key in keys[1:]:
        first, other = tensors[keys[0]], tensors[key]
        if other is not first and not (other.is_meta or torch.equal(first, other)):
            raise ConversionError(
                f"Expected '{key}' to be the same tensor as '{keys[0]}', with which the network "
                f"shares it (got different values)"
            )
