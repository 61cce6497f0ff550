"""The CNN Wild Park of Kofinas et al.: CNNs of many depths, widths, kernels and skips.

    <run>/checkpoint_000010/checkpoint.pt   `model`, `config`, `last_result`, `iteration`

Published with mkofinas/neural-graphs. Layer `i` may add the activations of an earlier layer
`residual[i]` to its own outputs. If the two have different numbers of channels, only the first
channels that both have are added, and the layers are split into neurons that are tied and neurons
that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.files import (
    CheckpointReader,
    checkpoints_in,
    has_checkpoints,
    plain,
    state_dict_in,
)
from nfn_graph.converters.zoos.networks import ACTIVATIONS, activation_of
from nfn_graph.converters.zoos.splits import find_split_file, read_splits
from nfn_graph.converters.zoos.zoo import Checkpoint, Network, Row, ZooDescription, ZooSource

_FILE = "checkpoint.pt"
_SPLIT_FILE = "cnn_park_splits.json"
# It only affects the positions of the last feature map, which are averaged.
_IMAGE_SIZE = 32
_ASK = (
    "Save a copy with plain values: checkpoint['config'] = "
    "OmegaConf.to_container(checkpoint['config'])"
)


@dataclass(frozen=True)
class ParkConfig:
    """The architecture of one network, as described in its file."""

    n_layers: int
    n_classes: int
    channels: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    residual: tuple[int, ...]
    activation: tuple[str, ...]

    def __post_init__(self) -> None:
        per_layer = (self.kernel_size, self.stride, self.padding, self.residual, self.activation)
        lengths = [len(self.channels) - 1, *map(len, per_layer)]
        numbers = (self.n_classes, *self.channels, *self.kernel_size, *self.stride)
        if self.n_layers < 1 or set(lengths) != {self.n_layers} or min(numbers) < 1:
            raise ConversionError(f"Expected sizes of {self.n_layers} layers (got {self})")
        for layer, source in enumerate(self.residual):
            if source >= layer or min(self.padding) < 0:
                raise ConversionError(
                    f"Expected layer {layer} to add an earlier one or -1 (got {self})"
                )
        for name in self.activation:
            activation_of(name)


class ParkCnn(nn.Module):
    """A network of the Wild Park."""

    def __init__(self, config: ParkConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.layers = nn.ModuleList(
            nn.Conv2d(
                channels[i],
                channels[i + 1],
                config.kernel_size[i],
                stride=config.stride[i],
                padding=config.padding[i],
            )
            for i in range(config.n_layers)
        )
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels[-1], config.n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits `[batch, classes]` of images `[batch, channels, height, width]`."""
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            source = self.config.residual[i]
            if source >= 0:
                x = add_first_channels(x, kept[source], *self._sizes(i, source))
            x = ACTIVATIONS[self.config.activation[i]](x)
            kept.append(x)
        return self.fc(self.flatten(self.global_pool(x)))

    def _sizes(self, layer: int, source: int) -> tuple[int, int]:
        return self.config.channels[layer + 1], self.config.channels[source + 1]


def add_first_channels(x: Tensor, other: Tensor, size: int, other_size: int) -> Tensor:
    """Adds the first channels that both have; the other channels of `x` stay unchanged.

    Args:
        x: Maps `[batch, channels, ...]`.
        other: Maps of the same positions.
        size: The number of channels of `x`.
        other_size: The number of channels of `other`.
    """
    shared = min(size, other_size)
    if other_size > shared:
        other = other[:, :shared]
    if size == shared:
        return x + other
    return torch.cat([x[:, :shared] + other, x[:, shared:]], dim=1)


@lru_cache(maxsize=256)
def make_park_cnn(config: ParkConfig) -> Network:
    """Creates the network on the meta device; all checkpoints of a run share it."""
    with torch.device("meta"):
        example = torch.empty(1, config.channels[0], _IMAGE_SIZE, _IMAGE_SIZE)
        return Network(ParkCnn(config), example)


def is_wild_park(path: Path) -> bool:
    """Whether a folder holds runs with `checkpoint_*/checkpoint.pt`."""
    return has_checkpoints(path, _FILE)


class WildParkSource(ZooSource):
    """The files of a CNN Wild Park."""

    unsplit = f"The runs were split at random: pass the published {_SPLIT_FILE} as split_file"

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        self.path = path
        self._reader = CheckpointReader()
        rows: list[Row] = [
            {"path": f"{run}/{folder}/{_FILE}", "run": run}
            for run, folder in checkpoints_in(path, _FILE)
        ]
        self.rows = rows
        file = find_split_file(path, (_SPLIT_FILE,), split_file)
        self.splits = {}
        if file is not None:
            splits = read_splits(file, [row["path"] for row in rows])
            self.splits = splits.indices
            for column, name in (("score", "test/acc"), ("step", "iteration")):
                for at, value in splits.columns.get(column, {}).items():
                    rows[at][name] = value
        self.description = ZooDescription(
            layout="CNN Wild Park",
            kind="cnn",
            label="test/acc",
            splits=f"'{file}'" if file else f"none without {_SPLIT_FILE}",
        )

    def details(self, index: int) -> Row:
        """Returns architecture and accuracy, for which the file is opened."""
        return self.read(index).details

    def read(self, index: int) -> Checkpoint:
        """Reads one checkpoint."""
        path, row = self.path / self.rows[index]["path"], self.rows[index]
        content = self._reader.read(path)
        model = content.get("model")
        if not isinstance(model, Mapping):
            raise ConversionError(
                f"Expected a state dict under 'model' in '{path}' (got {list(content)})"
            )
        result = plain(content.get("last_result"))
        measured = {
            "test/acc": result.get("test/acc") if isinstance(result, dict) else None,
            "iteration": content.get("iteration"),
        }
        for name, value in measured.items():
            if not isinstance(value, int | float) or row.get(name, value) != value:
                raise ConversionError(
                    f"Expected {name} {row.get(name, 'as a number')} in '{path}' (got {value})"
                )
        config = _config(path, content.get("config"))
        return Checkpoint(state_dict_in(path, model), {**measured, "config": config})

    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns the network with the architecture of a checkpoint."""
        config: dict[str, Any] = row["config"]
        hashable = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
        return make_park_cnn(ParkConfig(**cast(dict[str, Any], hashable)))


def _config(path: Path, content: Any) -> dict[str, Any]:
    """Returns the architecture as plain values after checking their types."""
    found = plain(content)
    kinds = ParkConfig.__annotations__
    if not isinstance(found, dict) or set(found) != set(kinds):
        got = list(found) if isinstance(found, dict) else type(found).__name__
        raise ConversionError(
            f"Expected 'config' in '{path}' to hold {', '.join(kinds)} (got {got}). {_ASK}"
        )
    for name, kind in kinds.items():
        values = found[name] if isinstance(found[name], list) else [found[name]]
        is_right = isinstance(found[name], list) == ("tuple" in kind)
        wanted = str if "str" in kind else int
        if not is_right or not all(type(value) is wanted for value in values):
            raise ConversionError(
                f"Expected {name} in 'config' of '{path}' as {kind} (got {found[name]!r}). {_ASK}"
            )
    return found
