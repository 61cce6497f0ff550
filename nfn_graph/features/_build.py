"""Builds the rows of a batch on the host and moves all of them to a device in one copy.

Entries are never listed by value and never sorted. Layers are completely connected and their
weights lie in the memory order of a `[out, in, ...]` tensor, so the rows of a site are numbers in
a mixed radix whose digits are its indices. Going to a coarser site drops a digit, and ordering
weights by source neuron exchanges two digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nfn_graph.features._blocks import (
    BlockTable,
    Ints,
    Labels,
    digits_of,
    ends_of,
    family_of,
    kept_labels,
    number_of,
    size_product,
)
from nfn_graph.features._rows import Grouping, LargeBlock, Rows, is_capturing
from nfn_graph.spec import NETWORK, FoldedSpec, Key, NetworkSpec, Site, WeightKey

# Blocks of at least this many rows are views; smaller ones are listed in indices. A view needs no
# memory and is several times faster with few channels, but costs some operations for every block;
# below this size `embedding_bag` sums many channels faster.
LARGE_ROWS = 2**16


def longest_bag(device: torch.device) -> int | None:
    """The largest number of rows that one sum may have on a device; None if there is no limit.

    On CUDA, a single thread of `embedding_bag` adds up a whole bag, so long bags are split.
    """
    return 64 if device.type == "cuda" else None


class _Listed(NamedTuple):
    """The listed rows of a family: the blocks and sizes of each, its number and digits there."""

    rows: Ints
    block: Ints
    local: Ints
    sizes: dict[str, Ints]
    digits: dict[str, Ints]
    views: list[int]


class RowBuilder:
    """Builds the rows of all types and sites, with arrays in the place of tensors.

    Args:
        spec: The types.
        tables: The tables of all families.
        longest: The largest number of rows that one sum may have; None if there is no limit.
    """

    def __init__(
        self, spec: NetworkSpec, tables: Mapping[Key, BlockTable[Ints]], longest: int | None
    ) -> None:
        self.spec = spec
        self.tables = tables
        self.longest = longest
        self.dtype = tables[NETWORK].graph.dtype
        sizes = [table.block_sizes for table in tables.values()]
        self.most = int(max(x[x < LARGE_ROWS].sum() for x in sizes)) + 1
        self.has_roles = any(neuron.role for neuron in spec.neurons)
        self.multiples: dict[int, Ints] = {}
        self.degrees: dict[tuple[Key, Labels, bool], Ints] = {}
        self.known: dict[tuple[Key, tuple[Labels, ...]], dict[str, Any]] = {}
        self.positions: dict[str, Any] = {}
        self.layer_sizes: dict[str, Any] = {}
        self.diagonals: dict[Key, Any] = {}
        self.off_diagonals: dict[Key, Any] = {}
        self.neurons = {neuron.name: self._neuron_rows(neuron.name) for neuron in spec.neurons}
        self.weights: dict[WeightKey, Rows] = {}
        self.self_edges: dict[WeightKey, dict[str, Any]] = {}
        for weight in spec.weights:
            key, listed = weight.key, self._listed(weight.key)
            fields = self._rows(key, ends_of(spec, key), listed)
            self.weights[key] = Rows(**fields, counts=[None])
            if spec.is_self(weight):
                self.self_edges[key] = self._self_edges(key)

    def site_rows(self, fold: FoldedSpec, site: Site) -> Rows:
        """The rows of a site of a folded spec."""
        counts: list[Any] = []
        for part in site.parts[:-1]:
            finer = fold.site[part.key]
            family = family_of(self.spec, finer)
            counts.append(self._degrees(family, part.kept, is_self=finer.is_self))
        if site.is_self and not isinstance(site.key, str):
            fields = self.self_edges[site.key]
        else:
            fields = self._rows(family_of(self.spec, site), kept_labels(fold, site))
        return Rows(**fields, counts=[*counts, None])

    def _rows(
        self, family: Key, kept: Sequence[Labels], listed: _Listed | None = None
    ) -> dict[str, Any]:
        """The rows of a family with a grouping for every cover, which keeps some of the indices.

        Returns the fields of :class:`Rows`, except for `counts`.
        """
        key = family, tuple(kept)
        if key not in self.known:
            listed = self._listed(family) if listed is None else listed
            groupings = [self._grouping(family, labels, listed) for labels in kept]
            self.known[key] = self._joined(self.tables[family].num_rows, groupings)
        return self.known[key]

    def _neuron_rows(self, name: str) -> Rows:
        listed, last = self._listed(name), self.tables[name].indices[-1]
        self.positions[name] = listed.digits[last]
        self.layer_sizes[name] = listed.sizes[last]
        return Rows(**self._rows(name, [()], listed), counts=[None])

    def _self_edges(self, key: WeightKey) -> dict[str, Any]:
        """The off-diagonal entries of a self weight as rows of their own, all of them listed.

        The order by source is also the place of the transposed entry of each entry.
        """
        table = self.tables[key]
        size = table.size[table.indices[0]]
        block_sizes = size * (size - 1)
        block = np.repeat(np.arange(len(size)), block_sizes)
        rows, sizes = self._steps(len(block)), size[block]
        start = (block_sizes.cumsum(dtype=self.dtype) - block_sizes)[block]
        target = (rows - start) // np.maximum(sizes - 1, 1)
        source = rows - start - target * (sizes - 1)
        source += source >= target
        transposed = start + source * (sizes - 1) + target - (target > source)
        groupings = []
        for kept, end in zip(ends_of(self.spec, key), (target, source), strict=True):
            group_sizes = self._degrees(key, kept, is_self=True)
            groupings.append(
                {
                    "num_groups": len(group_sizes),
                    "groups": table.coarse_start[kept][block] + end,
                    "order": rows if end is target else transposed,
                    "pointers": self._pointers(group_sizes),
                    "group_sizes": group_sizes,
                    "contiguous": end is target,
                }
            )
        own = np.repeat(np.arange(len(size)), size)
        position = self._steps(len(own)) - (size.cumsum(dtype=self.dtype) - size)[own]
        self.diagonals[key] = table.start[own] + position * (size[own] + 1)
        self.off_diagonals[key] = table.start[block] + target * sizes + source
        return self._joined(len(rows), groupings)

    def _listed(self, family: Key) -> _Listed:
        """The rows of a family, except those of large blocks. Neurons are always listed."""
        table = self.tables[family]
        counts = table.block_sizes
        is_neuron = family in self.spec.neuron
        views = [] if is_neuron else np.flatnonzero(counts >= LARGE_ROWS).tolist()
        if views:
            counts = counts.copy()
            counts[views] = 0
        block = np.repeat(np.arange(len(counts)), counts)
        rows = self._steps(len(block))
        local = rows - (counts.cumsum(dtype=self.dtype) - counts)[block]
        if views:
            rows = local + table.start[block]
        sizes = {index: size[block] for index, size in table.size.items()}
        digits = digits_of(local, sizes, table.indices)
        return _Listed(rows, block, local, sizes, digits, views)

    def _grouping(self, family: Key, kept: Labels, listed: _Listed) -> dict[str, Any]:
        """Groups the rows by those of the coarser site that keeps some of their indices.

        Returns the fields of the :class:`Grouping`, except for `num_rows` and `bags`.
        """
        table, views = self.tables[family], listed.views
        coarse_start = table.coarse_start[kept]
        groups, order = coarse_start[listed.block], listed.rows
        if kept:
            groups = groups + number_of(listed.digits, listed.sizes, kept)
        turned = kept + tuple(i for i in table.indices if i not in kept)
        if turned != table.indices:
            digits = digits_of(listed.local, listed.sizes, turned)
            order = table.start[listed.block] + number_of(digits, listed.sizes, table.indices)
        sizes = np.stack([table.size[i] for i in table.indices], 1).tolist() if views else []
        axes = tuple(table.indices.index(i) for i in kept)
        blocks = tuple(
            LargeBlock(int(table.start[b]), tuple(sizes[b]), int(coarse_start[b]), axes)
            for b in views
        )
        group_sizes = listed_sizes = self._degrees(family, kept)
        if views:
            listed_sizes = self._degrees(family, kept, without=views)
        return {
            "num_groups": self.tables[table.coarse_family[kept]].num_rows,
            "groups": groups,
            "order": order,
            # The tensors of a type connect layers in order: all groups are contiguous in `order`.
            "pointers": self._pointers(listed_sizes),
            "group_sizes": group_sizes,
            "contiguous": order is listed.rows,
            "blocks": blocks,
            "gaps": _gaps(blocks, table.num_rows) if blocks else (),
        }

    def _joined(self, num_rows: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields of the rows of a site, from the fields of its groupings, one per cover."""
        orders = [part["order"] for part in parts]
        if len(parts) > 1:
            # The orders of the groupings are slices of the joint order: both share one memory.
            joint, listed = np.concatenate(orders), len(orders[0])
            orders = [joint[i * listed : (i + 1) * listed] for i in range(len(parts))]
        groupings = tuple(
            Grouping(num_rows, **{**part, "order": own}, bags=self._bags(own, part["pointers"]))
            for part, own in zip(parts, orders, strict=True)
        )
        bags: Sequence[Any] = []
        cover_rows = cover_pointers = self._steps(0)
        if len(parts) == 1:
            cover_rows, bags = parts[0]["groups"], groupings[0].bags
        elif parts:
            cover_rows = np.empty((listed, len(parts)), dtype=self.dtype)
            cover_pointers = self._steps(listed + 1, len(parts))
            pointers, offset = [self._steps(1)], 0
            for i, part in enumerate(parts):
                np.add(part["groups"], offset, out=cover_rows[:, i])
                offset += part["num_groups"]
                pointers.append(part["pointers"][1:] + i * listed)
            bags = self._bags(joint, np.concatenate(pointers, dtype=self.dtype))
        return {
            "num_rows": num_rows,
            "groupings": groupings,
            "cover_rows": cover_rows.ravel(),
            "cover_pointers": cover_pointers,
            "bags": bags,
        }

    def _bags(self, order: Ints, pointers: Ints) -> list[Any]:
        """Splits sums into successive steps, in which no sum has more rows than allowed."""
        bags = [order, pointers]
        while self.longest is not None:
            sizes = np.diff(pointers)
            if sizes.max(initial=0) <= self.longest:
                break
            split = -(-sizes // self.longest)
            group = np.repeat(np.arange(len(sizes)), split)
            steps = np.arange(len(group), dtype=self.dtype)
            ends = split.cumsum(dtype=self.dtype)
            starts = pointers[group] + (steps - (ends - split)[group]) * self.longest
            bags[-1] = np.append(starts, pointers[-1:]).astype(self.dtype)
            pointers = self._pointers(split)
            bags += [steps, pointers]
        return bags

    def _degrees(
        self, family: Key, kept: Labels, *, without: Sequence[int] = (), is_self: bool = False
    ) -> Ints:
        """The number of rows of a family that each row of a coarser site stands for.

        Args:
            family: The family.
            kept: Its indices that the coarser site keeps.
            without: Blocks that do not count.
            is_self: Whether the entry between a neuron and itself does not count: it is a tap of
                the neuron, not an edge.
        """
        key = family, kept, is_self
        if key in self.degrees and not without:
            return self.degrees[key]
        table = self.tables[family]
        sizes = [size for index, size in table.size.items() if index not in kept]
        if is_self:
            sizes[-1] = sizes[-1] - 1
        each = size_product(sizes, table.graph)
        if without:
            each = each.copy()
            each[without] = 0
        start = table.coarse_start[kept]
        filled = size_product([table.size[index] for index in kept], table.graph)
        num_rows = self.tables[table.coarse_family[kept]].num_rows
        if table.num_filled_rows[kept] == num_rows and not self.has_roles:
            found = np.repeat(each, filled) if kept else each
        else:
            change = np.zeros(num_rows + 1, dtype=self.dtype)
            np.add.at(change, start, each)
            np.add.at(change, start + filled, -each)
            found = change[:-1].cumsum(dtype=self.dtype)
        if not without:
            self.degrees[key] = found
        return found

    def _steps(self, count: int, step: int = 1) -> Ints:
        """The first multiples of a number. They share their memory where possible."""
        known = self.multiples.get(step)
        if known is None or len(known) < count:
            known = np.arange(max(count, self.most), dtype=self.dtype) * step
            self.multiples[step] = known
        return known[:count]

    def _pointers(self, sizes: Ints) -> Ints:
        pointers = np.zeros(len(sizes) + 1, dtype=self.dtype)
        sizes.cumsum(out=pointers[1:], dtype=self.dtype)
        return pointers


def _gaps(blocks: Sequence[LargeBlock], num_rows: int) -> tuple[tuple[int, int], ...]:
    """The listed rows between blocks: the first row of each gap and the number of rows."""
    ends = [0, *(block.start + block.num_rows for block in blocks)]
    starts = [*(block.start for block in blocks), num_rows]
    pairs = zip(ends, starts, strict=True)
    return tuple((end, start - end) for end, start in pairs if start > end)


def on_device(
    rows: Iterable[Rows],
    tables: Iterable[BlockTable[Any]],
    others: Iterable[dict[Any, Any]],
    device: torch.device,
) -> int:
    """Replaces all arrays in rows, tables and dicts by tensors; returns their number of bytes.

    It changes the values in place, also those of frozen dataclasses, whose fields it fills in
    through `vars` before anything reads them.
    """
    has_values = type(torch.empty(0)) is Tensor  # Fake tensors have none.
    if has_values and is_capturing(device):
        raise RuntimeError(
            "Expected a batch of known sizes while a CUDA graph is captured (got new sizes). "
            "Call features() of this batch once before the capture."
        )
    containers: list[Any] = list(others)
    for found in rows:
        containers += [vars(found), found.counts, found.bags]
        for grouping in found.groupings:
            containers += [vars(grouping), grouping.bags]
    for table in tables:
        containers += [vars(table), table.size, table.coarse_start]
    places = [
        (container, key, value)
        for container in containers
        for key, value in (container.items() if type(container) is dict else enumerate(container))
        if type(value) is np.ndarray
    ]
    arrays = {id(array): array for _, _, array in places}
    # Slices share the memory of the array that they are part of.
    owners = [array if array.base is None else array.base for array in arrays.values()]
    unique = {id(owner): owner for owner in owners}
    if device.type == "cpu" and has_values:
        tensors = {number: torch.from_numpy(array) for number, array in arrays.items()}
    else:
        packed = np.concatenate([owner.ravel() for owner in unique.values()])
        parts = _sent(torch.from_numpy(packed), device).split([x.size for x in unique.values()])
        sent = dict(zip(unique, parts, strict=True))
        tensors = {}
        for array, owner in zip(arrays.values(), owners, strict=True):
            offset = (array.ctypes.data - owner.ctypes.data) // owner.itemsize
            tensors[id(array)] = sent[id(owner)].narrow(0, offset, array.size)
    for container, key, array in places:
        container[key] = tensors[id(array)]
    return sum(owner.nbytes for owner in unique.values())


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to a device without waiting for the device."""
    like = torch.empty(0, dtype=x.dtype, device=device)
    if type(like) is not Tensor:  # A mode in which tensors have no values.
        return like.new_empty(len(x))
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
