"""Gradients as input: a learned step of an optimiser.

The weights of a network and their gradients are two channels of the same graph. A neural functional
reads both and predicts one step, trained so that the loss after it is small. On networks and images
that it never saw, it is compared with gradient descent, at the one of 40 rates that is best there.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from nfn_graph import NFN, Batch, DataLoader, EquivariantNFN, WeightFeatures, WeightGraph
from nfn_graph.converters import from_state_dict

DIGITS = load_digits()
X = avg_pool2d(torch.tensor(DIGITS.images, dtype=torch.float32), 2).flatten(1) / 8 - 1
TARGET = torch.tensor(DIGITS.target)
SEEN, UNSEEN = torch.arange(1000), torch.arange(1000, len(X))
KEYS = ["0.weight", "1.weight", "0.bias", "1.bias"]


def losses(values: list[Tensor], images: Tensor) -> Tensor:
    """The loss of each of a stack of MLPs 16-12-10."""
    first, second, bias, last_bias = values
    hidden = (X[images] @ first.mT + bias.unsqueeze(1)).relu()
    logits = hidden @ second.mT + last_bias.unsqueeze(1)
    target = TARGET[images].expand(len(first), -1)
    return cross_entropy(logits.mT, target, reduction="none").mean(1)


def networks(count: int) -> list[WeightGraph]:
    """MLPs after 0 to 40 steps of training, with their gradients as a second channel."""
    shapes = [(12, 16), (10, 12), (12,), (10,)]
    values = [torch.randn(count, *s).div(s[-1] ** 0.5).requires_grad_() for s in shapes]
    stop = torch.randint(40, (count,))
    for step in range(41):
        batch = SEEN[torch.randint(len(SEEN), (64,))]
        gradients = torch.autograd.grad(losses(values, batch).sum(), values)
        if step == 40:  # The gradients at the weights that are kept.
            break
        for value, gradient in zip(values, gradients, strict=True):
            rates = (step < stop).float().view(-1, *[1] * (value.dim() - 1))
            value.data -= 0.3 * rates * gradient
    graphs = []
    for i in range(count):
        weights = {key: v[i].detach() for key, v in zip(KEYS, values, strict=True)}
        channels = {"gradient": {key: g[i] for key, g in zip(KEYS, gradients, strict=True)}}
        graphs.append(from_state_dict(weights, channels=channels))
    return graphs


def stacked(batch: Batch, features: WeightFeatures, channel: int) -> list[Tensor]:
    """One channel of all networks of a batch, in the order of `KEYS`."""
    (first, second), n = batch.spec.weights, len(batch)
    return [
        features.weights[first.key][..., channel].view(n, 12, 16),
        features.weights[second.key][..., channel].view(n, 10, 12),
        features.neurons[first.target][..., channel].view(n, 12),
        features.neurons[second.target][..., channel].view(n, 10),
    ]


def after_step(model: EquivariantNFN, batch: Batch, images: Tensor) -> Tensor:
    """The loss of every network after the step that the model predicts."""
    now, step = stacked(batch, batch.features(), 0), stacked(batch, model(batch).unfold(), 0)
    return losses([value + 0.1 * change for value, change in zip(now, step, strict=True)], images)


if __name__ == "__main__":
    torch.manual_seed(0)
    train, test = networks(300), networks(100)
    model = NFN(train[0].spec, (16, 1), in_channels=2, standardize=True, act="SiLU")
    model.standardize.fit(train)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(20):
        for batch in DataLoader(train, batch_size=25, shuffle=True):
            optimizer.zero_grad()
            after_step(model, batch, SEEN[torch.randint(len(SEEN), (128,))]).mean().backward()
            optimizer.step()

    with torch.no_grad():
        (batch,) = DataLoader(test, batch_size=len(test))
        now, gradients = (stacked(batch, batch.features(), channel) for channel in (0, 1))
        rates = torch.logspace(-3, 1, 40)
        pairs = list(zip(now, gradients, strict=True))
        descent = [losses([v - r * g for v, g in pairs], UNSEEN).mean() for r in rates]
        print(f"no step: loss {losses(now, UNSEEN).mean():.3f}")
        print(f"gradient descent, best of {len(rates)} rates: loss {min(descent):.3f}")
        print(f"learned step: loss {after_step(model, batch, UNSEEN).mean():.3f}")
