"""Predicting which weights of an initialisation a winning ticket keeps.

The third task of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ (section 3.3, appendix D.2): a conditional variational
autoencoder learns from pairs of an initialisation and its mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nfn_graph import Batch, NetworkSpec, WeightFeatures, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.data import Layout
from nfn_graph.messages import UserError
from nfn_graph.tasks.masks import masks_from_scores, prunable
from nfn_graph.tasks.models import ModelSettings
from nfn_graph.tasks.models.autoencoder import Ticket, TicketAutoencoder
from nfn_graph.tasks.models.build import slow_aggregates
from nfn_graph.tasks.training.options import Preset, TrainOptions
from nfn_graph.tasks.training.task import Metrics, Predictions, Task

_SHOWN = 4
# Learned channels of every input and output.
_POSITIONS = 8
# The tensors of one network, by key.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class WinningTicketsOptions(TrainOptions):
    """Predict winning tickets from initialisations.

    Attributes:
        model: The model: an NFN on all neurons, or one that processes every weight separately.
        preset: The model and training settings: those of the paper (encoder and decoder with 4
            NF-Layers each and 64 channels between them), or smaller ones. --channels does not
            include the last NF-Layers. Maps of aggregates learn at the learning rate divided by
            the number of taps that they read.
        latent: The number of latent channels per weight.
        divergence_weight: The weight of the divergence in the loss; 1 for the evidence
            lower bound.
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {
        "paper": Preset(ModelSettings((64, 64, 64), (), io_encoding=True, norm=True), 200, 8, 1e-3),
        "small": Preset(
            ModelSettings((16, 16, 16), (), io_encoding=True, norm=True, activation="SiLU"),
            12,
            8,
            1e-2,
            schedule="cosine",
        ),
        "tiny": Preset(ModelSettings((4,), (), io_encoding=True), 2, 4, 1e-3),
    }

    model: Literal["nfn-np", "nfn-pointwise"] = "nfn-np"
    preset: Literal["paper", "small", "tiny"] = "small"
    latent: int = 5
    divergence_weight: float = 1.0

    def parts(self) -> tuple[str, ...]:
        """The autoencoder has NF-Layers only."""
        return ("channels",)

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        if self.latent < 1:
            raise UserError(f"Expected --latent of at least 1 (got {self.latent})")
        if not self.divergence_weight >= 0:
            raise UserError(
                f"Expected --divergence-weight of at least 0 (got {self.divergence_weight})"
            )
        if self.noise or self.drop:
            raise UserError(
                "Expected no --noise and no --drop, which would change the masks too "
                f"(got {self.noise} and {self.drop})"
            )


class WinningTickets(Task[WinningTicketsOptions]):
    """A mask per network: the evidence lower bound, per weight."""

    name = "winning-tickets"
    kind = "tickets"
    monitor = "overlap"
    by_heart = ("overlap", 0.9)
    columns = ("overlap", "overlap_magnitude", "loss")
    OPTIONS = WinningTicketsOptions

    def usable(self, zoo: WeightDataset) -> WeightDataset:
        """The networks that did not diverge, because the masks of the others are meaningless."""
        return zoo.where(is_finite=True)

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """Returns how the masks were made."""
        options = zoos["train"].description["options"]
        return {name: options[name] for name in ("sparsity", "scope")}

    def attributes(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """How each mask was made, as the metrics need it."""
        return {"is_global": torch.tensor([s == "global" for s in zoo.column("scope").to_pylist()])}

    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained autoencoder for networks of these types."""
        options, settings = self.options, self.options.model_settings()
        if options.model not in ("nfn-np", "nfn-pointwise"):
            raise UserError(
                f"Expected a model of masks: nfn-np or nfn-pointwise (got '{options.model}')"
            )
        return TicketAutoencoder(
            spec,
            settings.channels,
            options.latent,
            _POSITIONS if settings.io_encoding else 0,
            options.model == "nfn-pointwise",
            norm=settings.norm,
            residual=settings.residual,
            act=settings.activation,
        )

    def parameter_groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        """The parameters at the learning rate; maps of aggregates have a lower one."""
        return slow_aggregates(model, lr)

    def loss(self, outputs: Ticket, batch: Batch) -> Tensor:
        """The negative evidence lower bound, divided by the number of weights."""
        scores, truth = outputs.scores, batch.features(spec=outputs.scores.incidence.spec)
        wrong = [
            binary_cross_entropy_with_logits(x, truth.weights[key][..., 1:2], reduction="sum")
            for key, x in scores.weights.items()
        ]
        count = sum(x.numel() for x in scores.weights.values())
        divergence = self.options.divergence_weight * outputs.divergence
        return (torch.stack(wrong).sum() + divergence) / count

    def loss_terms(self, batch: Batch) -> int:
        """The weights of all networks, of which the loss is the mean."""
        return sum(batch[key].edge_attr[..., 0].numel() for key in batch.spec.weight)

    def predict(self, outputs: Ticket, batch: Batch) -> Predictions:
        """The share of the kept weights that the scores find, and that the baseline finds."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.columns}
        both = batch.features()
        masks = by_network(both.map(lambda x: x[..., 1:2]))
        initial = by_network(both.map(lambda x: x[..., :1]))
        scores = by_network(outputs.scores)
        for i, layout in enumerate(batch.layouts):
            keys, is_global = prunable(layout), bool(batch.is_global[i])
            truth = {key: masks[i][key] for key in keys}
            sizes = {key: initial[i][key].abs() for key in keys}
            found["overlap"].append(_overlap(truth, scores[i], is_global))
            found["overlap_magnitude"].append(_overlap(truth, sizes, is_global))
            flat = [torch.cat([t[key].flatten() for key in keys]) for t in (scores[i], truth)]
            found["loss"].append(binary_cross_entropy_with_logits(flat[0], flat[1]))
        return {name: torch.stack(values) for name, values in found.items()}

    def metrics(self, predictions: Predictions, facts: Mapping[str, Any]) -> Metrics:
        """Means over networks; a random mask has an overlap of one minus the sparsity."""
        return {name: float(predictions[name].double().mean()) for name in self.columns}

    @torch.no_grad()
    def show(
        self, folder: Path, name: str, model: nn.Module, graphs: Sequence[WeightGraph]
    ) -> None:
        """Draws the score of every weight against its initial value, by layer."""
        from nfn_graph.tasks.reports.network_figures import score_plot

        batch = Batch.from_data_list(graphs[:_SHOWN])
        batch = batch.to(next(model.parameters()).device)
        scores: WeightFeatures = model(batch).scores
        raw = batch.features(spec=scores.incidence.spec)
        layers = {
            f"{key[0]} to {key[2]}": (
                raw.weights[key][..., 0].flatten(),
                x.flatten(),
                raw.weights[key][..., 1].flatten() > 0,
            )
            for key, x in scores.weights.items()
        }
        score_plot(folder / f"scores-{name}.png", layers, title=f"{self.options.model}, {name}")


def by_network(features: WeightFeatures) -> list[Tensors]:
    """The tensors of every network of features with one channel, by the keys of checkpoints, in
    the precision of the features."""
    graph = features.to_graph()
    is_batch = isinstance(graph, Batch)
    networks = [graph.get_example(i) for i in range(features.num_graphs)] if is_batch else [graph]
    for network in networks:
        network.layout = _in_precision(network.layout, features.dtype)
    return [network.to_tensors() for network in networks]


def _in_precision(layout: Layout, dtype: torch.dtype) -> Layout:
    """Does the same for tensors of another type than those of the checkpoint."""
    if all(placement.dtype == dtype for placement in layout.placements):
        return layout
    placements = tuple(replace(placement, dtype=dtype) for placement in layout.placements)
    return replace(layout, placements=placements)


@torch.no_grad()
def mask_scores(model: nn.Module, graph: WeightGraph) -> list[Tensors]:
    """The score that a trained model gives each weight, for every network of a graph."""
    return by_network(model.eval()(graph).scores)


def _overlap(truth: Tensors, scores: Tensors, is_global: bool) -> Tensor:
    """The share of the kept weights among the same number of weights with the largest scores."""
    hits = kept = 0.0
    for keys in [list(truth)] if is_global else [[key] for key in truth]:
        own = sum(float(truth[key].sum()) for key in keys)
        count = sum(truth[key].numel() for key in keys)
        masks = masks_from_scores({key: scores[key].unsqueeze(0) for key in keys}, 1 - own / count)
        hits += sum(float((truth[key] * masks[key][0]).sum()) for key in keys)
        kept += own
    return torch.tensor(hits / kept)
