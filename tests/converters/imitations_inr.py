"""Small imitations of published zoos of INRs, file by file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import torch
from imitations import Imitation, save, seeded
from torch import Tensor, nn

# -- INRs ------------------------------------------------------------------------------------


class DwsLayer(nn.Linear):
    """A layer of DWSNets' INRs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * super().forward(x))


class DwsInr(nn.Module):
    """An INR of DWSNets: keys `seq.{i}.{weight,bias}`."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(DwsLayer(2, 32), DwsLayer(32, 32), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.seq(x) + 0.5


class NfnLayer(nn.Module):
    """A layer of NFN's INRs, whose weights lie one level deeper."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


class NfnInr(nn.Module):
    """An INR of NFN: keys `net.{0,1}.linear.*` and `net.2.*`."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(NfnLayer(2, 32), NfnLayer(32, 32), nn.Linear(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _coordinates() -> Tensor:
    return torch.rand(20, 2, dtype=torch.float64) * 2 - 1


def dws_mnist(path: Path) -> Imitation:
    """Folders named by set, label and image; validation is known to a JSON file above only."""
    zoo = Imitation(path, _coordinates())
    places = [("training", 5, 0), ("training", 0, 10), ("training", 4, 2), ("testing", 7, 0)]
    for i, (name, label, image) in enumerate(places):
        file = f"mnist_png_{name}_{label}_{image}/checkpoints/model_final.pth"
        zoo.networks[file] = seeded(i, DwsInr)
        save(path / file, zoo.networks[file].state_dict())
    first, second, third, test = (f"elsewhere/mnist-inrs/{file}" for file in zoo.networks)
    splits = {
        "train": {"path": [third, first], "label": ["4", "5"]},
        "val": {"path": [second], "label": ["0"]},
        "test": {"path": [test], "label": ["7"]},
    }
    (path.parent / "mnist_splits.json").write_text(json.dumps(splits))
    return zoo


def dws_fashion(path: Path) -> Imitation:
    """Files with a label inside, and lists of paths in splits.json."""
    zoo = Imitation(path, _coordinates())
    files = [f"train/model_{i}.pth" for i in (2, 10, 7)] + ["test/model_3.pth"]
    for i, file in enumerate(files):
        zoo.networks[file] = seeded(10 + i, DwsInr)
        save(path / file, {**zoo.networks[file].state_dict(), "label": i})
    there = [f"/data/fmnist_inrs/{file}" for file in files]
    splits = {"train": [there[2], there[0]], "val": [there[1]], "test": [there[3]]}
    (path / "splits.json").write_text(json.dumps(splits))
    return zoo


def nfn_inrs(path: Path, outputs: int) -> Imitation:
    """Images on both sides of the published split points, some fitted again."""
    zoo = Imitation(path, _coordinates())
    files = [
        "randinit_smaller_3s/net0.pth",
        "randinit_smaller_3s/net44999.pth",
        "randinit_smaller_5s/net45000.pth",
        "randinit_smaller_5s/net49999.pth",
        "randinit_smaller_0s/net50000.pth",
        "randinit_smaller_aug0_3s/net44999.pth",
        "randinit_smaller_aug0_5s/net45000.pth",
        "randinit_smaller_aug12_3s/net0.pth",
    ]
    for i, file in enumerate(files):
        zoo.networks[file] = seeded(20 + i, lambda: NfnInr(outputs))
        save(path / file, zoo.networks[file].state_dict())
    return zoo


# -- inr2vec ---------------------------------------------------------------------------------


class ShapeInr(nn.Module):
    """A network of inr2vec: sines in all layers but the last."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        widths = [3, *[width] * hidden, 1]
        pairs = pairwise(widths)
        self.mlp = nn.ModuleList(nn.Linear(i, o) for i, o in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.mlp[:-1]:
            x = torch.sin(30 * layer(x))
        return self.mlp[-1](x)


def inr2vec(path: Path, width: int = 16, hidden: int = 4, train: int = 11) -> Imitation:
    """Vectors of parameters with a mesh beside them."""
    zoo = Imitation(path, torch.rand(20, 3, dtype=torch.float64) * 2 - 1)
    sizes = {"train": train, "val": 2, "test": 1}
    for split, count in sizes.items():
        (path / split).mkdir(parents=True)
        for i in range(count):
            name = f"{split}/{i}.h5"
            network = zoo.networks[name] = seeded(30 + i, lambda: ShapeInr(width, hidden))
            params = torch.cat([p.detach().flatten() for p in network.parameters()])
            with h5py.File(path / name, "w") as file:
                file.create_dataset("vertices", data=np.zeros((5, 3), np.float32))
                file.create_dataset("num_vertices", data=np.int64(5))
                file.create_dataset("triangles", data=np.zeros((2, 3), np.int64))
                file.create_dataset("num_triangles", data=np.int64(2))
                file.create_dataset("params", data=params.numpy())
                file.create_dataset("class_id", data=np.int64(i + 7))
    return zoo
