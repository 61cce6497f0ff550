"""Builds graphs of ONNX models by following their nodes with the methods of `wiring`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files import onnx as files
from nfn_graph.converters.onnx.node import Node, find_cause, is_number, place_of, why_refused
from nfn_graph.converters.onnx.node_recorder import OnnxRecorder
from nfn_graph.converters.onnx.operators import OPERATORS
from nfn_graph.converters.onnx.sizes import Sizes, computed_sizes, stored_sizes
from nfn_graph.converters.pytorch import as_inputs
from nfn_graph.converters.state_dict import build_graph
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.data import Layout
from nfn_graph.messages import one_line

#: Operations that read stored numbers only as sizes, or not at all once a network is trained.
_SIZED = frozenset({"Resize", "Upsample", "Dropout", "CastLike", "Shape", "Size", "Range"})


def from_onnx(path: str | Path, *, example_input: Any = None) -> WeightGraph:
    """Builds the graph of an ONNX model.

    Initialisers and constants keep their names and axes, in whichever orientation a node uses them.
    Single numbers in constant nodes, and integers, are carried along. A node that has no graph
    raises a `ConversionError` with its name and the reason.

    Args:
        path: The file.
        example_input: An input, or a tuple of inputs, whose shapes replace those in the file, which
            may be open.
    """
    path = Path(path)
    model, tensors = files.read(path)
    _set_input_shapes(model, tensors, example_input)
    try:
        layout = _follow(path, model, tensors)
    except ConversionError as error:
        # Names come from the file and may contain line breaks.
        reason = find_cause(path, model) or str(error)
        raise ConversionError(one_line(reason)) from error
    return build_graph(layout, tensors)


def _follow(path: Path, model: Any, tensors: Mapping[str, Tensor]) -> Layout:
    shapes = _infer_shapes(model, tensors)
    wiring = Wiring(tensors)
    recorder = OnnxRecorder(wiring)
    parameters = {tensor.name for tensor in model.graph.initializer}
    values: dict[str, Value] = {"": wiring.constant(())}
    sizes: dict[str, Sizes] = {}
    for name, tensor in tensors.items():
        values[name] = _stored(wiring, name, tensor, name in parameters)
        found = stored_sizes(tensor)
        if found is not None:
            sizes[name] = found
    for value in model.graph.input:
        if value.name not in tensors:
            values[value.name] = wiring.input(shapes.get(value.name))
            recorder.input(value.name)
    for position, proto in enumerate(model.graph.node):
        if proto.op_type == "Constant":
            _add_constant(wiring, proto, values, sizes)
            continue
        if not any(proto.output):
            continue
        with wiring.at(place_of(path, position, proto)):
            node = Node(wiring, proto, _inputs(proto, values), tensors, shapes, sizes)
            found = computed_sizes(node, proto.op_type, sizes)
            if found is None:
                _run(node, proto, values)
                recorder.record(node, proto.op_type, [values.get(n) for n in proto.output])
                continue
            for name in proto.output[:1]:
                _check_new(name, values)
                sizes[name] = found
                values[name] = wiring.constant(() if found.is_one else found.shape)
    for value in model.graph.output:
        if value.name not in values:
            raise ConversionError(
                f"Expected output '{value.name}' of '{path}' to be computed (got no node for it)"
            )
        with wiring.at(f"output '{value.name}' of '{path}'"):
            wiring.output(values[value.name])
            recorder.output(value.name)
    with wiring.at(f"'{path}'"):
        return wiring.layout()


def _set_input_shapes(model: Any, tensors: Mapping[str, Tensor], example_input: Any) -> None:
    if example_input is None:
        return
    inputs = [value for value in model.graph.input if value.name not in tensors]
    examples = as_inputs(example_input)
    if len(examples) != len(inputs) or not all(isinstance(x, Tensor) for x in examples):
        names = [value.name for value in inputs]
        raise ConversionError(
            f"Expected one tensor as example_input for each input of the model, {names} (got "
            f"{[type(x).__name__ for x in examples]})"
        )
    for value, example in zip(inputs, examples, strict=True):
        shape = value.type.tensor_type.shape
        known = [d.dim_value for d in shape.dim]
        given = list(example.shape)
        if known and (
            len(known) != len(given)
            or any(n > 0 and n != m for n, m in zip(known[1:], given[1:], strict=True))
        ):
            raise ConversionError(
                f"Expected an example_input that fits input '{value.name}' of shape "
                f"{[n if n > 0 else '?' for n in known]} (got {given})"
            )
        shape.ClearField("dim")
        for size in given:
            shape.dim.add().dim_value = size


def _stored(wiring: Wiring, name: str, tensor: Tensor, is_parameter: bool) -> Value:
    """Returns a weight; integers, and single numbers in constant nodes, are constants."""
    if tensor.is_floating_point() and (tensor.dim() or is_parameter):
        return wiring.parameter(name)
    if tensor.numel() == 1:
        return wiring.constant(())
    return replace(wiring.constant(tuple(tensor.shape)), key=name)


def _add_constant(
    wiring: Wiring, proto: Any, values: dict[str, Value], sizes: dict[str, Sizes]
) -> None:
    """Adds constants that are not tensors: numbers and lists of numbers."""
    for name in proto.output:
        if name in values:
            continue
        values[name] = wiring.constant(())
        for attribute in proto.attribute:
            if attribute.name == "value_int":
                sizes[name] = Sizes((int(attribute.i),), False)
            if attribute.name == "value_ints":
                sizes[name] = Sizes(tuple(map(int, attribute.ints)))
            # Neurons combined with different numbers keep their order.
            listed = len(attribute.floats) or len(attribute.ints)
            if listed > 1:
                values[name] = wiring.constant((listed,))
            if attribute.name == "sparse_value":
                values[name] = wiring.constant(tuple(attribute.sparse_tensor.dims))


def _inputs(proto: Any, values: Mapping[str, Value]) -> list[Value]:
    for name in proto.input:
        if name not in values:
            raise ConversionError(f"Expected input '{name}' to be known (got no node for it)")
    return [values[name] for name in proto.input]


def _run(node: Node, proto: Any, values: dict[str, Value]) -> None:
    operator = OPERATORS.get(proto.op_type) if proto.domain in ("", "ai.onnx") else None
    if operator is None:
        raise ConversionError(why_refused(proto))
    found = operator(node)
    results = found if isinstance(found, list) else [found]
    if proto.op_type not in _SIZED:
        node.wiring.account(node.inputs, results)
    for name, result in zip(proto.output, results, strict=False):
        if not name:
            continue
        _check_new(name, values)
        shape = node.shapes.get(name)
        # A single number stays one: filling a shape with it adds no neurons.
        known = shape is None or is_number(result)
        values[name] = result if known else node.wiring.annotate(result, shape or ())


def _check_new(name: str, values: Mapping[str, Value]) -> None:
    if name in values:
        raise ConversionError(f"Expected one node for '{name}' (got two)")


def _infer_shapes(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int | None, ...]]:
    """Returns the shapes of all values that ONNX can infer, with None for open sizes."""
    try:
        inferred = require("onnx.shape_inference", "to read .onnx files").infer_shapes(
            model, data_prop=True
        )
    except ConversionError:
        raise
    except Exception:  # A model without shapes can still be followed.
        inferred = model
    shapes: dict[str, tuple[int | None, ...]] = {}
    graph = inferred.graph
    for value in [*graph.input, *graph.value_info, *graph.output]:
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None
                for d in kind.shape.dim
            )
    shapes.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return shapes
