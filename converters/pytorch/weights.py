"""Torch operations with weights: products, convolutions, norms, and recurrent networks and cells.

Recurrent networks have the names and arguments of aten's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from nfn_graph.converters.pytorch.handling import HANDLERS, Handler, handles, ints
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight, Wiring
from nfn_graph.converters.wiring.recurrence import recur, stack_states


def _weight(w: Wiring, x: Any) -> Weight:
    if not isinstance(x, Weight):
        w.refuse(
            "Expected a weight of the state dict (got a computed tensor). Remove "
            "parametrisations first, or pass a module whose weights are stored"
        )
    return x


@handles("linear")
def linear(w: Wiring, input: Value, weight: Any, bias: Any = None) -> Value:
    """Handles `input @ weight.T + bias`."""
    return w.linear(input, _weight(w, weight), bias)


@handles("matmul", "mm", "bmm", "rmatmul")
def matmul(w: Wiring, input: Value, other: Value) -> Value:
    """Handles a product with a stored matrix, or along positions."""
    return w.matmul(input, other)


@handles("addmm", "baddbmm")
def addmm(w: Wiring, input: Value, mat1: Value, mat2: Value, **_: Any) -> Value:
    """Handles `input + mat1 @ mat2`."""
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
        # Groups come after the stride, the padding, and the dilation or output padding.
        groups = sizes[3] if len(sizes) > 3 else groups
        return w.conv(input, _weight(w, weight), bias, groups=groups, transposed=transposed)

    return handler


for _n in (1, 2, 3):
    HANDLERS[f"conv{_n}d"] = _conv(transposed=False)
    HANDLERS[f"conv_transpose{_n}d"] = _conv(transposed=True)


@handles("convolution")
def convolution(w: Wiring, input: Value, weight: Any, bias: Any, *sizes: Any) -> Value:
    """Handles the general operator of aten, which passes all arguments by position."""
    _stride, _padding, _dilation, transposed, _output_padding, groups = sizes
    return w.conv(input, _weight(w, weight), bias, groups=groups, transposed=transposed)


@handles("embedding")
def embedding(w: Wiring, input: Value, weight: Any, *_: Any, **__: Any) -> Value:
    """Handles a linear map of one-hot inputs, with one input neuron per row."""
    weight = _weight(w, weight)
    if not isinstance(input, Opaque):
        w.refuse("Expected indices that come from the input (got computed ones)")
    shape = (None, None) if input.shape is None else input.shape
    rows = w.opaque([input], (*shape, weight.shape[0]))
    # Indices may have any number of axes: one per batch, or one per token of it.
    return replace(w.linear(rows, weight, target=1, source=0), guessed=input.shape is None)


@handles("aten.embedding")
def aten_embedding(w: Wiring, weight: Any, indices: Value, *_: Any, **__: Any) -> Value:
    """Handles an embedding with aten's order of arguments."""
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
    """Handles parameters and statistics along axis 1, for all inputs or for each one."""
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
    """Handles a batch norm with aten's order of arguments."""
    return batch_norm(w, input, running_mean, running_var, weight, bias)


@handles("layer_norm")
def layer_norm(
    w: Wiring,
    input: Value,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> Value:
    """Handles statistics over the last axes, with parameters of their shape."""
    found = [p for p in (weight, bias) if p is not None]
    return w.layer_norm(input, found, len(ints(normalized_shape)))


@handles("rms_norm")
def rms_norm(
    w: Wiring, input: Value, normalized_shape: Any, weight: Any = None, *_: Any, **__: Any
) -> Value:
    """Handles a layer norm without a shift."""
    return layer_norm(w, input, normalized_shape, weight)


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
    """Handles statistics over groups of channels."""
    return w.group_norm(input, num_groups, [p for p in (weight, bias) if p is not None])


@handles("prelu")
def prelu(w: Wiring, input: Value, weight: Any) -> Value:
    """Handles one slope, or one per channel."""
    weight = _weight(w, weight)
    return w.combine(input, weight) if weight.shape == (1,) else w.channelwise(input, [weight], 1)


@handles("_weight_norm")
def weight_norm(w: Wiring, v: Any, g: Any, dim: int = 0) -> Value:
    """Handles a weight norm, whose two tensors are indexed by the same neurons."""
    return w.combine(_weight(w, v), _weight(w, g))


KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrent_name(module: nn.RNNBase | nn.RNNCellBase) -> str:
    """Returns the operator that a recurrent network or cell of torch.nn applies."""
    if isinstance(module, nn.RNNBase):
        return module.mode.lower()
    kind = type(module).__name__.removesuffix("Cell").lower()
    return f"rnn_{module.nonlinearity}_cell" if isinstance(module, nn.RNNCell) else f"{kind}_cell"


def recurrent_weights(module: nn.RNNBase) -> list[Any]:
    """Returns the tensors of a recurrent network in the order of aten's operators."""
    return [getattr(module, name) for names in module._all_weights for name in names]


def _network(is_lstm: bool) -> Handler:
    def handler(
        w: Wiring,
        input: Value,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float = 0.0,
        train: bool = False,
        bidirectional: bool = False,
        batch_first: bool = False,
    ) -> tuple[Value, ...]:
        if not isinstance(params, list | tuple):
            w.refuse("Expected a whole sequence (got a packed one). Pass the padded sequence")
        if isinstance(input, Opaque):
            input = w.ranked(input, 3)
        steps = num_layers * (2 if bidirectional else 1)
        starts = _starts(w, hx if is_lstm else [hx], steps)
        size = len(params) // steps
        outputs: list[Signal] = []
        cells: list[Signal] = []
        x = input
        for layer in range(num_layers):
            found = []
            for i in range(layer * steps // num_layers, (layer + 1) * steps // num_layers):
                own = [_weight(w, p) for p in params[i * size : (i + 1) * size]]
                biases = own[2:4] if has_biases else []
                y, cell = recur(
                    w, x, own[0], own[1], biases,
                    projection=own[-1] if size % 2 else None,
                    states=[start[i] for start in starts],
                )  # fmt: skip
                found.append(y)
                cells.append(cell)
            outputs += found
            x = w.concat(found, -1) if bidirectional else found[0]
        # A single sequence has no batch axis.
        time = 0 if outputs[0].rank == 2 or not batch_first else 1
        states = [stack_states(outputs, time)]
        return (x, *states, stack_states(cells, time)) if is_lstm else (x, *states)

    return handler


def _cell(is_lstm: bool) -> Handler:
    def handler(
        w: Wiring, input: Value, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Value | tuple[Value, ...]:
        weights = _weight(w, w_ih), _weight(w, w_hh)
        biases = [_weight(w, b) for b in (b_ih, b_hh) if b is not None]
        states = [None] if hx is None else list(hx) if is_lstm else [hx]
        y, cell = recur(w, input, *weights, biases, states=states)
        return (y, cell) if is_lstm else y

    return handler


def _starts(w: Wiring, states: Sequence[Any] | None, count: int) -> list[list[Any]]:
    """Returns the initial states of every layer and direction, for outputs and for cells."""
    if states is None:
        return []
    return [[_start(w, state, i) for i in range(count)] for state in states]


def _start(w: Wiring, state: Any, index: int) -> Any:
    if state is None or (isinstance(state, Opaque) and state.is_uniform):
        return None
    return w.entry(state, index) if isinstance(state, Weight) else w.select(state, 0, index)


for _kind in KINDS:
    HANDLERS[_kind] = _network(_kind == "lstm")
    HANDLERS[f"{_kind}_cell"] = _cell(_kind == "lstm")
