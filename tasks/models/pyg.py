"""Models of PyG on the networks as plain graphs: neurons are nodes, weights edge features.

They are not aware of what a layer is beyond the type numbers that they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv, PNAConv, TransformerConv, global_mean_pool

from nfn_graph import NetworkSpec, Standardize, WeightGraph
from nfn_graph.nn.models import mlp

_HEADS = 4


class PlainGraphModel(nn.Module):
    """Message passing along and against the edges of `to_homogeneous()`, a mean, an MLP.

    Args:
        kind: `"gine"`, `"pna"` or `"transformer"`.
        spec: The types of all networks.
        out_features: Outputs per network.
        channels: Of every layer; all layers have the first's, as they add their input.
        head: Hidden sizes of the MLP.
        dropout: Between them.
    """

    def __init__(
        self,
        kind: str,
        spec: NetworkSpec,
        out_features: int,
        channels: Sequence[int],
        head: Sequence[int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        width = max(_HEADS, channels[0] - channels[0] % _HEADS)
        self.standardize = Standardize(spec, 1)
        self.nodes = nn.Linear(max(n.taps for n in spec.neurons) or 1, width)
        self.node_types = nn.Embedding(len(spec.neurons), width)
        self.edges = nn.Linear(max(w.taps for w in spec.weights), width)
        # Edges against the direction of the network have types of their own.
        self.edge_types = nn.Embedding(2 * len(spec.weights), width)
        self.layers = nn.ModuleList(_layer(kind, width) for _ in channels)
        self.head = mlp([width * len(spec.neurons), *head], out_features, dropout)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network."""
        standardized = self.standardize(graph.features(spec=self.spec)).to_graph()
        data = standardized.to_homogeneous(spec=self.spec)
        edge_index, edge_type = data.edge_index, data.edge_type
        both = torch.cat([edge_index, edge_index.flip(0)], 1)
        types = torch.cat([edge_type, edge_type + len(self.spec.weights)])
        edges = self.edges(data.edge_attr).repeat(2, 1) + self.edge_types(types)
        values = data.x if data.x.shape[1] else data.x.new_zeros(len(data.x), 1)
        x = self.nodes(values) + self.node_types(data.node_type)
        for layer in self.layers:
            x = x + layer(x.relu(), both, edges)
        kinds = len(self.spec.neurons)
        group = data.batch * kinds + data.node_type
        pooled = global_mean_pool(x, group, graph.features().num_graphs * kinds)
        return self.head(pooled.unflatten(0, (-1, kinds)).flatten(1))


def _layer(kind: str, width: int) -> nn.Module:
    # PyG's annotations call its own layers abstract.
    kinds: dict[str, Any] = {"gine": GINEConv, "transformer": TransformerConv, "pna": PNAConv}
    layer = kinds[kind]
    options: dict[str, Any] = {"edge_dim": width}
    if kind == "gine":
        network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        return layer(network, train_eps=True, aggr="mean", **options)
    if kind == "transformer":
        return layer(width, width // _HEADS, heads=_HEADS, **options)
    # Degrees do not tell much where layers are complete: no scalers but the identity.
    return layer(
        width,
        width,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity"],
        deg=torch.tensor([0, 1]),
        **options,
    )
