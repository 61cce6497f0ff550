"""Predicting the test accuracy of a network from its weights.

The first task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.1, appendix D.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.regress import RegressOptions, RegressTask


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
