"""Which rows of a batch belong together, as index tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows in groups: those of group `i` are `order[pointers[i]:pointers[i + 1]]`.

    Attributes:
        index: `[rows]`, the group of each row.
        order: `[rows]`, the rows, group by group.
        pointers: `[groups + 1]`, where each group begins in `order`.
        counts: `[groups]`, how many rows each has.
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
class NeuronRows:
    """The neurons of one type in a batch, ordered by network, then layer, then position.

    Attributes:
        graph: `[n]`, the network of each neuron.
        position: `[n]`, its place in its layer.
        layer_size: `[n]`, the size of its layer.
        graphs: The neurons by network.
    """

    graph: Tensor
    position: Tensor
    layer_size: Tensor
    graphs: Segments

    @property
    def per_graph(self) -> Tensor:
        """`[graphs]`, how many neurons of this type each network has."""
        return self.graphs.counts

    @property
    def count(self) -> int:
        """Neurons of this type in the batch."""
        return self.graph.shape[0]


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """The edges of one weight type in a batch, ordered by network, target, source.

    Attributes:
        ends: `[2 * e]`, for each edge the rows of its target and its source neuron in a table
            of all target neurons followed by all source neurons.
        pairs: `[e + 1]`, where each edge begins in `ends`.
        order: `[2 * e]`, the edges by target neuron, then the edges by source neuron.
        pointers: `[targets + sources + 1]`, where each neuron begins in `order`.
        transposed: `[e]`, tensor by tensor, the edges by source, then target.
        targets: The edges by target neuron.
        sources: The edges by source neuron.
        per_graph: `[graphs]`, how many each network has.
    """

    ends: Tensor
    pairs: Tensor
    order: Tensor
    pointers: Tensor
    transposed: Tensor
    targets: Segments
    sources: Segments
    per_graph: Tensor

    @property
    def per_target(self) -> Tensor:
        """`[targets]`, how many of these edges end at each neuron."""
        return self.targets.counts

    @property
    def per_source(self) -> Tensor:
        """`[sources]`, how many of these edges start at each neuron."""
        return self.sources.counts

    @property
    def count(self) -> int:
        """Edges of this type in the batch."""
        return self.transposed.shape[0]

    @property
    def num_ends(self) -> tuple[int, int]:
        """How many target and source neurons there are, those without edges included."""
        return self.targets.count, self.sources.count

    @property
    def target(self) -> Tensor:
        """`[e]`, the row of each edge's target neuron."""
        return self.targets.index.long()

    @property
    def source(self) -> Tensor:
        """`[e]`, the row of each edge's source neuron."""
        return self.sources.index.long()

    @property
    def by_source(self) -> Tensor:
        """`[e]`, the permutation that orders each tensor's edges by source, then target."""
        return self.transposed.long()


@dataclass(frozen=True, eq=False)
class SelfRows:
    """How a weight tensor of a layer with itself splits.

    Attributes:
        neuron: `[n]`, the neurons of the layer.
        diagonal: `[n]`, the row of each neuron's diagonal entry in the whole tensor.
        off_diagonal: The rows of all other entries in the whole tensor.
        edges: Those other entries as edges of their own; `by_source` is at the same time
            the place of each edge's transposed edge.
    """

    neuron: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    edges: EdgeRows


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
    if isinstance(value, Segments | NeuronRows | EdgeRows | SelfRows):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(_storages, value))
    return set()


def group_of_rows(counts: Tensor, total: int) -> Tensor:
    """For rows in groups one after another, the group of each row: `[total]`.

    Args:
        counts: `[groups]`, how many rows each has.
        total: Their sum, which to read from a device would be to wait for it.
    """
    # Not `torch.repeat_interleave`, which wakes all threads however little there is to do.
    ends = counts.cumsum(0)
    steps = counts.new_zeros(total + 1).index_add(0, ends, torch.ones_like(ends))
    return steps.cumsum(0).narrow(0, 0, total)


def as_segments(index: Tensor, order: Tensor | None, counts: Tensor, steps: Tensor) -> Segments:
    """Segments of the given sizes.

    Args:
        index: The group of each row.
        order: The rows group by group; None if they are so already.
        counts: `[groups]`, the size of each.
        steps: The rows: 0, 1, 2, ...
    """
    pointers = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(steps.dtype)
    rows = steps if order is None else order
    return Segments(index, rows, pointers, counts, order is None)
