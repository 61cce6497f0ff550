"""Telling what an implicit neural representation shows, from its weights.

The second task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.2, appendix D.3), for images and for 3D shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nfn_graph import Batch, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.tasks.augment import MoveCoordinates
from nfn_graph.tasks.canonical import CanonicalPhases
from nfn_graph.tasks.metrics import confusion_matrix
from nfn_graph.tasks.models import ModelName, ModelSettings
from nfn_graph.tasks.option_checks import check_at_least
from nfn_graph.tasks.supervised import SupervisedTask
from nfn_graph.tasks.training.options import Preset, TrainOptions
from nfn_graph.tasks.training.task import Metrics, Predictions
from nfn_graph.tasks.zoo.folder import ZooFolder
from nfn_graph.tasks.zoo.render import render_networks
from nfn_graph.tasks.zoo.store import Row

_SHOWN = 64


def _layers(width: int, count: int = 3) -> tuple[int, ...]:
    return (width,) * count


def _smaller(
    channels: tuple[int, ...], head: tuple[int, ...], head_dropout: float, epochs: int
) -> Preset:
    """A model for a laptop: smooth, with a learning rate that falls, it learns in fewer steps."""
    model = ModelSettings(
        channels, head, head_dropout=head_dropout, io_encoding=True, activation="SiLU"
    )
    return Preset(model, epochs, 32, 3e-3, schedule="cosine")


@dataclass(frozen=True)
class ClassifyInrOptions(TrainOptions):
    """Classify the images or shapes that SIRENs hold, from their weights.

    Attributes:
        preset: The paper's model and training (3 NF-Layers of 512 channels), or smaller ones.
        canonical: Whether to bring every hidden neuron's phase into [0, pi/2] first; the
            function that the network computes stays the same.
        rotate: Augmentation: rotations of the image within so many degrees.
        shift: Augmentation: shifts of the image within this distance; the image is 2 wide.
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
        "tiny": Preset(ModelSettings((4,), (8,), io_encoding=True), 2, 8, 1e-3),
    }

    model: ModelName = "nfn-np"
    preset: Literal["paper", "medium", "small", "tiny"] = "small"
    canonical: bool = True
    rotate: float = 0.0
    shift: float = 0.0

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        for name in ("rotate", "shift"):
            check_at_least(name, getattr(self, name), 0)


class ClassifyInr(SupervisedTask[ClassifyInrOptions]):
    """One of several classes per network: softmax outputs, cross-entropy."""

    name = "classify-inr"
    kind = "inr"
    monitor = "accuracy"
    OPTIONS = ClassifyInrOptions

    def __init__(self, options: ClassifyInrOptions) -> None:
        super().__init__(options)
        if options.rotate or options.shift:
            self.augmentations.insert(0, MoveCoordinates(options.rotate, shift=options.shift))

    def usable(self, row: Row) -> bool:
        """Networks whose fit diverged show nothing."""
        return math.isfinite(row["mse"])

    def facts(self, zoo: ZooFolder) -> dict[str, Any]:
        """The names of the classes."""
        return {"classes": [str(name) for name in zoo.description["classes"]]}

    def check_facts(self, zoo: ZooFolder, facts: Mapping[str, Any]) -> None:
        """The classes must be those that the model has learnt to tell apart."""
        found = self.facts(zoo)["classes"]
        if found != facts["classes"]:
            raise UserError(
                f"Expected a zoo with the classes {', '.join(facts['classes'])}, as the run's own "
                f"(got '{zoo.folder}' with {', '.join(found)})"
            )

    def prepare(self, graph: WeightGraph, row: Row, facts: Mapping[str, Any]) -> WeightGraph:
        """Adds the label; the canonical form, if asked for."""
        graph = super().prepare(graph, row, facts)
        return CanonicalPhases(row["w0"])(graph) if self.options.canonical else graph

    def label(self, row: Row) -> Tensor:
        """The class of the image."""
        return torch.tensor([row["label"]])

    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """One number per class."""
        return len(facts["classes"])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(outputs, batch.y)

    def predict(self, outputs: Tensor, batch: Batch) -> Predictions:
        """The true class, the most likely one, and the loss."""
        loss = cross_entropy(outputs, batch.y, reduction="none")
        return {"target": batch.y, "prediction": outputs.argmax(1), "loss": loss}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """Accuracy, mean loss and the confusion matrix."""
        predicted, true = predictions["prediction"], predictions["target"]
        return {
            "accuracy": float((predicted == true).double().mean()),
            "loss": float(predictions["loss"].double().mean()),
            "confusion": confusion_matrix(predicted, true, len(facts["classes"])),
            "classes": list(facts["classes"]),
        }

    def draw(self, folder: Path, name: str, predictions: Predictions, zoo: ZooFolder) -> None:
        """The confusion matrix, and a sheet of INRs with what they were taken for."""
        from nfn_graph.tasks.reports.figures import confusion
        from nfn_graph.tasks.reports.gallery import gallery

        classes = [str(c) for c in zoo.description["classes"]]
        found = self.metrics(predictions, {"classes": classes})
        confusion(folder / f"confusion-{name}.png", found["confusion"], classes)
        count = min(_SHOWN, len(zoo))
        pictures = render_networks(zoo, range(count))
        taken = [classes[i] for i in predictions["prediction"][:count].tolist()]
        right = (predictions["prediction"] == predictions["target"])[:count].tolist()
        gallery(folder / f"inrs-{name}.png", pictures, taken, right)
