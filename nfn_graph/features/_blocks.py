"""The sizes of a batch as tables of blocks. A block is one layer or one tensor of one network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nfn_graph.spec import NETWORK, PRIME, FoldedSpec, Key, NetworkSpec, Shape, Site, WeightKey

Ints = NDArray[np.int64]
Labels = tuple[str, ...]
Array = TypeVar("Array", Tensor, Ints)


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
    coarse_start: dict[Labels, Array]
    coarse_family: dict[Labels, Key]
    num_filled_rows: dict[Labels, int]


def digits_of(number: Array, sizes: Mapping[str, Array], sequence: Labels) -> dict[str, Array]:
    """Splits row numbers into digits, one for each of the given indices, slowest first."""
    digits: dict[str, Array] = {}
    for index in reversed(sequence[1:]):
        quotient = number // sizes[index]
        digits[index] = number - quotient * sizes[index]
        number = quotient
    return digits | dict.fromkeys(sequence[:1], number)


def number_of(digits: Mapping[str, Array], sizes: Mapping[str, Array], sequence: Labels) -> Array:
    """Puts row numbers together from their digits: the inverse of :func:`digits_of`."""
    number = digits[sequence[0]]
    for index in sequence[1:]:
        number = number * sizes[index] + digits[index]
    return number


def size_product(sizes: Sequence[Array], like: Array) -> Array:
    """The products of some sizes in every block; ones if there are none."""
    return math.prod(sizes[1:], start=sizes[0]) if sizes else like * 0 + 1


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


def kept_labels(fold: FoldedSpec, site: Site) -> list[Labels]:
    """The indices of a site that each of its covers keeps, in the order of that cover."""
    if any(index.endswith(PRIME) for index in site.indices):
        return [(index,) for index in site.indices]  # The target and the source of one type.
    return [fold.sites[cover].indices for cover in site.covers]


# What a family needs at a coarser site: the kept indices, the coarser family, and which of the
# layers of a block (its target or its source) is the one there, if the type has several.
_Start = tuple[Labels, Key, int | None]


@lru_cache(maxsize=64)
def _families(
    spec: NetworkSpec, folds: tuple[FoldedSpec, ...]
) -> dict[Key, tuple[Labels, list[_Start]]]:
    """All families of a spec: their indices, and the coarser sites that they need."""
    sites = [(fold, site, family_of(spec, site)) for fold in folds for site in fold.sites]
    families: dict[Key, Labels] = {NETWORK: (), **{key: spec.indices(key) for key in spec.types}}
    for _, site, family in sites:
        families.setdefault(family, site.indices)
    # If several families have the same indices, the others follow the order of the first one.
    first: dict[Labels | frozenset[str], Key] = {}
    for family, indices in families.items():
        first.setdefault(indices, family)
        first.setdefault(frozenset(indices), family)
    needed: dict[Key, dict[Labels, None]] = {family: {} for family in families}
    for neuron in spec.neurons:
        parents = map(spec.indices, neuron.parents)
        needed[neuron.name] |= dict.fromkeys([(), *parents])
    for weight in spec.weights:
        needed[weight.key] |= dict.fromkeys(ends_of(spec, weight.key))
    for fold, site, family in sites:
        needed[family] |= dict.fromkeys(kept_labels(fold, site))
        for part in site.parts[:-1]:
            needed[family_of(spec, fold.site[part.key])][part.kept] = None
        for piece in site.pieces if isinstance(site.key, str) else ():
            needed[piece.store][site.indices] = None
    found: dict[Key, tuple[Labels, list[_Start]]] = {}
    for family, indices in families.items():
        starts: list[_Start] = []
        ends = ends_of(spec, family) if family in spec.weight else (indices,)
        for kept in needed[family]:
            plain = tuple(index.rstrip(PRIME) for index in kept)
            coarser = first[plain if plain in first else frozenset(plain)]
            several = isinstance(coarser, str) and coarser != NETWORK and spec.neuron[coarser].role
            starts.append((kept, coarser, ends.index(kept) if several else None))
        found[family] = indices, starts
    return found


@lru_cache(maxsize=4096)  # A mixture of networks is often new, but its networks rarely are.
def _blocks_of(spec: NetworkSpec, folds: tuple[FoldedSpec, ...], shape: Shape) -> tuple[Ints, Ints]:
    """The blocks of one network.

    Returns the numbers of blocks of all families, of their rows, and of the rows that they fill at
    coarser sites; and for every block the neurons in earlier layers of its target and of its
    source, and then its sizes, followed by ones.
    """
    families = _families(spec, folds)
    layers = dict(zip(spec.neuron, shape.sizes, strict=True))
    joined = dict(zip(spec.weight, shape.blocks, strict=True))
    width = max(len(indices) for indices, _ in families.values())

    def size(index: str, layer: int) -> int:
        """All neurons of a layer, or those inside one parent."""
        neuron = spec.neuron[index.rstrip(PRIME)]
        parents = math.prod(layers[parent][layer] for parent in neuron.parents)
        return layers[neuron.name][layer] // parents

    counts, rows, filled, blocks = [], [], [], []
    for key, (indices, starts) in families.items():
        at_target = indices
        if isinstance(key, str) and key in layers:
            targets = sources = layers[key]
            pairs = [(layer, layer) for layer in range(len(targets))]
        elif key in joined:
            at_target, targets, sources = spec.indices(key[2]), layers[key[2]], layers[key[0]]
            pairs = list(joined[key])
        else:
            targets = sources = ()
            pairs = [(0, 0)] if all(layers[index] for index in indices) else []
        sizes = [[size(i, t if i in at_target else s) for i in indices] for t, s in pairs]
        counts.append(len(pairs))
        rows.append(sum(map(math.prod, sizes)))
        for kept, _, _ in starts:
            axes = [indices.index(index) for index in kept]
            filled.append(sum(math.prod(own[axis] for axis in axes) for own in sizes))
        for (t, s), own in zip(pairs, sizes, strict=True):
            ones = [1] * (width - len(own))
            blocks.append([sum(targets[:t]), sum(sources[:s]), *own, *ones])
    return np.array(counts + rows + filled), np.array(blocks)


def block_tables(
    spec: NetworkSpec, shapes: Sequence[Shape], folds: tuple[FoldedSpec, ...]
) -> dict[Key, BlockTable[Ints]]:
    """The tables of all families that a batch needs."""
    families = _families(spec, folds)
    kinds = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    kind = np.array([kinds[shape] for shape in shapes], dtype=np.int64)
    numbers, blocks = zip(*(_blocks_of(spec, folds, shape) for shape in kinds), strict=True)
    of_kinds, joined = np.stack(numbers), np.concatenate(blocks)
    of_networks, many = of_kinds[kind].T, len(families)
    counts, rows = of_networks[:many], of_networks[many : 2 * many]
    num_rows, num_filled = rows.sum(1).tolist(), iter(of_networks[2 * many :].sum(1).tolist())
    # The rows of all covers of a site are numbered consecutively, and it has a cover per index.
    most = (joined.shape[1] - 2) * (max(num_rows) + 1)
    dtype: type = np.int32 if most < 2**31 else np.int64
    first_rows = (rows.cumsum(1) - rows).astype(dtype, order="C")
    first = dict(zip(families, first_rows, strict=True))
    # The blocks of one family after another, and in each those of one network after another.
    of_kind = of_kinds[:, :many]
    begin = (of_kind.cumsum() - of_kind.ravel()).reshape(of_kind.shape)[kind].T.ravel()
    each = counts.ravel()
    ends = each.cumsum()
    place = np.repeat(begin - (ends - each), each) + np.arange(ends[-1])
    values = joined[place].T.astype(dtype, order="C")
    graph: Ints = np.repeat(np.tile(np.arange(len(kind), dtype=dtype), many), each)
    sizes = values[2:].prod(0, dtype=dtype)
    num_blocks, is_single = counts.sum(1).tolist(), (of_kind == 1).all(0).tolist()
    tables, stop = {}, 0
    for i, (family, (indices, starts)) in enumerate(families.items()):
        here = slice(stop, stop + num_blocks[i])
        stop = here.stop
        table = BlockTable(
            indices=indices,
            num_rows=num_rows[i],
            block_sizes=sizes[here],
            graph=first[NETWORK] if is_single[i] else graph[here],
            start=sizes[here].cumsum(dtype=dtype) - sizes[here],
            size=dict(zip(indices, values[2:, here], strict=False)),
            coarse_start={},
            coarse_family={},
            num_filled_rows={},
        )
        for kept, coarser, end in starts:
            coarse_start = first[coarser] if is_single[i] else first[coarser][table.graph]
            if end is not None:
                coarse_start = coarse_start + values[end, here]
            table.coarse_start[kept] = coarse_start
            table.coarse_family[kept] = coarser
            table.num_filled_rows[kept] = next(num_filled)
        tables[family] = table
    return tables
