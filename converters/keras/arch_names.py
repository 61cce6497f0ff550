"""Matches the tensors of a Keras file to the names and axis orders of a PyTorch network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import ROLES
from nfn_graph.converters.keras.keys import (
    DEPTHWISE_ORDER,
    KERNEL_ORDER,
    by_layer,
    is_keras_1,
    is_numbered,
    natural,
    shown_layer,
    split_key,
)
from nfn_graph.data import Layout

# PyTorch's names for tensors other than kernels.
_LEAVES = {
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "alpha": "weight",
    "embeddings": "weight",
    "scale": "weight",
}


def has_keras_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> bool:
    """Whether keys and axes are those of a Keras file; names alone do not prove it."""
    for placement in layout.placements:
        # In Keras, kernel entries or source neurons come first.
        first = placement.axes[0]
        is_turned = first == "target" or (first == "source" and len(placement.shape) > 2)
        # Keras 1 could also have PyTorch's axis order.
        if is_turned and not is_keras_1(placement.keys[0]):
            return False
    return all(
        split_key(key)[1] in ROLES or is_numbered(key) or not x.is_floating_point()
        for key, x in tensors.items()
    )


@dataclass(frozen=True)
class TorchName:
    """A Keras tensor's name in a state dict, and its axes in PyTorch's order.

    Args:
        name: The name.
        order: The axes in PyTorch's order; omitted axes have size 1.
    """

    name: str
    order: tuple[int, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with PyTorch's axes."""
        dropped = [axis for axis in range(tensor.dim()) if axis not in self.order]
        return (
            tensor.permute(*self.order, *dropped).flatten(len(self.order) - 1)
            if dropped
            else (tensor.permute(self.order))
        )


@dataclass(frozen=True)
class _Part:
    """The tensors of a Keras layer that form one layer in PyTorch."""

    layer: str
    keys: Sequence[str]
    leaves: Sequence[str | None]


def arch_names(
    arch: nn.Module, keys: Iterable[str], tensors: Mapping[str, Tensor], is_ordered: bool
) -> dict[str, TorchName]:
    """Matches the tensors of a file to those of a network, layer by layer, in the order of both.

    Args:
        arch: The network.
        keys: The keys in the order of the file's layers.
        tensors: The tensors by key.
        is_ordered: Whether all layers are ordered; otherwise only those of the same class are.
    """
    mine = [
        part
        for found in by_layer(key for key in keys if tensors[key].is_floating_point()).values()
        for part in _parts(found, tensors)
    ]
    theirs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in arch.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if tensor.is_floating_point():
            theirs.setdefault(layer, {})[leaf] = tuple(tensor.shape)
    if len(mine) != len(theirs):
        raise ConversionError(
            f"Expected the {len(theirs)} layers of arch with weights (got {len(mine)} layers)"
        )
    if not is_ordered:
        mine = _in_order(mine, list(theirs.values()), tensors)
    names: dict[str, TorchName] = {}
    for part, (target, shapes) in zip(mine, theirs.items(), strict=True):
        names.update(_matched(part, target, shapes, tensors))
    return names


def _parts(keys: Sequence[str], tensors: Mapping[str, Tensor]) -> list[_Part]:
    """Returns the PyTorch layers for one Keras layer: two for a separable convolution."""
    layer = shown_layer(split_key(keys[0])[0])
    roles = [split_key(key)[1] for key in keys]
    if is_numbered(keys[0]):
        keys = sorted(keys, key=natural)
        large = [key for key in keys if tensors[key].dim() > 2]
        if len(large) == 2:
            return [_Part(layer, keys[:1], [None]), _Part(layer, keys[1:], [None] * len(keys[1:]))]
        return [_Part(layer, keys, [None] * len(keys))]
    if "pointwise_kernel" in roles:
        at = roles.index("depthwise_kernel") if "depthwise_kernel" in roles else 0
        rest = [key for i, key in enumerate(keys) if i != at]
        second = _Part(layer, rest, [_leaf(split_key(key)[1]) for key in rest])
        return [_Part(layer, [keys[at]], ["weight"]), second]
    return [_Part(layer, keys, [_leaf(role) for role in roles])]


def _leaf(role: str) -> str:
    return "weight" if role.endswith("kernel") else _LEAVES.get(role, role)


def _in_order(
    parts: Sequence[_Part],
    theirs: Sequence[Mapping[str, tuple[int, ...]]],
    tensors: Mapping[str, Tensor],
) -> list[_Part]:
    """Orders layers as in arch, given that only the layers of each class are ordered."""
    found: dict[tuple[int, ...], list[_Part]] = {}
    for part in sorted(parts, key=lambda part: natural(part.layer)):
        found.setdefault(tuple(tensors[key].dim() for key in part.keys), []).append(part)
    for same in found.values():
        classes = {re.sub(r"_\d+$", "", part.layer): part.layer for part in same}
        if len(classes) > 1:
            first, second, *_ = classes.values()
            raise ConversionError(
                f"Expected a file with the order of its layers (got '{first}' and '{second}', "
                f"which are counted separately). Save the model with model.save('name.keras')"
            )
    ordered = []
    for shapes in theirs:
        ranks = tuple(len(shape) for shape in shapes.values())
        if not found.get(ranks):
            raise ConversionError(
                f"Expected as many layers of every kind as in arch (got too few with tensors of "
                f"{ranks} axes)"
            )
        ordered.append(found[ranks].pop(0))
    return ordered


def _matched(
    part: _Part, target: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> dict[str, TorchName]:
    """Matches the tensors of one layer; shapes decide between possible axis orders."""
    leaves = [
        leaf or (list(shapes)[i] if i < len(shapes) else "") for i, leaf in enumerate(part.leaves)
    ]
    names = {}
    for key, leaf in zip(part.keys, leaves, strict=True):
        shape = tuple(tensors[key].shape)
        fitting = {
            order
            for order in _orders(key, shape)
            if leaf in shapes and tuple(shape[i] for i in order) == shapes[leaf]
        }
        if len(fitting) > 1:
            raise ConversionError(
                f"Expected a known order of the axes of '{key}' (got shape {list(shape)}, "
                f"which Keras 1 may have stored in either order)"
            )
        if fitting:
            prefix = f"{target}." if target else ""
            names[key] = TorchName(f"{prefix}{leaf}", fitting.pop())
    if len(names) != len(part.keys) or sorted(leaves) != sorted(shapes):
        got = {leaf: tuple(tensors[key].shape) for leaf, key in zip(leaves, part.keys, strict=True)}
        raise ConversionError(
            f"Expected layer '{part.layer}' to be '{target}' of arch with {dict(shapes)} (got "
            f"{got} in the axis order of Keras)"
        )
    return names


def _orders(key: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the possible orders of a tensor's axes in PyTorch."""
    rank, role = len(shape), split_key(key)[1]
    if rank < 2:
        return [tuple(range(rank))]
    if role == "embeddings":
        return [(0, 1)]
    if role == "alpha":
        # Shared axes have size 1 and are omitted.
        return [tuple(i for i in range(rank) if shape[i] != 1 or i == rank - 1)]
    orders = [KERNEL_ORDER[rank]] if rank in KERNEL_ORDER and role != "depthwise_kernel" else []
    if rank in DEPTHWISE_ORDER and (role == "depthwise_kernel" or shape[-1] == 1 < shape[-2]):
        orders.append(DEPTHWISE_ORDER[rank])
    if is_keras_1(key) and rank > 2:
        orders.append(tuple(range(rank)))
    return orders
