"""Recurrent networks in operations that can be batched over networks and differentiated twice.

Names and arguments are those of torch's own operators: `torch.lstm`, `torch.gru`, `torch.rnn_tanh`
and `torch.rnn_relu`, and their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: The state of a cell: its output, and in an LSTM its memory.
State = tuple[Tensor, ...]
#: The function from the gates of the input and those of the state to the next state.
Step = Callable[[Tensor, Tensor, State, "Tensor | None"], State]


def _lstm_step(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    output = o.sigmoid() * cell.tanh()
    return (output if projection is None else output @ projection.mT), cell


def _gru_step(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    z = (z + hz).sigmoid()
    return (z * state[0] + (1 - z) * (n + (r + hr).sigmoid() * hn).tanh(),)


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": lambda x, h, *_: ((x + h).tanh(),),
    "rnn_relu": lambda x, h, *_: ((x + h).relu(),),
}


def _gates(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.mT if bias is None else x @ weight.mT + bias


def _network(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    step, is_lstm = _STEPS[kind], kind == "lstm"

    def apply(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float = 0.0,
        train: bool = False,
        bidirectional: bool = False,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...]:
        is_turned = batch_first and x.dim() > 2
        x = x.transpose(0, 1) if is_turned else x
        directions = 2 if bidirectional else 1
        size = len(params) // (num_layers * directions)
        states = hx if is_lstm else (hx,)
        starts = (None,) * (1 + is_lstm) if hx is None else states
        ends: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                i = layer * directions + direction
                own = list(params[i * size : (i + 1) * size])
                projection = own.pop() if size % 2 else None
                first = [None if start is None else start[i] for start in starts]
                y, end = _sequence(step, x, own, projection, first, bool(direction))
                outputs.append(y)
                ends.append(end)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        x = x.transpose(0, 1) if is_turned else x
        return x, *(torch.stack(states) for states in zip(*ends, strict=True))

    return apply


def _sequence(
    step: Step,
    x: Tensor,
    weights: Sequence[Tensor],
    projection: Tensor | None,
    first: Sequence[Tensor | None],
    backwards: bool,
) -> tuple[Tensor, State]:
    """The outputs `[time, ..., out]` of one direction of one layer, and the last state."""
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    gates = _gates(x, w_ih, b_ih)
    hidden = w_hh.shape[1] if projection is None else projection.shape[1]
    sizes = (w_hh.shape[1], hidden)
    state = tuple(
        gates.new_zeros((*x.shape[1:-1], size)) if start is None else start
        for start, size in zip(first, sizes, strict=False)
    )
    outputs = []
    times = range(x.shape[0])
    for time in reversed(times) if backwards else times:
        state = step(gates[time], _gates(state[0], w_hh, b_hh), state, projection)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _cell(kind: str) -> Callable[..., Any]:
    step, is_lstm = _STEPS[kind], kind == "lstm"

    def apply(
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        zeros = x.new_zeros((*x.shape[:-1], w_hh.shape[1]))
        state = (zeros, zeros) if hx is None else tuple(hx) if is_lstm else (hx,)
        found = step(_gates(x, w_ih, b_ih), _gates(state[0], w_hh, b_hh), state, None)
        return found if is_lstm else found[0]

    return apply


#: The operations by name.
RECURRENT: dict[str, Callable[..., Any]] = {
    **{kind: _network(kind) for kind in _STEPS},
    **{f"{kind}_cell": _cell(kind) for kind in _STEPS},
}
