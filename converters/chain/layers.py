"""The chain of layers that keys and shapes of a state dict tell of: an MLP or a plain CNN.

Shapes decide which weights can follow one another; numbers in keys that are otherwise the
same (`layers.0`, `layers.2`) decide their order. The order of the keys in the dict says
nothing. What is left open is refused with the possible readings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nfn_graph.converters.chain.names import Name, stem
from nfn_graph.converters.chain.norms import VectorGroup, find_layer
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.layout import Layout

_MOST_STEPS = 10_000
_NOT_CHAINS = {
    r"weight_(ih|hh)(_l\d+)?(_reverse)?$": "a recurrence over time has no graph of weights",
    r"in_proj_weight|q_proj|k_proj|attn|attention": "attention has no graph of weights",
    r"downsample|shortcut|skip": "it is no chain; give the network as arch",
}
_ARCH = "Give the network as arch, on the meta device if it is large"


@dataclass
class ChainLayer:
    """A weight tensor of a chain, with its bias."""

    key: str
    shape: tuple[int, ...]
    name: Name
    bias: str | None = None
    vectors: list[VectorGroup] = field(default_factory=list)

    @property
    def spatial(self) -> int:
        """Axes of the kernel; 0 for a linear layer."""
        return len(self.shape) - 2

    def follows(self, before: ChainLayer, channels: int) -> bool:
        """Whether it can read the `channels` outputs of another layer."""
        if self.spatial:
            fits = self.shape[1] == channels or self.is_depthwise(channels)
            return fits and self.spatial == before.spatial
        inputs = self.shape[1]
        return inputs == channels or bool(before.spatial and inputs % channels == 0)

    def is_depthwise(self, channels: int) -> bool:
        """Whether it convolves each of several channels on its own."""
        one = self.spatial > 0 and self.shape[1] == 1 < channels
        return one and self.shape[0] % channels == 0


def chain_layout(tensors: Mapping[str, Tensor], flatten: str | None) -> Layout:
    """The layout of the chain that a state dict can only be."""
    for key in tensors:
        for pattern, reason in _NOT_CHAINS.items():
            if re.search(pattern, key):
                raise ConversionError(f"Expected a chain of layers (got '{key}': {reason})")
    if not any(tensor.dim() > 1 for tensor in tensors.values()):
        raise ConversionError(f"Expected weights with at least two axes (got {_listed(tensors)})")
    layers, groups = _parts(tensors)
    chain = _only_order(layers)
    scalars = []
    for group in groups:
        if group.size == 1 and not any(layer.shape[0] == 1 for layer in chain):
            scalars.append(group)
            continue
        shapes = [(layer.name, layer.shape) for layer in chain]
        at = find_layer(group, shapes, [g for g in groups if g.template == group.template])
        chain[max(at - 1, 0)].vectors.append(group if at else group.at_input())
    return _wired(tensors, chain, scalars, flatten)


def _wired(
    tensors: Mapping[str, Tensor],
    chain: Sequence[ChainLayer],
    scalars: Sequence[VectorGroup],
    flatten: str | None,
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
                channels = 0 if before is None else x.shape[1]  # type: ignore[index]
                groups = channels if layer.is_depthwise(channels or 0) else 1
                x = w.conv(x, weight, bias, groups=groups or 1)
            else:
                x = _flattened(w, x, layer, before, flatten)
                x = w.linear(x, weight, bias)
            for group in sorted(layer.vectors, key=lambda g: (g.size, g.name.numbers)):
                if not group.is_input:
                    x = _with_vectors(w, x, layer, group, flatten)
        before = layer
    for group in scalars:
        for key in group.keys:
            x = w.combine(x, w.parameter(key))
    w.output(x)
    return w.layout()


def _with_vectors(
    w: Wiring, x: Value, layer: ChainLayer, group: VectorGroup, flatten: str | None
) -> Value:
    channels = x.shape[1] if x.shape else None
    if layer.spatial and group.size != channels and len(x.shape or ()) > 2:
        x = _flat(w, x, layer.spatial, flatten, group.keys[0], group.size, channels or 1)
    return w.channelwise(x, [w.parameter(key) for key in group.keys], 1)


def _flattened(
    w: Wiring, x: Value, layer: ChainLayer, before: ChainLayer | None, flatten: str | None
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
    w: Wiring, x: Value, spatial: int, flatten: str | None, key: str, size: int, channels: int
) -> Value:
    if flatten is None:
        raise ConversionError(
            f"Expected flatten='channels_first' or flatten='channels_last' (got none). The "
            f"{size} entries of '{key}' are {channels} channels times {size // channels} "
            f"positions, in either order. {_ARCH}, if it permutes before it flattens"
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
            f"(got {[n.key for n in fitting] or 'none'}). {_ARCH}"
        )
    fitting[0].bias = key


def _only_order(layers: Sequence[ChainLayer]) -> list[ChainLayer]:
    """The one order in which the weights form a chain."""
    found: list[list[ChainLayer]] = []
    for order in _orders(layers):
        found.append(order)
        if len(found) > 3:
            break
    if len(found) == 1:
        return found[0]
    if not found:
        shown = ", ".join(f"'{n.key}' {list(n.shape)}" for n in _by_name(layers))
        raise ConversionError(
            f"Expected weights [out, in, ...] that form a chain (got shapes that do not: "
            f"{shown}). {_ARCH}"
        )
    readings = "; or ".join(" -> ".join(n.key for n in order) for order in found[:3])
    raise ConversionError(
        f"Expected keys and shapes that tell the order of the layers (got several readings: "
        f"{readings}{'; ...' if len(found) > 3 else ''}). {_ARCH}"
    )


def _orders(layers: Sequence[ChainLayer]) -> Iterator[list[ChainLayer]]:
    ordered = _by_name(layers)
    later = {
        n.key: [m for m in ordered if m.name.template == n.name.template and m.name < n.name]
        for n in ordered
    }
    steps = 0
    stack: list[tuple[list[ChainLayer], int]] = [([], 0)]
    while stack:
        steps += 1
        if steps > _MOST_STEPS:
            raise ConversionError(
                f"Expected keys and shapes that tell the order of the layers (got more than "
                f"{_MOST_STEPS} partial readings). {_ARCH}"
            )
        order, channels = stack.pop()
        if len(order) == len(ordered):
            yield order
            continue
        used = {n.key for n in order}
        for layer in reversed(ordered):
            if layer.key in used or any(m.key not in used for m in later[layer.key]):
                continue
            if not order or layer.follows(order[-1], channels):
                stack.append(([*order, layer], layer.shape[0]))


def _by_name(layers: Sequence[ChainLayer]) -> list[ChainLayer]:
    return sorted(layers, key=lambda n: (n.name.template, n.name.numbers))


def _listed(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"'{key}' {list(t.shape)}" for key, t in list(tensors.items())[:5]]
    return f"{len(tensors)} tensors: {', '.join(shown)}" if shown else "no tensors"
