"""Weight graphs as plain PyG data, for PyG's own models and transforms."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric.data import Data, HeteroData

from nfn_graph.spec import NetworkSpec

# Graphs offer these functions as methods.
if TYPE_CHECKING:
    from nfn_graph.data._graph import WeightGraph


def to_hetero_data(graph: WeightGraph) -> HeteroData:
    """See `WeightGraph.materialize`."""
    features = graph.features()
    out = HeteroData()
    _keep_labels(graph, out)
    for key, x in features.tensors():
        if not isinstance(key, str):
            edges = features.incidence.weights[key]
            out[key].edge_index = torch.stack([edges.source, edges.target])
        for name, value in graph[key].items():
            out[key][name] = value
        out[key]["x" if isinstance(key, str) else "edge_attr"] = x.flatten(1)
    return out


def to_data(graph: WeightGraph, spec: NetworkSpec | None) -> Data:
    """See `WeightGraph.to_homogeneous`."""
    features = graph.features(spec=spec)
    neurons, weights = list(features.neurons.values()), list(features.weights.values())
    batch = torch.cat([features.graph_of(name) for name in features.neurons]).long()
    # Nodes are ordered by type here, but PyG expects them ordered by network.
    order = batch.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    sizes = [len(x) for x in neurons]
    start = dict(zip(features.neurons, accumulate(sizes, initial=0), strict=False))
    ends = [
        torch.stack([edges.source + start[source], edges.target + start[target]])
        for (source, _, target), edges in features.incidence.weights.items()
    ]
    data = Data()
    _keep_labels(graph, data)
    x, x_mask = _pad_taps(neurons)
    data.x, data.x_mask = x[order], x_mask[order]
    data.node_type = _type_ids(neurons)[order]
    data.batch = batch[order]
    data.num_nodes = len(order)
    data.edge_index = place[torch.cat(ends, 1)]
    data.edge_attr, data.edge_mask = _pad_taps(weights)
    data.edge_type = _type_ids(weights)
    return data


def _keep_labels(graph: WeightGraph, out: Data | HeteroData) -> None:
    for key, value in graph._global_store.items():
        if key != "layout":
            out[key] = value


def _pad_taps(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The features with as many taps as the type with the most, and which of them are real."""
    most = max(x.shape[1] for x in parts)
    masks = [torch.ones_like(x, dtype=torch.bool) for x in parts]
    padded = [[pad(x, (0, 0, 0, most - x.shape[1])).flatten(1) for x in y] for y in (parts, masks)]
    return torch.cat(padded[0]), torch.cat(padded[1])


def _type_ids(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.full((x.shape[0],), i, device=x.device) for i, x in enumerate(parts)])
