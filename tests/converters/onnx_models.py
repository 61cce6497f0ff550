"""Small ONNX models, written to files and run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import onnx
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node named after its kind; two spaces stand around an input that is left out."""
    return helper.make_node(
        kind, inputs.split(" "), outputs.split(" "), name=f"{kind}_1", **attributes
    )


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random tensors by name."""
    return {key: torch.rand(shape) + 0.1 for key, shape in shapes.items()}


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    tensors: dict[str, torch.Tensor],
    shape: Sequence[int | str | None],
    outputs: str = "y",
) -> Path:
    """A model of one input `x` in a file."""
    model = checkpoints.onnx_model(nodes, tensors, {"x": shape}, outputs.split())
    path.write_bytes(model.SerializeToString())
    return path


def run(path: Path, x: torch.Tensor) -> list[torch.Tensor]:
    """What ONNX's own runtime computes."""
    results = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    return [torch.as_tensor(result) for result in results]
