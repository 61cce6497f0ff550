r"""Models that return weights: they edit the networks that they read.

.. math:: U' = U + \gamma f(U), \qquad f(\sigma U) = \sigma f(U)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import nn

from nfn_graph import (
    NFN,
    EquivariantNFN,
    NetworkSpec,
    Probe,
    ProbeEncoding,
    Standardize,
    WeightFeatures,
    WeightGraph,
)
from nfn_graph.messages import UserError
from nfn_graph.spec import Key
from nfn_graph.tasks.models.baselines import FlatMLP, num_places
from nfn_graph.tasks.models.build import ModelSettings, nfn_options

EditorName = Literal["nfn-np", "nfn-hnp", "nfn-pointwise", "mlp", "mlp-aug"]


class Editor(nn.Module):
    r"""Adds a learned change to every weight of a network: :math:`U' = U + \gamma f(U)`.

    Where :math:`f` has several channels, every channel of the result is a network of its own;
    :func:`nfn_graph.tasks.edit.joined_networks` makes one network of them.

    Args:
        network: The function :math:`f`, from features before the fold to features of the same
            networks.
        encoding: The activations of every neuron at the probes, as further input channels.
        scale: The initial value of :math:`\gamma`.
        per_tensor: Whether every type of weight or bias has a :math:`\gamma` of its own.
    """

    def __init__(
        self,
        network: EquivariantNFN | FlatEditor,
        scale: float = 0.01,
        per_tensor: bool = False,
        encoding: ProbeEncoding | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.spec: NetworkSpec = network.spec
        # Only the weights are standardized here: the encoding has a scale of its own.
        self.standardize = Standardize(self.spec, 1) if encoding is not None else None
        self.encoding = encoding
        self.places: dict[Key, int] = {
            key: i if per_tensor else 0 for i, key in enumerate(self.spec.taps)
        }
        self.scale = nn.Parameter(torch.full((max(self.places.values()) + 1,), scale))

    def forward(self, graph: WeightGraph) -> WeightGraph:
        """The edited networks, with all else that the graph or batch holds."""
        features = graph.features(spec=self.spec)
        given = features
        if self.encoding is not None and self.standardize is not None:
            given = self.encoding(graph, self.standardize(features))
        change: WeightFeatures = self.network(given).unfold()
        scaled = change.map_types(lambda key, x: x * self.scale[self.places[key]])
        return (features.map(lambda x: x.expand(-1, -1, scaled.channels)) + scaled).to_graph()


class FlatEditor(nn.Module):
    """An MLP on the flattened weights that returns a number for each of them.

    Args:
        spec: The types of all networks.
        sizes: The most neurons of each type that a network may have.
        head: Hidden sizes.
        dropout: The dropout probability between layers.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        sizes: Mapping[str, int],
        head: tuple[int, ...],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.flat = FlatMLP(spec, sizes, num_places(spec, sizes), head, dropout)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """A number for every weight, as features before the fold."""
        features = self.flat.standardize(features)
        return self.flat.unflatten(self.flat.head(self.flat.flatten(features)), features)


def build_editor(
    name: str,
    settings: ModelSettings,
    spec: NetworkSpec,
    sizes: Mapping[str, int],
    *,
    scale: float = 0.01,
    per_tensor: bool = False,
    ensemble: int = 1,
) -> Editor:
    """An untrained editor.

    Args:
        name: The name of the model.
        settings: The parts of the model; `channels` are those of all NF-Layers but the last one.
        spec: The types of all networks that it will see.
        sizes: The largest number of neurons of each type, which only the MLP depends on.
        scale: See :class:`Editor`.
        per_tensor: See :class:`Editor`.
        ensemble: The number of networks that the editor makes of one.
    """
    if name not in get_args(EditorName):
        raise UserError(
            f"Expected a model that returns weights: {', '.join(get_args(EditorName))} "
            f"(got '{name}')"
        )
    if name in ("mlp", "mlp-aug"):
        flat = FlatEditor(spec, sizes, settings.head, settings.head_dropout)
        return Editor(flat, scale, per_tensor)
    options, encoding = nfn_options(name, settings), None
    if settings.probes:
        encoding = ProbeEncoding(Probe(spec, settings.probes), settings.probe_channels)
        options |= {"in_channels": 1 + encoding.channels, "standardize": False}
    network = NFN(spec, (*settings.channels, ensemble), **options)
    return Editor(network, scale, per_tensor, encoding)
