"""One model for networks of different widths and depths.

MLPs with one or two hidden layers of 6 or 10 neurons are trained on digits, and a model predicts
their test accuracies from a batch of all of them. Then it meets widths that it never saw. With a
type for every depth (the union of the specs) it can be no deeper than what it was made for; with
`RoleTypes`, one type for all hidden layers, it also takes networks with three of them.
"""

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss

from nfn_graph import NFN, DataLoader, InvariantNFN, NetworkSpec, WeightGraph
from nfn_graph.transforms import RoleTypes


def train_mlps(count: int, *hidden: int) -> list[WeightGraph]:
    """MLPs on digits of 4 x 4 pixels, all at once, with random learning rates; `y` is accuracy."""
    digits = load_digits()
    x = avg_pool2d(torch.tensor(digits.images, dtype=torch.float32), 2).flatten(1) / 8 - 1
    target = torch.tensor(digits.target)
    layers = list(pairwise((16, *hidden, 10)))
    weights = [torch.randn(count, o, i).div(i**0.5).requires_grad_() for i, o in layers]
    biases = [torch.zeros(count, 1, o, requires_grad=True) for _, o in layers]
    rates = 10 ** (3 * torch.rand(count, 1, 1) - 3)

    def logits(x: Tensor) -> Tensor:
        for weight, bias in zip(weights, biases, strict=True):
            x = x.relu() if x.dim() == 3 else x
            x = x @ weight.mT + bias
        return x

    for _ in range(100):
        i = torch.randint(1000, (64,))
        loss = cross_entropy(logits(x[i]).flatten(0, 1), target[i].repeat(count)) * count
        gradients = torch.autograd.grad(loss, [*weights, *biases])
        for value, gradient in zip([*weights, *biases], gradients, strict=True):
            value.data -= rates * gradient
    accuracy = (logits(x[1000:]).argmax(-1) == target[1000:]).float().mean(1)
    graphs = []
    for i in range(count):
        graph = WeightGraph.from_tensors(
            [weight[i].detach() for weight in weights], [bias[i, 0].detach() for bias in biases]
        )
        graph.y = accuracy[i : i + 1]
        graphs.append(graph)
    return graphs


def fit(model: InvariantNFN, graphs: list[WeightGraph], epochs: int = 10) -> None:
    """Trains a model on batches of all sizes."""
    model.standardize.fit(graphs)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(epochs):
        for batch in DataLoader(graphs, batch_size=25, shuffle=True):
            optimizer.zero_grad()
            mse_loss(model(batch).squeeze(1), batch.y).backward()
            optimizer.step()


@torch.no_grad()
def correlation(model: InvariantNFN, graphs: list[WeightGraph]) -> str:
    """Between the predicted and the true accuracies."""
    (batch,) = DataLoader(graphs, batch_size=len(graphs))
    found = torch.corrcoef(torch.stack([model(batch).squeeze(1), batch.y]))[0, 1]
    return f"correlation {found:.2f}"


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = [(6,), (10,), (6, 10), (10, 6)]
    train = [graph for hidden in sizes for graph in train_mlps(60, *hidden)]
    unseen = [graph for hidden in [(8,), (14,), (8, 14)] for graph in train_mlps(30, *hidden)]
    deeper = train_mlps(50, 8, 8, 8)
    settings = {"channels": (16, 16), "out_features": 1, "head": (64,), "standardize": True}

    union = NFN(NetworkSpec.union(graph.spec for graph in train), **settings)
    fit(union, train)
    print("one type per depth, unseen widths:", correlation(union, unseen))

    roles = RoleTypes()
    train, unseen, deeper = ([roles(graph) for graph in part] for part in (train, unseen, deeper))
    shared = NFN(NetworkSpec.union(graph.spec for graph in train), **settings)
    fit(shared, train)
    print("one type for all, unseen widths:", correlation(shared, unseen))
    print("one type for all, unseen depth:", correlation(shared, deeper))
