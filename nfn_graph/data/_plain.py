"""Weight graphs as plain PyG data, for PyG's own models and transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
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
    for name, x in features.neurons.items():
        out[name].x = x.flatten(1)
        for key, value in graph[name].items():
            if key != "x":
                out[name][key] = value
    for weight, x in features.weights.items():
        edges = features.incidence.weights[weight]
        out[weight].edge_index = torch.stack([edges.source, edges.target])
        out[weight].edge_attr = x.flatten(1)
        for key, value in graph[weight].items():
            if key != "edge_attr":
                out[weight][key] = value
    return out


def to_data(graph: WeightGraph, spec: NetworkSpec | None) -> Data:
    """See `WeightGraph.to_homogeneous`."""
    features = graph.features(spec=spec)
    neurons, weights = list(features.neurons.values()), list(features.weights.values())
    incidence = features.incidence
    batch = torch.cat([features.graph_of(name) for name in features.neurons]).long()
    # Nodes are ordered by type here, but PyG expects them ordered by network.
    order = batch.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    start, total = {}, 0
    for name, x in features.neurons.items():
        start[name], total = total, total + x.shape[0]
    ends = [
        torch.stack([edges.source + start[key[0]], edges.target + start[key[2]]])
        for key, edges in incidence.weights.items()
    ]
    data = Data()
    _keep_labels(graph, data)
    x, x_mask = _pad_taps(neurons)
    data.x, data.x_mask = x[order], x_mask[order]
    data.node_type = _type_ids(neurons)[order]
    data.batch = batch[order]
    data.num_nodes = total
    data.edge_index = place[torch.cat(ends, 1)]
    data.edge_attr, data.edge_mask = _pad_taps(weights)
    data.edge_type = _type_ids(weights)
    return data


def _keep_labels(graph: WeightGraph, out: Data | HeteroData) -> None:
    for key, value in graph._global_store.items():
        if key != "layout":
            out[key] = value


def _pad_taps(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    most = max(x.shape[1] for x in parts)
    padded, masks = [], []
    for x in parts:
        count, taps, channels = x.shape
        padded.append(torch.cat([x, x.new_zeros(count, most - taps, channels)], 1).flatten(1))
        mask = torch.arange(most, device=x.device) < taps
        masks.append(mask.repeat_interleave(channels).expand(count, -1))
    return torch.cat(padded), torch.cat(masks)


def _type_ids(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.full((x.shape[0],), i, device=x.device) for i, x in enumerate(parts)])
