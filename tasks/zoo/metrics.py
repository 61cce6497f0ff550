"""Losses and accuracies of many classifiers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.architecture import Activation, Architecture, forward
from nfn_graph.tasks.zoo.parameters import Parameters

# Numbers that the largest activation of one evaluation step may hold.
_MOST_ENTRIES = 2**22


class TrainingData(NamedTuple):
    """Images `[count, channels, height, width]` and labels of both splits, on one device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def of(cls, images: Images, device: torch.device, dtype: torch.dtype) -> TrainingData:
        """The images of a source, centred: pixels within [0, 1] become [-1, 1]."""
        parts = []
        for index in (images.train_index, images.test_index):
            parts.append((images.values(index) * 2 - 1).to(device, dtype))
            parts.append(images.labels[index].to(device))
        return cls(*parts)

    @staticmethod
    def facts(images: Images) -> dict[str, Any]:
        """What a reader of a zoo must know about its images."""
        return {
            "fingerprint": images.fingerprint,
            "classes": list(images.classes),
            "image_shape": list(images.shape),
            "pixels": "scaled from [0, 1] to [-1, 1]",
        }


class Metrics(NamedTuple):
    """How well a network does on the images that it was trained on, and on the test split."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


def measure(
    architecture: Architecture,
    parameters: Parameters,
    activation: Activation,
    data: TrainingData,
    trained_on: Sequence[Tensor],
) -> list[Metrics]:
    """The metrics of stacked networks.

    Args:
        architecture: Their common shape.
        parameters: Stacked parameters.
        activation: Of all of them.
        data: The images.
        trained_on: For every network, the training images that it saw.
    """
    networks = (architecture, parameters, activation)
    seen = torch.zeros(len(trained_on), len(data.train_images), dtype=torch.bool)
    for row, index in zip(seen, trained_on, strict=True):
        row[index] = True
    needed = seen.any(0).nonzero().squeeze(1)
    seen = seen[:, needed].to(data.train_images.device)
    needed = needed.to(data.train_images.device)
    losses, hits = _evaluate(networks, data.train_images[needed], data.train_labels[needed])
    counts = seen.sum(1).to(losses.dtype)
    train_loss = losses.where(seen, 0).sum(1) / counts
    train_accuracy = (hits & seen).sum(1) / counts
    losses, hits = _evaluate(networks, data.test_images, data.test_labels)
    columns = (train_loss, train_accuracy, losses.mean(1), hits.to(losses.dtype).mean(1))
    return [Metrics(*row) for row in torch.stack(columns, 1).tolist()]


def _evaluate(
    networks: tuple[Architecture, Parameters, Activation], images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss, and whether the answer is right: `[N, images]` each."""
    architecture, parameters, activation = networks
    num = len(next(iter(parameters.values())))
    widest = max([64, *(torch.Size(units).numel() for units in architecture.units)])
    at_once = max(1, _MOST_ENTRIES // (num * widest))
    losses, hits = [], []
    for x, y in zip(images.split(at_once), labels.split(at_once), strict=True):
        outputs = forward(architecture, parameters, activation, x.unsqueeze(1))
        expected = y.expand(num, -1)
        losses.append(F.cross_entropy(outputs, expected, reduction="none"))
        # Of a network that has diverged, no answer is right.
        hits.append((outputs.argmax(1) == expected) & outputs.isfinite().all(1))
    return torch.cat(losses, 1), torch.cat(hits, 1)
