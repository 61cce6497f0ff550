"""What the tasks with one label per network share: augmentation."""

from __future__ import annotations

from typing import TypeVar

from nfn_graph import Batch
from nfn_graph.tasks.augment import PermuteNeurons, WeightDrop, WeightNoise
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.training.task import Task

Options = TypeVar("Options", bound=TrainOptions)


class SupervisedTask(Task[Options]):
    """A task with one label per network.

    Args:
        options: Its options, resolved.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.augmentations = [
            *([PermuteNeurons()] if options.model == "mlp-aug" else []),
            *([WeightNoise(options.noise)] if options.noise else []),
            *([WeightDrop(options.drop)] if options.drop else []),
        ]

    def augment(self, batch: Batch) -> Batch:
        """Permutations for the model that must learn them, noise and drop where asked for."""
        for transform in self.augmentations:
            batch = transform(batch)
        return batch
