"""Recurrence over time: states whose neurons are read by the weights that lead to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nfn_graph.converters.wiring.axes import Layer, plain, product
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.converters.wiring.values import (
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    Split,
    SplitAxis,
    Value,
    Weight,
    distinct,
    with_axis,
)
from nfn_graph.converters.wiring.vocabulary import Wiring


def recur(
    w: Wiring,
    x: Value,
    weight: Weight,
    recurrent: Weight,
    biases: Sequence[Weight] = (),
    *,
    projection: Weight | None = None,
    states: Sequence[Value | None] = (),
    target: int = 0,
) -> tuple[Signal, Signal]:
    """Follows one direction of one layer of an RNN, a GRU or an LSTM; neurons are the last axis.
    The outputs of both weights are gates of the same hidden neurons, gate after gate, and a gate is
    a tap. The recurrent weight leads from the state to itself, so both of its axes are permuted
    together.

    Args:
        w: The network so far.
        x: The input, with or without an axis of time.
        weight: The weight of the input, `[gates * hidden, in]`.
        recurrent: The weight of the state, `[gates * hidden, hidden]`.
        biases: Vectors, or rows of vectors, with any number of consecutive gates.
        projection: The weight `[out, hidden]` that computes the state from the hidden neurons.
        states: The initial states of the output and, in an LSTM, of the cell.
        target: The axis of the gates in both weights.

    Returns:
        The output, and the cell of an LSTM, which has the hidden neurons.
    """
    source = 1 - target
    if weight.rank != 2 or recurrent.rank != 2:
        w.refuse(
            f"Expected weights [gates * hidden, in] and [gates * hidden, hidden] (got "
            f"{list(weight.shape)} and {list(recurrent.shape)})"
        )
    hidden = recurrent.shape[source] if projection is None else projection.shape[1]
    total = recurrent.shape[target]
    if not hidden or total % hidden or weight.shape[target] != total:
        w.refuse(
            f"Expected gates of {hidden} hidden neurons in both weights (got "
            f"{weight.shape[target]} and {total} outputs)"
        )
    x = w.claim(x, -1, weight.shape[source])
    if isinstance(x.axes[-1], SplitAxis):
        w.neurons(x, -1)
    # The results depend on the order of time steps.
    x = distinct(x, range(x.rank - 1))
    w.mixes(x, range(x.rank - 1))
    layer = w.layer(hidden)
    state = layer if projection is None else w.layer(projection.shape[0])
    y = w.linear(x, weight, target=target, source=source)
    _tie_gates(w, y, layer)
    y = replace(y, stored=with_axis(y.stored, y.rank - 1, NeuronAxis(plain(state))))
    cell = replace(y, stored=with_axis(y.stored, y.rank - 1, NeuronAxis(plain(layer))))
    _tie_gates(w, w.linear(y, recurrent, target=target, source=source), layer)
    if projection is not None:
        tie(w.neurons(w.linear(cell, projection), -1), plain(state))
    for bias in biases:
        _use_gates(w, bias, layer)
    for start, own in zip(states, (state, layer), strict=False):
        _begin(w, start, own)
    return y, cell


def _tie_gates(w: Wiring, y: Signal, layer: Layer) -> None:
    segments = w.neurons(y, -1)
    size = sum(s.size or 0 for s in segments)
    tie(segments, product(size // layer.size, layer))


def _use_gates(w: Wiring, bias: Weight, layer: Layer) -> None:
    count, rest = divmod(bias.shape[-1], layer.size) if bias.rank else (0, 1)
    if rest:
        w.refuse(
            f"Expected a bias with gates of {layer.size} hidden neurons (got {list(bias.shape)})"
        )
    w.use(bias, [*[None] * (bias.rank - 1), ("neuron", product(count, layer))])


def _begin(w: Wiring, state: Value | None, layer: Layer) -> None:
    """Ties the neurons of an initial state, however it was computed, to a layer."""
    if state is None or (isinstance(state, Opaque) and state.is_uniform):
        return
    if isinstance(state, Weight):
        if max(state.shape, default=1) == 1:
            w.use(state, [None] * state.rank)
            return
        if state.shape[-1] != layer.size:
            w.refuse(f"Expected an initial state of {layer.size} neurons (got {list(state.shape)})")
        w.use(state, [*[None] * (state.rank - 1), ("neuron", plain(layer))])
        return
    tie(w.neurons(w.claim(state, -1, layer.size), -1), plain(layer))


def stack_states(states: Sequence[Signal], time: int | None) -> Signal:
    """Stacks the last states of all layers and directions along a new first axis, without time.

    Each state has its own neurons. They are tied if they are used together, and a single one can be
    selected.

    Args:
        states: Outputs or cells with equal numbers of neurons.
        time: The axis of time, None if there is none.
    """
    *axes, _ = states[0].stored
    axes = [axis for i, axis in enumerate(axes) if i != time]
    neurons = [state.axes[-1] for state in states]
    segments = tuple(s for axis in neurons if isinstance(axis, NeuronAxis) for s in axis.segments)
    if len(states) == 1:
        return Signal((Positions(1), *axes, neurons[0]))
    split = Split(segments, (len(states), neurons[0].size or 0))
    return Signal((SplitAxis(split, 0), *axes, SplitAxis(split, 1)))
