"""Predicting a number of every network from its weights.

Predicting the test accuracy is the first task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.1, appendix D.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from nfn_graph.converters import WeightDataset
from nfn_graph.converters.store.table import arrow
from nfn_graph.messages import UserError
from nfn_graph.tasks.metrics import regression_metrics
from nfn_graph.tasks.models import ModelSettings
from nfn_graph.tasks.supervised import SupervisedOptions, SupervisedTask, known_labels
from nfn_graph.tasks.training.options import Preset
from nfn_graph.tasks.training.task import Metrics, Predictions

# The colours of more widths than this cannot be told apart in a figure.
_MOST_GROUPS = 8


@dataclass(frozen=True)
class RegressOptions(SupervisedOptions):
    """Predict a number from the weights of a network.

    Attributes:
        preset: The model and training settings: those of the paper's first task, or smaller ones.
        target: The kind of the numbers: any numbers (squared error in units of their standard
            deviation), or shares between 0 and 1 (binary cross-entropy).
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {
        "paper": Preset(
            ModelSettings((16, 16, 5), (1000, 1000), probes=96, statistics=True), 50, 8, 1e-3
        ),
        "small": Preset(
            ModelSettings((16, 16, 5), (128, 128), probes=96, statistics=True), 30, 16, 1e-3
        ),
        "tiny": Preset(ModelSettings((4,), (8,), probes=8, statistics=True), 2, 8, 1e-3),
    }

    preset: Literal["paper", "small", "tiny"] = "small"
    target: Literal["number", "share"] = "number"


Options = TypeVar("Options", bound=RegressOptions)


class RegressTask(SupervisedTask[Options], Generic[Options]):
    """One number per network: squared error, or cross-entropy of shares."""

    monitor = "tau"
    by_heart = ("r2", 0.95)

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """The label, and the scale of the training networks' numbers."""
        facts = super().facts(zoos)
        mean, std = 0.0, 1.0
        if self.options.target == "number":
            numbers = _numbers(zoos["train"], facts["label"])
            mean, std = float(numbers.mean()), float(numbers.std())
            if not std > 1e-12 * abs(mean):
                raise UserError(
                    f"Expected training networks with different numbers in column "
                    f"'{facts['label']}' of '{zoos['train'].folder}' (got {mean:g} for all "
                    f"{len(numbers)})"
                )
        return {**facts, "mean": mean, "std": std}

    def targets(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> Tensor:
        """The numbers, on the scale of the training networks."""
        column = self.label_column(zoo, facts["label"])
        numbers = _numbers(zoo, column)
        if self.options.target == "share" and not ((numbers >= 0) & (numbers <= 1)).all():
            raise UserError(
                f"Expected shares between 0 and 1 in column '{column}' of '{zoo.folder}' (got "
                f"{numbers.min():g} to {numbers.max():g}). Use --target number."
            )
        scaled = (numbers - facts["mean"]) / facts["std"]
        return torch.from_numpy(scaled).to(torch.get_default_dtype())

    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """One number per network."""
        return 1

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error, or the binary cross-entropy."""
        is_share = self.options.target == "share"
        compare = binary_cross_entropy_with_logits if is_share else mse_loss
        return compare(outputs.squeeze(1), targets.to(outputs.dtype), reduction="none")

    def answer(self, outputs: Tensor) -> Predictions:
        """The number, on the scale of the training networks."""
        found = outputs.squeeze(1)
        return {"prediction": found.sigmoid() if self.options.target == "share" else found}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """Kendall's tau-b with its ceiling, R2, mean absolute and root mean squared error."""
        found = _restored(predictions, facts)
        return regression_metrics(found["prediction"], found["target"])

    def written(self, predictions: Predictions, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The numbers on the scale of the table."""
        return super().written(_restored(predictions, facts), facts)

    def draw(
        self,
        folder: Path,
        name: str,
        predictions: Predictions,
        zoo: WeightDataset,
        facts: Mapping[str, Any],
    ) -> None:
        """Predicted against true numbers."""
        from nfn_graph.tasks.reports.figures import scatter

        found, shown = self.metrics(predictions, facts), _restored(predictions, facts)
        has_widths = "width" in zoo.store.table.column_names
        widths = zoo.column("width").to_pylist() if has_widths else []
        is_grouped = 1 < len(set(widths)) <= _MOST_GROUPS
        scatter(
            folder / f"scatter-{name}.png",
            shown["target"].tolist(),
            shown["prediction"].tolist(),
            title=f"{self.options.model}, {name} networks",
            groups=[f"width {w}" for w in widths] if is_grouped else None,
            tau=found["tau"],
            r2=found["r2"],
        )


class Regress(RegressTask[RegressOptions]):
    """Predicts any column of numbers of any store."""

    name = "regress"
    OPTIONS = RegressOptions


def _restored(predictions: Predictions, facts: Mapping[str, Any]) -> Predictions:
    """Predictions on the scale of the table."""
    if (facts["mean"], facts["std"]) == (0.0, 1.0):
        return predictions
    return {name: x.double() * facts["std"] + facts["mean"] for name, x in predictions.items()}


def _numbers(zoo: WeightDataset, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns a column of numbers, in double precision."""
    labels, types = known_labels(zoo, column), arrow().types
    if not (types.is_integer(labels.type) or types.is_floating(labels.type)):
        raise UserError(
            f"Expected numbers in column '{column}' of '{zoo.folder}' (got {labels.type}). Classes "
            f"are predicted by: nfn-graph train classify"
        )
    found: np.ndarray[Any, np.dtype[np.float64]]
    found = labels.to_numpy().astype(np.float64)
    if not np.isfinite(found).all():
        raise UserError(
            f"Expected finite numbers in column '{column}' of '{zoo.folder}' (got infinite ones)"
        )
    return found


@dataclass(frozen=True)
class PredictGeneralizationOptions(RegressOptions):
    """Predict the test accuracy of classifiers from their weights."""

    target: Literal["number", "share"] = "share"


class PredictGeneralization(RegressTask[PredictGeneralizationOptions]):
    """Accuracies as probabilities: sigmoid outputs, binary cross-entropy."""

    name = "predict-generalization"
    OPTIONS = PredictGeneralizationOptions

    def label_column(self, zoo: WeightDataset, known: str | None = None) -> str:
        """The test accuracy, by the name that the zoo has for it."""
        return super().label_column(zoo, known or "test_accuracy")
