"""Small imitations of published zoos, file by file, from networks with known outputs."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What metrics.csv.gz of the Small CNN Zoo has, in its order.
METRICS = [
    "config.activation",
    "config.b_init",
    "config.dataset",
    "config.dnn_architecture",
    "config.dropout",
    "config.epochs",
    "config.epochs_between_checkpoints",
    "config.init_std",
    "config.l2reg",
    "config.learning_rate",
    "config.num_layers",
    "config.num_units",
    "config.optimizer",
    "config.random_seed",
    "config.train_fraction",
    "config.w_init",
    "modeldir",
    "step",
    "test_accuracy",
    "test_loss",
    "train_accuracy",
    "train_loss",
]
# layout.csv of the Small CNN Zoo, byte for byte.
LAYOUT = """varname,start_idx,end_idx,shape
sequential/conv2d/bias:0,0,16,"(16,)"
sequential/conv2d/kernel:0,16,160,"(3, 3, 1, 16)"
sequential/conv2d_1/bias:0,160,176,"(16,)"
sequential/conv2d_1/kernel:0,176,2480,"(3, 3, 16, 16)"
sequential/conv2d_2/bias:0,2480,2496,"(16,)"
sequential/conv2d_2/kernel:0,2496,4800,"(3, 3, 16, 16)"
sequential/dense/bias:0,4800,4810,"(10,)"
sequential/dense/kernel:0,4810,4970,"(16, 10)"
"""


@dataclass
class Imitation:
    """A zoo on the disk and what its networks compute.

    Attributes:
        path: Its folder.
        inputs: What the networks are run on.
        networks: The published networks, by the file or record that they are in.
    """

    path: Path
    inputs: Tensor
    networks: dict[Any, nn.Module] = field(default_factory=dict)

    def outputs(self, name: Any) -> Tensor:
        """What a network computes, in float64."""
        with torch.no_grad():
            return self.networks[name].double()(self.inputs)


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A network with random weights, biases among them, in float32 as zoos keep it."""
    torch.manual_seed(seed)
    network = build()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network.eval()


# -- Small CNN Zoo ---------------------------------------------------------------------------


class GrayCnn(nn.Module):
    """The network of the Small CNN Zoo."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 16, 3, stride=2) for i in (1, 16, 16))
        self.d = nn.Linear(16, 10)
        self.activation = {"relu": torch.relu, "tanh": torch.tanh}[activation]

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = self.activation(layer(x))
        return self.d(x.mean((2, 3)))


def small_cnn_zoo(path: Path, steps: Sequence[int]) -> Imitation:
    """One network per step, as rows of one matrix."""
    path.mkdir(parents=True)
    zoo = Imitation(path, torch.randn(2, 1, 28, 28, dtype=torch.float64))
    weights = np.zeros((len(steps), 4970), np.float32)
    records = []
    for i, step in enumerate(steps):
        activation = ("relu", "tanh")[i % 2]
        network = seeded(i, lambda a=activation: GrayCnn(a))  # type: ignore[misc]
        parts = []
        for layer in (network.a, network.b, network.c, network.d):
            kernel = layer.weight.detach()
            # TensorFlow keeps (height, width, in, out) and (in, out).
            kernel = kernel.permute(2, 3, 1, 0) if kernel.dim() == 4 else kernel.T
            parts += [layer.bias.detach().flatten(), kernel.flatten()]
        weights[i] = torch.cat(parts).numpy()
        zoo.networks[i] = network
        record = dict.fromkeys(METRICS, "0.5") | {
            "config.activation": activation,
            "config.dataset": "cifar10",
            "modeldir": f"/models/{i}, again",
            "step": str(step),
            "test_accuracy": str(0.1 + i / 1000),
        }
        records.append(record)
    np.save(path / "weights.npy", weights)
    (path / "layout.csv").write_text(LAYOUT)
    with gzip.open(path / "metrics.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, METRICS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return zoo


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


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def _coordinates() -> Tensor:
    return torch.rand(20, 2, dtype=torch.float64) * 2 - 1


def dws_mnist(path: Path) -> Imitation:
    """Folders named by set, label and image; validation is known to a JSON file above only."""
    zoo = Imitation(path, _coordinates())
    places = [("training", 5, 0), ("training", 0, 10), ("training", 4, 2), ("testing", 7, 0)]
    for i, (name, label, image) in enumerate(places):
        file = f"mnist_png_{name}_{label}_{image}/checkpoints/model_final.pth"
        zoo.networks[file] = seeded(i, DwsInr)
        _save(path / file, zoo.networks[file].state_dict())
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
        _save(path / file, {**zoo.networks[file].state_dict(), "label": i})
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
        _save(path / file, zoo.networks[file].state_dict())
    return zoo
