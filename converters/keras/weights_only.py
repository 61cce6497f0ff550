"""Reads a Keras file without a configuration, if its layers can only form a chain.

The tensors determine whether each layer is a link of the chain or must be refused. Files of Keras 3
only number the layers of each class, so their order is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.chain.names import NamedWeight, check_chain, check_names
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.keras import KerasFile
from nfn_graph.converters.keras.config import KerasLayer, KerasModel, keys_by_role
from nfn_graph.converters.keras.handlers import LAYERS
from nfn_graph.converters.keras.keys import by_layer, is_keras_1, natural, shown_layer, snake_case

_BY_NAME = {**{snake_case(name): name for name in [*LAYERS, "InputLayer"]}, "input": "InputLayer"}
# Layers that combine others, or whose effect depends on options that the file does not contain.
_UNCLEAR = (
    "Add Subtract Multiply Average Maximum Minimum Concatenate Reshape Permute RepeatVector "
    "GroupNormalization Bidirectional TimeDistributed"
)
# Words in the names of layers without weights that act entrywise or along positions.
_HARMLESS = re.compile(
    r"input|relu|elu|tanh|sigmoid|softmax|act|drop|noise|pool|pad|crop|up_?sampl|norm|reg|gap|mask|"
    r"flat"
)


class Ends(NamedTuple):
    """The numbers of neurons that a layer reads and returns."""

    inputs: int
    outputs: int


def refuse_chain(got: str) -> ConversionError:
    """Returns the error for a file that is not a chain, or might not be one."""
    return ConversionError(
        f"Expected a chain of layers (got {got}). Pass the network as a PyTorch module: arch=..."
    )


def default_class(name: str) -> str | None:
    """Returns the class of a layer with a default name; None for a custom name."""
    return _BY_NAME.get(re.sub(r"_\d+$", "", name.rpartition("/")[2]))


def class_of(layer: KerasLayer, tensors: Mapping[str, Tensor]) -> str:
    """Returns the class of a layer that may be a link of a chain."""
    named = default_class(layer.name)
    if not any(tensors[key].is_floating_point() for key in layer.keys):
        if named in _UNCLEAR.split() or not (named or _HARMLESS.search(layer.name.lower())):
            raise refuse_chain(f"layer '{layer.name}', which may combine others or move neurons")
        if named is None and "input" in layer.name.lower():
            return "InputLayer"
        return named or ("Flatten" if "flat" in layer.name.lower() else "Identity")
    roles = keys_by_role(layer)
    kernel = roles.get("kernel")
    if kernel is not None and is_keras_1(kernel) and tensors[kernel].dim() > 2:
        raise refuse_chain(f"'{kernel}', a kernel of Keras 1, whose axes may have two orders")
    if named is not None and named not in _UNCLEAR.split():
        return named
    words = set(roles)
    if "recurrent_kernel" in words and not re.search(r"forward|backward", layer.name):
        hidden, gates = tensors[roles["recurrent_kernel"]].shape
        return {4: "LSTM", 3: "GRU"}.get(gates // hidden, "SimpleRNN")
    if "recurrent_kernel" in words or re.search(r"lstm|gru|rnn", layer.name):
        raise refuse_chain(f"layer '{layer.name}', a recurrence over time in two directions")
    if kernel is not None and words <= {"kernel", "bias"}:
        return _kernel_class(kernel, roles.get("bias"), tensors)
    if "moving_mean" in words:
        return "BatchNormalization"
    if words <= {"gamma", "beta"} and re.search(r"(?<![a-z])(ln|layer_?norm)", layer.name.lower()):
        return "LayerNormalization"
    for role, class_name in (("embeddings", "Embedding"), ("alpha", "PReLU")):
        if words == {role}:
            return class_name
    if "depthwise_kernel" in words:
        kind = "Separable" if "pointwise_kernel" in words else "Depthwise"
        return f"{kind}Conv{tensors[roles['depthwise_kernel']].dim() - 2}D"
    raise refuse_chain(f"layer '{layer.name}' with {', '.join(layer.keys)}, of an unknown class")


def _kernel_class(key: str, bias: str | None, tensors: Mapping[str, Tensor]) -> str:
    """Returns the class of a layer with a custom name and a kernel."""
    kernel = tensors[key]
    spatial = kernel.dim() - 2
    if spatial <= 0:
        return "Dense"
    first, last = kernel.shape[-2:]
    results = None if bias is None else tensors[bias].numel()
    if last == 1 < first and spatial < 3:
        if results is None:
            raise refuse_chain(
                f"'{key}' of shape {list(kernel.shape)}, the kernel of a convolution or of a "
                f"depthwise convolution"
            )
        if results == first:
            return f"DepthwiseConv{spatial}D"
    return f"Conv{spatial}D{'Transpose' if results == first != last else ''}"


def ends_of(layer: KerasLayer, tensors: Mapping[str, Tensor]) -> Ends | None:
    """Returns the neurons that a layer's weights connect; None if they belong to single neurons."""
    roles = keys_by_role(layer)
    key = roles.get("kernel", roles.get("depthwise_kernel", roles.get("embeddings")))
    if key is None or tensors[key].dim() < 2:
        return None
    first, last = tensors[key].shape[-2:]
    if "recurrent_kernel" in roles:
        return Ends(first, tensors[roles["recurrent_kernel"]].shape[0])
    if layer.class_name.startswith("SeparableConv") and "pointwise_kernel" in roles:
        return Ends(first, tensors[roles["pointwise_kernel"]].shape[-1])
    if layer.class_name.startswith("DepthwiseConv"):
        return Ends(first, first * last)
    return Ends(last, first) if layer.class_name.endswith("Transpose") else Ends(first, last)


def is_spatial(layer: KerasLayer) -> bool:
    """Whether a layer is a convolution, whose results have positions."""
    return re.search(r"Conv\dD", layer.class_name) is not None


def are_flattened(before: tuple[KerasLayer, Ends], after: tuple[KerasLayer, Ends]) -> bool:
    """Whether positions are flattened between two layers; raises if the second cannot follow."""
    (other, (_, outputs)), (layer, (inputs, _)) = before, after
    if inputs == outputs:
        return False
    has_positions = is_spatial(other) or other.class_name == "Embedding"
    if layer.class_name == "Dense" and has_positions and inputs % outputs == 0:
        return True
    raise refuse_chain(
        f"'{layer.name}', which reads {inputs} neurons, after '{other.name}', which returns "
        f"{outputs}"
    )


_MOST_STEPS = 10_000

Chain = list[tuple[KerasLayer, Ends]]


def in_order(layers: Sequence[KerasLayer], tensors: Mapping[str, Tensor]) -> list[KerasLayer]:
    """Returns the only possible order of the layers with weights."""
    counted = sorted((n for n in layers if n.keys), key=lambda layer: natural(layer.name))
    links: dict[str, Chain] = {}
    vectors: dict[str, list[KerasLayer]] = {}
    for layer in counted:
        if not any(tensors[key].is_floating_point() for key in layer.keys):
            continue
        ends = ends_of(layer, tensors)
        if ends is None:
            vectors.setdefault(layer.class_name, []).append(layer)
        else:
            links.setdefault(layer.class_name, []).append((layer, ends))
    chain = _only_chain(list(links.values()))
    if any(layer.class_name == "InputLayer" for layer in layers):
        _check_untied(chain)
    behind: list[list[KerasLayer]] = [[] for _ in range(len(chain) + 1)]
    for same in vectors.values():
        for layer, at in zip(same, _only_places(same, chain, tensors), strict=True):
            behind[at].append(layer)
    ordered = list(behind[0])
    for (layer, _), after in zip(chain, behind[1:], strict=True):
        ordered += [layer, *after]
    return ordered


def _only_chain(classes: Sequence[Chain]) -> Chain:
    found: list[Chain] = []
    for chain in _chains(classes):
        found.append(chain)
        if len(found) > 1:
            readings = "; or ".join(" -> ".join(n.name for n, _ in chain) for chain in found)
            raise refuse_chain(f"several readings: {readings}")
    if not found:
        shown = ", ".join(
            f"'{layer.name}' from {ends.inputs} to {ends.outputs}"
            for same in classes
            for layer, ends in same
        )
        raise refuse_chain(f"layers that do not form one: {shown}")
    return found[0]


def _chains(classes: Sequence[Chain]) -> Iterator[Chain]:
    """Yields all chains in which the layers of every class keep their order."""
    total = sum(map(len, classes))
    stack: list[tuple[Chain, tuple[int, ...]]] = [([], (0,) * len(classes))]
    for _ in range(_MOST_STEPS):
        if not stack:
            return
        chain, used = stack.pop()
        if len(chain) == total:
            yield chain
            continue
        for i, same in enumerate(classes):
            if used[i] < len(same) and (not chain or _follows(chain[-1], same[used[i]])):
                after = (*used[:i], used[i] + 1, *used[i + 1 :])
                stack.append(([*chain, same[used[i]]], after))
    raise refuse_chain(f"more than {_MOST_STEPS} partial readings")


def _follows(before: tuple[KerasLayer, Ends], after: tuple[KerasLayer, Ends]) -> bool:
    try:
        are_flattened(before, after)
    except ConversionError:
        return False
    return True


def _check_untied(chain: Chain) -> None:
    """Refuses a functional model whose layers may be added, because its file omits additions."""
    sizes: dict[int, str] = {chain[0][1].inputs: "the input"}
    for layer, ends in chain:
        if ends.outputs in sizes:
            raise refuse_chain(
                f"a functional model with {ends.outputs} neurons at {sizes[ends.outputs]} and at "
                f"'{layer.name}', which may be added to each other"
            )
        sizes[ends.outputs] = f"'{layer.name}'"


def _only_places(
    layers: Sequence[KerasLayer], chain: Chain, tensors: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """Returns the places of the layers of one class, in order; 0 is the input."""
    found: list[tuple[int, ...]] = [()]
    for layer in layers:
        size = next(tensors[key].shape[-1] for key in layer.keys if tensors[key].dim())
        fitting = [i for i in range(len(chain) + 1) if _fits(size, chain, i)]
        found = [(*places, i) for places in found for i in fitting if i >= max(places, default=0)]
        if len(found) > _MOST_STEPS:
            break
    if len(found) != 1:
        names = ", ".join(f"'{layer.name}'" for layer in layers[:3])
        raise refuse_chain(f"{len(found) or 'no'} places for {names}")
    return found[0]


def _fits(size: int, chain: Chain, at: int) -> bool:
    outputs = chain[0][1].inputs if at == 0 else chain[at - 1][1].outputs
    return size == outputs or (0 < at < len(chain) and size == chain[at][1].inputs)


def read_chain(file: KerasFile, flatten: FlattenOrder | None) -> KerasModel:
    """Reads the layers of a file as a Sequential model."""
    found = list(_leaves(file))
    for layer in found:
        layer.class_name = class_of(layer, file.tensors)
    if sum(layer.class_name == "InputLayer" for layer in found) > 1:
        raise refuse_chain("several inputs")
    if not file.is_ordered:
        found = in_order(found, file.tensors)
    layers: list[KerasLayer] = []
    chain: list[tuple[KerasLayer, Ends]] = []
    for layer in found:
        ends = ends_of(layer, file.tensors)
        is_flat = any(before.class_name in ("Flatten", "Dense") for before in layers)
        if ends is not None:
            if chain and are_flattened(chain[-1], (layer, ends)):
                if flatten is None:
                    raise _unknown_order(layer, ends, chain[-1][1])
                if not is_flat:
                    layers.append(KerasLayer("flatten", "Flatten"))
            chain.append((layer, ends))
        has_images = any(is_spatial(before) for before in layers) and not is_flat
        # Entries are flattened in their stored order.
        if layer.class_name != "Flatten":
            order = flatten or "channels_last"
            is_first = order == "channels_first" and has_images
            layer.options = {"data_format": order, "axis": 1 if is_first else -1}
        layers.append(layer)
    check_names([f"{n.name}.weight" for n, _ in chain if default_class(n.name) is None])
    if chain:
        check_chain([_named(layer, ends) for layer, ends in chain])
    return KerasModel(layers)


def _leaves(file: KerasFile) -> Iterator[KerasLayer]:
    """Yields the layers; a nested model lists only its layers with weights."""
    for group, keys in file.layers.items():
        inside = by_layer(keys)
        if len(inside) < 2:
            name = group if file.is_ordered else shown_layer(group)
            yield KerasLayer(name, "", keys=tuple(keys))
            continue
        for path, found in inside.items():
            yield KerasLayer(shown_layer(path), "", keys=tuple(found))


def _named(layer: KerasLayer, ends: Ends) -> NamedWeight:
    is_square = is_spatial(layer) and ends.inputs == ends.outputs > 1
    return NamedWeight(
        f"{layer.name}.weight", *ends, is_square and default_class(layer.name) is None
    )


def _unknown_order(layer: KerasLayer, ends: Ends, before: Ends) -> ConversionError:
    return ConversionError(
        f"Expected flatten='channels_first' or flatten='channels_last' (got none). The "
        f"{ends.inputs} inputs of '{layer.name}' are {before.outputs} channels times "
        f"{ends.inputs // before.outputs} positions, in either order. Keras uses channels_last"
    )
