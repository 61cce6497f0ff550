"""The operations of ONNX, each in the words of `wiring`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring import Activation, Opaque, Value, Weight, Wiring

Shapes = Mapping[str, tuple[int | None, ...]]


class Node:
    """One node of an ONNX graph, with the values that it takes."""

    def __init__(
        self,
        wiring: Wiring,
        proto: Any,
        inputs: list[Value],
        tensors: Mapping[str, Tensor],
        shapes: Shapes,
    ) -> None:
        self.wiring = wiring
        self.inputs = inputs
        self.names = list(proto.input)
        self.outputs = list(proto.output)
        self.tensors = tensors
        self.shapes = shapes
        self._attributes = {a.name: a for a in proto.attribute}

    @property
    def x(self) -> Value:
        """The first input."""
        return self.value(0)

    def has(self, index: int) -> bool:
        """Whether an optional input is given."""
        return index < len(self.names) and bool(self.names[index])

    def value(self, index: int) -> Value:
        """An input that must be given."""
        if not self.has(index):
            raise ConversionError(f"Expected at least {index + 1} inputs (got {len(self.names)})")
        return self.inputs[index]

    def weight(self, index: int) -> Weight:
        """An input that must be a floating-point tensor of the file."""
        value = self.value(index)
        if not isinstance(value, Weight):
            raise ConversionError(
                f"Expected '{self.names[index]}' to be a stored tensor of floating-point numbers "
                f"(got a computed one, a single number or integers)"
            )
        return value

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer."""
        return int(self._attributes[name].i) if name in self._attributes else default

    def integers(self, name: str, index: int | None = None) -> list[int] | None:
        """Integers from an attribute, or from an input that the file stores; None if absent."""
        if name in self._attributes:
            return [int(i) for i in self._attributes[name].ints]
        if index is None or not self.has(index):
            return None
        stored = self.tensors.get(self.names[index])
        if stored is None or stored.is_floating_point():
            raise ConversionError(
                f"Expected '{name}' to be stored in the file (got '{self.names[index]}', which "
                f"is computed)"
            )
        return [int(i) for i in stored.reshape(-1).tolist()]

    def shape(self, index: int) -> tuple[int | None, ...] | None:
        """The shape of an input, None if it is not known."""
        value = self.value(index)
        return self.shapes.get(self.names[index], value.shape)

    def rank(self, index: int = 0) -> int:
        """The number of axes of an input."""
        shape = self.shape(index)
        if shape is None:
            raise ConversionError("Expected an input of known rank (got a model without shapes)")
        return len(shape)


def is_number(value: Value) -> bool:
    """Whether a value is one constant number, whatever shape it fills."""
    return isinstance(value, Opaque) and value.shape == () and not value.is_input


Operator = Callable[[Node], "Value | list[Value]"]


def _bias(node: Node, index: int) -> Weight | None:
    return node.weight(index) if node.has(index) and not is_number(node.value(index)) else None


def _conv(node: Node) -> Value:
    bias = _bias(node, 2)
    return node.wiring.conv(node.x, node.weight(1), bias, groups=node.integer("group", 1))


def _conv_transpose(node: Node) -> Value:
    bias = _bias(node, 2)
    return node.wiring.conv(
        node.x, node.weight(1), bias, groups=node.integer("group", 1), transposed=True
    )


def _gemm(node: Node) -> Value:
    if node.integer("transA", 0):
        raise ConversionError("Expected a Gemm with transA=0 (got 1, which mixes the batch)")
    target, source = (0, 1) if node.integer("transB", 0) else (1, 0)
    y: Value = node.wiring.linear(
        node.wiring.ranked(node.x, 2), node.weight(1), target=target, source=source
    )
    return node.wiring.combine(y, node.value(2)) if node.has(2) else y


def _matmul(node: Node) -> Value:
    first, second = node.value(0), node.value(1)
    if isinstance(second, Weight) and second.rank == 2 and not isinstance(first, Weight):
        return node.wiring.linear(first, second, target=1, source=0)
    if isinstance(first, Weight) and first.rank == 2 and not isinstance(second, Weight):
        return node.wiring.linear(second, first, axis=-2, target=0, source=1)
    if isinstance(first, Opaque) and isinstance(second, Opaque):
        return node.wiring.opaque([first, second])
    raise ConversionError(
        "Expected a product with one stored matrix (got two computed values, as in attention, or "
        "two stored ones)"
    )


def _batch_norm(node: Node) -> Value:
    return node.wiring.channelwise(node.x, [node.weight(i) for i in range(1, 5)], 1)


def _instance_norm(node: Node) -> Value:
    return node.wiring.channelwise(node.x, [node.weight(1), node.weight(2)], 1)


def _layer_norm(node: Node) -> Value:
    y = node.x
    for index in (1, 2):
        if node.has(index):
            y = node.wiring.combine(y, node.value(index))
    return y


def _group_norm(node: Node) -> Value:
    scale = node.weight(1)
    groups = node.integer("num_groups", 1)
    if groups not in (1, scale.shape[0]):
        raise ConversionError(
            f"Expected 1 group or one for each of {scale.shape[0]} channels (got {groups} groups). "
            f"Channels of different groups cannot be exchanged one by one"
        )
    return node.wiring.channelwise(node.x, [scale, node.weight(2)], 1)


def _entrywise(node: Node) -> Value:
    return reduce(node.wiring.combine, (node.value(i) for i in range(len(node.names))))


def _pointwise(node: Node) -> Value:
    return node.wiring.pointwise(node.x)


def _pool(node: Node) -> Value:
    if len(node.outputs) > 1:
        raise ConversionError("Expected pooling with one output (got one with indices)")
    return node.wiring.pool(node.x, node.rank() - 2)


def _resize(node: Node) -> Value:
    before, after = node.shape(0), node.shapes.get(node.outputs[0])
    if before is None or after is None or before[1] != after[1]:
        raise ConversionError(f"Expected a resize that keeps channels (got {before} to {after})")
    return node.wiring.pool(node.x, len(before) - 2)


def _pad(node: Node) -> Value:
    rank = node.rank()
    pads = node.integers("pads", 1) or []
    axes = node.integers("axes", 3) or list(range(rank))
    if len(pads) != 2 * len(axes):
        raise ConversionError(f"Expected two pads for each of {len(axes)} axes (got {pads})")
    padded = [a % rank for a, n, m in zip(axes, pads, pads[len(axes) :], strict=False) if n or m]
    if not padded:
        return node.x
    if min(padded) < 2:
        raise ConversionError(f"Expected padding of positions (got padding of axis {min(padded)})")
    return node.wiring.pool(node.x, rank - min(padded))


def _flatten(node: Node) -> Value:
    axis = node.integer("axis", 1)
    if isinstance(node.x, Activation):
        axis = axis % (node.x.rank + 1) if axis < 0 else axis
    y = node.wiring.flatten(node.x, axis)
    return y if axis == 1 else node.wiring.flatten(y, 0, axis - 1)


def _reshape(node: Node) -> Value:
    stored = node.tensors.get(node.names[1]) if node.has(1) else None
    sizes: list[int | None]
    if stored is not None or "shape" in node._attributes:
        sizes = list(node.integers("shape", 1) or [])
        if 0 in sizes and not node.integer("allowzero", 0):
            old = node.shape(0) or ()
            if len(old) < len(sizes):
                old = (*old, *[None] * (len(sizes) - len(old)))
            sizes = [old[i] if n == 0 else n for i, n in enumerate(sizes)]
    else:
        known = node.shapes.get(node.outputs[0])
        if known is None:
            raise ConversionError("Expected a reshape to a shape that can be told (got none)")
        sizes = list(known)
    if isinstance(node.x, Activation) and len(sizes) == 2 and sizes[0] in (None, -1):
        # The batch stays apart: the rest is flattened, whatever sizes are known of it.
        rest = None if sizes[1] == -1 else sizes[1]
        return node.wiring.annotate(node.wiring.flatten(node.x, 1), (None, rest))
    return node.wiring.reshape(node.x, sizes)


def _transpose(node: Node) -> Value:
    order = node.integers("perm")
    if order is None:
        order = list(range(node.rank()))[::-1]
    return node.wiring.permute(node.x, order)


def _squeeze(node: Node) -> Value:
    return node.wiring.squeeze(node.x, *(node.integers("axes", 1) or []))


def _unsqueeze(node: Node) -> Value:
    y = node.x
    axes = node.integers("axes", 1) or []
    rank = node.rank() + len(axes)
    for axis in sorted(a % rank for a in axes):
        y = node.wiring.unsqueeze(y, axis)
    return y


def _concat(node: Node) -> Value:
    return node.wiring.concat(node.inputs, node.integer("axis", 0))


def _slice(node: Node) -> Value:
    starts, stops = node.integers("starts", 1) or [], node.integers("ends", 2) or []
    axes = node.integers("axes", 3) or list(range(len(starts)))
    steps = node.integers("steps", 4) or [1] * len(starts)
    y = node.x
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        y = node.wiring.slice(y, axis, start, None if stop >= 2**31 - 1 else stop, step)
    return y


def _split(node: Node) -> list[Value]:
    axis = node.integer("axis", 0)
    sizes = node.integers("split", 1)
    if sizes is None:
        shape = node.shape(0)
        total = None if shape is None else shape[axis]
        if total is None:
            raise ConversionError("Expected to split an axis of known size (got an unknown one)")
        step = -(-total // len(node.outputs))
        sizes = [min(step, total - step * i) for i in range(len(node.outputs))]
    values, start = [], 0
    for size in sizes:
        values.append(node.wiring.slice(node.x, axis, start, start + size))
        start += size
    return values


def _reduce(node: Node) -> Value:
    axes = node.integers("axes", 1)
    if axes is None and node.integer("noop_with_empty_axes", 0):
        return node.x
    return node.wiring.reduce(node.x, axes, bool(node.integer("keepdims", 1)))


def _gather(node: Node) -> Value:
    if not isinstance(node.x, Activation):
        if isinstance(node.x, Weight):
            raise ConversionError("Expected an activation (got an embedding, a table of rows)")
        return node.wiring.opaque([node.x])
    indices = node.tensors.get(node.names[1]) if node.has(1) else None
    if indices is None or indices.is_floating_point() or indices.dim():
        raise ConversionError("Expected one stored index (got several, or a computed one)")
    return node.wiring.select(node.x, node.integer("axis", 0), int(indices))


def _expand(node: Node) -> Value:
    """Entries repeated along axes of size 1, as every entrywise operation does by itself."""
    return node.x


def _filled(node: Node) -> Value:
    return node.wiring.constant(())


def _shape(node: Node) -> Value:
    """Sizes of positions, of which no symmetry is lost."""
    return node.wiring.constant(None)


def _sizes(node: Node) -> Value:
    if any(not isinstance(value, Opaque) for value in node.inputs):
        raise ConversionError("Expected a computation of shapes (got one of activations)")
    return node.wiring.opaque(node.inputs)


_GROUPS: list[tuple[Operator, str]] = [
    (_conv, "Conv"),
    (_conv_transpose, "ConvTranspose"),
    (_gemm, "Gemm"),
    (_matmul, "MatMul"),
    (_batch_norm, "BatchNormalization"),
    (_instance_norm, "InstanceNormalization"),
    (_layer_norm, "LayerNormalization RMSNormalization"),
    (_group_norm, "GroupNormalization"),
    (_entrywise, "Add Sub Mul Div Pow PRelu Min Max Sum Mean Mod Where Equal Greater Less And Or"),
    (
        _pointwise,
        "Relu LeakyRelu ThresholdedRelu Sigmoid HardSigmoid HardSwish Tanh Elu Celu Selu Gelu Mish "
        "Swish Softplus Softsign Erf Exp Log Sqrt Reciprocal Neg Abs Sign Floor Ceil Round Sin Cos "
        "Tan Sinh Cosh Asin Acos Atan Clip Identity Dropout Cast CastLike Not IsNaN Softmax "
        "LogSoftmax Hardmax LpNormalization Shrink",
    ),
    (_pool, "MaxPool AveragePool LpPool GlobalMaxPool GlobalAveragePool GlobalLpPool"),
    (_resize, "Resize Upsample"),
    (_pad, "Pad"),
    (_flatten, "Flatten"),
    (_reshape, "Reshape"),
    (_transpose, "Transpose"),
    (_squeeze, "Squeeze"),
    (_unsqueeze, "Unsqueeze"),
    (_concat, "Concat"),
    (_slice, "Slice"),
    (_split, "Split"),
    (
        _reduce,
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum "
        "ReduceLogSumExp ReduceSumSquare",
    ),
    (_gather, "Gather"),
    (_shape, "Shape Size"),
    (_sizes, "Range"),
    (_filled, "ConstantOfShape"),
    (_expand, "Expand"),
]
OPERATORS: dict[str, Operator] = {
    name: operator for operator, names in _GROUPS for name in names.split()
}
