"""What a task must say so that it can be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor, nn
from torch_geometric.transforms import BaseTransform

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.tasks.augment import PermuteNeurons, WeightDrop, WeightNoise
from nfn_graph.tasks.models import fit_inputs, sizes_of
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.zoo.folder import ZooFolder
from nfn_graph.tasks.zoo.store import Row

Options = TypeVar("Options", bound=TrainOptions)
Metrics = dict[str, Any]
# For every network of a split: what it is, and what the model says.
Predictions = dict[str, Tensor]


@dataclass(frozen=True)
class TaskData:
    """The networks of a zoo by split, ready for a model.

    Attributes:
        zoos: The parts of the zoo, row for row the networks.
        graphs: Their graphs, prepared.
        facts: What else the task knows about them, such as the names of classes.
    """

    zoos: Mapping[str, ZooFolder]
    graphs: Mapping[str, Sequence[WeightGraph]]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC, Generic[Options]):
    """A task: a model, its loss, metrics and figures.

    Args:
        options: Its options; what is not given is taken from the preset.

    Attributes:
        augmentations: What is done to every batch in training, in turn.
    """

    name: ClassVar[str]
    # The kind of zoo that it needs.
    kind: ClassVar[str]
    # The validation metric by which the best epoch is chosen, and which of its values is best.
    monitor: ClassVar[str]
    best: ClassVar[Literal["max", "min"]] = "max"
    # What `predictions.csv` says of every network.
    columns: ClassVar[tuple[str, ...]] = ("target", "prediction")
    OPTIONS: ClassVar[type[TrainOptions]]

    def __init__(self, options: Options) -> None:
        options.check()
        self.options = options.resolved()
        self.augmentations: list[BaseTransform] = [
            *([PermuteNeurons()] if options.model == "mlp-aug" else []),
            *([WeightNoise(options.noise)] if options.noise else []),
            *([WeightDrop(options.drop)] if options.drop else []),
        ]

    @abstractmethod
    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained model for networks of these types and sizes."""

    def parameter_groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        """The parameters of a model with their learning rates, as optimisers take them."""
        return [{"params": list(model.parameters()), "lr": lr}]

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean loss of a batch, of what the model returned for it."""

    def loss_terms(self, batch: Batch) -> int:
        """What the loss of a batch is the mean of: so many terms, its networks."""
        return batch.num_graphs

    @abstractmethod
    def predict(self, outputs: Any, batch: Batch) -> Predictions:
        """What is kept of every network of a batch: all of `columns`, perhaps more."""

    @abstractmethod
    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """The metrics of a split."""

    def draw(self, folder: Path, name: str, predictions: Predictions, zoo: ZooFolder) -> None:
        """Draws figures of the predictions for a split into a folder, if the task has any."""

    def show(
        self, folder: Path, name: str, model: nn.Module, graphs: Sequence[WeightGraph]
    ) -> None:
        """Draws what a trained model does to networks of a split, if the task has such figures."""

    def usable(self, row: Row) -> bool:
        """Whether a network can be learnt from."""
        return True

    def prepare(self, graph: WeightGraph, row: Row, facts: Mapping[str, Any]) -> WeightGraph:
        """What is done to every graph once: its labels, perhaps a canonical form."""
        return graph

    def augment(self, batch: Batch) -> Batch:
        """Permutations for the model that must learn them, noise and drop where asked for."""
        for transform in self.augmentations:
            batch = transform(batch)
        return batch

    def facts(self, zoo: ZooFolder) -> dict[str, Any]:
        """What the preparation of graphs, metrics and figures must know about a zoo."""
        return {}

    def check_facts(self, zoo: ZooFolder, facts: Mapping[str, Any]) -> None:
        """Raises if a trained model cannot be evaluated on a zoo, given what its own was like."""

    def fitted(self, data: TaskData) -> tuple[nn.Module, NetworkSpec, dict[str, int]]:
        """An untrained model that has seen the scale of its inputs, and what it was made for."""
        everything = [g for graphs in data.graphs.values() for g in graphs]
        spec = NetworkSpec.union({g.spec for g in everything})
        sizes = sizes_of(everything)
        model = self.build(spec, sizes, data.facts)
        fit_inputs(model, data.graphs["train"])
        return model, spec, sizes
