"""Bring over a trained model of the published package `nfn`, and go on with it here.

The model is trained with `nfn` 0.1.2 to predict the test accuracy of MLPs from their weights, which
must all have the same width there. `from_nfn` makes the same function of it, with its parameters;
then networks of other widths can share a batch with them, and training goes on with all of them.
"""

import torch
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from nfn.layers import NPLinear, NPPool, TupleOp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss

from nfn_graph import Batch, DataLoader, WeightGraph
from nfn_graph.interop.nfn import batch_from_nfn, from_nfn


def train_mlps(count: int, width: int) -> tuple[WeightSpaceFeatures, Tensor]:
    """MLPs 16-width-10 on digits of 4 x 4 pixels, as `nfn` keeps them, and their accuracies."""
    digits = load_digits()
    x = avg_pool2d(torch.tensor(digits.images, dtype=torch.float32), 2).flatten(1) / 8 - 1
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
    first, second, bias, last_bias = (value.detach() for value in values)
    weights = [first.unsqueeze(1), second.unsqueeze(1)]  # [networks, channels, out, in]
    return WeightSpaceFeatures(weights, [bias, last_bias]), accuracy


def graphs_of(features: WeightSpaceFeatures, accuracy: Tensor) -> list[WeightGraph]:
    """The same networks as graphs, with their accuracies as labels."""
    graphs = batch_from_nfn(features).to_data_list()
    for graph, value in zip(graphs, accuracy, strict=True):
        graph.y = value.view(1)
    return graphs


@torch.no_grad()
def explained(model: nn.Module, batch: Batch) -> float:
    """The share of the variance of the accuracies that a model explains."""
    return 1 - (mse_loss(model(batch).squeeze(1), batch.y) / batch.y.var(correction=0)).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    features, accuracy = train_mlps(200, width=8)
    spec = network_spec_from_wsfeat(features)
    published = nn.Sequential(
        NPLinear(spec, 1, 16),
        TupleOp(nn.ReLU()),
        NPLinear(spec, 16, 16),
        TupleOp(nn.ReLU()),
        NPPool(spec),
        nn.Flatten(),
        nn.Linear(16 * NPPool.get_num_outs(spec), 1),
    )
    optimizer = torch.optim.Adam(published.parameters(), 5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        mse_loss(published(features).squeeze(1), accuracy).backward()
        optimizer.step()

    model = from_nfn(published)
    same = Batch.from_data_list(graphs_of(*train_mlps(100, width=8)))
    difference = (model(batch_from_nfn(features)) - published(features)).abs().max().item()
    print(f"largest difference of a prediction: {difference:.1e}")
    print(f"new networks of the same width: R2 {explained(model, same):.2f}")

    train = [graph for width in (6, 12) for graph in graphs_of(*train_mlps(100, width))]
    other = Batch.from_data_list(
        [graph for width in (6, 10, 14) for graph in graphs_of(*train_mlps(30, width))]
    )
    print(f"other widths, as it came: R2 {explained(model, other):.2f}")
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(5):
        for batch in DataLoader(train, batch_size=25, shuffle=True):
            optimizer.zero_grad()
            mse_loss(model(batch).squeeze(1), batch.y).backward()
            optimizer.step()
    print(f"other widths, trained on: R2 {explained(model, other):.2f}")
