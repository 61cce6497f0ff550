"""Which rows of the networks of a batch belong together, computed once for its sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.features._blocks import (
    BlockTable,
    block_tables,
    digits_of,
    ends_of,
    family_of,
    number_of,
    size_product,
)
from nfn_graph.features._build import RowBuilder, longest_bag, on_device
from nfn_graph.features._rows import Rows, group_of_rows, is_lasting
from nfn_graph.spec import NETWORK, FoldedSpec, Key, NetworkSpec, Shape, Site, Symmetry, WeightKey


def _folds(spec: NetworkSpec) -> dict[Symmetry, FoldedSpec]:
    """The folds of a spec under both groups, or under NP alone if HNP is not possible."""
    folds: dict[Symmetry, FoldedSpec] = {"np": spec.fold("np")}
    if all(n.size is not None for n in spec.neurons if n.fixed) and not any(
        n.role for n in spec.neurons
    ):
        folds["hnp"] = spec.fold("hnp")
    return folds


class _Located(NamedTuple):
    """For every row of a family: its block, the first row and sizes there, its number there."""

    block: Tensor
    start: Tensor
    local: Tensor
    sizes: dict[str, Tensor]


class Incidence:
    """The incidence of a batch of networks, made by :meth:`of`, which caches by sizes.

    Args:
        spec: The types, which determine the order of the shapes.
        shapes: The sizes of every network.
        device: The device of the index tensors.

    Attributes:
        neurons: The rows of every neuron type, by network.
        weights: The rows of every weight type, by target and by source neuron.
        sites: For each symmetry group, the rows of every site of the folded spec.
        positions: For every neuron type, the position of each neuron in its layer or parent.
        layer_sizes: For every neuron type, the size of the layer or parent of each neuron.
        diagonals: For the weights of a layer with itself, the row of each neuron's own entry.
        off_diagonals: For the same weights, the rows of all other entries.
        masks: See :func:`filled_taps`.

    Example:
        >>> from nfn_graph.testing import random_graph
        >>> graph = random_graph(NetworkSpec.chain(2, input_size=2, output_size=1), {"hidden1": 3})
        >>> incidence = graph.features().incidence
        >>> incidence.num_graphs, incidence.positions["hidden1"].tolist()
        (1, [0, 1, 2])
    """

    def __init__(self, spec: NetworkSpec, shapes: tuple[Shape, ...], device: torch.device) -> None:
        self.spec = spec
        self.shapes = shapes
        self.device = device
        self.num_graphs = len(shapes)
        # Whether every network has every type. In this usual case nothing is masked.
        self.is_whole = all(all(shape.sizes) and all(shape.blocks) for shape in set(shapes))
        self.masks: dict[Symmetry, dict[Key, Tensor]] = {}
        self._scales: dict[tuple[Symmetry, torch.dtype], tuple[Tensor | None, ...]] = {}
        folds = _folds(spec)
        tables = block_tables(spec, shapes, tuple(folds.values()))
        builder = RowBuilder(spec, tables, longest_bag(device))
        self.neurons: dict[str, Rows] = builder.neurons
        self.weights: dict[WeightKey, Rows] = builder.weights
        self.positions: dict[str, Tensor] = builder.positions
        self.layer_sizes: dict[str, Tensor] = builder.layer_sizes
        self.diagonals: dict[Key, Tensor] = builder.diagonals
        self.off_diagonals: dict[Key, Tensor] = builder.off_diagonals
        self.sites: dict[Symmetry, tuple[Rows, ...]] = {
            symmetry: tuple(builder.site_rows(fold, site) for site in fold.sites)
            for symmetry, fold in folds.items()
        }
        self._tables: dict[Key, BlockTable[Tensor]] = tables  # type: ignore[assignment]
        # Index tensors that are made in inference mode cannot be used in training later.
        with torch.inference_mode(False):
            self._index_bytes = on_device(
                (*chain(*self.sites.values()), *self.neurons.values(), *self.weights.values()),
                self._tables.values(),
                (self.positions, self.layer_sizes, self.diagonals, self.off_diagonals),
                device,
            )

    @staticmethod
    def of(spec: NetworkSpec, shapes: Sequence[Shape], device: torch.device) -> Incidence:
        """The incidence of these sizes. It is cached, since training repeats few sizes."""
        sizes = tuple(shapes)
        key = (spec, sizes, device)
        found = _CACHE.get(key)
        return _CACHE.put(key, Incidence(spec, sizes, device)) if found is None else found

    def to(self, device: torch.device) -> Incidence:
        """Moves the incidence to another device."""
        if device == self.device:
            return self
        return Incidence.of(self.spec, self.shapes, device)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the index tensors."""
        masks = (mask for masks in self.masks.values() for mask in masks.values())
        scales = (x for scales in self._scales.values() for x in scales if x is not None)
        return sum(x.nbytes for x in (*masks, *scales)) + self._index_bytes

    @property
    def is_lasting(self) -> bool:
        """Whether the tensors are ordinary ones, not those of a torch mode or transform."""
        return is_lasting(self._tables[NETWORK].graph)

    def rows(self, key: Key) -> Rows:
        """The rows of a stored type: neurons by network, weights by target and source."""
        return self.neurons[key] if isinstance(key, str) else self.weights[key]

    def reorder(self, key: Key, x: Tensor, sequence: Sequence[str], back: bool = False) -> Tensor:
        """Puts the rows of a stored type into another order of its indices.

        Args:
            key: The type.
            x: Its rows, `[rows, ...]`.
            sequence: Its indices, slowest first.
            back: Whether to reverse it: from rows in that order to rows in their own order.
        """
        own, sequence = self.spec.indices(key), tuple(sequence)
        if own == sequence:
            return x
        grouping = self.rows(key).groupings[0]
        if grouping.blocks and not grouping.gaps:
            first, second = (sequence, own) if back else (own, sequence)
            axes = [first.index(i) for i in second]
            parts = [
                x.narrow(0, block.start, block.num_rows)
                .view(*(block.sizes[own.index(i)] for i in first), -1)
                .permute(*axes, len(own))
                .reshape(block.num_rows, *x.shape[1:])
                for block in grouping.blocks
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = self._located(key)
        first, second = (own, sequence) if back else (sequence, own)
        digits = digits_of(rows.local, rows.sizes, first)
        return x.index_select(0, rows.start + number_of(digits, rows.sizes, second))

    def graph_of(self, key: Key, spec: NetworkSpec | FoldedSpec) -> Tensor:
        """`[rows]`, the network of each row of a stored type or of a site of a folded spec."""
        if key == NETWORK:
            return self._tables[NETWORK].graph
        if isinstance(key, str):
            return self.neurons[key].groupings[0].index
        family: Key = key
        if isinstance(spec, FoldedSpec):
            site = spec.site[key]
            if site.is_self:
                edges = self.sites[spec.symmetry][spec.sites.index(site)]
                return self.graph_of(key[2], spec).index_select(0, edges.targets.index)
            family = family_of(self.spec, site)
        table = self._tables[family]
        return table.graph.index_select(0, group_of_rows(table.block_sizes, table.num_rows))

    def scales(self, spec: FoldedSpec, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The factors `[rows, taps, 1]` that turn the sums of every site's summary into means.

        They are None for a leaf, whose summary is its own entries.
        """
        found = self._scales.get((spec.symmetry, dtype))
        if found is None:
            pairs = zip(spec.sites, self.sites[spec.symmetry], strict=True)
            # Scales that are made in inference mode cannot be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                found = tuple(self._scale(site, rows, dtype) for site, rows in pairs)
            if all(is_lasting(x) for x in found if x is not None):
                self._scales[spec.symmetry, dtype] = found
        return found

    def _scale(self, site: Site, rows: Rows, dtype: torch.dtype) -> Tensor | None:
        if site.is_leaf:
            return None
        ones = torch.ones(rows.num_rows, dtype=dtype, device=self.device)
        columns = [
            (ones if count is None else 1 / count.clamp(min=1).to(dtype))
            .unsqueeze(1)
            .expand(rows.num_rows, part.taps)
            for part, count in zip(site.parts, rows.counts, strict=True)
        ]
        return torch.cat(columns, 1).unsqueeze(-1)

    def num_filled_rows(self, key: Key, site: Site) -> int:
        """The number of rows of a site that have an entry of a stored type."""
        return self._tables[key].num_filled_rows[site.indices]

    def filled_rows(self, key: Key, indices: tuple[str, ...]) -> Tensor:
        """The rows of the site with these indices that have an entry of a stored type."""
        table = self._tables[key]
        filled = size_product([table.size[i] for i in indices], table.graph)
        block = group_of_rows(filled, table.num_filled_rows[indices])
        place = torch.arange(len(block), dtype=filled.dtype, device=self.device)
        offset = table.coarse_start[indices] - (filled.cumsum(0) - filled)
        return (place + offset.index_select(0, block)).long()

    def lookup(self, key: WeightKey, target: Tensor, source: Tensor) -> Tensor:
        """For every weight in order, the row of the weight between the given neurons.

        Args:
            key: The weight type.
            target: For every weight, a neuron of the same layer as its own target.
            source: For every weight, a neuron of the same layer as its own source.
        """
        table, rows = self._tables[key], self._located(key)
        digits: dict[str, Tensor] = {}
        for labels, ends in zip(ends_of(self.spec, key), (target, source), strict=True):
            first = table.coarse_start[labels].index_select(0, rows.block)
            digits |= digits_of(ends - first, rows.sizes, labels)
        return rows.start + number_of(digits, rows.sizes, table.indices)

    def moved(
        self, name: str, parents: Mapping[str, Tensor], places: Mapping[str, Tensor]
    ) -> Tensor:
        """For every neuron of a nested type, the neuron that moves to its place.

        Args:
            name: The type.
            parents: For the types that it is nested in, the neuron that moves to each place. Types
                that are not given stay as they are.
            places: For the type itself, the position inside the parent of the neuron that moves to
                each place.
        """
        table, rows = self._tables[name], self._located(name)
        digits = digits_of(rows.local, rows.sizes, table.indices)
        found = {k: x for k, x in places.items() if k in digits}
        for parent in self.spec.neuron[name].parents:
            labels = self.spec.indices(parent)
            start = table.coarse_start[labels].index_select(0, rows.block)
            row = start + number_of(digits, rows.sizes, labels)
            row = parents[parent].index_select(0, row) if parent in parents else row
            found = digits_of(row - start, rows.sizes, labels) | found
        return rows.start + number_of(found, rows.sizes, table.indices)

    def _located(self, family: Key) -> _Located:
        table = self._tables[family]
        block = group_of_rows(table.block_sizes, table.num_rows)
        start = table.start.index_select(0, block)
        rows = torch.arange(table.num_rows, dtype=start.dtype, device=self.device)
        sizes = {index: size.index_select(0, block) for index, size in table.size.items()}
        return _Located(block, start, rows - start, sizes)


class _Cache:
    """A thread-safe cache of the most recently used incidences.

    Args:
        max_entries: The largest number of incidences to keep.
        max_bytes: The most memory that they may use together. A single incidence above this limit
            is kept apart until the next one of that kind.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Incidence] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._oversize: tuple[Hashable, Incidence] | None = None
        self._lock = Lock()

    def get(self, key: Hashable) -> Incidence | None:
        """The incidence of a key, or None."""
        with self._lock:
            if self._oversize is not None and self._oversize[0] == key:
                return self._oversize[1]
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Incidence) -> Incidence:
        """Caches an incidence if that is allowed, and returns it."""
        if not value.is_lasting:
            return value
        size = value.num_bytes
        with self._lock:
            if size > self.max_bytes:
                self._oversize = (key, value)
                return value
            # The most recently used one may have grown. Measuring all of them whenever a new one is
            # added would take longer than making it.
            if self._values:
                last = next(reversed(self._values))
                self._sizes[last] = self._values[last].num_bytes
            self._values[key], self._sizes[key] = value, size
            total = sum(self._sizes.values())
            while len(self._values) > self.max_entries or total > self.max_bytes:
                oldest, _ = self._values.popitem(last=False)
                total -= self._sizes.pop(oldest)
        return value


_CACHE = _Cache(max_entries=32, max_bytes=2**28)
