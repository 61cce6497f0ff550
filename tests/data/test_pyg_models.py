"""PyG's own models on the same graphs, trained for a few steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import GINEConv, PNAConv, TransformerConv, global_mean_pool
from torch_geometric.transforms import ToUndirected
from torch_geometric.utils import degree

from networks import chain
from nfn_graph import Batch


def batch_of() -> Batch:
    graphs = [chain((2, w, w + 1, 3), dtype=torch.float32) for w in (3, 6, 4, 5)]
    batch = Batch.from_data_list(graphs)
    batch.y = torch.tensor([0.0, 1.0, -1.0, 2.0])
    return batch


def conv_of(kind: str, data) -> nn.Module:
    edges = data.edge_attr.shape[1]
    if kind == "gine":
        return GINEConv(nn.Linear(8, 8), edge_dim=edges)
    if kind == "pna":
        counts = degree(data.edge_index[1], data.num_nodes, dtype=torch.long)
        return PNAConv(8, 8, ["mean", "max"], ["identity"], torch.bincount(counts), edge_dim=edges)
    return TransformerConv(8, 4, heads=2, edge_dim=edges)


@pytest.mark.parametrize("kind", ["gine", "pna", "transformer"])
def test_models_of_plain_graphs_train(kind):
    batch = batch_of()
    data = ToUndirected()(batch.to_homogeneous())
    first = nn.Linear(data.x.shape[1], 8)
    types = nn.Embedding(4, 8)
    conv, last = conv_of(kind, data), nn.Linear(8, 1)
    parameters = [p for m in (first, types, conv, last) for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    losses = []
    for _ in range(40):
        x = conv(first(data.x) + types(data.node_type), data.edge_index, data.edge_attr)
        out = last(global_mean_pool(x.relu(), data.batch)).squeeze(-1)
        assert out.shape == (4,)
        loss = (out - batch.y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
