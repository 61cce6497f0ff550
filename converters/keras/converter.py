"""Builds graphs of Keras models.

If a file contains the model's configuration, the configuration is followed layer by layer. A file
that contains only weights may list its layers in order, and is then read as a chain. With a PyTorch
network as `arch`, the tensors are read as views with PyTorch's names and axis order, and the
placements are then expressed in terms of the file's own tensors. In all cases, the graph restores
the tensors of the file, key for key and axis for axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder, Hints
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import keras as files
from nfn_graph.converters.keras.arch_names import TorchName, arch_names, has_keras_tensors
from nfn_graph.converters.keras.config import KerasModel, bind, parse_model
from nfn_graph.converters.keras.following import model_layout
from nfn_graph.converters.keras.keys import DEPTHWISE_ORDER, KERNEL_ORDER, is_numbered
from nfn_graph.converters.keras.weights_only import read_chain
from nfn_graph.converters.layout_changes import permuted
from nfn_graph.converters.layouts import find_layout
from nfn_graph.converters.state_dict import build_graph
from nfn_graph.data import Layout, Placement, View

_NORM_ROLES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}

_WEIGHTS_ALONE = "its file contains only weights, not the activation functions"


def from_keras(
    file: files.KerasFile,
    *,
    arch: nn.Module | None = None,
    flatten: FlattenOrder | None = None,
    example_input: Any = None,
) -> WeightGraph:
    """Builds the graph of a Keras file; see :func:`nfn_graph.converters.load`."""
    if arch is not None:
        return _from_arch(file, arch, example_input)
    if file.config is None:
        model, unknown = read_chain(file, flatten), _WEIGHTS_ALONE
    else:
        model, unknown = parse_model(file.config), None
        bind(model, file)
    return build_graph(model_layout(model, file.tensors, unknown), file.tensors)


def _from_arch(file: files.KerasFile, arch: nn.Module, example_input: Any) -> WeightGraph:
    keys, is_ordered = list(file.tensors), file.is_ordered
    if file.config is not None and not is_ordered:
        model: KerasModel = parse_model(file.config)
        bind(model, file)
        keys, is_ordered = [key for layer in model.leaves for key in layer.keys], True
    names = arch_names(arch, keys, file.tensors, is_ordered)
    state_dict = {t.name: t.view(file.tensors[key]) for key, t in names.items()}
    # Keras has no batch counters.
    for name, tensor in arch.state_dict().items():
        if not tensor.is_floating_point():
            state_dict[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    graph = build_graph(find_layout(state_dict, arch, Hints(), example_input), state_dict)
    graph.layout = _file_layout(graph.layout, names, file.tensors)
    return graph


def _file_layout(
    layout: Layout, names: Mapping[str, TorchName], tensors: Mapping[str, Tensor]
) -> Layout:
    """Expresses a layout in terms of the file's keys and axis orders."""
    keys = {torch_name.name: key for key, torch_name in names.items()}
    placements = tuple(
        permuted(
            p,
            names[keys[p.keys[0]]].order,
            tuple(keys[k] for k in p.keys),
            tensors[keys[p.keys[0]]].dim(),
        )
        for p in layout.placements
    )
    placed = {key for p in placements for key in p.keys}
    carried = {key: tensor for key, tensor in tensors.items() if key not in placed}
    views: dict[int, list[View]] = {}
    for number, (p, *_) in enumerate(layout.sources):
        key = keys[p.keys[0]]
        order, rank = names[key].order, tensors[key].dim()
        left_out = tuple(axis for axis in range(rank) if axis not in order)
        views[number] = [("permute", ((*order, *left_out),))]
        if left_out:
            views[number].append(("squeeze", (tuple(range(-len(left_out), 0)),)))
    return replace(
        layout,
        placements=placements,
        carried=carried,
        keys=tuple(tensors),
        computation=layout.computation.reading(views),
    )


def save_keras(
    graph: WeightGraph, path: Path, tensors: Mapping[str, Tensor], template: Path | None
) -> None:
    """Writes the tensors of a graph into a copy of a file, or into a new file of weights."""
    known = None if template is None else files.read(template).tensors
    if known is None or not known.keys() >= tensors.keys():
        tensors = to_keras(graph, tensors)
    files.write(path, tensors, template)


def to_keras(graph: WeightGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a graph with Keras's keys and axis orders.

    Tensors of a Keras file already have them; those of a PyTorch network are renamed and permuted.
    """
    placements = {key: p for p in graph.layout.placements for key in p.keys}
    # Keras lists layers in the order of the computation, which is also that of placements.
    ordered = {key: tensors[key] for key in dict.fromkeys([*placements, *tensors])}
    if has_keras_tensors(graph.layout, tensors):
        return ordered if any(map(is_numbered, tensors)) else dict(tensors)
    tensors = ordered
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for key, tensor in tensors.items():
        layer, role = _layer_and_role(key)
        if tensor.dim() <= 1:
            is_norm = f"{layer}.running_mean" in tensors
            name, value = _NORM_ROLES.get(role, role) if is_norm else role, tensor
        else:
            name, value = _keras_kernel(key, tensor, placements.get(key))
        path = f"{layer}/{name}:0"
        if path in found:
            raise ConversionError(
                f"Expected one kernel for each layer to write to Keras (got '{origins[path]}' and "
                f"'{key}' for '{path}'). Save to .safetensors or .pt."
            )
        found[path], origins[path] = value, key
    return found


def _keras_kernel(key: str, tensor: Tensor, placement: Placement | None) -> tuple[str, Tensor]:
    """Returns Keras's name for a kernel, and the kernel in its axis order."""
    axes = [] if placement is None else [axis for axis in placement.axes if axis != "tap"]
    is_turned = axes == ["source", "target"]
    is_depthwise = placement is not None and isinstance(placement.store, str) and tensor.dim() > 2
    orders = DEPTHWISE_ORDER if is_depthwise else KERNEL_ORDER
    if is_turned and tensor.dim() == 2:
        return "kernel", tensor
    if tensor.dim() not in orders or (is_depthwise and tensor.shape[1] != 1) or is_turned:
        raise ConversionError(
            f"Expected a dense, convolution or depthwise kernel to write to Keras (got "
            f"'{key}' of shape {list(tensor.shape)}). Save to .safetensors or .pt."
        )
    order = orders[tensor.dim()]
    back = [order.index(axis) for axis in range(len(order))]
    return "depthwise_kernel" if is_depthwise else "kernel", tensor.permute(back)


def _layer_and_role(key: str) -> tuple[str, str]:
    """Splits a key of any program into the layer and the role of the tensor."""
    cut = max(key.rfind("."), key.rfind("/"))
    return key[: max(cut, 0)] or "layer", key[cut + 1 :].split(":")[0]
