"""Which rows of a batch belong together, built from sizes by arithmetic.

Entries are never listed by value and never sorted. Layers are completely connected and their
weights lie in the memory order of a `[out, in, ...]` tensor, so the rows of a site are numbers in
a mixed radix whose digits are its indices. To go to a coarser site is to drop a digit; to order
weights by source neuron is to exchange two.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from nfn_graph.features._blocks import (
    Blocks,
    block_tables,
    ends_of,
    family_of,
    kept_labels,
    on_device,
)
from nfn_graph.features._rows import (
    NeuronRows,
    Rows,
    Segments,
    SelfRows,
    group_of_rows,
    is_lasting,
    tensor_bytes,
)
from nfn_graph.spec import (
    NETWORK,
    FoldedSpec,
    Key,
    NetworkSpec,
    Part,
    Shape,
    Site,
    Symmetry,
    WeightKey,
)

_Counts = dict[tuple[Key, tuple[str, ...]], Tensor]


def _folds(spec: NetworkSpec) -> dict[Symmetry, FoldedSpec]:
    """The folds of a spec under both groups, as far as there are."""
    folds: dict[Symmetry, FoldedSpec] = {"np": spec.fold("np")}
    if all(n.size is not None for n in spec.neurons if n.fixed) and not any(
        n.role for n in spec.neurons
    ):
        folds["hnp"] = spec.fold("hnp")
    return folds


class Incidence:
    """The incidence of a batch of networks. Made by :meth:`of`, which caches by sizes.

    Args:
        spec: The types, in whose order the shapes are given.
        shapes: The sizes of every network.
        device: The device of the index tensors.

    Attributes:
        neurons: The rows of every neuron type, by network.
        weights: The rows of every weight type, by target and by source neuron.
        self_weights: How the weights of a layer with itself split.
        sites: For each symmetry group, the rows of every site of the folded spec.
    """

    def __init__(self, spec: NetworkSpec, shapes: tuple[Shape, ...], device: torch.device) -> None:
        self.spec = spec
        self.shapes = shapes
        self.device = device
        self.num_graphs = len(shapes)
        # Whether every network has every type; the usual case, in which nothing is masked.
        self.is_whole = all(all(shape.sizes) and all(shape.blocks) for shape in set(shapes))
        self.neurons: dict[str, NeuronRows] = {}
        self.weights: dict[WeightKey, Rows] = {}
        self.self_weights: dict[WeightKey, SelfRows] = {}
        self.sites: dict[Symmetry, tuple[Rows, ...]] = {}
        self.masks: dict[Symmetry, dict[Key, Tensor]] = {}
        self.scales: dict[tuple[Symmetry, torch.dtype], tuple[Tensor | None, ...]] = {}
        folds = _folds(spec)
        tables = block_tables(spec, shapes, folds.values())
        most = max(table.total for table in tables.values()) + 1
        # The rows of all covers of a site are numbered together.
        width = max(len(site.covers) for fold in folds.values() for site in fold.sites)
        self._dtype = torch.int32 if max(2, width) * most < 2**31 else torch.int64
        # Index tensors made in inference mode could not be used in training later on.
        with torch.inference_mode(False):
            self._steps = torch.arange(most, dtype=self._dtype, device=device)
            self._pairs = 2 * self._steps
            self._blocks = on_device(tables, device)
            for neuron in spec.neurons:
                self.neurons[neuron.name] = self._neuron_rows(neuron.name)
            for weight in spec.weights:
                self.weights[weight.key] = self._weight_rows(weight.key)
                if spec.is_self(weight):
                    self.self_weights[weight.key] = self._split_self(weight.key)
            counts: _Counts = {}
            for symmetry, fold in folds.items():
                self.sites[symmetry] = tuple(self._site_rows(fold, s, counts) for s in fold.sites)

    @staticmethod
    def of(spec: NetworkSpec, shapes: Sequence[Shape], device: torch.device) -> Incidence:
        """The incidence of these sizes; training repeats few of them, so it is cached."""
        sizes = tuple(shapes)
        key = (spec, sizes, device)
        found = _CACHE.get(key)
        return _CACHE.put(key, Incidence(spec, sizes, device)) if found is None else found

    def to(self, device: torch.device) -> Incidence:
        """The same incidence on another device."""
        if device == self.device:
            return self
        return Incidence.of(self.spec, self.shapes, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index tensors."""
        held = (self.neurons, self.weights, self.self_weights, self.sites)
        return tensor_bytes((held, self.masks, self.scales))

    @property
    def is_lasting(self) -> bool:
        """Whether the tensors are ordinary ones, not those of a mode or transform."""
        return is_lasting(self._pairs)

    def rows(self, key: Key) -> Rows:
        """The rows of a stored type: neurons by network, weights by target and source."""
        return self.neurons[key] if isinstance(key, str) else self.weights[key]

    def renumber(self, key: Key, sequence: Sequence[str], back: bool = False) -> Tensor | None:
        """The rows of a stored type in another order of its indices; None if that is its own.

        Args:
            key: The type.
            sequence: Its indices, slowest first.
            back: Whether to return the inverse: for every row of the type, its place in that
                order.
        """
        own, sequence = self.spec.indices(key), tuple(sequence)
        if own == sequence:
            return None
        blocks = self._blocks[key]
        block, local = self._locate(blocks)
        start = blocks.start.index_select(0, block)
        first, second = (own, sequence) if back else (sequence, own)
        return start + blocks.number(block, blocks.digits(block, local, first), second)

    def networks(self, key: Key, spec: NetworkSpec | FoldedSpec) -> Tensor:
        """`[rows]`, the network of each row of a stored type or of a site of a folded spec."""
        if key == NETWORK:
            return torch.arange(self.num_graphs, device=self.device)
        if isinstance(key, str):
            return self.neurons[key].graph
        family: Key = key
        if isinstance(spec, FoldedSpec):
            if spec.site[key].is_self:
                target = self.self_weights[key].edges.targets.index
                return self.neurons[key[2]].graph.index_select(0, target)
            family = family_of(self.spec, spec.site[key])
        blocks = self._blocks[family]
        return blocks.graph.index_select(0, self._locate(blocks)[0])

    def filled(self, key: Key, site: Site) -> int:
        """How many rows of a site have an entry of a stored type."""
        return self._blocks[key].filled[site.indices]

    def owners(self, key: Key, indices: tuple[str, ...]) -> Tensor:
        """The rows of the site with these indices that have an entry of a stored type."""
        blocks = self._blocks[key]
        rows = _product([blocks.size[i] for i in indices], blocks.graph)
        block = group_of_rows(rows, blocks.filled[indices])
        place = self._steps.narrow(0, 0, blocks.filled[indices])
        first = blocks.starts[indices] - (rows.cumsum(0) - rows)
        return place + first.index_select(0, block)

    def lookup(self, key: WeightKey, target: Tensor, source: Tensor) -> Tensor:
        """For every weight in order, the row of the weight between the given neurons.

        Args:
            key: The weight type.
            target: For every weight, a neuron of the same layer as its own target.
            source: For every weight, a neuron of the same layer as its own source.
        """
        blocks = self._blocks[key]
        block, _ = self._locate(blocks)
        digits: dict[str, Tensor] = {}
        for labels, rows in zip(ends_of(self.spec, key), (target, source), strict=True):
            local = rows - blocks.starts[labels].index_select(0, block)
            digits |= blocks.digits(block, local, labels)
        start = blocks.start.index_select(0, block)
        return start + blocks.number(block, digits, blocks.indices)

    def moved(
        self, name: str, parents: Mapping[str, Tensor], places: Mapping[str, Tensor]
    ) -> Tensor:
        """For every neuron of a nested type, the neuron that comes to its place.

        Args:
            name: The type.
            parents: For the types that it is nested in, the neuron that comes to each place; as
                they are, if not given.
            places: For the type itself, the position inside the parent of the neuron that comes
                to each place.
        """
        blocks = self._blocks[name]
        block, local = self._locate(blocks)
        digits = blocks.digits(block, local, blocks.indices)
        found = {k: x for k, x in places.items() if k in digits}
        for parent in self.spec.neuron[name].parents:
            above = self._blocks[parent]
            start = blocks.starts[above.indices].index_select(0, block)
            row = start + blocks.number(block, digits, above.indices)
            row = parents[parent].index_select(0, row) if parent in parents else row
            found = blocks.digits(block, row - start, above.indices) | found
        return blocks.start.index_select(0, block) + blocks.number(block, found, blocks.indices)

    def _neuron_rows(self, name: str) -> NeuronRows:
        blocks = self._blocks[name]
        block, local = self._locate(blocks)
        last = blocks.indices[-1]
        position = blocks.digits(block, local, blocks.indices)[last]
        rows = Rows.of([self._segments(blocks, (), block, local)], [None], self._pairs)
        return NeuronRows(
            **vars(rows), position=position, layer_size=blocks.size[last].index_select(0, block)
        )

    def _weight_rows(self, key: WeightKey) -> Rows:
        blocks = self._blocks[key]
        block, local = self._locate(blocks)
        ends = [self._segments(blocks, labels, block, local) for labels in ends_of(self.spec, key)]
        return Rows.of(ends, [None], self._pairs)

    def _split_self(self, key: WeightKey) -> SelfRows:
        whole, neurons = self._blocks[key], self.neurons[key[0]]
        index = whole.indices[0]
        size, first = whole.size[index], whole.starts[index,]
        # A neuron's weights leave out the one to itself.
        count = size * (size - 1)
        total = whole.total - neurons.count
        steps, block = self._steps.narrow(0, 0, total), group_of_rows(count, total)
        start = (count.cumsum(0) - count).index_select(0, block)
        sizes = size.index_select(0, block)
        target, place = _divide(steps - start, sizes - 1)
        source = place + (place >= target)
        transposed = start + source * (sizes - 1) + target - (target > source).to(target.dtype)
        degrees = _degree(first, size, size - 1, neurons.count)
        pointers = _pointers(degrees, self._dtype)
        offset = first.index_select(0, block)
        at_target = Segments(self._number(target + offset), steps, pointers, degrees, True)
        order = self._number(transposed)
        at_source = Segments(self._number(source + offset), order, pointers, degrees, False)
        own_block = group_of_rows(size, neurons.count)
        return SelfRows(
            diagonal=whole.start.index_select(0, own_block)
            + neurons.position * (size.index_select(0, own_block) + 1),
            off_diagonal=whole.start.index_select(0, block) + target * sizes + source,
            edges=Rows.of([at_target, at_source], [None], self._pairs),
        )

    def _site_rows(self, fold: FoldedSpec, site: Site, counts: _Counts) -> Rows:
        family = family_of(self.spec, site)
        blocks = self._blocks[family]
        found = [
            None if part.below is None else self._count(fold, part, counts) for part in site.parts
        ]
        kept = [kept_labels(fold, site, i) for i in range(len(site.covers))]
        if site.is_self and not isinstance(family, str):
            return self.self_weights[family].edges
        if family in self.weights and kept == list(ends_of(self.spec, family)):
            return replace(self.weights[family], counts=tuple(found))
        if family in self.neurons and kept == [()]:
            covers = self.neurons[family].covers
        else:
            block, local = self._locate(blocks)
            covers = tuple(self._segments(blocks, labels, block, local) for labels in kept)
        pairs = self._pairs if len(covers) < 3 else self._steps * len(covers)
        return Rows.of(covers, found, pairs, blocks.total)

    def _count(self, fold: FoldedSpec, part: Part, counts: _Counts) -> Tensor:
        """The number of entries that each row of a site averages."""
        entry = fold.site[part.entry]
        family = family_of(self.spec, entry)
        if (family, part.kept) not in counts:
            blocks = self._blocks[family]
            rows = _product([blocks.size[i] for i in part.kept], blocks.graph)
            dropped = [blocks.size[i] for i in entry.indices if i not in part.kept]
            if entry.is_self:
                # A layer has no edge from a neuron to itself: that entry is a tap of the neuron.
                dropped[-1] = dropped[-1] - 1
            each = _product(dropped, blocks.graph)
            total = self._blocks[blocks.coarser[part.kept]].total
            counts[family, part.kept] = _degree(blocks.starts[part.kept], rows, each, total)
        return counts[family, part.kept]

    def _locate(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """For every row, its block and its number there."""
        block = group_of_rows(_product(list(blocks.size.values()), blocks.graph), blocks.total)
        start = self._number(blocks.start).index_select(0, block)
        return block, self._steps.narrow(0, 0, blocks.total) - start

    def _segments(
        self, blocks: Blocks, kept: tuple[str, ...], block: Tensor, local: Tensor
    ) -> Segments:
        """The rows by the rows of the coarser site that keeps some of their indices."""
        dropped = tuple(i for i in blocks.indices if i not in kept)
        total = self._blocks[blocks.coarser[kept]].total
        start = blocks.starts[kept]
        index = self._number(start).index_select(0, block)
        if kept:
            digits = blocks.digits(block, local, blocks.indices)
            index = index + blocks.number(block, digits, kept)
        rows = _product([blocks.size[i] for i in kept], blocks.graph)
        each = _product([blocks.size[i] for i in dropped], blocks.graph)
        degrees = _degree(start, rows, each, total)
        contiguous = kept + dropped == blocks.indices
        order = self._steps.narrow(0, 0, blocks.total)
        if not contiguous:
            digits = blocks.digits(block, local, kept + dropped)
            first = self._number(blocks.start).index_select(0, block)
            order = first + blocks.number(block, digits, blocks.indices)
        # The tensors of a type join layers in order, so that every group is one run of `order`.
        return Segments(
            self._number(index), order, _pointers(degrees, self._dtype), degrees, contiguous
        )

    def _number(self, values: Tensor) -> Tensor:
        return values.to(self._dtype)


def _divide(number: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder."""
    quotient = number // by
    return quotient, number - quotient * by


def _product(sizes: Sequence[Tensor], like: Tensor) -> Tensor:
    return math.prod(sizes[1:], start=sizes[0]) if sizes else torch.ones_like(like)


def _degree(start: Tensor, size: Tensor, each: Tensor, total: int) -> Tensor:
    """How many entries each row has, where `size` rows from `start` on have `each`."""
    change = start.new_zeros(total + 1)
    change = change.index_add(0, start, each).index_add(0, start + size, -each)
    return change.cumsum(0).narrow(0, 0, total).clone()


def _pointers(counts: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(dtype)


class _Cache:
    """The incidences used last, as many as fit; safe between threads.

    Args:
        max_entries: The number to keep.
        max_bytes: The memory they may have together. One that is larger than this by itself is
            not kept.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Incidence] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Incidence | None:
        """The incidence of a key, if it is there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Incidence) -> Incidence:
        """Keeps an incidence if it may be kept, and returns it."""
        size = value.num_bytes if value.is_lasting else self.max_bytes + 1
        if size > self.max_bytes:
            return value
        with self._lock:
            # What was used last may have grown since. Measuring all of them for every new one
            # would cost more than making it.
            if self._values:
                last = next(reversed(self._values))
                self._sizes[last] = self._values[last].num_bytes
            self._values[key], self._sizes[key] = value, size
            total = sum(self._sizes.values())
            while len(self._values) > self.max_entries or total > self.max_bytes:
                oldest, _ = self._values.popitem(last=False)
                total -= self._sizes.pop(oldest)
        return value

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._values.clear()
            self._sizes.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all incidences."""
        with self._lock:
            return sum(value.num_bytes for value in self._values.values())

    def __len__(self) -> int:
        return len(self._values)


_CACHE = _Cache(max_entries=32, max_bytes=2**28)
