"""A node of an ONNX model: its inputs, attributes and shapes, or the reason to refuse it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.wiring import Opaque, Value, Weight, Wiring

_ATTENTION = "attention must be exported as the operations that it consists of"
_CONTROL = "control flow that depends on values has no fixed wiring"
_QUANTISED = "quantised weights are integers; export the network in floating point"
_REASONS = {
    **dict.fromkeys(("Loop", "Scan", "If"), _CONTROL),
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _ATTENTION),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), _QUANTISED),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"), _QUANTISED),
    "LRN": "it mixes neighbouring channels, so their order matters",
}
#: Operations that make a conversion impossible, wherever they are in a network.
_CAUSES = frozenset({"Loop", "Scan", "Attention", "MultiHeadAttention"})


def place_of(path: Path, position: int, proto: Any) -> str:
    """Names a node of a file and its kind."""
    return f"node '{proto.name or position}' ({proto.op_type}) of '{path}'"


def why_refused(proto: Any) -> str:
    """Explains why a node of an unknown kind has no graph."""
    reason = _REASONS.get(proto.op_type)
    if reason is not None:
        return f"Expected an operation that keeps neurons apart (got {proto.op_type}: {reason})"
    kind = f"{proto.domain or 'ONNX'} operation {proto.op_type}"
    return (
        f"Expected an operation whose symmetry is known (got {kind}). Convert the parts of the "
        f"network before and after it separately"
    )


def find_cause(path: Path, model: Any) -> str | None:
    """Returns the node that makes a conversion impossible in any case, if there is one.

    Operations that prepare its inputs may be refused before it is reached.
    """
    for position, proto in enumerate(model.graph.node):
        if proto.op_type in _CAUSES:
            return f"{place_of(path, position, proto)}: {why_refused(proto)}"
    return None


Shapes = Mapping[str, tuple[int | None, ...]]


class Node:
    """A node of an ONNX graph, with the values that it reads."""

    def __init__(
        self,
        wiring: Wiring,
        proto: Any,
        inputs: list[Value],
        tensors: Mapping[str, Tensor],
        shapes: Shapes,
        sizes: Mapping[str, Any],
    ) -> None:
        self.wiring = wiring
        self.inputs = inputs
        self.names = list(proto.input)
        self.outputs = list(proto.output)
        self.tensors = tensors
        self.shapes = shapes
        self.sizes = sizes
        self._attributes = {a.name: a for a in proto.attribute}

    @property
    def x(self) -> Value:
        """The first input."""
        return self.value(0)

    def has(self, index: int) -> bool:
        """Whether an optional input is given."""
        return index < len(self.names) and bool(self.names[index])

    def value(self, index: int) -> Value:
        """Returns an input that must be given."""
        if not self.has(index):
            raise ConversionError(f"Expected at least {index + 1} inputs (got {len(self.names)})")
        return self.inputs[index]

    def weight(self, index: int) -> Weight:
        """Returns an input that must be a floating-point tensor of the file."""
        value = self.value(index)
        if not isinstance(value, Weight):
            raise ConversionError(
                f"Expected '{self.names[index]}' to be a stored tensor of floating-point numbers "
                f"(got a computed one, a single number or integers)"
            )
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer attribute, which must be given if it has no default."""
        if name in self._attributes:
            return int(self._attributes[name].i)
        if default is None:
            raise ConversionError(f"Expected the attribute '{name}' (got none)")
        return default

    def integers(self, name: str, index: int | None = None) -> list[int] | None:
        """Returns integers from an attribute or from a stored input; None if absent."""
        if name in self._attributes:
            return [int(i) for i in self._attributes[name].ints]
        if index is None or not self.has(index):
            return None
        stored = self.tensors.get(self.names[index])
        if stored is not None and not stored.is_floating_point():
            return [int(i) for i in stored.reshape(-1).tolist()]
        found = self.computed(index)
        if found is None or None in found:
            raise ConversionError(
                f"Expected '{name}' to be stored in the file, or computed from known sizes (got "
                f"'{self.names[index]}', which depends on an input). Pass an example_input"
            )
        return [i for i in found if i is not None]

    def computed(self, index: int) -> list[int | None] | None:
        """Returns integers of an input that the model computes, with None for unknown ones."""
        found = self.sizes.get(self.names[index]) if self.has(index) else None
        return None if found is None else [None if n is None else int(n) for n in found.values]

    def decimal(self, name: str, default: float) -> float:
        """Returns a floating-point attribute."""
        return float(self._attributes[name].f) if name in self._attributes else default

    def text(self, name: str, default: str) -> str:
        """Returns a text attribute."""
        found = self._attributes.get(name)
        return default if found is None else found.s.decode("utf-8", "replace")

    def number(self, name: str, default: float) -> int | float:
        """Returns the number in an attribute that is a tensor with one entry."""
        if name not in self._attributes:
            return default
        to_array = require("onnx.numpy_helper", "to read .onnx files").to_array
        value: int | float = to_array(self._attributes[name].t).reshape(-1)[0].item()
        return value

    def has_attribute(self, name: str) -> bool:
        """Whether an attribute is given."""
        return name in self._attributes

    def shape(self, index: int) -> tuple[int | None, ...] | None:
        """Returns the shape of an input; None if unknown."""
        value = self.value(index)
        return self.shapes.get(self.names[index], value.shape)

    def rank(self, index: int = 0) -> int:
        """Returns the number of axes of an input."""
        shape = self.shape(index)
        if shape is None:
            raise ConversionError("Expected an input of known rank (got a model without shapes)")
        return len(shape)


def is_number(value: Value) -> bool:
    """Whether a value is a single constant number, whatever shape it fills."""
    return isinstance(value, Opaque) and value.shape == () and not value.is_input


Operator = Callable[[Node], "Value | list[Value]"]


def by_name(groups: list[tuple[Operator, str]]) -> dict[str, Operator]:
    """Returns operators by the names of the ONNX operations that they handle."""
    return {name: operator for operator, names in groups for name in names.split()}
