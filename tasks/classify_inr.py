"""Classifying the image or shape that an implicit neural representation (INR) stores.

The second task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.2, appendix D.3), for images and for 3D shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.messages import UserError
from nfn_graph.tasks.augment import MoveCoordinates
from nfn_graph.tasks.classify import ClassifyOptions, ClassifyTask
from nfn_graph.tasks.option_checks import check_at_least
from nfn_graph.tasks.training.task import Predictions
from nfn_graph.tasks.zoo.render import render_networks
from nfn_graph.transforms import CanonicalPhases

_SHOWN = 64


@dataclass(frozen=True)
class ClassifyInrOptions(ClassifyOptions):
    """Classify the images or shapes that SIRENs store, from their weights.

    Attributes:
        canonical: Whether to move the phase of every hidden neuron into [0, pi/2] first, which does
            not change what the network computes.
        rotate: Augmentation: the largest angle of random rotations of the image, in degrees.
        shift: Augmentation: the largest distance of random shifts of the image, whose width is 2.
    """

    canonical: bool = True
    rotate: float = 0.0
    shift: float = 0.0

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        for name in ("rotate", "shift"):
            check_at_least(name, getattr(self, name), 0)


class ClassifyInr(ClassifyTask[ClassifyInrOptions]):
    """Predicts the class of the image or shape that a SIREN stores."""

    name = "classify-inr"
    # Files of SIRENs do not say what they compute, but their frequency factor is known.
    follows_record = False
    OPTIONS = ClassifyInrOptions

    def __init__(self, options: ClassifyInrOptions) -> None:
        super().__init__(options)
        if options.rotate or options.shift:
            self.augmentations.insert(0, MoveCoordinates(options.rotate, shift=options.shift))

    def usable(self, zoo: WeightDataset) -> WeightDataset:
        """Leaves out networks whose fit diverged, because they show nothing."""
        zoo = super().usable(zoo)
        if "mse" not in zoo.store.table.column_names:
            return zoo
        return zoo.select(np.isfinite(zoo.column("mse").to_numpy()))

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """Returns the classes, and the frequency factor of networks whose files do not state it."""
        facts = super().facts(zoos)
        if not self.options.canonical:
            return facts
        found = {w0 for zoo in zoos.values() for w0 in _w0(zoo).unique().tolist()}
        return {**facts, "w0": found.pop() if len(found) == 1 else None}

    def label_column(self, zoo: WeightDataset, known: str | None = None) -> str:
        """The class of the image, by the name that the zoo has for it."""
        return super().label_column(zoo, known or "label")

    def inputs(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The frequency factor for the canonical form."""
        return {"w0": _w0(zoo)} if self.options.canonical else {}

    def prepare(self, graph: WeightGraph, facts: Mapping[str, Any]) -> WeightGraph:
        """Brings the networks to their canonical form if `--canonical` is on."""
        if not self.options.canonical:
            return graph
        w0 = graph.w0 if "w0" in graph else facts["w0"]
        if w0 is None:
            raise UserError(
                "Expected networks with known frequency factors w0, because those of the training "
                "networks differ (got files without w0). Put them into a store with a column w0."
            )
        return CanonicalPhases(w0)(graph)

    def draw(
        self,
        folder: Path,
        name: str,
        predictions: Predictions,
        zoo: WeightDataset,
        facts: Mapping[str, Any],
    ) -> None:
        """Draws the confusion matrix, and a sheet of INRs with their predicted classes."""
        from nfn_graph.tasks.reports.network_figures import gallery

        super().draw(folder, name, predictions, zoo, facts)
        if zoo.description.get("kind") != "inr":
            return  # Networks can only be drawn if nfn-graph built their zoo.
        shown = zoo[:_SHOWN]
        classes, taken = facts["classes"], predictions["prediction"][: len(shown)]
        right = (taken == predictions["target"][: len(shown)]).tolist()
        pictures = render_networks(shown, range(len(shown)))
        gallery(folder / f"inrs-{name}.png", pictures, [classes[i] for i in taken], right)


def _w0(zoo: WeightDataset) -> Tensor:
    """The frequency factor of every network."""
    if "w0" not in zoo.store.table.column_names:
        raise UserError(
            f"Expected the frequency factors of SIRENs in a column 'w0' of '{zoo.folder}' (got no "
            f"such column). Add it to the labels, use --no-canonical, or the task classify."
        )
    return torch.from_numpy(zoo.column("w0").to_numpy().astype(np.float32))
