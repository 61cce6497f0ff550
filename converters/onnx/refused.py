"""Operations of ONNX that have no graph, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ATTENTION = "attention is followed in the operations that it consists of; export it so"
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


def find_cause(path: Path, model: Any) -> str | None:
    """The node for which a model that could not be followed has no graph in any case.

    What prepares it may be refused before it is reached.
    """
    for position, proto in enumerate(model.graph.node):
        if proto.op_type in _CAUSES:
            return f"{place_of(path, position, proto)}: {why_refused(proto)}"
    return None
