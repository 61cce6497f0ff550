"""Reads and writes a graph as a safetensors file, with layout and computation as metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph import NetworkSpec, NeuronType, WeightGraph, WeightType
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.graph_checks import check_graph
from nfn_graph.converters.layouts import layout_of
from nfn_graph.data import Computation, Layout, Neurons, Placement, Range, Ref, Shape, Step


def computation_to_json(computation: Computation) -> dict[str, Any]:
    """Converts a computation to JSON values."""
    if computation.reason is not None:
        return {"reason": computation.reason}
    return {
        "steps": [
            [step.operation, _pack(step.args), {name: _pack(arg) for name, arg in step.kwargs}]
            for step in computation.steps
        ],
        "outputs": [ref.step for ref in computation.outputs],
        "activations": [[n.name, n.value.step, n.axis] for n in computation.activations],
    }


def computation_from_json(document: dict[str, Any]) -> Computation:
    """Restores a computation from the result of :func:`computation_to_json`."""
    if "reason" in document:
        return Computation.unknown(str(document["reason"]))
    return Computation(
        tuple(
            Step(
                str(operation),
                tuple(map(_unpack, args)),
                tuple((name, _unpack(arg)) for name, arg in kwargs.items()),
            )
            for operation, args, kwargs in document["steps"]
        ),
        tuple(Ref(int(step)) for step in document["outputs"]),
        tuple(
            Neurons(str(name), Ref(int(step)), int(axis))
            for name, step, axis in document["activations"]
        ),
    )


def _pack(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.step}
    if isinstance(value, Range):
        return {"range": [_pack(bound) for bound in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    return [_pack(item) for item in value] if isinstance(value, tuple) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_unpack, value))
    if isinstance(value, dict):
        if "ref" in value:
            return Ref(int(value["ref"]))
        return Range(*map(_unpack, value["range"])) if "range" in value else ...
    return value


# The metadata entry that distinguishes graphs from other safetensors files.
MARK = "nfn_graph.layout"
_VERSION = 1
DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def write_graph(path: Path, graph: WeightGraph) -> None:
    """Writes a graph with everything that it holds to a file with any suffix."""
    parts = take_apart(graph)
    document = {"version": _VERSION, "layout": parts.layout, "notes": parts.notes}
    safetensors.write(path, parts.tensors, {MARK: json.dumps(document)})


class GraphParts(NamedTuple):
    """The contents of a graph, ready to be written.

    Attributes:
        layout: Its layout as JSON values, without the carried tensors.
        tensors: Its tensors by place: `store/hidden1/x`, `store/graph/y`, `carried/count`.
        notes: The other values in its stores, as JSON values.
    """

    layout: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


def take_apart(graph: WeightGraph) -> GraphParts:
    """Splits the graph of one network into the parts that are written."""
    tensors: dict[str, Tensor] = {}
    layout = _layout_to_json(layout_of(graph), tensors, "carried")
    notes: dict[str, Any] = {}
    stores = [(store._key or "graph", store) for store in graph.stores]
    for key, store in stores:
        prefix = key if isinstance(key, str) else "/".join(key)
        for name, value in store.items():
            if isinstance(value, Tensor):
                tensors[f"store/{prefix}/{name}"] = value
            elif not isinstance(value, Layout):
                notes[f"{prefix}/{name}"] = pack(f"{prefix}.{name}", value)
    return GraphParts(layout, tensors, notes)


def put_together(
    layout: Layout, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
) -> WeightGraph:
    """Builds a graph from a layout and the tensors and notes of :func:`take_apart`."""
    graph = WeightGraph()
    graph.layout = layout
    values = {place: unpack(value) for place, value in notes.items()}
    for place, value in (_below(tensors, "store/") | values).items():
        *prefix, name = place.split("/")
        key: Any = prefix[0] if len(prefix) == 1 else tuple(prefix)
        store: Any = graph if key == "graph" else graph[key]
        store[name] = value
    return graph


def read_graph(path: Path, file: safetensors.SafetensorsFile) -> WeightGraph:
    """Reads a graph written by :func:`write_graph`; raises `ConversionError` if it is invalid."""
    try:
        document = json.loads(file.metadata[MARK])
        if document["version"] != _VERSION:
            raise ConversionError(
                f"Expected version {_VERSION} of the graph format (got {document['version']}). "
                f"Update nfn-graph."
            )
        layout = layout_from_json(document["layout"], file.tensors)
        graph = put_together(layout, file.tensors, document["notes"])
        check_graph(graph)
    except Exception as error:  # A wrong document may cause any error.
        raise ConversionError(
            f"Expected a graph written by nfn-graph in '{path}' (got {type(error).__name__}: "
            f"{error}). It is damaged."
        ) from error
    return graph


def read_graph_or_tensors(path: Path) -> WeightGraph | dict[str, Tensor]:
    """Reads the graph in a safetensors file if it holds one, and otherwise its tensors."""
    file = safetensors.read_file(path)
    return read_graph(path, file) if MARK in file.metadata else file.tensors


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def _layout_to_json(layout: Layout, tensors: dict[str, Tensor], place: str) -> dict[str, Any]:
    """Converts a layout to JSON values and adds its carried tensors to `tensors`."""
    carried: dict[str, Any] = {}
    for key, value in layout.carried.items():
        if isinstance(value, Tensor):
            tensors[f"{place}/{key}"] = value
        else:
            carried[key] = pack(key, value)
    before = layout.before
    return {
        "spec": spec_to_json(layout.spec),
        "within": None if layout.within is None else spec_to_json(layout.within),
        "sizes": layout.shape.sizes,
        "blocks": layout.shape.blocks,
        "placements": list(map(_placement, layout.placements)),
        "keys": layout.keys,
        "aside": {key: list(map(_placement, parts)) for key, parts in layout.aside.items()},
        "carried": carried,
        "carried_order": list(layout.carried),
        "channels": {
            name: {key: str(dtype) for key, dtype in dtypes.items()}
            for name, dtypes in layout.channels.items()
        },
        "computation": computation_to_json(layout.computation),
        "before": None
        if before is None
        else [before[0], _layout_to_json(before[1], tensors, f"before/{place}")],
    }


def layout_from_json(
    document: dict[str, Any], tensors: Mapping[str, Tensor], place: str = "carried"
) -> Layout:
    """Restores a layout from `GraphParts.layout` and the carried tensors."""
    within, before = document["within"], document["before"]
    packed = {key: unpack(value) for key, value in document["carried"].items()}
    carried = {**_below(tensors, f"{place}/"), **packed}
    return Layout(
        spec_from_json(document["spec"]),
        Shape(_tuples(document["sizes"]), _tuples(document["blocks"])),
        tuple(map(_placement_from, document["placements"])),
        within=None if within is None else spec_from_json(within),
        carried={key: carried[key] for key in document["carried_order"]},
        aside={key: tuple(map(_placement_from, parts)) for key, parts in document["aside"].items()},
        keys=_tuples(document["keys"]),
        channels={
            name: {key: DTYPES[dtype] for key, dtype in dtypes.items()}
            for name, dtypes in document["channels"].items()
        },
        before=None
        if before is None
        else (before[0], layout_from_json(before[1], tensors, f"before/{place}")),
        computation=computation_from_json(document["computation"]),
    )


def _placement(placement: Placement) -> dict[str, Any]:
    return {**_fields(placement), "dtype": str(placement.dtype)}


def _placement_from(document: dict[str, Any]) -> Placement:
    values = {**document, "dtype": DTYPES[document["dtype"]]}
    return Placement(**{name: _tuples(value) for name, value in values.items()})


def spec_to_json(spec: NetworkSpec) -> dict[str, Any]:
    """Converts a spec to JSON values."""
    return {
        "neurons": [_fields(neuron) for neuron in spec.neurons],
        "weights": [_fields(weight) for weight in spec.weights],
    }


def spec_from_json(document: dict[str, Any]) -> NetworkSpec:
    """Restores a spec from the result of :func:`spec_to_json`."""
    return NetworkSpec(
        tuple(NeuronType(**n) for n in document["neurons"]),
        tuple(WeightType(**w) for w in document["weights"]),
    )


def _fields(value: Placement | NeuronType | WeightType) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def pack(name: str, value: Any) -> Any:
    """Converts an attribute of a graph to JSON values that distinguish tuples from lists."""
    if isinstance(value, tuple):
        return {"tuple": [pack(name, v) for v in value]}
    if isinstance(value, list):
        return [pack(name, v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: pack(name, v) for k, v in value.items()}}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"Expected '{name}' of the graph to be a tensor, number, text or a container of these to "
        f"save it (got {type(value).__name__})"
    )


def unpack(value: Any) -> Any:
    """Restores a value from the result of :func:`pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(unpack(v) for v in value["tuple"])
        if "bytes" in value:
            return bytes.fromhex(value["bytes"])
        return {k: unpack(v) for k, v in value["dict"].items()}
    return value
