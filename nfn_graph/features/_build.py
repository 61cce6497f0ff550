"""Builds the rows of a batch on the host and moves all of them to a device in one copy.

Entries are never listed by value and never sorted. Layers are completely connected and their
weights lie in the memory order of a `[out, in, ...]` tensor, so the rows of a site are numbers in
a mixed radix whose digits are its indices. Going to a coarser site drops a digit, and ordering
weights by source neuron exchanges two digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nfn_graph.features._blocks import (
    BlockTable,
    Labels,
    ends_of,
    family_of,
    kept_labels,
    size_product,
)
from nfn_graph.features._rows import Grouping, LargeBlock, Rows, is_capturing
from nfn_graph.spec import FoldedSpec, Key, NetworkSpec, Part, Site, WeightKey

Ints = NDArray[np.int64]
_Container = dict[Any, Any] | list[Any]
_Listed = tuple[Ints, Ints, Ints, dict[str, Ints], list[int]]

# Blocks of at least this many rows are views; smaller ones are listed in indices. A view needs no
# memory and is several times faster with few channels, but costs some operations for every block;
# below this size `embedding_bag` sums many channels faster.
LARGE_ROWS = 2**16


def longest_bag(device: torch.device) -> int | None:
    """The largest number of rows that one sum may have on a device; None if there is no limit.

    On CUDA, a single thread of `embedding_bag` adds up a whole bag, so long bags are split.
    """
    return 64 if device.type == "cuda" else None


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
        self.dtype = next(iter(tables.values())).graph.dtype
        most = max(table.num_rows for table in tables.values()) + 1
        sizes = [table.block_sizes for table in tables.values()]
        few = int(max(x[x < LARGE_ROWS].sum() for x in sizes)) + 1
        # If all blocks are small, all rows are listed.
        self.steps = np.arange(most if few == most else few, dtype=self.dtype)
        self.multiples: dict[int, Ints] = {}
        self.degrees: dict[tuple[Key, Labels, bool], Ints] = {}
        self.positions: dict[str, Any] = {}
        self.layer_sizes: dict[str, Any] = {}
        self.diagonals: dict[WeightKey, Any] = {}
        self.off_diagonals: dict[WeightKey, Any] = {}
        self.neurons = {n.name: self._neuron_rows(n.name) for n in spec.neurons}
        self.weights = {w.key: self._weight_rows(w.key) for w in spec.weights}
        self.self_edges = {w.key: self._self_edges(w.key) for w in spec.weights if spec.is_self(w)}

    def site_rows(self, fold: FoldedSpec, site: Site) -> Rows:
        """The rows of a site of a folded spec."""
        family = family_of(self.spec, site)
        counts: list[Any] = [
            None if part.below is None else self._count(fold, part) for part in site.parts
        ]
        kept = [kept_labels(fold, site, i) for i in range(len(site.covers))]
        if site.is_self and not isinstance(family, str):
            return self.self_edges[family]
        if family in self.weights and kept == list(ends_of(self.spec, family)):
            same = self.weights[family]
            return replace(same, counts=counts)
        if family in self.neurons and kept == [()]:
            return self._rows(self.neurons[family].groupings, counts)
        table = self.tables[family]
        listed = self._listed(table)
        groupings = [self._grouping(family, labels, listed) for labels in kept]
        return self._rows(groupings, counts, table.num_rows)

    def _neuron_rows(self, name: str) -> Rows:
        table = self.tables[name]
        listed = self._listed(table, large=False)
        block, _, _, digits, _ = listed
        last = table.indices[-1]
        self.positions[name] = digits[last]
        self.layer_sizes[name] = table.size[last][block]
        return self._rows([self._grouping(name, (), listed)], [None])

    def _weight_rows(self, key: WeightKey) -> Rows:
        table = self.tables[key]
        listed = self._listed(table)
        ends = [self._grouping(key, labels, listed) for labels in ends_of(self.spec, key)]
        return self._rows(ends, [None])

    def _self_edges(self, key: WeightKey) -> Rows:
        """The off-diagonal entries of a self weight as rows of their own, all of them listed.

        The order by source is also the place of the transposed entry of each entry.
        """
        whole, neurons = self.tables[key], self.neurons[key[0]]
        index = whole.indices[0]
        size, coarse_start = whole.size[index], whole.coarse_start[index,]
        # The weight from a neuron to itself is left out.
        block_sizes = size * (size - 1)
        block = np.repeat(np.arange(len(block_sizes)), block_sizes)
        steps = np.arange(len(block), dtype=self.dtype)
        start = (block_sizes.cumsum(dtype=self.dtype) - block_sizes)[block]
        sizes = size[block]
        target = (steps - start) // np.maximum(sizes - 1, 1)
        place = steps - start - target * (sizes - 1)
        source = place + (place >= target)
        transposed = start + source * (sizes - 1) + target - (target > source)
        group_sizes = _degree(coarse_start, size, size - 1, neurons.num_rows)
        pointers = self._pointers(group_sizes)
        offset = coarse_start[block]
        shared: dict[str, Any] = {
            "num_rows": len(block),
            "num_groups": neurons.num_rows,
            "pointers": pointers,
            "group_sizes": group_sizes,
        }
        at_target, at_source = (
            Grouping(
                groups=end + offset,
                order=order,  # type: ignore[arg-type]
                contiguous=order is steps,
                bags=self._bags(order, pointers),
                **shared,
            )
            for end, order in ((target, steps), (source, transposed))
        )
        own = np.repeat(np.arange(len(size)), size)
        self.diagonals[key] = whole.start[own] + self.positions[key[0]] * (size[own] + 1)
        self.off_diagonals[key] = whole.start[block] + target * sizes + source
        return self._rows([at_target, at_source], [None])

    def _listed(self, table: BlockTable[Ints], large: bool = True) -> _Listed:
        """The listed rows of a family.

        Returns the block of each row, its number in the block, the rows themselves, the digits of
        the numbers, and the blocks that are not listed.
        """
        sizes = table.block_sizes
        views = np.flatnonzero(sizes >= LARGE_ROWS).tolist() if large else []
        if views:
            sizes = sizes.copy()
            sizes[views] = 0
        block = np.repeat(np.arange(len(sizes)), sizes)
        local = self._steps(len(block)) - (sizes.cumsum(dtype=self.dtype) - sizes)[block]
        row = local + table.start[block] if views else self._steps(len(block))
        digits = table.digits(block, local, table.indices) if table.indices else {}
        return block, local, row, digits, views

    def _grouping(self, family: Key, kept: Labels, listed: _Listed) -> Grouping:
        """Groups the rows by those of the coarser site that keeps some of their indices."""
        table = self.tables[family]
        block, local, order, digits, large = listed
        dropped = tuple(i for i in table.indices if i not in kept)
        num_groups = self.tables[table.coarse_family[kept]].num_rows
        coarse_start = table.coarse_start[kept]
        groups = coarse_start[block]
        if kept:
            groups = groups + table.number(block, digits, kept)
        listed_sizes = group_sizes = self._degrees(family, kept, dropped)
        contiguous = kept + dropped == table.indices
        if not contiguous:
            swapped = table.digits(block, local, kept + dropped)
            order = table.start[block] + table.number(block, swapped, table.indices)
        if large:
            listed_sizes = self._degrees(family, kept, dropped, large)
        axes = tuple(table.indices.index(i) for i in kept)
        blocks = tuple(
            LargeBlock(
                int(table.start[b]),
                tuple(int(table.size[i][b]) for i in table.indices),
                int(coarse_start[b]),
                axes,
            )
            for b in large
        )
        # The tensors of a type connect layers in order, so every group is contiguous in `order`.
        pointers = self._pointers(listed_sizes)
        return Grouping(
            num_rows=table.num_rows,
            num_groups=num_groups,
            groups=groups,  # type: ignore[arg-type]
            order=order,  # type: ignore[arg-type]
            pointers=pointers,  # type: ignore[arg-type]
            bags=self._bags(order, pointers),
            group_sizes=group_sizes,  # type: ignore[arg-type]
            contiguous=contiguous,
            blocks=blocks,
            gaps=_gaps(blocks, table.num_rows) if blocks else (),
        )

    def _rows(
        self,
        groupings: Sequence[Grouping],
        counts: list[Any],
        num_rows: int | None = None,
    ) -> Rows:
        """Puts the rows of a site together from their groupings, one for every cover.

        Args:
            groupings: The rows grouped by the rows of each cover.
            counts: The counts of the site's parts.
            num_rows: The number of rows, which only a site without covers needs.
        """
        num_rows = groupings[0].num_rows if num_rows is None else num_rows
        none: Any = self.steps[:0]
        if not groupings:
            return Rows(num_rows, (), counts, none, none, [])
        if len(groupings) == 1:
            (only,) = groupings
            return Rows(num_rows, (only,), counts, only.groups, none, only.bags)
        # The orders of the groupings are slices of the joint order, so both share one memory.
        order: Any = np.concatenate([grouping.order for grouping in groupings])
        listed = len(groupings[0].order)
        cover_rows: Any = np.empty((listed, len(groupings)), dtype=self.dtype)
        pointers: list[Any] = [groupings[0].pointers]
        offset = 0
        for i, grouping in enumerate(groupings):
            np.add(grouping.groups, offset, out=cover_rows[:, i])
            offset += grouping.num_groups
            shared = order[i * listed : (i + 1) * listed]
            vars(grouping).update(order=shared, bags=[shared, *grouping.bags[1:]])
            if i:
                pointers.append(grouping.pointers[1:] + i * listed)
        num_covers = len(groupings)
        if num_covers not in self.multiples:
            self.multiples[num_covers] = num_covers * self.steps
        cover_pointers = self.multiples[num_covers]
        if len(cover_pointers) <= listed:
            cover_pointers = np.arange(listed + 1, dtype=self.dtype) * num_covers
        joint: Any = np.concatenate(pointers, dtype=self.dtype)
        return Rows(
            num_rows=num_rows,
            groupings=tuple(groupings),
            counts=counts,
            cover_rows=cover_rows.ravel(),
            cover_pointers=cover_pointers[: listed + 1],  # type: ignore[arg-type]
            bags=self._bags(order, joint),
        )

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
            pointers = np.append(np.zeros(1, self.dtype), ends)
            bags += [steps, pointers]
        return bags

    def _count(self, fold: FoldedSpec, part: Part) -> Ints:
        """The number of entries that each row of a site averages."""
        finer = fold.site[part.key]
        dropped = tuple(i for i in finer.indices if i not in part.kept)
        return self._degrees(family_of(self.spec, finer), part.kept, dropped, is_self=finer.is_self)

    def _degrees(
        self,
        family: Key,
        kept: Labels,
        dropped: Labels,
        without: Sequence[int] = (),
        is_self: bool = False,
    ) -> Ints:
        """The number of rows of a family that each row of a coarser site stands for.

        Args:
            family: The family.
            kept: Its indices that the coarser site keeps.
            dropped: Its other indices.
            without: Blocks that do not count.
            is_self: Whether the entry between a neuron and itself does not count: it is a tap of
                the neuron, not an edge.
        """
        key = (family, kept, is_self)
        if key in self.degrees and not without:
            return self.degrees[key]
        table = self.tables[family]
        above = self.tables[table.coarse_family[kept]]
        sizes = [table.size[i] for i in dropped]
        if is_self:
            sizes[-1] = sizes[-1] - 1
        each = size_product(sizes, table.graph)
        if without:
            each = each.copy()
            each[without] = 0
        start = table.coarse_start[kept]
        filled = size_product([table.size[i] for i in kept], table.graph)
        if start is above.start:
            found = np.repeat(each, filled) if kept else each
        else:
            found = _degree(start, filled, each, above.num_rows)
        if not without:
            self.degrees[key] = found
        return found

    def _steps(self, count: int) -> Ints:
        if count < len(self.steps):
            return self.steps[:count]
        return np.arange(count, dtype=self.dtype)

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


def _degree(start: Ints, size: Ints, each: Ints, num_rows: int) -> Ints:
    """The number of entries of each row, where `size` rows from `start` on have `each` entries."""
    if int(size.sum()) == num_rows and np.array_equal(start, size.cumsum() - size):
        return np.repeat(each, size)  # The usual case: the blocks are contiguous.
    change = np.zeros(num_rows + 1, dtype=each.dtype)
    np.add.at(change, start, each)
    np.add.at(change, start + size, -each)
    return change[:-1].cumsum(dtype=each.dtype)


def on_device(values: Iterable[object], device: torch.device) -> list[Tensor]:
    """Replaces all arrays in rows and dicts by tensors; returns those that own the memory.

    It changes the values in place, also those of frozen dataclasses, whose fields it fills in
    through `vars` before anything reads them.
    """
    has_values = type(torch.empty(0)) is Tensor  # Fake tensors have none.
    if has_values and is_capturing(device):
        raise RuntimeError(
            "Expected a batch of known sizes while a CUDA graph is captured (got new sizes). "
            "Call features() of this batch once before the capture."
        )
    places: list[tuple[_Container, Any, Ints]] = []
    roots: dict[int, Ints] = {}
    seen: set[int] = set()
    for value in values:
        _find(value if isinstance(value, dict) else vars(value), places, roots, seen)
    tensors: dict[int, Tensor] = {}
    if device.type == "cpu" and has_values:
        for container, key, array in places:
            if id(array) not in tensors:
                tensors[id(array)] = torch.from_numpy(array)
            container[key] = tensors[id(array)]
        return [torch.from_numpy(root) for root in roots.values()]
    packed = np.concatenate([root.ravel() for root in roots.values()])
    sent = _sent(torch.from_numpy(packed), device)
    tensors.update(zip(roots, sent.split([x.size for x in roots.values()]), strict=True))
    for container, key, array in places:
        root = array if array.base is None else array.base
        offset = (array.ctypes.data - root.ctypes.data) // root.itemsize
        container[key] = tensors[id(root)].narrow(0, offset, array.size)
    return [sent]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to a device without waiting for the device."""
    like = torch.empty(0, dtype=x.dtype, device=device)
    if type(like) is not Tensor:  # A mode in which tensors have no values.
        return like.new_empty(len(x))
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _find(
    values: _Container,
    places: list[tuple[_Container, Any, Ints]],
    roots: dict[int, Ints],
    seen: set[int],
) -> None:
    """Finds all arrays, and the arrays that own the memory of slices."""
    if id(values) in seen:
        return
    seen.add(id(values))
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        kind = type(value)
        if kind is np.ndarray:
            places.append((values, key, value))
            root = value if value.base is None else value.base
            roots[id(root)] = root
        elif kind is dict or kind is list:
            _find(value, places, roots, seen)
        elif kind is Rows:
            _find(value.__dict__, places, roots, seen)
        elif key == "groupings":
            for grouping in value:
                _find(grouping.__dict__, places, roots, seen)
