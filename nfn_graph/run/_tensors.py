"""The tensors of networks, read from the stores of their graph, differentiably."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nfn_graph.data import Layout, Placement
from nfn_graph.messages import UserError
from nfn_graph.spec import Key

#: The values of every store, `[networks, rows, taps]`.
Stores = Mapping[Key, Tensor]


def read_tensors(layout: Layout, stores: Stores) -> dict[int, Tensor]:
    """The tensors `[networks, *shape]` of networks of one layout, by their numbers."""
    offsets = first_rows(layout)
    return {
        number: _read(placements, stores, offsets)
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


def _read(
    placements: Sequence[Placement], stores: Stores, offsets: Mapping[tuple[Key, int], int]
) -> Tensor:
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


def read_flat(layouts: Sequence[Layout], number: int, stores: Mapping[Key, Tensor]) -> Tensor:
    """The entries of a tensor of networks of different layouts, network after network.

    Args:
        layouts: The layouts of the networks.
        number: The number of the tensor.
        stores: The entries `[rows, taps]` of all networks, network after network.
    """
    parts = [layout.sources[number] for layout in layouts]
    first = parts[0][0]
    place = (first.store, first.tap, first.taps)
    if all(len(p) == 1 and p[0].is_straight and _fills(p[0]) == place for p in parts) and all(
        layout.num_rows(first.store) == p[0].count for layout, p in zip(layouts, parts, strict=True)
    ):
        return stores[first.store][:, first.tap : first.tap + first.taps].reshape(-1)
    # Otherwise by the places of the entries, which are read like the entries themselves.
    keys = list(dict.fromkeys(p.store for own in parts for p in own))
    flat = torch.cat([stores[key].reshape(-1) for key in keys])
    sizes = [stores[key].numel() for key in keys]
    begin = dict(zip(keys, accumulate(sizes[:-1], initial=0), strict=True))
    places = []
    for layout in layouts:
        own: dict[Key, Tensor] = {}
        for key in keys:
            rows, taps = layout.num_rows(key), stores[key].shape[1]
            own[key] = torch.arange(begin[key], begin[key] + rows * taps).reshape(1, rows, taps)
            begin[key] += rows * taps
        places.append(_read(layout.sources[number], own, first_rows(layout)).reshape(-1))
    return flat.index_select(0, torch.cat(places).to(flat.device))


def _fills(placement: Placement) -> tuple[Key, int, int]:
    return placement.store, placement.tap, placement.taps


def rows_of(counts: Sequence[int], networks: Sequence[int], device: torch.device) -> Tensor:
    """The rows of some networks, in their order.

    Args:
        counts: How many rows every network has.
        networks: The networks, by their places.
        device: Where the rows are.
    """
    all_counts, chosen = torch.tensor(counts), torch.tensor(networks)
    own = all_counts[chosen]
    # What lies before a network's rows here is not what lies before them there.
    shift = (all_counts.cumsum(0) - all_counts)[chosen] - (own.cumsum(0) - own)
    rows = torch.arange(int(own.sum())) + shift.repeat_interleave(own)
    return rows.to(device)
