"""Follows Keras models layer by layer with the methods of `wiring`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.applied import Applied, Handler
from nfn_graph.converters.keras.config import Call, KerasLayer, KerasModel, Source, input_shape
from nfn_graph.converters.keras.handlers import LAYERS, refusal
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.converters.wiring.tape import Unrecordable, recording
from nfn_graph.data import Layout


class Followed(NamedTuple):
    """A value of a network.

    Attributes:
        value: What is known about its axes.
        ref: Its reference on the tape.
    """

    value: Value
    ref: Any


def model_layout(
    model: KerasModel, tensors: Mapping[str, Tensor], unknown: str | None = None
) -> Layout:
    """Returns the layout of a model whose layers know their tensors.

    Args:
        model: The model.
        tensors: Its tensors by key.
        unknown: The reason why the functions of the layers are not known, if they are not.
    """
    wiring = Wiring(tensors)
    if unknown is not None:
        wiring.tape.lose(unknown)
    for found in _follow(wiring, model, None):
        wiring.output(found.value)
        wiring.tape.output(found.ref)
    for layer in model.leaves:
        for key in layer.keys:
            if key not in wiring.uses and tensors[key].is_floating_point():
                raise ConversionError(
                    f"layer '{layer.name}' ({layer.class_name}): Expected a use of every tensor "
                    f"(got '{key}', which such a layer does not have)"
                )
    return wiring.layout()


def _follow(wiring: Wiring, model: KerasModel, inputs: Sequence[Followed] | None) -> list[Followed]:
    """Follows a model and returns its outputs; its inputs are the network's if None is given."""
    if not model.is_sequential:
        return _follow_calls(wiring, model, inputs)
    if inputs is not None and len(inputs) != 1:
        raise ConversionError(f"Expected one input of a Sequential (got {len(inputs)})")
    shape = input_shape(model.layers[0]) if model.layers else None
    values = [_input(wiring, shape)] if inputs is None else list(inputs)
    for layer in model.layers:
        if layer.class_name != "InputLayer":
            values = _apply(wiring, layer, Call((), ()), values)
    return values


def _follow_calls(
    wiring: Wiring, model: KerasModel, inputs: Sequence[Followed] | None
) -> list[Followed]:
    """Follows a functional model; each call of a layer is followed once its inputs are known."""
    values: dict[Source, Followed] = {}
    layers = {layer.name: layer for layer in model.layers}
    if inputs is not None and len(inputs) != len(model.inputs):
        raise ConversionError(f"Expected {len(model.inputs)} inputs (got {len(inputs)})")
    for i, source in enumerate(model.inputs):
        shape = input_shape(layers[source.layer])
        own = _input(wiring, shape) if inputs is None else inputs[i]
        values[Source(source.layer, 0, 0)] = own
    waiting = [(layer, i, call) for layer in model.layers for i, call in enumerate(layer.calls)]
    while waiting:
        left = []
        for layer, i, call in waiting:
            sources = [_numbered(layers[source.layer], source) for source in call.sources]
            if any(source not in values for source in sources):
                left.append((layer, i, call))
                continue
            results = _apply(wiring, layer, call, [values[source] for source in sources])
            values.update({Source(layer.name, i, n): y for n, y in enumerate(results)})
        if len(left) == len(waiting):
            raise ConversionError(
                f"Expected layers that read inputs or other layers (got '{left[0][0].name}', "
                f"which reads values that are never computed)"
            )
        waiting = left
    outputs = [_numbered(layers[source.layer], source) for source in model.outputs]
    missing = next((source for source in outputs if source not in values), None)
    if missing is not None or not outputs:
        raise ConversionError(
            f"Expected outputs that are computed (got {missing.layer if missing else 'none'})"
        )
    return [values[source] for source in outputs]


def _input(wiring: Wiring, shape: tuple[int | None, ...] | None) -> Followed:
    return Followed(wiring.input(shape), wiring.tape.input())


def _numbered(layer: KerasLayer, source: Source) -> Source:
    """Corrects the number of a call to count only the calls in the model.

    A nested model may count its own call before them.
    """
    is_later = layer.model is not None and source.call >= len(layer.calls) > 0
    if is_later and len(layer.calls) == 1:
        return source._replace(call=0)
    if is_later:
        raise ConversionError(
            f"Expected one of the {len(layer.calls)} calls of '{layer.name}' (got number "
            f"{source.call})"
        )
    return source


def _apply(
    wiring: Wiring, layer: KerasLayer, call: Call, values: Sequence[Followed]
) -> list[Followed]:
    with wiring.at(f"layer '{layer.name}' ({layer.class_name})"):
        if layer.model is not None:
            return _follow(wiring, layer.model, values)
        handler = None if layer.is_custom else LAYERS.get(layer.class_name)
        if handler is None:
            raise refusal(layer.class_name, layer.is_custom)
        read, refs = [given.value for given in values], [given.ref for given in values]
        applied = Applied(wiring, layer, read, call.others, refs)
        found = handler.follow(applied)
        results = found if isinstance(found, list) else [found]
        ref = recording(wiring.tape, lambda: _record(handler, applied))
        wiring.tape.note(ref, results[0])
        return [Followed(results[0], ref), *(Followed(value, None) for value in results[1:])]


def _record(handler: Handler, applied: Applied) -> Any:
    if handler.record is None:
        kind = applied.layer.class_name
        raise Unrecordable(f"it uses '{kind}' of Keras, which cannot be run from a graph")
    return handler.record(applied)
