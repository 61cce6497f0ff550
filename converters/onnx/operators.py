"""The operations of ONNX, each in the words of `wiring`."""

from __future__ import annotations

from functools import reduce

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.onnx.axes import AXIS_OPERATORS
from nfn_graph.converters.onnx.node import Node, Operator, by_name, is_number
from nfn_graph.converters.onnx.recurrence import recurrent
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight
from nfn_graph.converters.wiring.assembly import Use


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
    for value in (node.value(0), node.value(1)):
        if isinstance(value, Opaque) and value.key is not None:
            Use.of(value.key, node.tensors[value.key])
    return node.wiring.matmul(node.value(0), node.value(1))


def _batch_norm(node: Node) -> Value:
    return node.wiring.channel_norm(node.x, [node.weight(i) for i in range(1, 5)])


def _instance_norm(node: Node) -> Value:
    return node.wiring.channel_norm(node.x, [node.weight(1), node.weight(2)])


def _layer_norm(node: Node) -> Value:
    axis = node.integer("axis", -1)
    count = -axis if axis < 0 else node.rank() - axis
    return node.wiring.layer_norm(node.x, [node.value(i) for i in (1, 2) if node.has(i)], count)


def _group_norm(node: Node) -> Value:
    groups = node.integer("num_groups")
    return node.wiring.group_norm(node.x, groups, [node.weight(1), node.weight(2)])


def _statistics(node: Node) -> Value:
    """Softmax and the like: along one axis, or in older models along all from one on."""
    if not isinstance(node.x, Signal):
        return node.wiring.pointwise(node.x)
    axis = node.integer("axis", -1)
    node.wiring.statistics(node.x, [axis])
    return node.wiring.statistics(node.x, range(axis, 0 if axis < 0 else node.x.rank))


def _entrywise(node: Node) -> Value:
    values = (node.value(i) for i in range(max(1, len(node.names))))
    return reduce(node.wiring.combine, values)


def _pointwise(node: Node) -> Value:
    return node.wiring.pointwise(node.x)


def _filled(node: Node) -> Value:
    return node.wiring.constant(())


def _shape(node: Node) -> Value:
    """Sizes of positions, of which no symmetry is lost."""
    return node.wiring.constant(None)


def _sizes(node: Node) -> Value:
    if any(not isinstance(value, Opaque) for value in node.inputs):
        raise ConversionError("Expected a computation of shapes (got one of activations)")
    return node.wiring.opaque(node.inputs)


OPERATORS: dict[str, Operator] = AXIS_OPERATORS | by_name(
    [
        (_conv, "Conv"),
        (_conv_transpose, "ConvTranspose"),
        (_gemm, "Gemm"),
        (_matmul, "MatMul"),
        (_batch_norm, "BatchNormalization"),
        (_instance_norm, "InstanceNormalization"),
        (_layer_norm, "LayerNormalization RMSNormalization"),
        (_group_norm, "GroupNormalization"),
        (_statistics, "Softmax LogSoftmax Hardmax LpNormalization"),
        (
            _entrywise,
            "Add Sub Mul Div Pow PRelu Min Max Sum Mean Mod Where Equal Greater Less And Or Xor "
            "GreaterOrEqual LessOrEqual",
        ),
        (
            _pointwise,
            "Relu LeakyRelu ThresholdedRelu Sigmoid HardSigmoid HardSwish Tanh Elu Celu Selu Gelu "
            "Mish Swish Softplus Softsign Erf Exp Log Sqrt Reciprocal Neg Abs Sign Floor Ceil "
            "Round Sin Cos Tan Sinh Cosh Asin Acos Atan Clip Identity Dropout Cast CastLike Not "
            "IsNaN IsInf Shrink",
        ),
        (recurrent, "LSTM GRU RNN"),
        (_shape, "Shape Size"),
        (_sizes, "Range"),
        (_filled, "ConstantOfShape"),
    ]
)
