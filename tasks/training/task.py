"""What a task must say so that it can be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.tasks.models import build_model, fit_inputs, sizes_of
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
        graphs: Their graphs, labelled.
        facts: What else the task knows about them, such as the names of classes.
    """

    zoos: Mapping[str, ZooFolder]
    graphs: Mapping[str, Sequence[WeightGraph]]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC, Generic[Options]):
    """A task: labels, loss, metrics and figures.

    Args:
        options: Its options, resolved.
    """

    name: ClassVar[str]
    # The kind of zoo that it needs.
    kind: ClassVar[str]
    # The validation metric by which the best epoch is chosen; larger is better.
    monitor: ClassVar[str]
    OPTIONS: ClassVar[type[TrainOptions]]

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def label(self, row: Row) -> Tensor:
        """What is to be predicted, of one network."""

    @abstractmethod
    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """Outputs of the model per network."""

    @abstractmethod
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def predict(self, outputs: Tensor, batch: Batch) -> Predictions:
        """What is kept of every network of a batch: its target and its prediction."""

    @abstractmethod
    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """The metrics of a split."""

    @abstractmethod
    def draw(self, folder: Path, name: str, predictions: Predictions, zoo: ZooFolder) -> None:
        """Draws the figures of a split into a folder."""

    def usable(self, row: Row) -> bool:
        """Whether a network can be learnt from."""
        return True

    def prepare(self, graph: WeightGraph, row: Row) -> WeightGraph:
        """What is done to every graph once, such as bringing it into a canonical form."""
        return graph

    def augment(self, batch: Batch) -> Batch:
        """What is done to every batch in training."""
        return batch

    def facts(self, zoo: ZooFolder) -> dict[str, Any]:
        """What metrics and figures must know about a zoo."""
        return {}

    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained model for networks of these types and sizes."""
        options = self.options
        return build_model(
            options.model, options.model_settings(), spec, sizes, self.num_outputs(facts)
        )

    def fitted(self, data: TaskData) -> tuple[nn.Module, NetworkSpec, dict[str, int]]:
        """An untrained model that has seen the scale of its inputs, and what it was made for."""
        everything = [g for graphs in data.graphs.values() for g in graphs]
        spec = NetworkSpec.union({g.spec for g in everything})
        sizes = sizes_of(everything)
        model = self.build(spec, sizes, data.facts)
        fit_inputs(model, data.graphs["train"])
        return model, spec, sizes
