"""The recurrent operations of ONNX: LSTM, GRU and RNN, in one direction or both."""

from __future__ import annotations

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.onnx.node import Node, is_number
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight
from nfn_graph.converters.wiring.recurrence import recur, stack_states

#: The inputs that hold the first state of the output and of the cell, and the peepholes.
_FIRST_STATES, _PEEPHOLES = (5, 6), 7
_BATCH_FIRST = "layout"


def recurrent(node: Node) -> list[Value]:
    """All outputs, the last one, and the last cell of an LSTM.

    Tensors hold both directions along their first axis. The order of gates and the activation
    functions say nothing of neurons.
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
        # The directions come before the batch, or, if that is first, before the neurons.
        place = value.rank - 2 if batch_first else 1 if axis is None else 0
        found.append(wiring.move(value, [0], [place]))
    return found


def _is_weight(node: Node, index: int) -> bool:
    return node.has(index) and not is_number(node.value(index))


def _direction(node: Node, weight: Weight, index: int) -> Weight:
    """The part of a tensor for one direction."""
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
        raise ConversionError("Expected first states without layout=1 (got some with it)")
    if isinstance(state, Weight):
        return _direction(node, state, direction)
    return node.wiring.select(state, 0, direction)
