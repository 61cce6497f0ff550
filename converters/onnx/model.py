"""Graphs of ONNX models: their nodes, one after another, in the words of `wiring`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import onnx as files
from nfn_graph.converters.onnx.node import Node, is_number
from nfn_graph.converters.onnx.operators import OPERATORS
from nfn_graph.converters.optional import require
from nfn_graph.converters.wiring import Value, Wiring


def from_onnx(path: str | Path) -> WeightGraph:
    """The graph of an ONNX model.

    Initialisers and constants keep their names and axes, whichever way round a node uses
    them. What the graph cannot hold raises `ConversionError` with the node and the reason.
    """
    path = Path(path)
    model, tensors = files.read(path)
    shapes = _infer_shapes(model, tensors)
    wiring = Wiring(tensors)
    values: dict[str, Value] = {"": wiring.constant(())}
    for name, tensor in tensors.items():
        values[name] = _stored(wiring, name, tensor)
    for value in model.graph.input:
        if value.name not in tensors:
            values[value.name] = wiring.input(shapes.get(value.name))
    for position, proto in enumerate(model.graph.node):
        if proto.op_type == "Constant":
            _add_constant(wiring, proto, values)
            continue
        where = f"node '{proto.name or position}' ({proto.op_type}) of '{path}'"
        with wiring.at(where):
            node = Node(wiring, proto, _inputs(proto, values), tensors, shapes)
            _run(node, proto, values)
    for value in model.graph.output:
        if value.name not in values:
            raise ConversionError(
                f"Expected output '{value.name}' of '{path}' to be computed (got no node for it)"
            )
        with wiring.at(f"output '{value.name}' of '{path}'"):
            wiring.output(values[value.name])
    with wiring.at(f"'{path}'"):
        return WeightGraph.from_placements(wiring.layout(), tensors)


def _stored(wiring: Wiring, name: str, tensor: Tensor) -> Value:
    """Numbers without an axis, and integers, take part in no symmetry."""
    if tensor.is_floating_point() and tensor.dim():
        return wiring.parameter(name)
    return wiring.constant(() if tensor.numel() == 1 else tuple(tensor.shape))


def _add_constant(wiring: Wiring, proto: Any, values: dict[str, Value]) -> None:
    """Constants in other forms than a tensor: numbers and lists of numbers."""
    for name in proto.output:
        if name not in values:
            values[name] = wiring.constant(())


def _inputs(proto: Any, values: Mapping[str, Value]) -> list[Value]:
    for name in proto.input:
        if name not in values:
            raise ConversionError(f"Expected input '{name}' to be known (got no node for it)")
    return [values[name] for name in proto.input]


def _run(node: Node, proto: Any, values: dict[str, Value]) -> None:
    operator = OPERATORS.get(proto.op_type) if proto.domain in ("", "ai.onnx") else None
    if operator is None:
        raise ConversionError(
            f"Expected an operation whose symmetry is known (got {proto.domain or 'ONNX'} "
            f"operation {proto.op_type}). Attention, recurrence over time, control flow and "
            f"custom operations have no graph."
        )
    found = operator(node)
    results = found if isinstance(found, list) else [found]
    for name, result in zip(proto.output, results, strict=False):
        if not name:
            continue
        if name in values:
            raise ConversionError(f"Expected one node for '{name}' (got two)")
        shape = node.shapes.get(name)
        # One number stays one number: filling a shape with it adds no neurons.
        known = shape is None or is_number(result)
        values[name] = result if known else node.wiring.annotate(result, shape or ())


def _infer_shapes(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int | None, ...]]:
    """The shapes of all values that ONNX can tell, None for sizes left open."""
    try:
        inferred = require("onnx.shape_inference", "to read .onnx files").infer_shapes(
            model, data_prop=True
        )
    except ConversionError:
        raise
    except Exception:  # a model without shapes can still be followed
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
