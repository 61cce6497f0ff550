"""The interface of a task that can be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor, nn
from torch_geometric.transforms import BaseTransform

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.augment import PermuteNeurons, WeightDrop, WeightNoise
from nfn_graph.tasks.models.build import fast_probes
from nfn_graph.tasks.training.options import TrainOptions

Options = TypeVar("Options", bound=TrainOptions)
Metrics = dict[str, Any]
# The labels and predictions of all networks of a split.
Predictions = dict[str, Tensor]


class Task(ABC, Generic[Options]):
    """A task defines a model, its loss, its metrics and its figures.

    Args:
        options: The options of the task; missing values come from the preset.

    Attributes:
        augmentations: The augmentations of every training batch, in this order.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.regress import Regress, RegressOptions
        >>> from nfn_graph.tasks.training import Task
        >>> task = Regress(RegressOptions(Path("zoo"), Path("run"), preset="tiny"))
        >>> isinstance(task, Task), task.name, task.monitor
        (True, 'regress', 'tau')
    """

    name: ClassVar[str]
    # The kind of zoo that it needs; None for any store.
    kind: ClassVar[str | None] = None
    # The validation metric by which the best epoch is chosen, and which of its values is best.
    monitor: ClassVar[str]
    best: ClassVar[Literal["max", "min"]] = "max"
    # A metric, and the value that it must reach on training networks that a model has memorised.
    by_heart: ClassVar[tuple[str, float]]
    # The columns of `predictions.csv`.
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
        """The parameters of a model with their learning rates; probes have a rate of their own."""
        return fast_probes(model, lr)

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean loss of a batch, given the outputs of the model."""

    def loss_terms(self, batch: Batch) -> int:
        """The number of terms that the loss of a batch is the mean of: by default its networks."""
        return batch.num_graphs

    @abstractmethod
    def predict(self, outputs: Any, batch: Batch) -> Predictions:
        """The values to keep for every network of a batch: all of `columns`, and possibly more."""

    def answer(self, outputs: Any) -> Predictions:
        """The predictions for all networks, whose labels are not needed."""
        raise NotImplementedError(f"{self.name} cannot predict without labels")

    @abstractmethod
    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """The metrics of a split."""

    def has_learnt(self, metrics: Metrics) -> bool:
        """Whether a model with these metrics has memorised its training networks."""
        name, bound = self.by_heart
        value = metrics[name]
        return bool(value >= bound if self.best == "max" else value <= bound)

    def written(self, predictions: Predictions, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Returns the values to write for every network: the known ones of `columns`."""
        return {name: predictions[name].tolist() for name in self.columns if name in predictions}

    def draw(
        self,
        folder: Path,
        name: str,
        predictions: Predictions,
        zoo: WeightDataset,
        facts: Mapping[str, Any],
    ) -> None:
        """Draws figures of the predictions for a split into a folder, if the task has any."""

    def show(
        self, folder: Path, name: str, model: nn.Module, graphs: Sequence[WeightGraph]
    ) -> None:
        """Draws what a trained model does to networks of a split, if the task has such figures."""

    def usable(self, zoo: WeightDataset) -> WeightDataset:
        """Returns the networks that a model can learn from."""
        return zoo

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """Returns facts about the data, such as names of classes and scales of labels.

        They are plain values, which are kept with the run.
        """
        return {}

    def check_facts(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> None:
        """Raises if a model cannot be evaluated on a zoo, given the facts of its own zoo."""

    def attributes(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns further attributes of graphs, such as labels: one row per network."""
        return {}

    def transform(self, facts: Mapping[str, Any]) -> Callable[[WeightGraph], WeightGraph] | None:
        """Returns the transform of every single network before it is put into a batch, if any."""
        return None

    def prepare(self, graph: WeightGraph, facts: Mapping[str, Any]) -> WeightGraph:
        """Prepares networks before a model sees them, such as by a canonical form.

        Args:
            graph: A batch, or a single network of those that are kept in memory.
            facts: The facts that :meth:`facts` returned.
        """
        return graph

    def augment(self, batch: Batch) -> Batch:
        """Permutes neurons for mlp-aug, and applies the augmentations of the options."""
        for transform in self.augmentations:
            batch = transform(batch)
        return batch
