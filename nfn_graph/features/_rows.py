"""Which rows of a batch belong together, as index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows in groups: those of group `i` are `order[pointers[i]:pointers[i + 1]]`.

    Attributes:
        index: `[rows]`, the group of each row.
        order: `[rows]`, the rows, group by group.
        pointers: `[groups + 1]`, where each group begins in `order`.
        counts: `[groups]`, the number of rows of each.
        contiguous: Whether `order` is 0, 1, 2, ...
    """

    index: Tensor
    order: Tensor
    pointers: Tensor
    counts: Tensor
    contiguous: bool

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.counts.shape[0]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a site, or of a stored type, and the coarser rows that each belongs to.

    Rows are ordered by network, and in a network by the indices of the site, the last index
    fastest: the memory order of a `[out, in, ...]` tensor for the weights of a layer.

    Attributes:
        count: The number of rows.
        covers: The rows by the rows of each coarser site: the weights of a layer by target and
            by source neuron, its neurons by network.
        counts: For every part of the site's summary, the number of entries that are averaged
            in each row; None for the site's own entries.
        ends: `[count * covers]`, for each row its row in every cover, in a table of the rows of
            all covers one after another.
        pairs: `[count + 1]`, where each row begins in `ends`.
        order: `[count * covers]`, the rows by each cover, one after another.
        pointers: Where each row of each cover begins in `order`.
    """

    count: int
    covers: tuple[Segments, ...]
    counts: tuple[Tensor | None, ...]
    ends: Tensor
    pairs: Tensor
    order: Tensor
    pointers: Tensor

    @classmethod
    def of(
        cls,
        covers: Sequence[Segments],
        counts: Sequence[Tensor | None],
        pairs: Tensor,
        count: int | None = None,
    ) -> Rows:
        """Puts the covers together.

        Args:
            covers: The rows by the rows of each coarser site.
            counts: The counts of the site's parts.
            pairs: Multiples of the number of covers.
            count: The number of rows, if there are no covers that tell.
        """
        count = covers[0].index.shape[0] if count is None else count
        none = pairs.narrow(0, 0, 0)
        if not covers:
            return cls(count, (), tuple(counts), none, none, none, none)
        if len(covers) == 1:
            only = covers[0]
            return cls(count, (only,), tuple(counts), only.index, none, only.order, only.pointers)
        # The parts of the joint order serve as the orders of the covers: one memory for both.
        order = torch.cat([cover.order for cover in covers])
        orders = order.split(count) if count else [order] * len(covers)
        tables, pointers, offset = [], [covers[0].pointers], 0
        for i, cover in enumerate(covers):
            tables.append(cover.index + offset)
            offset += cover.count
            if i:
                pointers.append(cover.pointers.narrow(0, 1, cover.count) + i * count)
        return cls(
            count=count,
            covers=tuple(
                replace(cover, order=part) for cover, part in zip(covers, orders, strict=True)
            ),
            counts=tuple(counts),
            ends=torch.stack(tables, 1).flatten(),
            pairs=pairs.narrow(0, 0, count + 1),
            order=order,
            pointers=torch.cat(pointers),
        )

    @property
    def targets(self) -> Segments:
        """The weights of a layer by target neuron."""
        return self.covers[0]

    @property
    def sources(self) -> Segments:
        """The weights of a layer by source neuron."""
        return self.covers[-1]

    @property
    def target(self) -> Tensor:
        """`[count]`, the row of each weight's target neuron."""
        return self.covers[0].index.long()

    @property
    def source(self) -> Tensor:
        """`[count]`, the row of each weight's source neuron."""
        return self.covers[-1].index.long()

    @property
    def transposed(self) -> Tensor:
        """`[count]`, the weights of each tensor by source, then target."""
        return self.covers[-1].order

    @property
    def cover_sizes(self) -> list[int]:
        """The number of rows of every cover."""
        return [cover.count for cover in self.covers]


@dataclass(frozen=True, eq=False)
class NeuronRows(Rows):
    """The neurons of one type in a batch, by network.

    Attributes:
        position: `[count]`, the place of each neuron in its layer, or in its parent.
        layer_size: `[count]`, the number of places there.
    """

    position: Tensor
    layer_size: Tensor

    @property
    def graphs(self) -> Segments:
        """The neurons by network."""
        return self.covers[0]

    @property
    def graph(self) -> Tensor:
        """`[count]`, the network of each neuron."""
        return self.covers[0].index


@dataclass(frozen=True, eq=False)
class SelfRows:
    """How a weight tensor of a layer with itself splits.

    Attributes:
        diagonal: `[neurons]`, the row of each neuron's diagonal entry in the whole tensor.
        off_diagonal: The rows of all other entries in the whole tensor.
        edges: Those other entries as rows of their own; `transposed` is at the same time the
            place of each entry's transposed entry.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    edges: Rows


def is_lasting(x: Tensor) -> bool:
    """Whether a tensor may be kept for later calls.

    Tensors of a fake mode belong to it, and those made inside a transform of `torch.func` die
    with it; the latter are known by having no storage.
    """
    if type(x) is not Tensor:
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def tensor_bytes(value: object) -> int:
    """The memory of all tensors in rows, dicts, lists and tuples of them."""
    return sum(size for _, size in _storages(value))


def _storages(value: object) -> set[tuple[int, int]]:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {(storage.data_ptr(), storage.nbytes())}
    if isinstance(value, Segments | Rows | SelfRows):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(_storages, value))
    return set()


def group_of_rows(counts: Tensor, total: int) -> Tensor:
    """For rows in groups one after another, the group of each row: `[total]`.

    Args:
        counts: `[groups]`, the number of rows of each.
        total: Their sum. Reading it from a device would wait for the device.
    """
    # Not `torch.repeat_interleave`, which wakes all threads however little there is to do.
    ends = counts.cumsum(0)
    steps = counts.new_zeros(total + 1).index_add(0, ends, torch.ones_like(ends))
    return steps.cumsum(0).narrow(0, 0, total)
