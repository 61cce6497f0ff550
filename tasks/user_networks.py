"""Networks of users that a trained model reads, and the files that it writes for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nfn_graph import WeightFeatures, WeightGraph
from nfn_graph.converters import save
from nfn_graph.converters.files import keras, onnx
from nfn_graph.converters.formats import KERAS, ONNX, detect, format_of
from nfn_graph.messages import UserError

# Operators of ONNX that dense layers, and factors of activations, are made of.
_LINEAR = {"Gemm", "MatMul", "Add", "Sub", "Mul", "Div"}
_LINEAR |= {"Cast", "Constant", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose"}


def check_single(graph: WeightGraph) -> WeightFeatures:
    """The features of one network, in its own precision but at least in single."""
    raw = graph.features()
    if raw.num_graphs != 1 or raw.channels != 1:
        raise UserError(
            f"Expected one network with its weights (got {raw.num_graphs} networks with "
            f"{raw.channels} channels)"
        )
    return raw.to(torch.promote_types(raw.dtype, torch.float32))


def check_sines(checkpoint: Path) -> None:
    """Raises if a file says that a network has other activations than sines.

    ONNX models and Keras's configurations name them; other files hold nothing but tensors.
    """
    format_, _ = detect(checkpoint)
    if format_ is ONNX:
        found = {node.op_type for node in onnx.read(checkpoint)[0].graph.node} - _LINEAR
    elif format_ is KERAS:
        found = set(_activations(keras.read(checkpoint).config)) - {"linear"}
    else:
        return
    strange = sorted(found - {"Sin", "sin", "sine"})
    if strange or (format_ is ONNX and not found):
        raise UserError(
            f"Expected a SIREN, whose hidden layers are sines, in '{checkpoint}' (got "
            f"{', '.join(strange) or 'no sines'})"
        )


def _activations(config: Any) -> Iterator[str]:
    """The names of all activations in a configuration of Keras."""
    if isinstance(config, dict):
        if isinstance(config.get("activation"), str):
            yield config["activation"]
        config = list(config.values())
    if isinstance(config, list):
        for value in config:
            yield from _activations(value)


def save_like(graph: WeightGraph, path: Path, checkpoint: Path) -> None:
    """Saves a network in the form of the checkpoint that it came from, as far as the suffix
    allows."""
    suffix = path.suffix.lower()
    is_alike = suffix == checkpoint.suffix.lower() and format_of(path).has_template
    save(graph, path, template=checkpoint if is_alike else None)
