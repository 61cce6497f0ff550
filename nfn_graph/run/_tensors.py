"""Reads the tensors of networks from the stores of their graph, differentiably."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from nfn_graph.data import Layout, Placement
from nfn_graph.messages import UserError
from nfn_graph.spec import Key

#: The values of every store, `[networks, rows, taps]`.
Stores = Mapping[Key, Tensor]


def read_tensors(layout: Layout, stores: Stores) -> dict[int, Tensor]:
    """Reads the tensors `[networks, *shape]` of networks of one layout, by number."""
    offsets = first_rows(layout)
    return {
        number: read_entries(placements, stores, offsets)
        for number, placements in enumerate(layout.sources)
    }


def first_rows(layout: Layout) -> dict[tuple[Key, int], int]:
    """The first row of every block of a store."""
    offsets: dict[tuple[Key, int], int] = {}
    filled: dict[Key, int] = {}
    for placement in sorted(layout.placements, key=lambda p: p.block):
        if (placement.store, placement.block) not in offsets:
            offsets[placement.store, placement.block] = filled.get(placement.store, 0)
            filled[placement.store] = filled.get(placement.store, 0) + placement.count
    return offsets


def read_entries(
    placements: Sequence[Placement], stores: Stores, offsets: Mapping[tuple[Key, int], int]
) -> Tensor:
    """Reads a tensor `[networks, *shape]` of networks of one layout.

    Args:
        placements: The places of the parts of the tensor.
        stores: The values of every store.
        offsets: The first row of every block of a store.
    """
    first = placements[0]
    tensor: Tensor | None = None
    for placement in placements:
        rows = stores[placement.store]
        begin = offsets[placement.store, placement.block]
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
