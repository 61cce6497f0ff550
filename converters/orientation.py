"""Weights that are stored as `[in, out]`, as arrays of NumPy, JAX and TensorFlow are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from nfn_graph.converters.permuted import permuted
from nfn_graph.data import Layout, View

#: How weights are stored: as `[out, in, ...]`, or as `[..., in, out]`.
Orientation = Literal["out_in", "in_out"]


def turned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Views of weights `[..., in, out]` as `[out, in, ...]`, and all else as it is."""
    return {key: x.permute(_order(x.dim())) if _is_weight(x) else x for key, x in tensors.items()}


def turned_back(layout: Layout, tensors: Mapping[str, Any]) -> Layout:
    """The layout of weights `[..., in, out]`, given that of their views.

    Args:
        layout: Where the entries of the views go.
        tensors: The weights.
    """
    views: dict[int, list[View]] = {
        number: [("permute", (_order(len(parts[0].shape)),))]
        for number, parts in enumerate(layout.sources)
        if _is_weight(tensors[parts[0].keys[0]])
    }
    placements = (
        permuted(p, _order(len(p.shape)), p.keys) if _is_weight(tensors[p.keys[0]]) else p
        for p in layout.placements
    )
    return replace(
        layout,
        placements=tuple(placements),
        computation=layout.computation.reading(views),
    )


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _order(axes: int) -> tuple[int, ...]:
    return (axes - 1, axes - 2, *range(axes - 2))
