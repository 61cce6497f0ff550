"""Graphs for stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import checkpoints
import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters import from_module, from_state_dict
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.transforms import GrowKernels


class Residual(nn.Module):
    """A weight around a layer, and two layers that share a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Linear(a, b) for a, b in ((3, 4), (4, 6), (6, 4), (4, 2))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the block makes to what it reads."""
        x = self.first(x)
        return self.last(x + self.down(torch.relu(self.up(x))))


def signalling(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The NaNs have bits that a cast by the processor would change."""
    found = {key: tensor.clone() for key, tensor in tensors.items()}
    first = next(iter(found.values()))
    first.view(torch.int32).flatten()[0] = 0x7F800001
    return found


def graphs() -> dict[str, WeightGraph]:
    """One network of every kind that a store must keep."""
    torch.manual_seed(0)
    mlp = checkpoints.mlp().state_dict()
    mixed = {key: x.half() if "2." in key else x for key, x in mlp.items()}
    buffers = {**mlp, "extra": torch.arange(3, dtype=torch.uint8), "note": "text"}
    channels = {"mask": {k: x > 0 for k, x in mlp.items()}, "grad": {"0.bias": torch.ones(5)}}
    labelled = from_state_dict(mlp)
    labelled.y = torch.tensor([3.0])
    labelled.name = ("a", 1)
    labelled["hidden1"].score = torch.rand(5)
    convolution = from_module(checkpoints.cnn(), example_input=torch.empty(1, 2, 9, 9))
    kernels = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    return {
        "mlp": from_state_dict(mlp),
        "signalling": from_state_dict(signalling(mlp)),
        "without biases": from_state_dict({k: x for k, x in mlp.items() if "weight" in k}),
        "deep": from_state_dict(checkpoints.mlp((3, 4, 4, 4, 2)).state_dict()),
        "wide": from_state_dict(checkpoints.mlp((3, 9, 4, 2)).state_dict()),
        "double": from_state_dict(checkpoints.mlp(dtype=torch.float64).state_dict()),
        "two types": from_state_dict(mixed),
        "buffers": from_state_dict(buffers),
        "channels": from_state_dict(mlp, channels=channels),
        "labels": labelled,
        "convolution": convolution,
        "residual": from_module(Residual(), example_input=torch.empty(1, 3)),
        "transformed": GrowKernels((3, 3))(
            from_state_dict(kernels.state_dict(), example_input=torch.empty(1, 2, 9, 9))
        ),
    }


def write_store(folder: Path, networks: Sequence[WeightGraph], shard_size: int = 4) -> Path:
    """A store of graphs, with a number and a half for each."""
    writer = StoreWriter(folder, {})
    for begin in range(0, len(networks), shard_size):
        part = networks[begin : begin + shard_size]
        rows = ({"number": begin + i, "half": (begin + i) / 2} for i in range(len(part)))
        writer.publish(f"{begin:05d}", zip(rows, part, strict=True))
    return folder
