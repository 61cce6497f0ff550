"""Batches of networks of the same shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from nfn_graph.converters.store.reader import Numbers
from nfn_graph.messages import UserError


class BucketedSampler(Sampler[list[int]]):
    """A batch sampler: every batch holds networks of one architecture only.

    Every epoch the networks of each architecture are shuffled and cut into batches, and the
    batches are shuffled. The seed and the epoch decide the order, and nothing else.

    Args:
        architectures: A number for the architecture of every network.
        batch_size: Networks per batch; the last batch of an architecture may be smaller.
        shuffle: Whether to shuffle; otherwise architectures and networks come in their order.
        seed: Of the order.
        drop_last: Whether to leave out batches that are not full.
    """

    def __init__(
        self,
        architectures: Numbers,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or seed < 0:
            raise UserError(
                f"Expected a batch size of at least 1 and a seed of at least 0 (got {batch_size} "
                f"and {seed})"
            )
        numbers = np.unique(architectures)
        self.buckets = [torch.from_numpy(np.flatnonzero(architectures == n)) for n in numbers]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    @property
    def sampler(self) -> BucketedSampler:
        """This object: Lightning sets the epoch of the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch; every pass counts up."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        (state,) = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state))
        self.epoch += 1
        batches = []
        for bucket in self.buckets:
            if self.shuffle:
                bucket = bucket[torch.randperm(len(bucket), generator=generator)]
            found = bucket.split(self.batch_size)
            batches += [b for b in found if len(b) == self.batch_size or not self.drop_last]
        order = torch.arange(len(batches))
        if self.shuffle:
            order = torch.randperm(len(batches), generator=generator)
        return (batches[i].tolist() for i in order.tolist())

    def __len__(self) -> int:
        if self.drop_last:
            return sum(len(bucket) // self.batch_size for bucket in self.buckets)
        return sum(-(-len(bucket) // self.batch_size) for bucket in self.buckets)
