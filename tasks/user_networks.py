"""Networks of users that a trained model reads, and the files that it gives back."""

from __future__ import annotations

from pathlib import Path

import torch

from nfn_graph import WeightFeatures, WeightGraph
from nfn_graph.converters import save

# Formats that are written into a copy of the file that was read.
_TEMPLATES = (".onnx", ".h5", ".keras")


def check_single(graph: WeightGraph) -> WeightFeatures:
    """The features of one network, in its own precision but at least in single."""
    raw = graph.features()
    if raw.num_graphs != 1 or raw.channels != 1:
        raise ValueError(
            f"Expected one network with its weights (got {raw.num_graphs} networks with "
            f"{raw.channels} channels)"
        )
    return raw.to(torch.promote_types(raw.dtype, torch.float32))


def save_like(graph: WeightGraph, path: Path, checkpoint: Path) -> None:
    """Saves a network as the checkpoint that it came from was, as far as the suffix allows."""
    suffix = path.suffix.lower()
    is_alike = suffix == checkpoint.suffix.lower() and suffix in _TEMPLATES
    save(graph, path, template=checkpoint if is_alike else None)
