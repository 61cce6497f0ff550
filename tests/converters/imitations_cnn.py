"""Small imitations of published zoos of CNNs, file by file."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from imitations import Imitation, save, seeded
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


# -- Model Zoos ------------------------------------------------------------------------------


class ZooCnn(nn.Module):
    """A network of the Model Zoos: its layers in a list, in the order of the published code."""

    def __init__(self, widths: tuple[int, ...], kernels: tuple[int, ...], nlin: str, dropout: bool):
        super().__init__()
        act = {"tanh": nn.Tanh, "gelu": nn.GELU, "relu": nn.ReLU, "leakyrelu": nn.LeakyReLU}[nlin]
        is_large = kernels == (3, 3, 3)
        layers: list[nn.Module] = []
        for i, kernel in enumerate(kernels):
            layers.append(nn.Conv2d(widths[i], widths[i + 1], kernel))
            if i < 2 or is_large:
                layers.append(nn.MaxPool2d(2, 2))
            layers.append(act())
            if dropout and (i < 2 or is_large):
                layers.append(nn.Dropout(0.5))
        positions = 4 if is_large else 9
        layers += [nn.Flatten(), nn.Linear(positions * widths[-1], 20), act()]
        if dropout:
            layers.append(nn.Dropout(0.5))
        self.module_list = nn.ModuleList([*layers, nn.Linear(20, 10)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.module_list:
            x = layer(x)
        return x


def model_zoo(path: Path, kind: str = "CNN", trials: int = 8, dropout: bool = False) -> Imitation:
    """Trials with checkpoints of some epochs, and a line of results for every epoch."""
    widths, kernels, size = {
        "CNN": ((1, 8, 6, 4), (5, 5, 2), 28),
        "CNN2": ((3, 6, 9, 6), (5, 5, 2), 28),
        "CNN3": ((3, 16, 32, 15), (3, 3, 3), 32),
    }[kind]
    zoo = Imitation(path, torch.randn(2, widths[0], size, size, dtype=torch.float64))
    for i in range(trials):
        nlin = ("tanh", "gelu", "relu", "leakyrelu")[i % 4]
        trial = path / f"NN_tune_trainable_{i:05d}_seed={i}"
        config = {"model::type": kind, "model::nlin": nlin, "seed": i, "optim::lr": 0.001}
        for epoch in (0, 3):
            name = f"{trial.name}/checkpoint_{epoch:06d}/checkpoints"
            network = seeded(50 + i + epoch, lambda a=nlin: ZooCnn(widths, kernels, a, dropout))  # type: ignore[misc]
            zoo.networks[name] = network
            save(path / name, network.state_dict())
        (trial / "params.json").write_text(json.dumps(config))
        lines = [
            {
                "train_loss": 1.0,
                "train_acc": 0.5,
                "test_loss": 1.5,
                "test_acc": i / 10 + epoch / 100,
                "training_iteration": epoch,
                "config": config,
            }
            for epoch in range(4)
        ]
        (trial / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.json").write_text("{}")
    return zoo


# -- CNN Wild Park ---------------------------------------------------------------------------


class ParkNet(nn.Module):
    """A network of the CNN Wild Park, with the addition in place as in the published code."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        pairs = pairwise(config["channels"])
        self.layers = nn.ModuleList(
            nn.Conv2d(i, o, kernel, stride=1, padding=kernel // 2)
            for (i, o), kernel in zip(pairs, config["kernel_size"], strict=True)
        )
        self.fc = nn.Linear(config["channels"][-1], config["n_classes"])

    def forward(self, x: Tensor) -> Tensor:
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": torch.relu,
            "gelu": nn.functional.gelu,
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
            "leaky_relu": nn.functional.leaky_relu,
        }
        outputs: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer(x)
            source = self.config["residual"][i]
            if source > -1:
                c = min(outputs[source].shape[1], x.shape[1])
                x = x.clone()
                x[:, :c] += outputs[source][:, :c]
            x = functions[self.config["activation"][i]](x)
            outputs[i] = x
        return self.fc(x.mean((2, 3)))


def park_config(channels: list[int], kernels: list[int], residual: list[int]) -> dict[str, Any]:
    """The architecture of a network of the Wild Park."""
    names = ["gelu", "leaky_relu", "tanh", "sigmoid", "relu"]
    return {
        "n_layers": len(kernels),
        "n_classes": 10,
        "channels": [3, *channels],
        "kernel_size": kernels,
        "stride": [1] * len(kernels),
        "padding": [kernel // 2 for kernel in kernels],
        "residual": residual,
        "activation": names[: len(kernels)],
    }


# Wider and narrower sources, sources of sources, one source twice, no residuals at all, and two
# layers in a row with one source: their kernel leads from neurons to themselves.
PARK = [
    park_config([8, 16, 4, 8], [3, 5, 7, 3], [-1, -1, 0, 1]),
    park_config([4, 8, 16, 32, 8], [3, 3, 5, 3, 7], [-1, -1, 0, 1, 0]),
    park_config([8, 4, 8], [5, 3, 3], [-1, -1, 0]),
    park_config([16, 8], [7, 3], [-1, -1]),
    park_config([4, 16, 8], [3, 5, 3], [-1, -1, -1]),
    park_config([8, 4, 16, 8], [3, 5, 3, 3], [-1, -1, 0, 0]),
]


def wild_park(path: Path) -> Imitation:
    """Runs with checkpoints whose configuration is plain, as in a converted copy."""
    zoo = Imitation(path, torch.randn(2, 3, 12, 12, dtype=torch.float64))
    files, scores, steps = [], [], []
    for i, config in enumerate(PARK):
        for step in (10, 20) if i < 2 else (20,):
            name = f"NN_tune_trainable_{i:05d}/checkpoint_{step:06d}/checkpoint.pt"
            network = zoo.networks[name] = seeded(80 + i + step, lambda c=config: ParkNet(c))  # type: ignore[misc]
            optimizer = torch.optim.Adam(network.parameters())
            content = {
                "model": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "config": config,
                "last_result": {"test/acc": i / 10 + step / 100, "test/loss": 1.0},
                "iteration": step,
            }
            save(path / name, content)
            files.append(f"cifar10_zooV2/{name}")
            scores.append(i / 10 + step / 100)
            steps.append(step)
    parts = {"train": [6, 0, 3, 1], "val": [2], "test": [5, 4, 7]}
    splits = {
        split: {
            "path": [files[i] for i in part],
            "score": [scores[i] for i in part],
            "step": [steps[i] for i in part],
        }
        for split, part in parts.items()
    }
    (path.parent / "cnn_park_splits.json").write_text(json.dumps(splits))
    return zoo
