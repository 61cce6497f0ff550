"""Graphs of Keras models.

Keras stores the axes of a kernel as `(*spatial, in, out)`, PyTorch as `(out, in, *spatial)`. The
tensors are read as views in PyTorch's order and under PyTorch's names, converted like any state
dict, and the placements are then written in terms of the file's own tensors: what comes back
from the graph is the file, key for key and axis for axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder, Hints
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import keras as files
from nfn_graph.converters.keras.config import check_chain, layer_classes
from nfn_graph.converters.keras.permuted import permuted
from nfn_graph.converters.layouts import find_layout
from nfn_graph.converters.state_dict import build_graph
from nfn_graph.data import Layout, Placement, PlacementAxis

# What the axes of a Keras kernel are in PyTorch's order, by their number.
KERNEL_ORDER = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
DEPTHWISE_ORDER = {3: (1, 2, 0), 4: (2, 3, 0, 1)}
_VECTORS = {
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_NORM_NAMES = {name: keras for keras, name in list(_VECTORS.items())[1:]}
_KERAS_ROLES = {*_VECTORS, "kernel", "depthwise_kernel", "pointwise_kernel"}
_NUMBERED_NORM = ("gamma", "beta", "moving_mean", "moving_variance")


@dataclass(frozen=True)
class TorchName:
    """A Keras tensor's name in a state dict, and its axes in PyTorch's order."""

    name: str
    order: tuple[int, ...]


def from_keras(
    path: Path,
    *,
    arch: nn.Module | None = None,
    flatten: FlattenOrder | None = None,
    example_input: Any = None,
) -> WeightGraph:
    """The graph of a Keras `.h5` file; see :func:`nfn_graph.converters.load`."""
    file = files.read(path)
    classes = layer_classes(file.config)
    names = torch_names(path, file, classes)
    counters: dict[str, Tensor] = {}
    if arch is not None:
        names = _names_of(arch, names, file.tensors, path)
        # Keras does not count batches.
        counters = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype)
            for name, tensor in arch.state_dict().items()
            if not tensor.is_floating_point()
        }
    elif file.config is not None:
        order = check_chain(path, file.config)
        flatten = flatten or order
    tensors = {t.name: file.tensors[key].permute(t.order) for key, t in names.items()}
    # The axes of a kernel say whether it is depthwise, the configuration that it is a chain.
    depthwise = [t.name for t in names.values() if t.order in DEPTHWISE_ORDER.values()]
    hints = Hints(
        flatten, depthwise=frozenset(depthwise), is_chain=arch is None and file.config is not None
    )
    state_dict = {**counters, **tensors}
    layout = find_layout(state_dict, arch, hints, example_input)
    graph = build_graph(layout, state_dict)
    graph.layout = _file_layout(graph.layout, names, file.tensors)
    return graph


def to_keras(graph: WeightGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a graph with Keras's keys and axis orders.

    Those of a Keras file are that already; those of a PyTorch network are renamed and permuted.
    """
    if _is_keras(graph, tensors):
        return dict(tensors)
    placements = {key: p for p in graph.layout.placements for key in p.keys}
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for key, tensor in tensors.items():
        layer, role = _layer_and_role(key)
        if tensor.dim() <= 1:
            is_norm = f"{layer}.running_mean" in tensors
            name, value = _NORM_NAMES.get(role, role) if is_norm else role, tensor
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


def _is_keras(graph: WeightGraph, tensors: Mapping[str, Tensor]) -> bool:
    """Whether keys and axes are those of a Keras file; names alone may be anybody's."""
    if any(_neuron_axes(p) == ["target", "source"] for p in graph.layout.placements):
        return False
    return all(
        _role(key) in _KERAS_ROLES or "/vars/" in key or not x.is_floating_point()
        for key, x in tensors.items()
    )


def _neuron_axes(placement: Placement) -> list[PlacementAxis]:
    return [axis for axis in placement.axes if axis != "tap"]


def _keras_kernel(key: str, tensor: Tensor, placement: Placement | None) -> tuple[str, Tensor]:
    """What Keras calls a kernel, and the kernel in its order of axes."""
    is_turned = placement is not None and _neuron_axes(placement) == ["source", "target"]
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
    """The layer that a key of any program names, and what the tensor is in it."""
    cut = max(key.rfind("."), key.rfind("/"))
    return key[: max(cut, 0)] or "layer", key[cut + 1 :].split(":")[0]


def torch_names(
    path: Path, file: files.KerasFile, classes: Mapping[str, str]
) -> dict[str, TorchName]:
    """The name and axis order of every tensor of a file in PyTorch's terms."""
    names = {}
    for layer, keys in file.layers.items():
        for key, role in zip(keys, _roles(path, keys, file.tensors), strict=True):
            tensor = file.tensors[key]
            if not tensor.is_floating_point():
                names[key] = TorchName(f"{layer}.{role}", tuple(range(tensor.dim())))
            elif role in _VECTORS and tensor.dim() == 1:
                separable = f"{layer}.pointwise" if _is_separable(keys) else layer
                names[key] = TorchName(f"{separable}.{_VECTORS[role]}", (0,))
            else:
                names[key] = _kernel_name(path, layer, key, role, file, classes.get(layer))
    return names


def _roles(path: Path, keys: tuple[str, ...], tensors: Mapping[str, Tensor]) -> list[str]:
    """What each tensor of a layer is: by its name, or by its number in Keras 3's layout."""
    roles = [_role(key) for key in keys]
    if not roles[0].isdecimal():
        return roles
    sizes = [tuple(tensors[key].shape) for key in keys]
    if len(sizes) == 4 and len(set(sizes)) == 1 and len(sizes[0]) == 1:
        return list(_NUMBERED_NORM)
    if len(sizes[0]) >= 2 and len(sizes) <= 2 and all(len(size) == 1 for size in sizes[1:]):
        return ["kernel", "bias"][: len(sizes)]
    raise ConversionError(
        f"Expected the numbered weights '{keys[0]}', ... of '{path}' to be a kernel and a bias, "
        f"or the four vectors of a batch norm (got shapes {sizes}). Save the model with "
        f"model.save('name.h5'), which keeps the names."
    )


def _kernel_name(
    path: Path, layer: str, key: str, role: str, file: files.KerasFile, class_name: str | None
) -> TorchName:
    tensor = file.tensors[key]
    biases = [k for k in file.layers[layer] if k.rsplit("/", 1)[-1].startswith(("bias", "1"))]
    orders: dict[int, tuple[int, ...]] = {}
    name = layer
    if role == "depthwise_kernel" or (role == "kernel" and "Depthwise" in (class_name or "")):
        orders = DEPTHWISE_ORDER
        name = f"{layer}.depthwise" if _is_separable(file.layers[layer]) else layer
    elif role == "pointwise_kernel":
        orders, name = KERNEL_ORDER, f"{layer}.pointwise"
    elif role == "kernel":
        orders = KERNEL_ORDER
        inputs, outputs = tensor.shape[-2:] if tensor.dim() > 1 else (0, 0)
        if class_name is None and tensor.dim() in DEPTHWISE_ORDER and outputs == 1 < inputs:
            # The same shape as a depthwise kernel; only the bias can tell them apart.
            if not biases:
                raise ConversionError(
                    f"Expected to know whether '{key}' of '{path}' is a convolution or a "
                    f"depthwise convolution (got shape {list(tensor.shape)}, which fits both). "
                    f"Save the model with model.save('name.h5'), which keeps the configuration."
                )
            orders = DEPTHWISE_ORDER if file.tensors[biases[0]].numel() == inputs else orders
    if tensor.dim() not in orders:
        raise ConversionError(
            f"Expected tensor '{key}' of '{path}' to be a kernel, a bias or a parameter of a batch "
            f"norm (got '{role}' with shape {list(tensor.shape)})"
        )
    if orders is DEPTHWISE_ORDER and tensor.shape[-1] != 1:
        raise ConversionError(
            f"Expected a depth multiplier of 1 of '{key}' in '{path}' (got {tensor.shape[-1]}, "
            f"whose outputs cannot be permuted freely)"
        )
    return TorchName(f"{name}.weight", orders[tensor.dim()])


def _role(key: str) -> str:
    return key.rsplit("/", 1)[-1].split(":")[0]


def _is_separable(keys: tuple[str, ...]) -> bool:
    return any("pointwise_kernel" in key for key in keys)


def _names_of(
    arch: nn.Module,
    names: Mapping[str, TorchName],
    tensors: Mapping[str, Tensor],
    path: Path,
) -> dict[str, TorchName]:
    """The names of `arch` for the tensors of a file: layer by layer, in the order of both."""
    mine: dict[str, dict[str, str]] = {}
    for key, torch_name in names.items():
        layer, _, role = torch_name.name.rpartition(".")
        if tensors[key].is_floating_point():
            mine.setdefault(layer, {})[role] = key
    theirs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in arch.state_dict().items():
        layer, _, role = name.rpartition(".")
        if tensor.is_floating_point():
            theirs.setdefault(layer, {})[role] = tuple(tensor.shape)
    renamed = dict(names)
    if len(mine) != len(theirs):
        raise ConversionError(
            f"Expected the {len(theirs)} layers of arch in '{path}' (got {len(mine)} layers)"
        )
    for (layer, keys), (target, shapes) in zip(mine.items(), theirs.items(), strict=True):
        got = {
            role: tuple(tensors[key].permute(names[key].order).shape) for role, key in keys.items()
        }
        if got != shapes:
            raise ConversionError(
                f"Expected layer '{layer}' of '{path}' to be '{target}' of arch with {shapes} "
                f"(got {got})"
            )
        for role, key in keys.items():
            renamed[key] = TorchName(f"{target}.{role}", names[key].order)
    return renamed


def _file_layout(
    layout: Layout, names: Mapping[str, TorchName], tensors: Mapping[str, Tensor]
) -> Layout:
    """The layout in terms of the file's keys and axis orders."""
    keys = {torch_name.name: key for key, torch_name in names.items()}
    placements = tuple(
        permuted(p, names[keys[p.keys[0]]].order, tuple(keys[k] for k in p.keys))
        for p in layout.placements
    )
    carried = {keys[name]: tensors[keys[name]] for name in layout.carried if name in keys}
    return replace(layout, placements=placements, carried=carried, keys=tuple(tensors))
