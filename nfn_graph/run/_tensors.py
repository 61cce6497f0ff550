"""Reads the tensors of networks from the stores of their graph, differentiably."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nfn_graph.data import Layout
from nfn_graph.messages import UserError
from nfn_graph.spec import Key

#: The values of every store, `[networks, rows, taps]`.
Stores = Mapping[Key, Tensor]


def read_tensors(layout: Layout, stores: Stores) -> dict[int, Tensor]:
    """Reads the tensors `[networks, *shape]` of networks of one layout, by number."""
    return {number: read_entries(layout, number, stores) for number in range(len(layout.sources))}


def read_entries(layout: Layout, number: int, stores: Stores) -> Tensor:
    """Reads a tensor `[networks, *shape]` of networks of one layout.

    Args:
        layout: The layout.
        number: The number of the tensor.
        stores: The values of every store.
    """
    placements = layout.sources[number]
    first = placements[0]
    tensor: Tensor | None = None
    for placement in placements:
        rows = stores[placement.store]
        begin = layout.first_rows[placement.store, placement.block]
        taps = slice(placement.tap, placement.tap + placement.taps)
        part = placement.ordered(rows[:, begin : begin + placement.count, taps])
        if placement.is_whole:
            return part.reshape(rows.shape[0], *first.shape)
        if tensor is None:
            tensor = rows.new_zeros(rows.shape[0], *first.shape)
        placement.viewed(tensor)[(slice(None), *placement.slices)] = part
    if tensor is None:
        raise UserError("Expected placements of a tensor (got none)")
    return tensor
