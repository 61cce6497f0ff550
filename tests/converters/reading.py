"""Files as our readers see them, before any graph is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nfn_graph.converters.files import keras, npz, onnx, pytorch, safetensors
from nfn_graph.converters.files.detect import detect


def read_tensors(path: Path) -> Mapping[str, Any]:
    """The named tensors of a file as they are stored, of a PyTorch file as they are nested."""
    format_, _ = detect(path)
    if format_ == "safetensors":
        return safetensors.read(path)
    if format_ == "npz":
        return npz.read(path)
    if format_ == "keras":
        return keras.read(path).tensors
    if format_ == "onnx":
        return onnx.read(path)[1]
    return pytorch.read(path, format_ == "pytorch_legacy")
