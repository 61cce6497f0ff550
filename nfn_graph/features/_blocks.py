"""The sizes of a batch as tables of blocks. A block is one layer or one tensor of one network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nfn_graph.spec import (
    NETWORK,
    PRIME,
    FoldedSpec,
    Key,
    NetworkSpec,
    Shape,
    Site,
    WeightKey,
    WeightType,
)

Labels = tuple[str, ...]
_Row = tuple[int, ...]


Array = TypeVar("Array", Tensor, NDArray[np.int64])


def take(x: Array, index: Array) -> Array:
    """Selects the rows of an array or tensor with the given numbers."""
    return x.index_select(0, index) if isinstance(x, Tensor) else x[index]


@dataclass(frozen=True, eq=False)
class Blocks(Generic[Array]):
    """The blocks of one family of rows: of a neuron type, a weight type or a site.

    They are built as arrays on the host and become tensors on a device.

    Attributes:
        indices: The indices that number the rows of a block, slowest first.
        total: The number of rows of all blocks.
        count: The number of rows of every block.
        graph: The network of every block.
        start: The first row of every block.
        size: For every index, its size in every block.
        starts: For every site that keeps some of the indices, the first row of every block there.
        coarser: The families of those sites.
        filled: The number of rows of those sites that belong to one of the blocks.
    """

    indices: Labels
    total: int
    count: Array
    graph: Array
    start: Array
    size: dict[str, Array]
    starts: dict[Labels, Array] = field(default_factory=dict)
    coarser: dict[Labels, Key] = field(default_factory=dict)
    filled: dict[Labels, int] = field(default_factory=dict)

    def digits(self, block: Array, number: Array, sequence: Labels) -> dict[str, Array]:
        """Splits row numbers into digits, one for each of the given indices, slowest first."""
        digits: dict[str, Array] = {}
        for index in reversed(sequence[1:]):
            size = take(self.size[index], block)
            quotient = number // size
            digits[index] = number - quotient * size
            number = quotient
        return digits | {sequence[0]: number}

    def number(self, block: Array, digits: Mapping[str, Array], sequence: Labels) -> Array:
        """Puts row numbers together from their digits: the inverse of :meth:`digits`."""
        number = digits[sequence[0]]
        for index in sequence[1:]:
            number = number * take(self.size[index], block) + digits[index]
        return number


def ends_of(spec: NetworkSpec, key: WeightKey) -> tuple[Labels, Labels]:
    """The indices of a weight type's target and of its source."""
    source, _, target = key
    primed = PRIME if source == target else ""
    return spec.indices(target), tuple(index + primed for index in spec.indices(source))


def family_of(spec: NetworkSpec, site: Site) -> Key:
    """The family of a site's rows: that of a stored type with the same rows, or else its own."""
    if isinstance(site.key, str):
        return site.key
    if site.key[0] != "*" and spec.indices(site.key) == site.indices:
        return site.key
    return ("*", *site.indices)  # type: ignore[return-value]


def kept_labels(fold: FoldedSpec, site: Site, position: int) -> Labels:
    """The indices of a site that one of its covers keeps, in the order of that cover."""
    coarser = fold.sites[site.covers[position]].indices
    if any(index.endswith(PRIME) for index in site.indices):
        return (site.indices[position],)  # The target or the source of one type.
    return coarser


def block_tables(
    spec: NetworkSpec, shapes: Sequence[Shape], folds: Sequence[FoldedSpec]
) -> dict[Key, Blocks[NDArray[np.int64]]]:
    """The tables of all families that a batch needs."""
    kinds = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    kind = np.array([kinds[shape] for shape in shapes], dtype=np.int64)
    sizes = [_sizes(spec, shape) for shape in kinds]
    # For each block of a family, the number of neurons of its type in earlier layers. Weights have
    # two such numbers, one for the target and one for the source.
    before: dict[Key, NDArray[np.int64]] = {}
    tables: dict[Key, Blocks[NDArray[np.int64]]] = {}

    def add(key: Key, indices: Labels, blocks: list[list[_Row]]) -> None:
        tables[key], before[key] = _table(indices, blocks, kind)

    add(NETWORK, (), [[()]] * len(kinds))
    for neuron in spec.neurons:
        blocks = [size.layers[neuron.name] for size in sizes]
        add(neuron.name, spec.indices(neuron.name), blocks)
    for weight in spec.weights:
        add(weight.key, spec.indices(weight.key), [size.tensors[weight.key] for size in sizes])
    for fold in folds:
        for site in fold.sites:
            family = family_of(spec, site)
            if family not in tables:
                add(family, site.indices, [size.pairs(site) for size in sizes])
    first = {key: _first_rows(table, len(shapes)) for key, table in tables.items()}
    # If several families have the same indices, the others follow the order of the first one.
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
            start = start + before[family][:, ends.index(kept)]
        elif coarser == family:
            start = table.start
        table.starts[kept], table.coarser[kept] = start, coarser
        table.filled[kept] = int(size_product([table.size[i] for i in kept], table.graph).sum())

    for neuron in spec.neurons:
        for kept in [(), *(spec.indices(parent) for parent in neuron.parents)]:
            add_start(neuron.name, kept)
    for weight in spec.weights:
        for kept in ends_of(spec, weight.key):
            add_start(weight.key, kept)
    for fold in folds:
        for site in fold.sites:
            for position in range(len(site.covers)):
                add_start(family_of(spec, site), kept_labels(fold, site, position))
            for part in site.parts:
                if part.below is not None:
                    add_start(family_of(spec, fold.site[part.entry]), part.kept)
            for piece in site.pieces if isinstance(site.key, str) else ():
                add_start(piece.store, site.indices)
    # The rows of all covers of a site are numbered consecutively.
    width = max(2, *(len(site.covers) for fold in folds for site in fold.sites))
    most = max(table.total for table in tables.values()) + 1
    if width * most >= 2**31:
        return tables
    return {key: _narrowed(table) for key, table in tables.items()}


def size_product(sizes: Sequence[Array], like: Array) -> Array:
    """The products of some sizes in every block; ones if there are none."""
    if not sizes:
        return like * 0 + 1
    return math.prod(sizes[1:], start=sizes[0])


def _first_rows(table: Blocks[NDArray[np.int64]], graphs: int) -> NDArray[np.int64]:
    """The first row of every network."""
    rows = np.bincount(table.graph, table.count, graphs).astype(np.int64)
    return rows.cumsum() - rows


def _narrowed(table: Blocks[NDArray[np.int64]]) -> Blocks[NDArray[np.int64]]:
    """Converts a table to 32-bit integers."""
    return replace(
        table,
        count=table.count.astype(np.int32),
        graph=table.graph.astype(np.int32),
        start=table.start.astype(np.int32),
        size={key: x.astype(np.int32) for key, x in table.size.items()},
        starts={key: x.astype(np.int32) for key, x in table.starts.items()},
    )


class _Sizes:
    """The sizes of one kind of network, by type and index, and the blocks of all types."""

    def __init__(self, spec: NetworkSpec, shape: Shape) -> None:
        self.spec = spec
        self.of_type = dict(zip(spec.neuron, shape.sizes, strict=True))
        self.layers = {name: self._layers(name) for name in spec.neuron}
        pairs = zip(spec.weights, shape.blocks, strict=True)
        self.tensors = {weight.key: self._tensors(weight, blocks) for weight, blocks in pairs}

    def index(self, index: str, layer: int) -> int:
        """The size of an index: all neurons of a layer, or those inside one parent."""
        name = index.rstrip(PRIME)
        count = self.of_type[name][layer]
        for parent in self.spec.neuron[name].parents:
            count //= self.of_type[parent][layer]
        return count

    def _layers(self, name: str) -> list[_Row]:
        """The blocks of a neuron type: sizes, and the number of neurons in earlier layers."""
        sizes = self.of_type[name]
        indices = self.spec.indices(name)
        if len(indices) == 1:
            return list(zip(sizes, accumulate(sizes, initial=0), strict=False))
        return [
            (*(self.index(i, layer) for i in indices), sum(sizes[:layer]))
            for layer in range(len(sizes))
        ]

    def _tensors(self, weight: WeightType, joined: Sequence[tuple[int, int]]) -> list[_Row]:
        """The blocks of a weight type: sizes, and the numbers of neurons before both ends."""
        targets, sources = self.of_type[weight.target], self.of_type[weight.source]
        indices, at_target = self.spec.indices(weight.key), self.spec.indices(weight.target)
        is_flat = len(at_target) == len(self.spec.indices(weight.source)) == 1
        blocks: list[_Row] = []
        for t, s in joined:
            if is_flat:
                sizes = [targets[t], sources[s]]
            else:
                sizes = [self.index(i, t if i in at_target else s) for i in indices]
            blocks.append((*sizes, sum(targets[:t]), sum(sources[:s])))
        return blocks

    def pairs(self, site: Site) -> list[_Row]:
        """The block of a site of pairs, which exists if the network has all of its types."""
        if not all(self.of_type[index] for index in site.indices):
            return []
        return [tuple(self.index(i, 0) for i in site.indices)]


# A mixture of networks is often new, but its networks rarely are.
_sizes = lru_cache(maxsize=4096)(_Sizes)


def _table(
    indices: Labels, blocks: list[list[_Row]], kind: NDArray[np.int64]
) -> tuple[Blocks[NDArray[np.int64]], NDArray[np.int64]]:
    """Repeats the blocks of each kind for all networks; also returns what follows the sizes."""
    values = np.array([row for rows in blocks for row in rows], dtype=np.int64)
    if all(len(rows) == 1 for rows in blocks):
        graph, values = np.arange(len(kind)), values[kind]  # The usual case.
    else:
        counts = np.array([len(rows) for rows in blocks], dtype=np.int64)
        values = values.reshape(counts.sum(), -1 if len(values) else len(indices) + 2)
        first, each = counts.cumsum() - counts, counts[kind]
        graph = np.repeat(np.arange(len(kind)), each)
        place = np.arange(len(graph)) - np.repeat(each.cumsum() - each, each)
        values = values[first[kind[graph]] + place]
    size = {index: values[:, i].copy() for i, index in enumerate(indices)}
    count = size_product(list(size.values()), graph)
    start = count.cumsum() - count
    table = Blocks(indices, int(count.sum()), count, graph, start, size)
    return table, values[:, len(indices) :]
