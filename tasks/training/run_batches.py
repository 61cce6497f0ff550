"""The batches of a run for one of several processes, in an order that depends on a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import Sampler

from nfn_graph import EdgeBatchSampler
from nfn_graph.data import network_sizes
from nfn_graph.tasks.training.data import PreparedGraphs, PreparedLoader
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.zoo.seeds import generator_of, seed_of

# Networks per batch where no gradients are computed.
_EVAL_BATCH = 64


class RunBatches(pl.LightningDataModule):
    """The batches of training and validation.

    All processes together see every network once in an epoch, and none twice. Without
    `max_edges`, the networks of a step do not depend on the number of processes.

    Args:
        options: The options of the run.
        graphs: The networks by split.
    """

    def __init__(self, options: TrainOptions, graphs: Mapping[str, PreparedGraphs]) -> None:
        super().__init__()
        self.options = options
        self.graphs = graphs
        # Raise before a run begins if the processes cannot share the networks.
        self._train_batches(0, options.devices * options.nodes)
        _in_order(graphs["validation"], options, 0, options.devices * options.nodes)

    def train_dataloader(self) -> PreparedLoader:
        """This process's part of every step."""
        return self._loader("train", self._train_batches(*self._place()))

    def val_dataloader(self) -> PreparedLoader:
        """This process's part; all processes have the same number of batches."""
        batches = _in_order(self.graphs["validation"], self.options, *self._place())
        return self._loader("validation", batches)

    def is_idle(self, step: int) -> bool:
        """Whether there is no network for this process in a step of training."""
        if self.options.max_edges:
            return False
        return self._place()[0] >= len(self.graphs["train"]) - step * self._batch_size

    @property
    def _batch_size(self) -> int:
        return self.options.batch_size or 1

    def _place(self) -> tuple[int, int]:
        """The rank of this process, and the number of all."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def _train_batches(self, rank: int, world_size: int) -> Sampler[list[int]]:
        graphs, options = self.graphs["train"], self.options
        if not options.max_edges:
            order = EpochSampler(graphs, options.seed)
            return StepSampler(order, self._batch_size, rank, world_size)
        seed = seed_of(options.seed, "batches")
        return EdgeBatchSampler(
            graphs, options.max_edges, seed=seed, rank=rank, world_size=world_size
        )

    def _loader(self, split: str, batches: Sampler[list[int]]) -> PreparedLoader:
        return PreparedLoader(self.graphs[split], batches, self.options.workers)


def eval_loader(graphs: PreparedGraphs, options: TrainOptions) -> PreparedLoader:
    """Batches of networks in their order, where no gradients are computed."""
    return PreparedLoader(graphs, _in_order(graphs, options), options.workers)


def _in_order(
    graphs: PreparedGraphs, options: TrainOptions, rank: int = 0, world_size: int = 1
) -> EdgeBatchSampler:
    places: dict[str, Any] = {"rank": rank, "world_size": world_size, "shuffle": False}
    if not options.max_edges:
        return EdgeBatchSampler([1] * len(graphs), _EVAL_BATCH, **places)
    # Without gradients, twice as many edges need no more memory. Networks that training has not
    # seen may be larger; two always fit, so that processes can share any number of networks.
    sizes = network_sizes(graphs)
    return EdgeBatchSampler(sizes, 2 * max(options.max_edges, *sizes), **places)


class StepSampler(Sampler[list[int]]):
    """One process's part of the networks of every step.

    If the last step of an epoch has fewer networks than there are processes, those without one
    compute its first network once more, so that all take part in the step; it must not count.

    Args:
        sampler: The order of the networks.
        batch_size: Networks per step, over all processes.
        rank: The rank of this process.
        world_size: The number of processes.
    """

    def __init__(self, sampler: EpochSampler, batch_size: int, rank: int, world_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for start in range(0, len(order), self.batch_size):
            step = order[start : start + self.batch_size]
            yield step[self.rank :: self.world_size] or step[:1]

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)


class EpochSampler(Sampler[int]):
    """A random order that depends only on the seed and the epoch.

    Args:
        data: The data to order.
        seed: The seed of the run.
    """

    def __init__(self, data: Sized, seed: int) -> None:
        self.count = len(data)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = generator_of(self.seed, self.epoch, "order")
        return iter(torch.randperm(self.count, generator=generator).tolist())

    def __len__(self) -> int:
        return self.count
