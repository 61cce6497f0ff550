"""Editing the image that an implicit neural representation stores, through its weights.

The fourth task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.4, appendix D.4). The
target of an edited network is rendered from its original weights and changed by an image
operation. A run therefore needs nothing but a zoo, and a user's network has a target too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.messages import UserError
from nfn_graph.tasks.image_operations import Operation, check_operation, edit_images
from nfn_graph.tasks.models import ModelSettings
from nfn_graph.tasks.models.editors import EditorName, build_editor
from nfn_graph.tasks.option_checks import check_at_least
from nfn_graph.tasks.training.options import Preset, TrainOptions
from nfn_graph.tasks.training.task import Metrics, Predictions, Task
from nfn_graph.tasks.zoo.render import render_graphs
from nfn_graph.tasks.zoo.siren import siren_computation
from nfn_graph.transforms import CanonicalPhases

_SHOWN = 10


@dataclass(frozen=True)
class EditInrOptions(TrainOptions):
    """Edit the images that SIRENs store, by changing their weights.

    Attributes:
        model: The model: an NFN with one of three symmetries, or an MLP on the concatenated weights
            as a baseline. mlp-aug permutes neurons at random in training.
        preset: The model and training settings: those of the paper (3 NF-Layers with 128 channels
            between them), or smaller ones. --channels does not include the last NF-Layer, which
            has one channel.
        operation: The image operation to learn.
        amount: The strength of the operation: pixels for dilate, erode and blur, a factor for
            contrast, degrees for rotate. 0 stands for 3 (dilate, erode), 1 (blur), 1.5 and 45.
        edit_scale: The initial value of gamma in U + gamma f(U).
        ensemble: The number of networks that the editor makes of one. Their images are averaged,
            and they are stored as one network whose hidden layers are that many times as wide.
        scale_per_tensor: Whether every type of weight or bias has its own gamma.
        canonical: Whether to move the phase of every hidden neuron into [0, pi/2] first, which does
            not change what the network computes.
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {
        # 45,000 images in batches of 32: 36 epochs are the paper's 50,000 steps.
        "paper": Preset(
            ModelSettings((128, 128), (1000, 1000, 1000), io_encoding=True, probes=0), 36, 32, 1e-3
        ),
        # A smooth activation learns much faster: the edited images are smooth in all weights.
        "small": Preset(
            ModelSettings((32, 32), (512, 512), io_encoding=True, activation="SiLU", probes=0),
            8,
            16,
            5e-3,
            schedule="cosine",
        ),
        "tiny": Preset(ModelSettings((4,), (8,), io_encoding=True, probes=0), 2, 8, 1e-3),
    }

    model: EditorName = "nfn-np"
    preset: Literal["paper", "small", "tiny"] = "small"
    operation: Operation = "dilate"
    amount: float = 0.0
    edit_scale: float = 0.01
    ensemble: int = 1
    scale_per_tensor: bool = False
    canonical: bool = True

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_operation(self.operation, self.amount)
        check_at_least("ensemble", self.ensemble, 1)
        if self.ensemble > 1 and self.model in ("mlp", "mlp-aug"):
            raise UserError(
                f"Expected --ensemble 1 with --model {self.model}, which returns a single network "
                f"(got {self.ensemble})"
            )

    def parts(self) -> tuple[str, ...]:
        """An editor made of NF-Layers has no MLP behind them."""
        if self.model in ("mlp", "mlp-aug"):
            return super().parts()
        return ("channels", "fourier_features", "probes")


class EditInr(Task[EditInrOptions]):
    """Edits one image per network; the loss is the mean squared error of the rendered pixels."""

    name = "edit-inr"
    kind = "inr"
    monitor = "mse"
    best = "min"
    by_heart = ("relative", 0.2)
    columns = ("mse", "mse_unedited", "mse_fit")
    OPTIONS = EditInrOptions

    def usable(self, zoo: WeightDataset) -> WeightDataset:
        """Leaves out networks whose fit diverged, because they show nothing."""
        return zoo.select(np.isfinite(zoo.column("mse").to_numpy()))

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """The facts that are needed to render the networks."""
        zoo = zoos["train"]
        description = zoo.description
        if description["signal"] != "image":
            raise UserError(
                f"Expected a zoo of INRs of images (got '{zoo.folder}', which holds the "
                f"{description['signal']} of shapes). Build one with: nfn-graph zoo inr --out ..."
            )
        names = ("image_shape", "output_offset")
        return {"w0": description["options"]["w0"], **{n: description[n] for n in names}}

    def check_facts(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> None:
        """Raises unless the networks of the zoo show images."""
        self.facts({"train": zoo})

    def attributes(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The frequency factor of every network, and the error of its own fit."""
        columns = {"w0": "w0", "mse_fit": "mse"}
        return {
            name: torch.from_numpy(zoo.column(column).to_numpy().astype(np.float32))
            for name, column in columns.items()
        }

    def placed(
        self, graph: WeightGraph, w0: float, offset: float, facts: Mapping[str, Any]
    ) -> WeightGraph:
        """Prepares a network that is not part of a zoo, with the computation of a SIREN."""
        if graph.layout.computation.reason is not None:
            computation = siren_computation(graph.layout, w0, offset)
            graph.layout = graph.layout.noting(computation=computation)
        graph.w0 = torch.tensor([w0])
        return self.prepare(graph, facts)

    def prepare(self, graph: WeightGraph, facts: Mapping[str, Any]) -> WeightGraph:
        """Adds the target image of the edited network, and the error of the unedited one."""
        height, width = facts["image_shape"][1:]
        original = render_graphs(graph, (height, width))
        graph.y = edit_images(original, self.options.operation, self.options.amount)
        graph.mse_unedited = _errors(original, graph.y)
        return CanonicalPhases(graph.w0)(graph) if self.options.canonical else graph

    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained editor for networks of these types and sizes."""
        options = self.options
        return build_editor(
            options.model,
            options.model_settings(),
            spec,
            sizes,
            scale=options.edit_scale,
            per_tensor=options.scale_per_tensor,
            ensemble=options.ensemble,
        )

    def loss(self, outputs: WeightGraph, batch: Batch) -> Tensor:
        """Returns the mean squared error between the edited images and their targets."""
        return _errors(pictures(outputs), batch.y).mean()

    def predict(self, outputs: WeightGraph, batch: Batch) -> Predictions:
        """Returns three errors of every network: edited, unedited, and of its fit to its image."""
        mse = _errors(pictures(outputs), batch.y)
        return {"mse": mse, "mse_unedited": batch.mse_unedited, "mse_fit": batch.mse_fit}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """The mean error, and its ratio to the errors of the unedited networks and of the fits."""
        means = {name: float(predictions[name].double().mean()) for name in self.columns}
        return {
            **means,
            "relative": means["mse"] / max(means["mse_unedited"], 1e-12),
            "relative_to_fit": means["mse"] / max(means["mse_fit"], 1e-12),
        }

    @torch.no_grad()
    def show(
        self, folder: Path, name: str, model: nn.Module, graphs: Sequence[WeightGraph]
    ) -> None:
        """Draws a sheet of some networks before and after the edit, with their targets."""
        from nfn_graph.tasks.reports.network_figures import draw_probes, edit_sheet

        if name == "test":
            draw_probes(folder / "probes.png", model, graphs)
        batch = Batch.from_data_list(graphs[:_SHOWN])
        batch = batch.to(next(model.parameters()).device)
        edited = pictures(model(batch))
        edit_sheet(folder / f"edits-{name}.png", pictures(batch), edited, batch.y)


def pictures(graph: WeightGraph) -> Tensor:
    """The images that prepared networks show, in the size of their targets."""
    height, width = graph.y.shape[2:]
    return render_graphs(graph, (height, width))


def _errors(images: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error of every image."""
    return (images - targets.to(images.dtype)).square().flatten(1).mean(1)
