"""What the tasks with one label per network share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from nfn_graph import NetworkSpec, WeightGraph
from nfn_graph.tasks.models import build_model
from nfn_graph.tasks.models.rates import fast_probes
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.training.task import Task
from nfn_graph.tasks.zoo.store import Row

Options = TypeVar("Options", bound=TrainOptions)


class SupervisedTask(Task[Options]):
    """A task with one label per network, from an invariant model.

    Args:
        options: Its options; what is not given is taken from the preset.
    """

    @abstractmethod
    def label(self, row: Row) -> Tensor:
        """What is to be predicted, of one network."""

    @abstractmethod
    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """Outputs of the model per network."""

    def parameter_groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        """Probes learn at a rate of their own."""
        return fast_probes(model, lr)

    def prepare(self, graph: WeightGraph, row: Row, facts: Mapping[str, Any]) -> WeightGraph:
        """Adds the label."""
        graph.y = self.label(row)
        return graph

    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained model for networks of these types and sizes."""
        options = self.options
        return build_model(
            options.model,
            options.model_settings(),
            spec,
            sizes,
            self.num_outputs(facts),
            facts.get("input_shape"),
        )
