"""Which rows of a batch belong together, as index tensors and as blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class LargeBlock(NamedTuple):
    """A block of so many rows that it is summed and written as a view, not listed in indices.

    Attributes:
        start: Its first row.
        sizes: The sizes of its indices, slowest first, which number its rows.
        coarse_start: Its first row at a coarser site.
        kept: The numbers of the indices that the coarser site has, in the order of that site.

    Example:
        >>> weights = LargeBlock(0, sizes=(2, 3), coarse_start=0, kept=(0,))  # by target neuron
        >>> weights.sums(torch.arange(6.0).unsqueeze(1)).flatten()
        tensor([ 3., 12.])
    """

    start: int
    sizes: tuple[int, ...]
    coarse_start: int
    kept: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.sizes)

    @property
    def num_coarse_rows(self) -> int:
        """The number of rows at the coarser site."""
        return math.prod(self.sizes[axis] for axis in self.kept)

    def stretch(self, first: int, count: int) -> LargeBlock:
        """The part of the block with `count` values of the slowest index, from `first` on.

        If the coarser site keeps that index, it must be the slowest one there as well.
        """
        count = min(count, self.sizes[0] - first)
        start = self.start + first * math.prod(self.sizes[1:])
        coarse_start = self.coarse_start
        if 0 in self.kept:
            coarse_start += first * math.prod(self.sizes[axis] for axis in self.kept[1:])
        return LargeBlock(start, (count, *self.sizes[1:]), coarse_start, self.kept)

    def view(self, x: Tensor) -> Tensor:
        """The rows of the block in a tensor `[rows, width]`, as `[*sizes, width]`."""
        return x.narrow(0, self.start, self.num_rows).view(*self.sizes, x.shape[1])

    def sums(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Sums the rows of the block to those of the coarser site: `[coarser rows, width]`."""
        dropped = [axis for axis in range(len(self.sizes)) if axis not in self.kept]
        sums = self.view(x).sum(dropped, dtype=dtype)
        rank = [sorted(self.kept).index(axis) for axis in self.kept]
        return sums.permute(*rank, len(rank)).reshape(self.num_coarse_rows, x.shape[1])

    def coarse(self, table: Tensor) -> Tensor:
        """Its rows in a table of the coarser site, in a shape that broadcasts with :meth:`view`."""
        axes = [self.kept.index(axis) for axis in sorted(self.kept)]
        rows = table.narrow(0, self.coarse_start, self.num_coarse_rows)
        rows = rows.view(*(self.sizes[axis] for axis in self.kept), table.shape[1])
        shape = [size if axis in self.kept else 1 for axis, size in enumerate(self.sizes)]
        return rows.permute(*axes, len(axes)).view(*shape, table.shape[1])

    def expand(self, table: Tensor) -> Tensor:
        """Gives each row of the block its row of the coarser site: `[rows, width]`."""
        width = table.shape[1]
        return self.coarse(table).expand(*self.sizes, width).reshape(self.num_rows, width)


@dataclass(frozen=True, eq=False)
class Grouping:
    """A division of rows into groups.

    Most rows are *listed* in index tensors: those of group `i` are
    `order[pointers[i]:pointers[i + 1]]`. The rows of large blocks are not listed.

    Attributes:
        num_rows: The number of rows.
        num_groups: The number of groups.
        groups: `[listed rows]`, the group of each listed row.
        order: `[listed rows]`, the listed rows, group by group.
        pointers: `[groups + 1]`, where each group begins in `order`.
        group_sizes: `[groups]`, the number of rows of each group, including those of the blocks.
        contiguous: Whether the rows of every group are contiguous.
        bags: The rows and pointers of the one or more steps that sum the listed rows, each of which
            sums the result of the step before: `order` and `pointers`, or more where a device sums
            many short bags faster than few long ones.
        blocks: The large blocks.
        gaps: The listed rows between blocks, if there are blocks: the first row of each gap and
            the number of rows.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> graph = random_graph(NetworkSpec.chain(2, input_size=2, output_size=1), {"hidden1": 2})
        >>> grouping = graph.features().rows(("input", "weight", "hidden1")).targets
        >>> grouping.groups.tolist(), grouping.pointers.tolist()  # two edges to each neuron
        ([0, 0, 1, 1], [0, 2, 4])
    """

    num_rows: int
    num_groups: int
    groups: Tensor
    order: Tensor
    pointers: Tensor
    group_sizes: Tensor
    contiguous: bool
    bags: Sequence[Tensor]
    blocks: tuple[LargeBlock, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def index(self) -> Tensor:
        """`[rows]`, the group of each row. If there are blocks, it is computed at every access."""
        if not self.blocks:
            return self.groups
        like = self.groups
        numbers = torch.arange(self.num_groups, dtype=like.dtype, device=like.device).unsqueeze(1)
        blocks = [block.expand(numbers).flatten() for block in self.blocks]
        return self.joined(like, blocks)

    def listed(self, x: Tensor) -> Tensor:
        """The listed rows of a tensor."""
        if not self.blocks:
            return x
        parts = [x.narrow(0, start, count) for start, count in self.gaps]
        return torch.cat(parts) if parts else x.narrow(0, 0, 0)

    def joined(self, listed: Tensor, blocks: Iterable[Tensor]) -> Tensor:
        """Puts all rows in order, from the listed ones and those of every block."""
        parts = dict(zip((block.start for block in self.blocks), blocks, strict=True))
        place = 0
        for start, count in self.gaps:
            parts[start] = listed.narrow(0, place, count)
            place += count
        return torch.cat([parts[start] for start in sorted(parts)])


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a site or of a stored type, and the coarser rows that each belongs to.

    Rows are ordered by network, and in a network by the indices of the site, the last index
    fastest: the memory order of a `[out, in, ...]` tensor for the weights of a layer.

    Attributes:
        num_rows: The number of rows.
        groupings: For every cover of the site (each coarser site that it sums into), the rows
            grouped by the rows of that cover: the weights of a layer by target and by source
            neuron, its neurons by network.
        counts: For every part of the site's summary, the number of entries that are averaged
            in each row; None for the site's own entries.
        cover_rows: `[listed rows * covers]`, the row of each listed row in every cover, numbered
            in a table of the rows of all covers, one cover after another.
        cover_pointers: `[listed rows + 1]`, where each row begins in `cover_rows`.
        bags: The sums of the listed rows by each cover, one cover after another; see
            :class:`Grouping`.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> graph = random_graph(NetworkSpec.chain(2, input_size=2, output_size=1), {"hidden1": 2})
        >>> edges = graph.features().rows(("input", "weight", "hidden1"))
        >>> edges.target.tolist(), edges.source.tolist()
        ([0, 0, 1, 1], [0, 1, 0, 1])
    """

    num_rows: int
    groupings: tuple[Grouping, ...]
    counts: Sequence[Tensor | None]
    cover_rows: Tensor
    cover_pointers: Tensor
    bags: Sequence[Tensor]

    @property
    def targets(self) -> Grouping:
        """The weights of a layer by target neuron."""
        return self.groupings[0]

    @property
    def sources(self) -> Grouping:
        """The weights of a layer by source neuron."""
        return self.groupings[-1]

    @property
    def target(self) -> Tensor:
        """`[rows]`, the row of each weight's target neuron."""
        return self.groupings[0].index.long()

    @property
    def source(self) -> Tensor:
        """`[rows]`, the row of each weight's source neuron."""
        return self.groupings[-1].index.long()

    @property
    def transposed(self) -> Tensor:
        """`[rows]`, the weights of a layer with itself, ordered by source and then by target."""
        return self.groupings[-1].order

    @cached_property
    def cover_sizes(self) -> list[int]:
        """The number of rows of every cover."""
        return [grouping.num_groups for grouping in self.groupings]

    @cached_property
    def blocks(self) -> list[tuple[LargeBlock, ...]]:
        """The large blocks at every cover, numbered in the table of all covers."""
        if not self.groupings or not self.groupings[0].blocks:
            return []
        found, offset = [], 0
        for grouping in self.groupings:
            found.append(
                [b._replace(coarse_start=b.coarse_start + offset) for b in grouping.blocks]
            )
            offset += grouping.num_groups
        return list(zip(*found, strict=True))

    def cover_rows_of(self, rows: Tensor) -> Tensor:
        """`[len(rows), covers]`, like :attr:`cover_rows` but of any rows, listed or not."""
        num_covers = len(self.groupings)
        if not self.blocks:
            return self.cover_rows.view(self.num_rows, num_covers).index_select(0, rows)
        out = self.cover_rows.new_zeros(len(rows), num_covers, dtype=torch.long)
        listed, last = 0, max(self.cover_rows.shape[0] // num_covers - 1, 0)
        for start, count in self.groupings[0].gaps:
            inside = (rows >= start) & (rows < start + count)
            place = (rows - start + listed).clamp(0, last)
            found = self.cover_rows.view(-1, num_covers).index_select(0, place)
            out = torch.where(inside.unsqueeze(1), found, out)
            listed += count
        for blocks in self.blocks:
            inside = (rows >= blocks[0].start) & (rows < blocks[0].start + blocks[0].num_rows)
            found = torch.stack([_coarse_rows(block, rows) for block in blocks], 1)
            out = torch.where(inside.unsqueeze(1), found, out)
        return out


def _coarse_rows(block: LargeBlock, rows: Tensor) -> Tensor:
    """The coarser row of each row of a block; the numbers of rows outside of it are meaningless."""
    digits, number = [], rows - block.start
    for size in reversed(block.sizes):
        digits.append(number % size)
        number = number // size
    digits.reverse()
    out = torch.zeros_like(rows)
    for axis in block.kept:
        out = out * block.sizes[axis] + digits[axis]
    return out + block.coarse_start


def is_lasting(x: Tensor) -> bool:
    """Whether a tensor may be kept for later calls.

    Tensors of a fake mode belong to that mode, and those made inside a transform of `torch.func`
    end with it; the latter can be recognised because they have no storage. Tensors that are made
    during the capture of a CUDA graph lie in the memory of that graph.

    Example:
        >>> is_lasting(torch.ones(2))
        True
    """
    if type(x) is not Tensor or is_capturing(x.device):
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def group_of_rows(group_sizes: Tensor, num_rows: int) -> Tensor:
    """The group of each row, for rows that are ordered by group: `[rows]`.

    Args:
        group_sizes: `[groups]`, the number of rows of each group.
        num_rows: The sum of the sizes, because reading it from a device would wait for the device.

    Example:
        >>> group_of_rows(torch.tensor([2, 0, 1]), 3)
        tensor([0, 0, 2])
    """
    # Not `torch.repeat_interleave`, which wakes all threads even for little work.
    ends = group_sizes.cumsum(0)
    steps = ends.new_zeros(num_rows + 1).index_add(0, ends, torch.ones_like(ends))
    return steps.cumsum(0).narrow(0, 0, num_rows)
