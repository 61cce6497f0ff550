"""Batches of networks of different sizes with a limited number of edges."""

from __future__ import annotations

import hashlib
import heapq
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from nfn_graph.data._graph import WeightGraph
from nfn_graph.messages import UserError

Batches = list[list[int]]
# Networks whose sizes differ by less than such a factor may swap places in a batch. The last factor
# keeps the order of sizes, which always fits.
_ALIKE = (2.0, 1.25, 1.0)


class EdgeBatchSampler(Sampler[list[int]]):
    """Batches with about the same number of edges, at most `max_edges`.

    For `DataLoader(data, batch_sampler=...)`. Every epoch visits every network exactly once. With
    several ranks, all of them have the same number of batches, and in every step about the same
    number of edges; no network is repeated to achieve this. Ranks may therefore have different
    numbers of networks in a step. For the average of the gradients to be that of the union, the
    mean loss of a rank must be multiplied by its number of networks and by the number of ranks, and
    divided by the number of networks on all ranks.

    Batches are sampled again in every epoch and depend only on the seed and the epoch. Networks of
    similar sizes swap places; a network without any of similar size may share a batch with the same
    networks again.

    Args:
        data: The networks, as graphs or a dataset with an attribute `sizes`, or their sizes as a
            sequence of integers. The size of a graph is the number of entries of its weights: every
            tap of an edge counts.
        max_edges: The largest number of edges in a batch. A larger network raises an error.
        shuffle: Whether to sample batches at random. If not, networks stay in order, and a batch
            ends before it would exceed `max_edges`.
        seed: The random seed of the sampled batches.
        rank: The number of this process among several.
        world_size: The number of processes.

    Example:
        >>> from nfn_graph import DataLoader, EdgeBatchSampler, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graphs = [random_graph(spec, {"hidden1": n}) for n in (4, 8, 40, 8, 4)]
        >>> sampler = EdgeBatchSampler(graphs, max_edges=160, shuffle=False)
        >>> [batch.num_graphs for batch in DataLoader(graphs, batch_sampler=sampler)]
        [3, 2]
    """

    def __init__(
        self,
        data: Any,
        max_edges: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UserError(f"Expected a rank from 0 to {world_size - 1} (got {rank})")
        self.sizes = network_sizes(data)
        self.max_edges = max_edges
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._check()
        self._fixed = [] if shuffle else self._consecutive()
        self._num_steps = self._smallest_num_steps() if shuffle else len(self._fixed) // world_size

    @property
    def sampler(self) -> EdgeBatchSampler:
        """This object, since Lightning sets the epoch of the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch whose batches are sampled; call it before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return (step[self.rank] for step in self.steps())

    def __len__(self) -> int:
        return self._num_steps

    def steps(self) -> list[Batches]:
        """The batches of all ranks in every step of the epoch, the same on every rank."""
        ranks = self.world_size
        if not self.shuffle:
            return [self._fixed[i : i + ranks] for i in range(0, len(self._fixed), ranks)]
        digest = hashlib.blake2b(repr((self.seed, self.epoch)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        batches = sorted(self._draw(generator), key=self._edges, reverse=True)
        order = torch.randperm(len(self), generator=generator).tolist()
        totals = [0] * ranks
        steps: list[Batches] = []
        for step in order:
            # Batches of similar sizes share a step; the largest goes to the rank with the fewest
            # edges.
            together = batches[step * ranks : (step + 1) * ranks]
            least_first = sorted(range(ranks), key=totals.__getitem__)
            steps.append([batch for _, batch in sorted(zip(least_first, together, strict=True))])
            totals = [total + self._edges(b) for total, b in zip(totals, steps[-1], strict=True)]
        return steps

    def _draw(self, generator: torch.Generator) -> Batches:
        sizes = torch.tensor(self.sizes)
        order = torch.randperm(len(sizes), generator=generator)
        for factor in _ALIKE:
            grade = (sizes.log() / math.log(factor)).floor() if factor > 1 else sizes
            largest_first = grade[order].argsort(descending=True, stable=True)
            batches = self._packed(order[largest_first].tolist(), self._num_steps)
            if all(self._edges(batch) <= self.max_edges for batch in batches):
                break
        return batches

    def _smallest_num_steps(self) -> int:
        """Approximately the smallest number of steps whose batches do not exceed the limit."""
        largest_first = sorted(range(len(self.sizes)), key=self.sizes.__getitem__, reverse=True)
        # No batch is empty, so there are at most as many batches as networks.
        most = len(self.sizes) // self.world_size
        steps = min(most, math.ceil(sum(self.sizes) / self.max_edges / self.world_size))
        while True:
            fullest = max(map(self._edges, self._packed(largest_first, steps)))
            if fullest <= self.max_edges:
                return steps
            if steps == most:
                raise self._no_equal_counts()
            steps = min(most, max(steps + 1, math.ceil(steps * fullest / self.max_edges)))

    def _packed(self, order: Iterable[int], steps: int) -> Batches:
        """Puts one network after another into the batch with the fewest edges so far."""
        batches: Batches = [[] for _ in range(steps * self.world_size)]
        emptiest = [(0, where) for where in range(len(batches))]
        for index in order:
            edges, where = emptiest[0]
            batches[where].append(index)
            heapq.heapreplace(emptiest, (edges + self.sizes[index], where))
        return batches

    def _consecutive(self) -> Batches:
        batches: Batches = []
        room = 0
        for index, size in enumerate(self.sizes):
            if size > room:
                batches.append([])
                room = self.max_edges
            batches[-1].append(index)
            room -= size
        while len(batches) % self.world_size:
            longest = max(batches, key=len)
            where, middle = batches.index(longest), len(longest) // 2
            if middle == 0:
                raise self._no_equal_counts()
            batches[where : where + 1] = [longest[:middle], longest[middle:]]
        return batches

    def _edges(self, batch: Iterable[int]) -> int:
        return sum(self.sizes[index] for index in batch)

    def _check(self) -> None:
        if len(self.sizes) < self.world_size:
            raise UserError(
                f"Expected at least one network for each of {self.world_size} ranks "
                f"(got {len(self.sizes)})"
            )
        for where, size in enumerate(self.sizes):
            if size < 1:
                raise UserError(f"Expected networks with edges (got {size} in network {where})")
            if size > self.max_edges:
                raise UserError(
                    f"Expected networks of at most max_edges = {self.max_edges} edges each (got "
                    f"{size} in network {where}). Raise max_edges, or leave out such networks."
                )

    def _no_equal_counts(self) -> UserError:
        return UserError(
            f"Expected networks that {self.world_size} ranks can share in equal numbers of batches "
            f"with max_edges = {self.max_edges} edges (got {len(self.sizes)} networks, of which "
            f"too many fill a batch alone). Raise max_edges, or leave the last "
            f"{len(self.sizes) % self.world_size} out."
        )


def network_sizes(data: Any) -> list[int]:
    """The number of weight entries of every network, without reading the networks.

    Args:
        data: Graphs, a dataset with an attribute `sizes`, or a sequence of integers.

    Example:
        >>> from nfn_graph.data import network_sizes
        >>> network_sizes([WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(1, 4)])])
        [12]
    """
    return [_size(x) for x in getattr(data, "sizes", data)]


def _size(network: Any) -> int:
    if isinstance(network, WeightGraph):
        return sum(layout.num_entries for layout in network.layouts)
    try:
        return operator.index(network)
    except TypeError:
        raise TypeError(
            f"Expected WeightGraphs, or their numbers of edges as integers "
            f"(got {type(network).__name__})"
        ) from None
