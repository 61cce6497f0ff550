"""The sizes of a batch as tables of blocks: one layer, or one tensor, of one network each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from nfn_graph.spec import NETWORK, PRIME, FoldedSpec, Key, NetworkSpec, Shape, Site, WeightKey

Labels = tuple[str, ...]
_Row = tuple[int, ...]


Array = TypeVar("Array", Tensor, NDArray[np.int64])


def take(x: Array, index: Array) -> Array:
    """The rows of an array or tensor with the given numbers."""
    return x.index_select(0, index) if isinstance(x, Tensor) else x[index]


@dataclass(frozen=True, eq=False)
class Blocks(Generic[Array]):
    """The blocks of one family of rows: of a neuron type, a weight type or a site.

    First as arrays on the host, then as tensors on a device.

    Attributes:
        indices: The indices that number the rows of a block, slowest first.
        total: The rows of all blocks.
        graph: The network of every block.
        start: The first row of every block.
        size: For every index, its size in every block.
        starts: For the sites that keep some of the indices, the first row there of every block.
        coarser: The families of those sites.
        filled: How many of their rows belong to one of the blocks.
    """

    indices: Labels
    total: int
    graph: Array
    start: Array
    size: dict[str, Array]
    starts: dict[Labels, Array]
    coarser: dict[Labels, Key]
    filled: dict[Labels, int]

    def digits(self, block: Array, number: Array, sequence: Labels) -> dict[str, Array]:
        """The digits of numbers whose places are the given indices, slowest first."""
        digits: dict[str, Array] = {}
        for index in reversed(sequence[1:]):
            size = take(self.size[index], block)
            quotient = number // size
            digits[index] = number - quotient * size
            number = quotient
        return digits | {sequence[0]: number}

    def number(self, block: Array, digits: Mapping[str, Array], sequence: Labels) -> Array:
        """The numbers with those digits: the inverse of :meth:`digits`."""
        number = digits[sequence[0]]
        for index in sequence[1:]:
            number = number * take(self.size[index], block) + digits[index]
        return number


class _Table:
    """A family of blocks while it is being put together.

    Args:
        indices: The indices of the family.
        values: For every block the network, the size of every index and, for the two ends of a
            weight or the neurons themselves, the place of the layer among those of its type.
    """

    def __init__(self, indices: Labels, values: NDArray[np.int64]) -> None:
        self.indices = indices
        self.graph = values[:, 0]
        self.sizes = values[:, 1 : 1 + len(indices)]
        self.layers = values[:, 1 + len(indices) :]
        self.count = self.sizes.prod(1)
        self.start = self.count.cumsum() - self.count
        self.total = int(self.count.sum())
        self.starts: dict[Labels, NDArray[np.int64]] = {}
        self.coarser: dict[Labels, Key] = {}
        self.filled: dict[Labels, int] = {}

    def first_of_graphs(self, graphs: int) -> NDArray[np.int64]:
        """The first row of every network."""
        rows = np.bincount(self.graph, self.count, graphs).astype(np.int64)
        return rows.cumsum() - rows

    def blocks(self, dtype: DTypeLike) -> Blocks[NDArray[np.int64]]:
        """The finished table, with numbers of one dtype."""
        return Blocks(
            indices=self.indices,
            total=self.total,
            graph=self.graph.astype(dtype),
            start=self.start.astype(dtype),
            size={i: self.sizes[:, k].astype(dtype) for k, i in enumerate(self.indices)},
            starts={kept: start.astype(dtype) for kept, start in self.starts.items()},
            coarser=self.coarser,
            filled=self.filled,
        )


def ends_of(spec: NetworkSpec, key: WeightKey) -> tuple[Labels, Labels]:
    """The indices of a weight type's target and of its source."""
    source, _, target = key
    primed = PRIME if source == target else ""
    return spec.indices(target), tuple(index + primed for index in spec.indices(source))


def family_of(spec: NetworkSpec, site: Site) -> Key:
    """The family of a site's rows: a stored type that has them, or else the site's own."""
    if isinstance(site.key, str):
        return site.key
    if site.key[0] != "*" and spec.indices(site.key) == site.indices:
        return site.key
    return ("*", *site.indices)  # type: ignore[return-value]


def kept_labels(fold: FoldedSpec, site: Site, cover: int) -> Labels:
    """The indices of a site that a cover keeps, in the cover's order."""
    coarser = fold.sites[site.covers[cover].site].indices
    if any(index.endswith(PRIME) for index in site.indices):
        return (site.indices[cover],)  # The target or the source of one type.
    return coarser


def block_tables(
    spec: NetworkSpec, shapes: Sequence[Shape], folds: Iterable[FoldedSpec]
) -> dict[Key, Blocks[NDArray[np.int64]]]:
    """The tables of all families that a batch needs."""
    kinds = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    kind = np.array([kinds[shape] for shape in shapes], dtype=np.int64)
    sizes = [_Sizes(spec, shape) for shape in kinds]
    tables: dict[Key, _Table] = {
        NETWORK: _Table((), np.arange(len(shapes), dtype=np.int64)[:, None])
    }
    for neuron in spec.neurons:
        blocks = [size.layers(neuron.name) for size in sizes]
        tables[neuron.name] = _table(spec.indices(neuron.name), blocks, kind)
    for i, weight in enumerate(spec.weights):
        blocks = [size.tensors(i) for size in sizes]
        tables[weight.key] = _table(spec.indices(weight.key), blocks, kind)
    folds = list(folds)
    for fold in folds:
        for site in fold.sites:
            family = family_of(spec, site)
            if family not in tables:
                blocks = [size.pairs(site) for size in sizes]
                tables[family] = _table(site.indices, blocks, kind)
    first = {key: table.first_of_graphs(len(shapes)) for key, table in tables.items()}
    # Of several families over the same indices the first one, whose order the others follow.
    by_order: dict[Labels, Key] = {}
    by_set: dict[frozenset[str], Key] = {}
    for key, table in tables.items():
        by_order.setdefault(table.indices, key)
        by_set.setdefault(frozenset(table.indices), key)

    def add_start(family: Key, kept: Labels) -> None:
        table = tables[family]
        if kept in table.starts:
            return
        plain = tuple(index.rstrip(PRIME) for index in kept)
        coarser = by_order[plain] if plain in by_order else by_set[frozenset(plain)]
        start = first[coarser][table.graph] if kept else table.graph
        ends = (
            ends_of(spec, family) if not isinstance(family, str) and family in spec.weight else ()
        )
        if kept and kept in ends:
            start = start + table.layers[:, ends.index(kept)]
        elif coarser == family:
            start = table.start
        table.starts[kept], table.coarser[kept] = start, coarser
        places = [table.indices.index(index) for index in kept]
        table.filled[kept] = int(table.sizes[:, places].prod(1).sum())

    for neuron in spec.neurons:
        for kept in [(), *(spec.indices(parent) for parent in neuron.parents)]:
            add_start(neuron.name, kept)
    for weight in spec.weights:
        for kept in ends_of(spec, weight.key):
            add_start(weight.key, kept)
    for fold in folds:
        for site in fold.sites:
            for cover in range(len(site.covers)):
                add_start(family_of(spec, site), kept_labels(fold, site, cover))
            for part in site.parts:
                if part.below is not None:
                    add_start(family_of(spec, fold.site[part.entry]), part.kept)
            for piece in site.pieces if isinstance(site.key, str) else ():
                add_start(piece.store, site.indices)
    # The rows of all covers of a site are numbered together.
    width = max(2, *(len(site.covers) for fold in folds for site in fold.sites))
    most = max(table.total for table in tables.values()) + 1
    dtype = np.int32 if width * most < 2**31 else np.int64
    return {key: table.blocks(dtype) for key, table in tables.items()}


class _Sizes:
    """The sizes of one kind of network, by type and index."""

    def __init__(self, spec: NetworkSpec, shape: Shape) -> None:
        self.spec = spec
        self.blocks = shape.blocks
        self.of_type = dict(zip(spec.neuron, shape.sizes, strict=True))

    def index(self, index: str, layer: int) -> int:
        """The size of an index: all neurons of a layer, or those inside one parent."""
        name = index.rstrip(PRIME)
        count = self.of_type[name][layer]
        for parent in self.spec.neuron[name].parents:
            count //= self.of_type[parent][layer]
        return count

    def layers(self, name: str) -> list[_Row]:
        """The blocks of a neuron type: sizes, and the neurons of the layers before."""
        sizes = self.of_type[name]
        indices = self.spec.indices(name)
        if len(indices) == 1:
            return list(zip(sizes, accumulate(sizes, initial=0), strict=False))
        return [
            (*(self.index(i, layer) for i in indices), sum(sizes[:layer]))
            for layer in range(len(sizes))
        ]

    def tensors(self, number: int) -> list[_Row]:
        """The blocks of a weight type: sizes, and the neurons of the layers before both ends."""
        weight = self.spec.weights[number]
        targets, sources = self.of_type[weight.target], self.of_type[weight.source]
        indices, at_target = self.spec.indices(weight.key), self.spec.indices(weight.target)
        is_flat = len(at_target) == len(self.spec.indices(weight.source)) == 1
        blocks: list[_Row] = []
        for t, s in self.blocks[number]:
            if is_flat:
                sizes = [targets[t], sources[s]]
            else:
                sizes = [self.index(i, t if i in at_target else s) for i in indices]
            blocks.append((*sizes, sum(targets[:t]), sum(sources[:s])))
        return blocks

    def pairs(self, site: Site) -> list[_Row]:
        """The block of a site of pairs: present where all of its types are."""
        if not all(self.of_type[index] for index in site.indices):
            return []
        return [tuple(self.index(i, 0) for i in site.indices)]


def _table(indices: Labels, blocks: list[list[_Row]], kind: NDArray[np.int64]) -> _Table:
    """The blocks of all networks, from those of each kind of network."""
    width = next((len(row) for rows in blocks for row in rows), len(indices) + 2)
    values = np.array([row for rows in blocks for row in rows], dtype=np.int64).reshape(-1, width)
    counts = np.array([len(rows) for rows in blocks], dtype=np.int64)
    first = counts.cumsum() - counts
    graph = np.repeat(np.arange(len(kind)), counts[kind])
    place = np.arange(len(graph)) - np.repeat(counts[kind].cumsum() - counts[kind], counts[kind])
    return _Table(indices, np.column_stack([graph, values[first[kind[graph]] + place]]))
