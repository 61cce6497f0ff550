"""The sizes of a batch as tables of blocks. A block is one layer or one tensor of one network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
# The sizes of the indices of one block, and for neurons and weights the number of neurons in
# earlier layers of the type, of the target and of the source.
_Block = tuple[int, ...]


Array = TypeVar("Array", Tensor, NDArray[np.int64])


def take(x: Array, index: Array) -> Array:
    """Selects the rows of an array or tensor with the given numbers."""
    return x.index_select(0, index) if isinstance(x, Tensor) else x[index]


@dataclass(frozen=True, eq=False)
class BlockTable(Generic[Array]):
    """The blocks of one family of rows: of a neuron type, a weight type or a site.

    They are built as arrays on the host and become tensors on a device.

    Attributes:
        indices: The indices that number the rows of a block, slowest first.
        num_rows: The number of rows of all blocks.
        block_sizes: The number of rows of every block.
        graph: The network of every block.
        start: The first row of every block.
        size: For every index, its size in every block.
        coarse_start: For every site that keeps some of the indices, the first row of every block
            there.
        coarse_family: The families of those sites.
        num_filled_rows: The number of rows of those sites that belong to one of the blocks.
    """

    indices: Labels
    num_rows: int
    block_sizes: Array
    graph: Array
    start: Array
    size: dict[str, Array]
    coarse_start: dict[Labels, Array] = field(default_factory=dict)
    coarse_family: dict[Labels, Key] = field(default_factory=dict)
    num_filled_rows: dict[Labels, int] = field(default_factory=dict)

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


def kept_labels(fold: FoldedSpec, site: Site, cover: int) -> Labels:
    """The indices of a site that one of its covers keeps, in the order of that cover."""
    coarser = fold.sites[site.covers[cover]].indices
    if any(index.endswith(PRIME) for index in site.indices):
        return (site.indices[cover],)  # The target or the source of one type.
    return coarser


# The first rows that a family needs at a coarser site: the kept indices, the coarser family, and
# the end (target or source) that they are, if any.
_Start = tuple[Key, Labels, Key, int | None]


@lru_cache(maxsize=64)
def _families(
    spec: NetworkSpec, folds: tuple[FoldedSpec, ...]
) -> tuple[dict[Key, Labels], list[_Start], int]:
    """The indices of all families of a spec, their starts, and the most covers of a site."""
    sites = [(fold, site) for fold in folds for site in fold.sites]
    indices: dict[Key, Labels] = {NETWORK: ()}
    indices |= {key: spec.indices(key) for key in spec.types}
    for _, site in sites:
        indices.setdefault(family_of(spec, site), site.indices)
    # If several families have the same indices, the others follow the order of the first one.
    by_order: dict[Labels, Key] = {}
    by_set: dict[frozenset[str], Key] = {}
    for key, labels in indices.items():
        by_order.setdefault(labels, key)
        by_set.setdefault(frozenset(labels), key)
    needed: dict[tuple[Key, Labels], None] = {}
    for neuron in spec.neurons:
        for kept in [(), *(spec.indices(parent) for parent in neuron.parents)]:
            needed[neuron.name, kept] = None
    for weight in spec.weights:
        for kept in ends_of(spec, weight.key):
            needed[weight.key, kept] = None
    for fold, site in sites:
        for cover in range(len(site.covers)):
            needed[family_of(spec, site), kept_labels(fold, site, cover)] = None
        for part in site.parts:
            if part.below is not None:
                needed[family_of(spec, fold.site[part.key]), part.kept] = None
        for piece in site.pieces if isinstance(site.key, str) else ():
            needed[piece.store, site.indices] = None
    starts: list[_Start] = []
    for family, kept in needed:
        plain = tuple(index.rstrip(PRIME) for index in kept)
        coarser = by_order[plain] if plain in by_order else by_set[frozenset(plain)]
        ends = ends_of(spec, family) if family in spec.weight else ()
        end = ends.index(kept) if kept and kept in ends else None
        starts.append((family, kept, coarser, end))
    return indices, starts, max(2, *(len(site.covers) for _, site in sites))


def block_tables(
    spec: NetworkSpec, shapes: Sequence[Shape], folds: tuple[FoldedSpec, ...]
) -> dict[Key, BlockTable[NDArray[np.int64]]]:
    """The tables of all families that a batch needs."""
    families, starts, most_covers = _families(spec, folds)
    kinds = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    kind = np.array([kinds[shape] for shape in shapes], dtype=np.int64)
    sizes = [_sizes(spec, folds, shape) for shape in kinds]
    num_rows = np.bincount(kind, minlength=len(kinds)) @ np.array([s.num_rows for s in sizes])
    # The rows of all covers of a site are numbered consecutively.
    dtype: type = np.int32 if most_covers * (int(num_rows.max()) + 1) < 2**31 else np.int64
    graph: NDArray[np.int64] = np.arange(len(kind), dtype=dtype)
    # In the usual case, every network has one block of every family, and all rows of a family
    # follow each other at every coarser site.
    is_usual = bool(sizes) and all(size.is_single for size in sizes)
    tables: dict[Key, BlockTable[NDArray[np.int64]]] = {}
    before: dict[Key, NDArray[np.int64]] = {}
    columns: NDArray[np.int64] = graph
    if is_usual:
        columns = np.array([size.flat for size in sizes], dtype=dtype)[kind].T.copy()
    place = 0
    for key, indices in families.items():
        if is_usual:
            graphs, values = graph, columns[place:]
            place += len(sizes[0].blocks[key][0])
        else:
            blocks = [size.blocks[key] for size in sizes]
            graphs, values = _for_networks(blocks, len(indices) + 2, kind, dtype)
        size = {index: values[i] for i, index in enumerate(indices)}
        before[key] = values[len(indices) :]
        block_sizes = size_product(list(size.values()), graphs)
        start = block_sizes.cumsum(dtype=dtype) - block_sizes
        tables[key] = BlockTable(indices, int(block_sizes.sum()), block_sizes, graphs, start, size)
    if is_usual:
        for family, kept, coarser, _ in starts:
            table, above = tables[family], tables[coarser]
            table.coarse_start[kept], table.coarse_family[kept] = above.start, coarser
            table.num_filled_rows[kept] = above.num_rows
        return tables
    first = {key: _first_rows(table, len(shapes)) for key, table in tables.items()}
    for family, kept, coarser, end in starts:
        table = tables[family]
        start = first[coarser][table.graph] if kept else table.graph
        if end is not None:
            start = start + before[family][end]
        elif coarser == family:
            start = table.start
        table.coarse_start[kept], table.coarse_family[kept] = start, coarser
        filled = size_product([table.size[i] for i in kept], table.graph)
        table.num_filled_rows[kept] = int(filled.sum())
    return tables


def size_product(sizes: Sequence[Array], like: Array) -> Array:
    """The products of some sizes in every block; ones if there are none."""
    if not sizes:
        return like * 0 + 1
    return math.prod(sizes[1:], start=sizes[0])


def _first_rows(table: BlockTable[NDArray[np.int64]], num_graphs: int) -> NDArray[np.int64]:
    """The first row of every network."""
    dtype = table.block_sizes.dtype
    sizes = np.bincount(table.graph, table.block_sizes, num_graphs).astype(dtype)
    return sizes.cumsum(dtype=dtype) - sizes


class _Sizes:
    """The sizes of one kind of network.

    Attributes:
        blocks: For every family, its blocks.
        num_rows: The number of rows of every family.
        is_single: Whether every family has exactly one block.
        flat: The blocks of all families one after another, if there is one of each.
    """

    def __init__(self, spec: NetworkSpec, folds: tuple[FoldedSpec, ...], shape: Shape) -> None:
        self.spec = spec
        self.of_type = dict(zip(spec.neuron, shape.sizes, strict=True))
        families, _, _ = _families(spec, folds)
        joined = dict(zip(spec.weight, shape.blocks, strict=True))
        self.blocks: dict[Key, list[_Block]] = {}
        for key, indices in families.items():
            if key in joined:
                self.blocks[key] = self._tensors(spec.weight[key], joined[key])
            elif key in self.of_type:
                self.blocks[key] = self._layers(key)
            elif all(self.of_type[index] for index in indices):
                self.blocks[key] = [tuple(self._index(index, 0) for index in indices)]
            else:
                self.blocks[key] = []
        self.num_rows = [
            sum(math.prod(block[: len(indices)]) for block in self.blocks[key])
            for key, indices in families.items()
        ]
        self.is_single = all(len(blocks) == 1 for blocks in self.blocks.values())
        self.flat = [x for blocks in self.blocks.values() for block in blocks for x in block]

    def _index(self, index: str, layer: int) -> int:
        """The size of an index: all neurons of a layer, or those inside one parent."""
        name = index.rstrip(PRIME)
        count = self.of_type[name][layer]
        for parent in self.spec.neuron[name].parents:
            count //= self.of_type[parent][layer]
        return count

    def _layers(self, name: str) -> list[_Block]:
        """The blocks of a neuron type."""
        sizes, indices = self.of_type[name], self.spec.indices(name)
        return [
            (*(self._index(i, layer) for i in indices), before)
            for layer, before in zip(range(len(sizes)), accumulate(sizes, initial=0), strict=False)
        ]

    def _tensors(self, weight: WeightType, joined: Sequence[tuple[int, int]]) -> list[_Block]:
        """The blocks of a weight type."""
        targets, sources = self.of_type[weight.target], self.of_type[weight.source]
        indices, at_target = self.spec.indices(weight.key), self.spec.indices(weight.target)
        return [
            (
                *(self._index(i, t if i in at_target else s) for i in indices),
                sum(targets[:t]),
                sum(sources[:s]),
            )
            for t, s in joined
        ]


# A mixture of networks is often new, but its networks rarely are.
_sizes = lru_cache(maxsize=4096)(_Sizes)


def _for_networks(
    blocks: list[list[_Block]], most: int, kind: NDArray[np.int64], dtype: type
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Repeats the blocks of each kind for all networks: their networks, and `[sizes, blocks]`."""
    counts = np.array([len(own) for own in blocks], dtype=np.int64)
    width = max((len(block) for own in blocks for block in own), default=most)
    values: NDArray[np.int64] = np.array([block for own in blocks for block in own], dtype=dtype)
    first, each = counts.cumsum() - counts, counts[kind]
    graph = np.repeat(np.arange(len(kind)), each)
    place = np.arange(len(graph)) - np.repeat(each.cumsum() - each, each)
    values = values.reshape(counts.sum(), width)[first[kind[graph]] + place]
    return graph.astype(dtype), values.T.copy()
