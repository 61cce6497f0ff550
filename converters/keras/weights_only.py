"""The chain of layers that a Keras file without a configuration can only be.

Such a file lists the layers in their order, also those without weights. What they are is told
by the names that Keras gives (`conv2d_1`, `max_pooling2d`) and by the tensors that they have. A
layer that may be something else than a link of a chain is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.chain.topology import NamedWeight, check_chain, check_names
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.keras import KerasFile
from nfn_graph.converters.keras.config import KerasLayer, KerasModel
from nfn_graph.converters.keras.keys import by_layer, is_keras_1, shown_layer, snake_case
from nfn_graph.converters.keras.layers import LAYERS, refusal
from nfn_graph.converters.keras.roles import keys_by_role

_ASK = "Give the network as a PyTorch module: arch=..."
_BY_NAME = {snake_case(name): name for name in [*LAYERS, "InputLayer"]}
# Layers that join others, or whose effect depends on options that the file does not hold.
_UNCLEAR = frozenset(
    (
        *("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"),
        *("Reshape", "Permute", "RepeatVector", "GroupNormalization"),
    )
)
# Words in the names of layers without weights that act on every entry, or along positions.
_HARMLESS = re.compile(
    r"input|relu|elu|tanh|sigmoid|softmax|act|drop|noise|pool|pad|crop|up_?sampl|norm|reg|gap|mask"
)


class Ends(NamedTuple):
    """How many neurons a layer reads and returns."""

    inputs: int
    outputs: int


def read_chain(file: KerasFile, flatten: FlattenOrder | None) -> KerasModel:
    """The layers of a file as a Sequential model.

    Args:
        file: A file that lists its layers in their order.
        flatten: The order of the entries between a convolution and a dense layer, if known.
    """
    layers: list[KerasLayer] = []
    chain: list[tuple[KerasLayer, Ends]] = []
    for layer in _leaves(file):
        roles = keys_by_role(layer)
        layer.class_name = _class_of(layer, roles, file.tensors)
        options: dict[str, object] = {"data_format": flatten or "channels_last"}
        ends = _ends(layer, roles, file.tensors)
        is_flat = any(before.class_name in ("Flatten", "Dense") for before in layers)
        if ends is not None:
            if chain and _is_flattened(chain[-1], layer, ends):
                if flatten is None:
                    raise _unknown_order(layer, ends, chain[-1][1])
                if not is_flat:
                    layers.append(KerasLayer("flatten", "Flatten"))
                is_flat = True
            chain.append((layer, ends))
        if layer.class_name == "BatchNormalization" and not is_flat:
            has_positions = any(_spatial(before) for before in layers)
            options["axis"] = 1 if flatten == "channels_first" and has_positions else -1
        # Entries are flattened as they lie.
        layer.options = {} if layer.class_name == "Flatten" else options
        layers.append(layer)
    if sum(layer.class_name == "InputLayer" for layer in layers) > 1:
        raise _refusal("several inputs")
    custom = [layer for layer, _ in chain if not _is_default(layer.name)]
    check_names([f"{layer.name}.weight" for layer in custom])
    if chain:
        check_chain([_named(layer, ends, file.tensors) for layer, ends in chain])
    return KerasModel(layers)


def _leaves(file: KerasFile) -> Iterator[KerasLayer]:
    """The layers in their order; a model inside lists only those of its layers with weights."""
    for group, keys in file.layers.items():
        inside = by_layer(keys)
        if len(inside) < 2:
            yield KerasLayer(group, "", keys=tuple(keys))
            continue
        for path, found in inside.items():
            yield KerasLayer(shown_layer(path), "", keys=tuple(found))


def _class_of(layer: KerasLayer, roles: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    named = _default_class(layer.name)
    if not any(tensors[key].is_floating_point() for key in layer.keys):
        if named in _UNCLEAR or (named is None and not _is_harmless(layer.name)):
            raise _refusal(f"layer '{layer.name}', which may join others or move their neurons")
        return named or ("Flatten" if "flat" in layer.name.lower() else "Identity")
    kernel = roles.get("kernel")
    if kernel is not None and is_keras_1(kernel) and tensors[kernel].dim() > 2:
        raise _refusal(f"'{kernel}', a kernel of Keras 1, whose axes may have two orders")
    if named is not None and named not in _UNCLEAR:
        return named
    words = set(roles)
    if "recurrent_kernel" in words or re.search(r"lstm|gru|rnn", layer.name):
        raise ConversionError(f"layer '{layer.name}': {refusal('RNN')}")
    if "kernel" in words and words <= {"kernel", "bias"}:
        return _kernel_class(layer, roles, tensors)
    if "moving_mean" in words:
        return "BatchNormalization"
    if words <= {"gamma", "beta"} and re.search(r"(?<![a-z])(ln|layer_?norm)", layer.name.lower()):
        return "LayerNormalization"
    for role, class_name in (("embeddings", "Embedding"), ("alpha", "PReLU")):
        if words == {role}:
            return class_name
    if {"depthwise_kernel", "pointwise_kernel"} <= words:
        return f"SeparableConv{tensors[roles['depthwise_kernel']].dim() - 2}D"
    if "depthwise_kernel" in words:
        return f"DepthwiseConv{tensors[roles['depthwise_kernel']].dim() - 2}D"
    raise _refusal(f"layer '{layer.name}' with {', '.join(layer.keys)}, whose class is not known")


def _kernel_class(
    layer: KerasLayer, roles: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> str:
    """The class of a layer with a name of its author's and a kernel."""
    kernel = tensors[roles["kernel"]]
    spatial = kernel.dim() - 2
    if spatial <= 0:
        return "Dense"
    first, last = kernel.shape[-2:]
    results = tensors[roles["bias"]].numel() if "bias" in roles else None
    if last == 1 < first and spatial < 3:
        if results is None:
            raise _refusal(
                f"'{roles['kernel']}' of shape {list(kernel.shape)}, the kernel of a convolution "
                f"or of a depthwise convolution"
            )
        if results == first:
            return f"DepthwiseConv{spatial}D"
    if results == first != last:
        return f"Conv{spatial}DTranspose"
    return f"Conv{spatial}D"


def _ends(
    layer: KerasLayer, roles: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Ends | None:
    """The neurons that the weights of a layer join, None if they belong to single neurons."""
    if layer.class_name.startswith("SeparableConv") and "pointwise_kernel" in roles:
        depthwise, pointwise = (
            tensors[roles[f"{name}_kernel"]] for name in ("depthwise", "pointwise")
        )
        return Ends(depthwise.shape[-2], pointwise.shape[-1])
    key = roles.get("kernel", roles.get("depthwise_kernel", roles.get("embeddings")))
    if key is None or tensors[key].dim() < 2:
        return None
    first, last = tensors[key].shape[-2:]
    if layer.class_name.startswith("DepthwiseConv"):
        return Ends(first, first * last)
    return Ends(last, first) if layer.class_name.endswith("Transpose") else Ends(first, last)


def _is_flattened(before: tuple[KerasLayer, Ends], layer: KerasLayer, ends: Ends) -> bool:
    """Whether positions lie between two layers; what cannot follow at all is refused."""
    other, (_, outputs) = before
    if ends.inputs == outputs:
        return False
    has_positions = _spatial(other) or other.class_name == "Embedding"
    if layer.class_name == "Dense" and has_positions and ends.inputs % outputs == 0:
        return True
    raise _refusal(
        f"'{layer.name}', which reads {ends.inputs} neurons, after '{other.name}', which returns "
        f"{outputs}"
    )


def _spatial(layer: KerasLayer) -> bool:
    return re.search(r"Conv\dD", layer.class_name) is not None


def _named(layer: KerasLayer, ends: Ends, tensors: Mapping[str, Tensor]) -> NamedWeight:
    is_square = _spatial(layer) and ends.inputs == ends.outputs > 1
    return NamedWeight(
        f"{layer.name}.weight", *ends, is_square and _default_class(layer.name) is None
    )


def _default_class(name: str) -> str | None:
    """The class that a name of Keras's own says, None for a name of the author's."""
    return _BY_NAME.get(re.sub(r"_\d+$", "", name.rpartition("/")[2]))


def _is_default(name: str) -> bool:
    return _default_class(name) is not None


def _is_harmless(name: str) -> bool:
    return "flat" in name.lower() or _HARMLESS.search(name.lower()) is not None


def _unknown_order(layer: KerasLayer, ends: Ends, before: Ends) -> ConversionError:
    count = ends.inputs // before.outputs
    return ConversionError(
        f"Expected flatten='channels_first' or flatten='channels_last' (got none). The "
        f"{ends.inputs} inputs of '{layer.name}' are {before.outputs} channels times {count} "
        f"positions, in either order; Keras's own is channels_last"
    )


def _refusal(got: str) -> ConversionError:
    return ConversionError(f"Expected a chain of layers (got {got}). {_ASK}")
