"""ONNX operations, each followed with the methods of `wiring`."""

from __future__ import annotations

from functools import partial, reduce

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.onnx.axis_operators import AXIS_OPERATORS
from nfn_graph.converters.onnx.node import Node, Operator, by_name, is_number
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight
from nfn_graph.converters.wiring.assembly import Use
from nfn_graph.converters.wiring.recurrence import recur, stack_states

#: The inputs that hold the initial state of the output and of the cell, and the peepholes.
_FIRST_STATES, _PEEPHOLES = (5, 6), 7
_BATCH_FIRST = "layout"


def recurrent(node: Node) -> list[Value]:
    """Returns all outputs, the last one, and the last cell of an LSTM.

    Tensors hold both directions along their first axis. The order of gates and the activation
    functions do not affect the symmetry.
    """
    wiring, weight, recurrent = node.wiring, node.weight(1), node.weight(2)
    directions = 2 if node.text("direction", "forward") == "bidirectional" else 1
    if weight.rank != 3 or recurrent.rank != 3 or weight.shape[0] != directions:
        raise ConversionError(
            f"Expected weights [{directions}, gates * hidden, in] (got {list(weight.shape)} and "
            f"{list(recurrent.shape)})"
        )
    x = wiring.ranked(node.x, 3)
    biases = [node.weight(i) for i in (3, _PEEPHOLES) if _is_weight(node, i)]
    outputs: list[Signal] = []
    cells: list[Signal] = []
    for i in range(directions):
        y, cell = recur(
            wiring,
            x,
            _direction(node, weight, i),
            _direction(node, recurrent, i),
            [_direction(node, bias, i) for bias in biases],
            states=[_first_state(node, j, i) for j in _FIRST_STATES],
        )
        outputs.append(y)
        cells.append(cell)
    batch_first = bool(node.integer(_BATCH_FIRST, 0))
    found: list[Value] = []
    time = 1 if batch_first else 0
    for states, axis in ((outputs, None), (outputs, time), (cells, time)):
        value = stack_states(states, axis)
        # The directions come before the batch, or before the neurons if the batch is first.
        place = value.rank - 2 if batch_first else 1 if axis is None else 0
        found.append(wiring.move(value, [0], [place]))
    return found


def _is_weight(node: Node, index: int) -> bool:
    return node.has(index) and not is_number(node.value(index))


def _direction(node: Node, weight: Weight, index: int) -> Weight:
    """Returns the part of a tensor for one direction."""
    if weight.shape[0] == 1:
        return weight.view(range(1, weight.rank))
    return node.wiring.entry(weight, index)


def _first_state(node: Node, index: int, direction: int) -> Value | None:
    if not node.has(index):
        return None
    state = node.value(index)
    if isinstance(state, Opaque) and state.is_uniform:
        return None
    if node.integer(_BATCH_FIRST, 0):
        raise ConversionError("Expected initial states without layout=1 (got some with it)")
    if isinstance(state, Weight):
        return _direction(node, state, direction)
    return node.wiring.select(state, 0, direction)


def _bias(node: Node, index: int) -> Weight | None:
    return node.weight(index) if _is_weight(node, index) else None


def _conv(node: Node, transposed: bool = False) -> Value:
    bias, groups = _bias(node, 2), node.integer("group", 1)
    return node.wiring.conv(node.x, node.weight(1), bias, groups=groups, transposed=transposed)


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
    """Handles softmax and similar functions, which older models apply to several axes at once."""
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
    """Handles sizes of positions, which do not affect the symmetry."""
    return node.wiring.constant(None)


def _sizes(node: Node) -> Value:
    if any(not isinstance(value, Opaque) for value in node.inputs):
        raise ConversionError("Expected a computation of shapes (got one of activations)")
    return node.wiring.opaque(node.inputs)


OPERATORS: dict[str, Operator] = AXIS_OPERATORS | by_name(
    [
        (_conv, "Conv"),
        (partial(_conv, transposed=True), "ConvTranspose"),
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
