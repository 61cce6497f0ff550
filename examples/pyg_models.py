"""A GNN of PyG and a neural functional on the same graphs.

300 MLPs are trained on digits, each with a random learning rate and width. The models learn from
the weights of 200 of them and predict the test accuracy of the others. `to_homogeneous()` returns
plain graphs for any model of PyG; for models with types, such as `HeteroConv`, use `materialize()`.
Both models do well here.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as PlainLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.transforms import ToUndirected

from nfn_graph import NFN, DataLoader, WeightGraph


def train_mlps(count: int, width: int) -> list[WeightGraph]:
    """MLPs 16-width-10 on digits of 4 x 4 pixels, trained all at once; `y` is the accuracy."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)
    x = nn.functional.avg_pool2d(x, 2).flatten(1) / 8 - 1
    target = torch.tensor(digits.target)
    shapes = [(width, 16), (10, width), (1, width), (1, 10)]
    values = [torch.randn(count, *s).div(s[-1] ** 0.5).requires_grad_() for s in shapes]
    rates = 10 ** (3 * torch.rand(count, 1, 1) - 3)

    def logits(x: Tensor) -> Tensor:
        first, second, bias, last_bias = values
        return (x @ first.mT + bias).relu() @ second.mT + last_bias

    for _ in range(100):
        i = torch.randint(1000, (64,))
        loss = cross_entropy(logits(x[i]).flatten(0, 1), target[i].repeat(count)) * count
        for value, gradient in zip(values, torch.autograd.grad(loss, values), strict=True):
            value.data -= rates * gradient
    accuracy = (logits(x[1000:]).argmax(-1) == target[1000:]).float().mean(1)
    graphs = []
    for i in range(count):
        first, second, bias, last_bias = (value[i].detach() for value in values)
        graph = WeightGraph.from_tensors([first, second], [bias[0], last_bias[0]])
        graph.y = accuracy[i : i + 1]
        graphs.append(graph)
    return graphs


class GINE(nn.Module):
    """Weights are features of the edges; a bias and the layer are those of a neuron."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Embedding(3, width)
        self.neuron = nn.Linear(1, width)
        self.weight = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width))
        self.convs = nn.ModuleList(
            GINEConv(nn.Sequential(nn.Linear(width, width), nn.ReLU()), aggr="mean")
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, data: Data) -> Tensor:
        """One number per network."""
        x, edges = self.neuron(data.x) + self.layer(data.node_type), self.weight(data.edge_attr)
        for conv in self.convs:
            x = x + conv(x, data.edge_index, edges)
        return self.head(global_mean_pool(x, data.batch))


def fit(model: nn.Module, train: DataLoader | PlainLoader, test: DataLoader | PlainLoader) -> str:
    """Trains a model; says how well it explains the accuracies of the other networks."""
    start, optimizer = time.perf_counter(), torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(20):
        for batch in train:
            optimizer.zero_grad()
            mse_loss(model(batch).squeeze(1), batch.y).backward()
            optimizer.step()
    seconds, (batch,) = time.perf_counter() - start, test
    error = mse_loss(model(batch).squeeze(1), batch.y) / batch.y.var(correction=0)
    return f"R2 {1 - error.item():.2f}, trained in {seconds:.1f} s"


if __name__ == "__main__":
    torch.manual_seed(0)
    graphs = [graph for width in (6, 8, 10) for graph in train_mlps(100, width)]
    train, test = torch.utils.data.random_split(graphs, [200, 100])
    nfn = NFN(graphs[0].spec, (16, 16), out_features=1, head=(64,), act="SiLU", standardize=True)
    nfn.standardize.fit(train)
    print("NFN: ", fit(nfn, DataLoader(train, 20, shuffle=True), DataLoader(test, 100)))
    train, test = ([ToUndirected()(g.to_homogeneous()) for g in part] for part in (train, test))
    print("GINE:", fit(GINE(), PlainLoader(train, 20, shuffle=True), PlainLoader(test, 100)))
