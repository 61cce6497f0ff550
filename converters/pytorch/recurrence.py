"""Torch's recurrent networks and cells, under the names and arguments of aten's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from nfn_graph.converters.pytorch.registry import HANDLERS, Handler
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight, Wiring
from nfn_graph.converters.wiring.recurrence import recur, stack_states

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrent_name(module: nn.RNNBase | nn.RNNCellBase) -> str:
    """The operator that a recurrent network or cell of torch.nn applies."""
    if isinstance(module, nn.RNNBase):
        return module.mode.lower()
    kind = type(module).__name__.removesuffix("Cell").lower()
    return f"rnn_{module.nonlinearity}_cell" if isinstance(module, nn.RNNCell) else f"{kind}_cell"


def recurrent_weights(module: nn.RNNBase) -> list[Any]:
    """The tensors of a recurrent network, layer after layer, in the order of aten's operators."""
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
            w.refuse("Expected a whole sequence (got a packed one). Give the padded sequence")
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
        # A single sequence has no axis for a batch.
        time = 0 if outputs[0].rank == 2 or not batch_first else 1
        states = [stack_states(outputs, time)]
        return (x, *states, stack_states(cells, time)) if is_lstm else (x, *states)

    return handler


def _cell(is_lstm: bool) -> Handler:
    def handler(
        w: Wiring,
        input: Value,
        hx: Any,
        w_ih: Any,
        w_hh: Any,
        b_ih: Any = None,
        b_hh: Any = None,
    ) -> Value | tuple[Value, ...]:
        weights = _weight(w, w_ih), _weight(w, w_hh)
        biases = [_weight(w, b) for b in (b_ih, b_hh) if b is not None]
        states = [None] if hx is None else list(hx) if is_lstm else [hx]
        y, cell = recur(w, input, *weights, biases, states=states)
        return (y, cell) if is_lstm else y

    return handler


def _starts(w: Wiring, states: Sequence[Any] | None, count: int) -> list[list[Any]]:
    """The first states of every layer and direction, one list for outputs and one for cells."""
    if states is None:
        return []
    return [[_start(w, state, i) for i in range(count)] for state in states]


def _start(w: Wiring, state: Any, index: int) -> Any:
    if state is None or (isinstance(state, Opaque) and state.is_uniform):
        return None
    return w.entry(state, index) if isinstance(state, Weight) else w.select(state, 0, index)


def _weight(w: Wiring, tensor: Any) -> Weight:
    if not isinstance(tensor, Weight):
        w.refuse(
            "Expected recurrent weights of the state dict (got computed ones). Remove "
            "parametrisations first"
        )
    return tensor


for _kind in KINDS:
    HANDLERS[_kind] = _network(_kind == "lstm")
    HANDLERS[f"{_kind}_cell"] = _cell(_kind == "lstm")
