"""Predicting the test accuracy of a network from its weights.

The first task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.1, appendix D.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from nfn_graph import Batch
from nfn_graph.tasks.metrics import kendall_tau, mean_absolute_error, r_squared, tau_ceiling
from nfn_graph.tasks.models import ModelSettings
from nfn_graph.tasks.supervised import SupervisedTask
from nfn_graph.tasks.training.options import Preset, TrainOptions
from nfn_graph.tasks.training.task import Metrics, Predictions
from nfn_graph.tasks.zoo.folder import ZooFolder
from nfn_graph.tasks.zoo.store import Row


@dataclass(frozen=True)
class PredictGeneralizationOptions(TrainOptions):
    """Predict the test accuracy of classifiers from their weights.

    Attributes:
        preset: The paper's model and training, or a smaller one.
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {
        "paper": Preset(ModelSettings((16, 16, 5), (1000, 1000), statistics=True), 50, 8, 1e-3),
        "small": Preset(ModelSettings((16, 16, 5), (128, 128), statistics=True), 30, 16, 1e-3),
        "tiny": Preset(ModelSettings((4,), (8,), statistics=True), 2, 8, 1e-3),
    }

    preset: Literal["paper", "small", "tiny"] = "paper"


class PredictGeneralization(SupervisedTask[PredictGeneralizationOptions]):
    """Accuracies as probabilities: sigmoid outputs, binary cross-entropy."""

    name = "predict-generalization"
    kind = "cnn"
    monitor = "tau"
    OPTIONS = PredictGeneralizationOptions

    def usable(self, row: Row) -> bool:
        """Networks that diverged have no finite weights to read."""
        return bool(row["is_finite"])

    def facts(self, zoo: ZooFolder) -> dict[str, Any]:
        """The shape of the networks' inputs."""
        return {"input_shape": zoo.description["image_shape"]}

    def check_facts(self, zoo: ZooFolder, facts: Mapping[str, Any]) -> None:
        """A model that runs networks takes those that read images of one shape."""
        found = self.facts(zoo)["input_shape"]
        if self.options.model == "probe" and found != facts["input_shape"]:
            raise ValueError(
                f"Expected networks that read images of shape {facts['input_shape']}, as the run's "
                f"own (got '{zoo.folder}' with {found})"
            )

    def label(self, row: Row) -> Tensor:
        """The accuracy on the test images."""
        return torch.tensor([row["test_accuracy"]])

    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """One number per network."""
        return 1

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Binary cross-entropy."""
        return binary_cross_entropy_with_logits(outputs.squeeze(1), batch.y.to(outputs.dtype))

    def predict(self, outputs: Tensor, batch: Batch) -> Predictions:
        """The true and the predicted accuracy."""
        return {"target": batch.y, "prediction": outputs.squeeze(1).sigmoid()}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """Kendall's tau-b with its ceiling, R2 and the mean absolute error."""
        predicted, true = predictions["prediction"], predictions["target"]
        return {
            "tau": kendall_tau(predicted, true),
            "tau_ceiling": tau_ceiling(true),
            "r2": r_squared(predicted, true),
            "mae": mean_absolute_error(predicted, true),
        }

    def draw(self, folder: Path, name: str, predictions: Predictions, zoo: ZooFolder) -> None:
        """Predicted against true accuracy."""
        from nfn_graph.tasks.reports.figures import scatter

        found = self.metrics(predictions, {})
        widths = [row["width"] for row in zoo.rows]
        scatter(
            folder / f"scatter-{name}.png",
            predictions["target"].tolist(),
            predictions["prediction"].tolist(),
            title=f"{self.options.model}, {name} networks",
            groups=[f"width {w}" for w in widths] if len(set(widths)) > 1 else None,
            tau=found["tau"],
            r2=found["r2"],
        )
