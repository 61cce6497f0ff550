"""Torch operations with weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nfn_graph.converters.pytorch.registry import HANDLERS, Handler, handles, ints
from nfn_graph.converters.wiring import (
    Opaque,
    Value,
    Weight,
    Wiring,
)


def _weight(w: Wiring, x: Any) -> Weight:
    if not isinstance(x, Weight):
        w.refuse(
            "Expected a weight of the state dict (got a computed tensor). Remove "
            "parametrisations first, or give a module whose weights are stored"
        )
    return x


@handles("linear")
def linear(w: Wiring, input: Value, weight: Any, bias: Any = None) -> Value:
    """`input @ weight.T + bias`."""
    return w.linear(input, _weight(w, weight), bias)


@handles("matmul", "mm", "bmm", "rmatmul")
def matmul(w: Wiring, input: Value, other: Value) -> Value:
    """A product with a stored matrix, or along positions."""
    return w.matmul(input, other)


@handles("addmm", "baddbmm")
def addmm(w: Wiring, input: Value, mat1: Value, mat2: Value, **_: Any) -> Value:
    """`input + mat1 @ mat2`."""
    return w.combine(w.matmul(mat1, mat2), input)


def _conv(transposed: bool) -> Handler:
    def handler(
        w: Wiring,
        input: Value,
        weight: Any,
        bias: Any = None,
        *sizes: Any,
        groups: int = 1,
        **_: Any,
    ) -> Value:
        # After the stride, the padding, and the dilation or the padding of the output.
        groups = sizes[3] if len(sizes) > 3 else groups
        return w.conv(input, _weight(w, weight), bias, groups=groups, transposed=transposed)

    return handler


for _n in (1, 2, 3):
    HANDLERS[f"conv{_n}d"] = _conv(transposed=False)
    HANDLERS[f"conv_transpose{_n}d"] = _conv(transposed=True)


@handles("convolution")
def convolution(w: Wiring, input: Value, weight: Any, bias: Any, *sizes: Any) -> Value:
    """The general operator of aten, which gives all its arguments in their order."""
    _stride, _padding, _dilation, transposed, _output_padding, groups = sizes
    return w.conv(input, _weight(w, weight), bias, groups=groups, transposed=transposed)


@handles("embedding")
def embedding(w: Wiring, input: Value, weight: Any, *_: Any, **__: Any) -> Value:
    """A linear map of one-hot inputs: one input neuron per row."""
    weight = _weight(w, weight)
    if not isinstance(input, Opaque):
        w.refuse("Expected indices that come from the input (got computed ones)")
    shape = (None, None) if input.shape is None else input.shape
    rows = w.opaque([input], (*shape, weight.shape[0]))
    # Indices come with any number of axes: one per batch, or one per token of it.
    return replace(w.linear(rows, weight, target=1, source=0), guessed=input.shape is None)


@handles("aten.embedding")
def aten_embedding(w: Wiring, weight: Any, indices: Value, *_: Any, **__: Any) -> Value:
    """The same with aten's order of arguments."""
    return embedding(w, indices, weight)


@handles("batch_norm", "instance_norm")
def batch_norm(
    w: Wiring,
    input: Value,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> Value:
    """Parameters and statistics along axis 1, of all inputs or of each on its own."""
    found = [p for p in (weight, bias, running_mean, running_var) if p is not None]
    return w.channel_norm(input, found)


@handles("aten.batch_norm", "aten.instance_norm")
def aten_batch_norm(
    w: Wiring,
    input: Value,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *_: Any,
    **__: Any,
) -> Value:
    """The same with aten's order of arguments."""
    return batch_norm(w, input, running_mean, running_var, weight, bias)


@handles("layer_norm", "rms_norm")
def layer_norm(
    w: Wiring,
    input: Value,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> Value:
    """Statistics over the last axes, parameters of their shape."""
    found = [p for p in (weight, bias) if p is not None and not isinstance(p, float)]
    return w.layer_norm(input, found, len(ints(normalized_shape)))


@handles("group_norm")
def group_norm(
    w: Wiring,
    input: Value,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> Value:
    """Statistics over groups of channels."""
    return w.group_norm(input, num_groups, [p for p in (weight, bias) if p is not None])


@handles("prelu")
def prelu(w: Wiring, input: Value, weight: Any) -> Value:
    """One slope, or one per channel."""
    weight = _weight(w, weight)
    return w.combine(input, weight) if weight.shape == (1,) else w.channelwise(input, [weight], 1)


@handles("_weight_norm")
def weight_norm(w: Wiring, v: Any, g: Any, dim: int = 0) -> Value:
    """Both tensors of a weight norm lie along the same neurons."""
    return w.combine(_weight(w, v), _weight(w, g))
