"""The same networks for PyG's own models: one homogeneous graph, or one with types.

`to_homogeneous()` pads taps and numbers the types, for any model of plain graphs.
`materialize()` keeps the types, for PyG's `HeteroConv` and `to_hetero`.
"""

from itertools import pairwise

import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, GINEConv, HeteroConv, global_mean_pool
from torch_geometric.transforms import ToUndirected

from nfn_graph import Batch, WeightGraph


def network(width: int, scale: float) -> WeightGraph:
    """An MLP whose label is the scale of its weights."""
    sizes = [2, width, width, 1]
    weights = [scale * torch.randn(o, i) for i, o in pairwise(sizes)]
    graph = WeightGraph.from_tensors(weights, [torch.randn(n) for n in sizes[1:]])
    graph.y = torch.tensor([scale])
    return graph


class HomogeneousModel(nn.Module):
    """GINE on the padded graph; the edges carry the weights, the nodes biases and types."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        data = batch.to_homogeneous()
        self.types = nn.Embedding(len(batch.spec.neurons), 16)
        self.first = nn.Linear(data.x.shape[1], 16)
        self.convs = nn.ModuleList(
            GINEConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), edge_dim=data.edge_attr.shape[1])
            for _ in range(2)
        )
        self.last = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Predicts one number per network."""
        data = ToUndirected()(batch.to_homogeneous())
        x = self.first(data.x) + self.types(data.node_type)
        for conv in self.convs:
            x = x + conv(x, data.edge_index, data.edge_attr)
        return self.last(global_mean_pool(x, data.batch, batch.num_graphs)).squeeze(-1)


class TypedModel(nn.Module):
    """One convolution per weight type and direction, with the weights as edge features."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        data = ToUndirected()(batch.materialize())
        self.first = nn.ModuleDict(
            {n: nn.Linear(x.shape[1] + 1, 16) for n, x in data.x_dict.items()}
        )
        convs = {
            key: GATv2Conv(16, 16, edge_dim=x.shape[1], add_self_loops=False)
            for key, x in data.edge_attr_dict.items()
        }
        self.conv = HeteroConv(convs, aggr="sum")
        self.last = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Predicts one number per network."""
        data = ToUndirected()(batch.materialize())
        # A constant beside the biases, since input neurons have none.
        x = {n: torch.cat([v, v.new_ones(len(v), 1)], 1) for n, v in data.x_dict.items()}
        x = {name: self.first[name](value) for name, value in x.items()}
        x = self.conv(x, data.edge_index_dict, data.edge_attr_dict)
        graphs = batch.num_graphs
        pooled = [global_mean_pool(v.relu(), data[n].batch, graphs) for n, v in x.items()]
        return self.last(torch.stack(pooled).sum(0)).squeeze(-1)


def train(model: nn.Module, batch: Batch, steps: int = 60) -> tuple[float, float]:
    """Fits the labels of one batch; returns the first and the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(batch) - batch.y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    torch.manual_seed(0)
    batch = Batch.from_data_list([network(8 + i % 5, 0.2 + i / 16) for i in range(16)])
    models = {
        "GINE on to_homogeneous()": HomogeneousModel(batch),
        "HeteroConv on materialize()": TypedModel(batch),
    }
    for name, model in models.items():
        first, last = train(model, batch)
        print(f"{name}: loss {first:.3f} -> {last:.3f}")
