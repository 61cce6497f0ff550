"""HNP against NP: does the order of the inputs and outputs of a network mean something?

MLPs are trained on digits, each without the images of one class. Which one was it? NP may permute
the output neurons too, so that without an encoding of inputs and outputs it cannot tell classes
apart, however it is trained. With one it can, more slowly. HNP keeps the order of both, at the
price of more parameters.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

from nfn_graph import NFN, DataLoader, WeightGraph


def train_mlps(count: int, width: int = 8, steps: int = 60) -> list[WeightGraph]:
    """MLPs 16-width-10 on digits of 4 x 4 pixels, all at once; `y` is the class never seen."""
    digits = load_digits()
    x = avg_pool2d(torch.tensor(digits.images, dtype=torch.float32), 2).flatten(1) / 8 - 1
    target = torch.tensor(digits.target)
    missing = torch.randint(10, (count,))
    shapes = [(width, 16), (10, width), (1, width), (1, 10)]
    values = [torch.randn(count, *s).div(s[-1] ** 0.5).requires_grad_() for s in shapes]
    optimizer = torch.optim.Adam(values, 0.01)
    for _ in range(steps):
        i = torch.randint(len(x), (64,))
        first, second, bias, last_bias = values
        logits = (x[i] @ first.mT + bias).relu() @ second.mT + last_bias
        losses = cross_entropy(logits.mT, target[i].expand(count, -1), reduction="none")
        optimizer.zero_grad()
        (losses * (target[i] != missing[:, None])).sum().backward()
        optimizer.step()
    graphs = []
    for i in range(count):
        first, second, bias, last_bias = (value[i].detach() for value in values)
        graph = WeightGraph.from_tensors([first, second], [bias[0], last_bias[0]])
        graph.y = missing[i : i + 1]
        graphs.append(graph)
    return graphs


def fit(model: nn.Module, train: list[WeightGraph], test: list[WeightGraph]) -> float:
    """Trains a model; returns the share of the other networks whose class it finds."""
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(10):
        for batch in DataLoader(train, batch_size=25, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(model(batch), batch.y).backward()
            optimizer.step()
    with torch.no_grad():
        (batch,) = DataLoader(test, batch_size=len(test))
        return (model(batch).argmax(-1) == batch.y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    graphs = train_mlps(400)
    spec, train, test = graphs[0].spec, graphs[:300], graphs[300:]
    models = {
        "NP": {},
        "NP with IO-encoding": {"io_encoding": "sinusoidal"},
        "HNP": {"symmetry": "hnp"},
    }
    for name, options in models.items():
        options = {"out_features": 10, "head": (64,), "act": "SiLU", **options}
        model = NFN(spec, (16, 16), standardize=True, **options)
        model.standardize.fit(train)
        size = sum(p.numel() for p in model.parameters())
        print(f"{name}: found {fit(model, train, test):.2f} of the classes, {size:,} parameters")
