"""Predicting a class of every network from its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nfn_graph import Batch
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.store.table import arrow
from nfn_graph.messages import UserError
from nfn_graph.tasks.metrics import class_metrics
from nfn_graph.tasks.models import ModelSettings
from nfn_graph.tasks.supervised import SupervisedOptions, SupervisedTask, known_labels
from nfn_graph.tasks.training.options import Preset
from nfn_graph.tasks.training.task import Metrics, Predictions

# A column with more classes than this probably holds numbers, or a name for every network.
_MOST_CLASSES = 10_000


def _layers(width: int, count: int = 3) -> tuple[int, ...]:
    return (width,) * count


def _smaller(
    channels: tuple[int, ...], head: tuple[int, ...], head_dropout: float, epochs: int
) -> Preset:
    """A preset for a laptop. Smooth activations and a decaying rate need fewer training steps."""
    model = ModelSettings(
        channels, head, head_dropout=head_dropout, io_encoding=True, activation="SiLU"
    )
    return Preset(model, epochs, 32, 3e-3, schedule="cosine")


@dataclass(frozen=True)
class ClassifyOptions(SupervisedOptions):
    """Predict a class from the weights of a network.

    Attributes:
        preset: The model and training settings: those of the paper's second task (3 NF-Layers of
            512 channels), or smaller ones.
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {
        "paper": Preset(
            ModelSettings(_layers(512), (1000, 1000), head_dropout=0.5, io_encoding=True),
            100,
            32,
            1e-4,
        ),
        "medium": _smaller(_layers(64), (500, 500), 0.5, epochs=60),
        "small": _smaller(_layers(32), (256, 256), 0.2, epochs=30),
        "tiny": Preset(ModelSettings((4,), (8,), io_encoding=True, probes=9), 2, 8, 1e-3),
    }

    preset: Literal["paper", "medium", "small", "tiny"] = "small"


Options = TypeVar("Options", bound=ClassifyOptions)


class ClassifyTask(SupervisedTask[Options], Generic[Options]):
    """One of several classes per network: softmax outputs, cross-entropy."""

    monitor = "accuracy"
    by_heart = ("accuracy", 1.0)
    columns = ("target", "prediction", "probability")

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """The label and the names of the classes."""
        facts, zoo = super().facts(zoos), zoos["train"]
        found = class_names(zoo, facts["label"]) if "classes" in zoo.description else []
        if not found:
            found = sorted(
                {name for part in zoos.values() for name in class_names(part, facts["label"])},
                key=_by_number,
            )
        if not 1 < len(found) <= _MOST_CLASSES:
            raise UserError(
                f"Expected 2 to {_MOST_CLASSES:,} classes in column '{facts['label']}' of "
                f"'{zoo.folder}' (got {len(found)}: {', '.join(found[:3])})"
            )
        return {**facts, "classes": found}

    def check_facts(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> None:
        """The classes must be among those that the model has learnt to tell apart."""
        super().check_facts(zoo, facts)
        found = class_names(zoo, self.label_column(zoo, facts["label"]))
        if not set(found) <= set(facts["classes"]):
            raise UserError(
                f"Expected a zoo with the classes {', '.join(facts['classes'])}, as the run's own "
                f"(got '{zoo.folder}' with {', '.join(sorted(found, key=_by_number))})"
            )

    def targets(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> Tensor:
        """The numbers of the classes."""
        number = {name: i for i, name in enumerate(facts["classes"])}
        texts = _texts(zoo, self.label_column(zoo, facts["label"]))
        return torch.tensor([number[name] for name in texts], dtype=torch.long)

    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """Returns the number of classes."""
        return len(facts["classes"])

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(outputs, targets, reduction="none")

    def answer(self, outputs: Tensor) -> Predictions:
        """The most likely class, and its probability."""
        probability, prediction = outputs.softmax(1).max(1)
        return {"prediction": prediction, "probability": probability}

    def predict(self, outputs: Tensor, batch: Batch) -> Predictions:
        """The true class, the most likely one with its probability, and the loss."""
        return {**super().predict(outputs, batch), "loss": self.losses(outputs, batch.y)}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """Accuracy, macro F1, mean loss and the confusion matrix; also the AUC for two classes."""
        found = class_metrics(
            predictions["prediction"],
            predictions["target"],
            predictions["probability"],
            len(facts["classes"]),
        )
        return {
            **found,
            "loss": float(predictions["loss"].double().mean()),
            "classes": list(facts["classes"]),
        }

    def written(self, predictions: Predictions, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The names of the classes."""
        found = super().written(predictions, facts)
        for name in ("target", "prediction"):
            if name in found:
                found[name] = [facts["classes"][i] for i in found[name]]
        return found

    def draw(
        self,
        folder: Path,
        name: str,
        predictions: Predictions,
        zoo: WeightDataset,
        facts: Mapping[str, Any],
    ) -> None:
        """The confusion matrix."""
        from nfn_graph.tasks.reports.figures import confusion

        found = self.metrics(predictions, facts)
        confusion(folder / f"confusion-{name}.png", found["confusion"], found["classes"])


class Classify(ClassifyTask[ClassifyOptions]):
    """Predicts any column of names or whole numbers of any store."""

    name = "classify"
    OPTIONS = ClassifyOptions


def class_names(zoo: WeightDataset, column: str) -> list[str]:
    """The classes of a zoo: those that it lists, or all that occur."""
    if _is_listed(zoo, column):
        return [str(name) for name in zoo.description["classes"]]
    return sorted(set(_texts(zoo, column)), key=_by_number)


def _is_listed(zoo: WeightDataset, column: str) -> bool:
    """Whether a column holds indices into the list of classes that the zoo's builder stored."""
    return "classes" in zoo.description and column == "label"


def _texts(zoo: WeightDataset, column: str) -> list[str]:
    """The class of every network by name."""
    labels, types = known_labels(zoo, column), arrow().types
    kinds = (types.is_string, types.is_large_string, types.is_integer, types.is_boolean)
    if not any(is_kind(labels.type) for is_kind in kinds):
        raise UserError(
            f"Expected names or whole numbers as classes in column '{column}' of '{zoo.folder}' "
            f"(got {labels.type}). Numbers are predicted by: nfn-graph train regress"
        )
    found = labels.to_pylist()
    if _is_listed(zoo, column):
        classes = class_names(zoo, column)
        if not all(0 <= i < len(classes) for i in found):
            raise UserError(
                f"Expected numbers of {len(classes)} classes in column '{column}' of "
                f"'{zoo.folder}' (got {min(found)} to {max(found)}). The zoo is damaged."
            )
        return [classes[i] for i in found]
    return [str(value) for value in found]


def _by_number(name: str) -> tuple[float, str]:
    """Numbers in their order, then all other names in theirs."""
    return (int(name), name) if name.lstrip("-").isdecimal() else (float("inf"), name)
