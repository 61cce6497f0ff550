"""The INR classifier of the paper, ours and that of `nfn`, and the data for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from nfn.layers import IOSinusoidalEncoding, NPLinear, NPPool, TupleOp
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader

from harness.cases import Case, random_tensors
from nfn_graph import NFN, DataLoader, WeightGraph

CLASSES = 10


def our_step(case: Case, networks: int, device: torch.device, **options: Any) -> Step:
    """Returns a training step of our classifier, including the batches from the loader."""
    graphs = []
    for i in range(networks):
        graph = WeightGraph.from_tensors(*random_tensors(case.sizes, case.kernels))
        graph.y = i % CLASSES
        graphs.append(graph)
    width = case.channels
    model = NFN(
        graphs[0].spec,
        (width,) * 3,
        out_features=CLASSES,
        head=(1000,),
        io_encoding="sinusoidal",
        **options,
    ).to(device)
    loader = DataLoader(graphs, batch_size=case.batch, shuffle=True)
    batches = forever(loader)

    def predict() -> tuple[Tensor, Tensor]:
        batch = next(batches).to(device)
        return model(batch), batch.y

    return Step(model, predict)


def nfn_step(case: Case, networks: int, device: torch.device) -> Step:
    """Returns a training step of the same classifier in `nfn`."""
    data = [(random_tensors(case.sizes, case.kernels), i % CLASSES) for i in range(networks)]
    weights, biases = data[0][0]
    like = WeightSpaceFeatures([w[None, None] for w in weights], [b[None, None] for b in biases])
    spec = network_spec_from_wsfeat(like)
    encoding = IOSinusoidalEncoding(spec, enc_layers=False)
    width, layers = encoding.num_out_chan(1), []
    for _ in range(3):
        layers += [NPLinear(spec, width, case.channels), TupleOp(nn.ReLU())]
        width = case.channels
    model = nn.Sequential(
        encoding,
        *layers,
        NPPool(spec),
        nn.Flatten(),
        nn.Linear(NPPool.get_num_outs(spec) * width, 1000),
        nn.ReLU(),
        nn.Linear(1000, CLASSES),
    ).to(device)
    batches = forever(TorchDataLoader(data, batch_size=case.batch, shuffle=True))  # type: ignore[arg-type]

    def predict() -> tuple[Tensor, Tensor]:
        (weights, biases), labels = next(batches)
        features = WeightSpaceFeatures(
            [w.unsqueeze(1).to(device) for w in weights],
            [b.unsqueeze(1).to(device) for b in biases],
        )
        return model(features), labels.to(device)

    return Step(model, predict)


class Step:
    """A training step: forward, backward and update.

    Args:
        model: The model to train.
        predict: Function that takes the next batch and returns its logits and labels.
    """

    def __init__(self, model: nn.Module, predict: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.predict = predict
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def __call__(self) -> Tensor:
        """Makes a step and returns the loss."""
        self.optimizer.zero_grad()
        logits, labels = self.predict()
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of all epochs."""
    while True:
        yield from loader
