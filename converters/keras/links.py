"""What the layers of a Keras file without a configuration are: links of a chain, or refused.

The names that Keras gives (`conv2d_1`, `max_pooling2d`) and the tensors of a layer tell its class.
A layer that may be something else than a link of a chain is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import KerasLayer
from nfn_graph.converters.keras.keys import is_keras_1, snake_case
from nfn_graph.converters.keras.layers import LAYERS
from nfn_graph.converters.keras.roles import keys_by_role

_BY_NAME = {
    **{snake_case(name): name for name in [*LAYERS, "InputLayer"]},
    "input": "InputLayer",
}
# Layers that join others, or whose effect depends on options that the file does not hold.
_UNCLEAR = (
    "Add Subtract Multiply Average Maximum Minimum Concatenate Reshape Permute RepeatVector "
    "GroupNormalization Bidirectional TimeDistributed"
)
# Words in the names of layers without weights that act on every entry, or along positions.
_HARMLESS = re.compile(
    r"input|relu|elu|tanh|sigmoid|softmax|act|drop|noise|pool|pad|crop|up_?sampl|norm|reg|gap|mask|"
    r"flat"
)


class Ends(NamedTuple):
    """How many neurons a layer reads and returns."""

    inputs: int
    outputs: int


def refuse_chain(got: str) -> ConversionError:
    """What to raise where a file is no chain, or not only."""
    return ConversionError(
        f"Expected a chain of layers (got {got}). Give the network as a PyTorch module: arch=..."
    )


def default_class(name: str) -> str | None:
    """The class that a name of Keras's own says, None for a name of the author's."""
    return _BY_NAME.get(re.sub(r"_\d+$", "", name.rpartition("/")[2]))


def class_of(layer: KerasLayer, tensors: Mapping[str, Tensor]) -> str:
    """The class of a layer that may be a link of a chain."""
    named = default_class(layer.name)
    if not any(tensors[key].is_floating_point() for key in layer.keys):
        if named in _UNCLEAR.split() or not (named or _HARMLESS.search(layer.name.lower())):
            raise refuse_chain(f"layer '{layer.name}', which may join others or move neurons")
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
    """The class of a layer with a name of its author's and a kernel."""
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
    """The neurons that the weights of a layer join, None if they belong to single neurons."""
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
    """Whether positions lie between two layers; what cannot follow at all is refused."""
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
