"""Recurrent layers of Keras, and wrappers around layers that run along time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.applied import Applied, Operation, activated
from nfn_graph.converters.keras.config import KerasLayer
from nfn_graph.converters.wiring import Signal, Value
from nfn_graph.converters.wiring.recurrence import recur

RECURRENT = ("LSTM", "GRU", "SimpleRNN", "CuDNNLSTM", "CuDNNGRU")


def recurrent(layer: Applied) -> list[Value]:
    """Returns all outputs or the last one and, if the layer returns them, its last states."""
    y, cell = _run(layer)
    states = [y, cell] if "LSTM" in layer.layer.class_name else [y]
    results = [_result(layer, y)]
    if layer.layer.flag("return_state", False):
        results += [_last(layer, state) for state in states]
    return results


def bidirectional(layer: Applied) -> list[Value]:
    """Handles a recurrent layer and its backward twin, concatenated or combined entry by entry."""
    mode = layer.layer.options.get("merge_mode", "concat")
    first, second = _directions(layer.layer)
    count = 0 if len(layer.values) == 1 else (len(layer.values) - 1) // 2
    x, states = layer.values[:1], layer.values[1:]
    found = []
    for one, own in ((first, states[:count]), (second, states[count:])):
        if one.flag("return_state", False):
            raise ConversionError("Expected a Bidirectional layer without return_state (got one)")
        found.append(recurrent(Applied(layer.wiring, one, [*x, *own], layer.others))[0])
    if mode is None:
        return found
    if mode == "concat":
        return [layer.wiring.concat(found, -1)]
    if mode in ("sum", "mul", "ave"):
        return [reduce(layer.wiring.combine, found)]
    raise ConversionError(
        f"Expected the merge_mode concat, sum, mul, ave or None (got {mode!r:.40})"
    )


def time_distributed(dense: Operation) -> Operation:
    """Handles a layer applied to every step of a sequence; a dense layer does this by itself."""

    def operation(layer: Applied) -> Value | list[Value]:
        config = layer.layer.options.get("layer")
        options = config.get("config") if isinstance(config, Mapping) else None
        class_name = str(config.get("class_name")) if isinstance(config, Mapping) else "?"
        if class_name != "Dense" or not isinstance(options, Mapping):
            raise ConversionError(
                f"Expected a Dense layer inside TimeDistributed (got {class_name:.40})"
            )
        inner = KerasLayer(layer.layer.name, class_name, options, keys=layer.layer.keys)
        return dense(Applied(layer.wiring, inner, layer.values, layer.others))

    return operation


def _run(layer: Applied) -> tuple[Signal, Signal]:
    if not layer.values or layer.others:
        raise ConversionError(
            f"Expected a sequence, and perhaps initial states (got {len(layer.values)} values and "
            f"{len(layer.others)} other arguments)"
        )
    for option in ("activation", "recurrent_activation"):
        # Functions of the gates must act on every neuron in the same way.
        own = replace(layer.layer, options={"activation": layer.layer.options.get(option)})
        activated(Applied(layer.wiring, own, ()), layer.wiring.constant(()))
    x, *states = layer.values
    return recur(
        layer.wiring,
        layer.wiring.ranked(x, 3),
        layer.weight("kernel"),
        layer.weight("recurrent_kernel"),
        layer.weights("bias"),
        states=states,
        target=1,
    )


def _result(layer: Applied, y: Signal) -> Value:
    # A file of weights does not contain this option, and readers of the last axis do not depend on
    # it.
    if layer.layer.options.get("return_sequences", True):
        return y
    return _last(layer, y)


def _last(layer: Applied, y: Signal) -> Value:
    return layer.wiring.select(y, 0 if layer.layer.flag("time_major", False) else 1, -1)


def _directions(layer: KerasLayer) -> tuple[KerasLayer, KerasLayer]:
    """Returns the two layers of a Bidirectional layer, each with its tensors."""
    inner = _inner(layer.options.get("layer"))
    backward = layer.options.get("backward_layer")
    both = inner, replace(inner) if backward is None else _inner(backward)
    for one, word in zip(both, ("forward", "backward"), strict=True):
        one.keys = tuple(
            key for key in layer.keys if any(p.startswith(word) for p in key.split("/"))
        )
    left = [key for key in layer.keys if key not in both[0].keys + both[1].keys]
    if left or set(both[0].keys) & set(both[1].keys):
        raise ConversionError(
            f"Expected tensors of a forward and of a backward layer (got "
            f"'{(left or both[0].keys)[0]}')"
        )
    return both


def _inner(config: Any) -> KerasLayer:
    options = config.get("config") if isinstance(config, Mapping) else None
    class_name = str(config.get("class_name")) if isinstance(config, Mapping) else "?"
    if class_name not in RECURRENT or not isinstance(options, Mapping):
        raise ConversionError(
            f"Expected a recurrent layer inside Bidirectional (got {class_name:.40})"
        )
    return KerasLayer(str(options.get("name", class_name)), class_name, options)
