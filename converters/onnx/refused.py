"""Operations of ONNX that have no graph, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

_ATTENTION = "attention multiplies activations with each other"
_CONTROL = "control flow that depends on values has no fixed wiring"
_QUANTISED = "quantised weights are whole numbers; export the network in floating point"
_REASONS = {
    **dict.fromkeys(("Loop", "Scan", "If"), _CONTROL),
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _ATTENTION),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), _QUANTISED),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"), _QUANTISED),
    "LRN": "it mixes neighbouring channels, so their order matters",
}
#: What no part of a network can be followed past, wherever it stands.
_CAUSES = frozenset({"Loop", "Scan", "Attention", "MultiHeadAttention"})
#: What may stand between the softmax of an attention and its product with the values.
_BETWEEN = frozenset({"Dropout", "Cast", "Identity", "Where", "Mul", "Reshape", "Transpose"})


def place_of(path: Path, position: int, proto: Any) -> str:
    """A node of a file by its name and kind."""
    return f"node '{proto.name or position}' ({proto.op_type}) of '{path}'"


def why_refused(proto: Any) -> str:
    """Why a node of an unknown kind has no graph."""
    reason = _REASONS.get(proto.op_type)
    if reason is not None:
        return f"Expected an operation that keeps neurons apart (got {proto.op_type}: {reason})"
    kind = f"{proto.domain or 'ONNX'} operation {proto.op_type}"
    return (
        f"Expected an operation whose symmetry is known (got {kind}). Convert the parts of the "
        f"network before and after it on their own"
    )


def find_cause(path: Path, model: Any, tensors: Mapping[str, Tensor]) -> str | None:
    """The node for which a model that could not be followed has no graph in any case.

    What prepares it, such as the heads of an attention, may be refused before it is reached.
    """
    weights_of_attention: set[str] = set()
    for position, proto in enumerate(model.graph.node):
        if proto.op_type in _CAUSES:
            return f"{place_of(path, position, proto)}: {why_refused(proto)}"
        reads = weights_of_attention.intersection(proto.input)
        if proto.op_type == "Softmax" or (reads and proto.op_type in _BETWEEN):
            weights_of_attention.update(proto.output)
        is_stored = any(name in tensors for name in proto.input)
        if proto.op_type == "MatMul" and reads and not is_stored:
            return (
                f"{place_of(path, position, proto)}: Expected a product with a stored matrix (got "
                f"one of two computed values: {_ATTENTION})"
            )
    return None
