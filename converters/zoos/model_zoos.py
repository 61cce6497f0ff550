"""The Model Zoos of Schürholt et al.: small CNNs with a checkpoint after every epoch.

    <trial>/checkpoint_000050/checkpoints   the state dict
    <trial>/params.json                     hyperparameters
    <trial>/result.json                     one line of accuracies per epoch

Published with ModelZoos/ModelZooDataset. The networks are its classes CNN, CNN2 and CNN3, which
differ in widths and kernels. The numbers in keys (`module_list.{i}`) depend on the dropout.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.files import (
    checkpoints_in,
    has_checkpoints,
    read_checkpoint,
    read_json,
    read_json_lines,
    state_dict_in,
)
from nfn_graph.converters.zoos.networks import Layer, make_plain_cnn, weight_layers
from nfn_graph.converters.zoos.splits import refuse_split_file
from nfn_graph.converters.zoos.zoo import Checkpoint, Network, Row, ZooDescription, ZooSource

_FILE = "checkpoints"
_KEY = re.compile(r"(module_list\.(\d+))\.(?:weight|bias)")
_METRICS = ("test_acc", "train_acc", "test_loss", "train_loss")
# The image size, and which convolutions are followed by pooling, for each choice of kernel sizes.
_SHAPES = {(5, 5, 2): (28, (True, True, False)), (3, 3, 3): (32, (True, True, True))}


def is_model_zoo(path: Path) -> bool:
    """Whether a folder holds trials with `checkpoint_*/checkpoints`."""
    return has_checkpoints(path, _FILE)


class ModelZooSource(ZooSource):
    """The files of one of the Model Zoos."""

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        refuse_split_file(path, split_file)
        self.path = path
        self._trial: tuple[Path, dict[int, Row], Row] | None = None
        self.rows = self._find()
        self.splits = published_splits([row["trial"] for row in self.rows])
        self.description = ZooDescription(
            layout="Model Zoo (Schürholt et al.)",
            kind="cnn",
            label="test_acc",
            splits="trials 70/15/15 in the order of random.Random(42) over their sorted names; "
            "the published order starts from that of a file system",
            assumptions=(
                "convolution, 2 x 2 max pooling, activation; no pooling after the third "
                "convolution of networks with 5 x 5 kernels; images of 28 x 28, or 32 x 32 for "
                "3 x 3 kernels",
            ),
        )

    def _find(self) -> list[Row]:
        epochs: dict[tuple[str, int], str] = {}
        for trial, folder in checkpoints_in(self.path, _FILE):
            epoch, path = int(folder.rsplit("_", 1)[1]), f"{trial}/{folder}/{_FILE}"
            first = epochs.setdefault((trial, epoch), path)
            if first != path:
                raise ConversionError(
                    f"Expected one checkpoint of epoch {epoch} in '{self.path / trial}' (got "
                    f"'{first}' and '{path}')"
                )
        return [
            {"path": epochs[trial, epoch], "trial": trial, "epoch": epoch}
            for trial, epoch in sorted(epochs)
        ]

    def details(self, index: int) -> Row:
        """Returns hyperparameters, and the metrics after the epoch."""
        row = self.rows[index]
        trial, epoch = self.path / row["trial"], row["epoch"]
        if self._trial is None or self._trial[0] != trial:
            # The checkpoints of a trial are read one after the other.
            results, params = _read_results(trial / "result.json"), _read_params(trial)
            self._trial = (trial, results, params)
        _, results, params = self._trial
        if epoch not in results and epoch >= min(results, default=0):
            raise ConversionError(
                f"Expected a line with training_iteration {epoch} in '{trial / 'result.json'}' "
                f"(got {len(results)} lines up to {max(results, default='none')})"
            )
        # Some zoos contain the initialisation, for which there are no metrics.
        measured = results.get(epoch, dict.fromkeys(_METRICS, math.nan))
        return {**{name: measured[name] for name in _METRICS}, "config": params}

    def read(self, index: int) -> Checkpoint:
        """Reads one checkpoint."""
        path = self.path / self.rows[index]["path"]
        tensors = state_dict_in(path, read_checkpoint(path))
        return Checkpoint(tensors, self.details(index))

    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns a CNN; the kernel sizes determine where it has pooling."""
        found: dict[int, str] = {}
        for key in tensors:
            layer = _KEY.fullmatch(key)
            if layer is None:
                raise ConversionError(
                    f"Expected the keys 'module_list.*' of a small CNN (got '{key}'). Other "
                    f"networks are read with load(path, arch=...)"
                )
            found[int(layer[2])] = layer[1]
        layers = weight_layers(tensors, [found[i] for i in sorted(found)])
        kernels = tuple(x.shape[2] for x in layers if len(x.shape) == 4)
        if kernels not in _SHAPES or len(layers) == len(kernels):
            raise ConversionError(
                f"Expected convolutions with kernels of sizes {' or '.join(map(str, _SHAPES))}, "
                f"then linear layers (got {[list(x.shape) for x in layers]})"
            )
        size, is_pooled = _SHAPES[kernels]
        pooled: tuple[Layer, ...] = tuple(
            layer._replace(is_pooled=is_pooled[i] if i < len(kernels) else False)
            for i, layer in enumerate(layers)
        )
        return make_plain_cnn(pooled, str(row["config"].get("model::nlin")), False, size)


def _read_results(path: Path) -> dict[int, Row]:
    """Reads the metrics by epoch."""
    found: dict[int, Row] = {}
    for number, line in read_json_lines(path):
        epoch = line.get("training_iteration")
        if not isinstance(epoch, int) or epoch in found:
            raise ConversionError(
                f"Expected a new training_iteration in line {number} of '{path}' (got {epoch!r})"
            )
        for name in _METRICS:
            if not isinstance(line.get(name), int | float):
                raise ConversionError(
                    f"Expected a number as {name} in line {number} of '{path}' (got "
                    f"{line.get(name)!r})"
                )
        found[epoch] = line
    return found


def _read_params(trial: Path) -> Row:
    path = trial / "params.json"
    found = read_json(path)
    if not isinstance(found, dict) or "model::nlin" not in found:
        raise ConversionError(
            f"Expected hyperparameters with 'model::nlin' in '{path}' (got {str(found)[:80]})"
        )
    return found


def published_splits(trials: Sequence[str]) -> dict[str, list[int]]:
    """Splits the trials 70/15/15, with all checkpoints of a trial in the same split."""
    order = sorted(set(trials))
    random.Random(42).shuffle(order)
    first = int(0.7 * len(order))
    second = first + int(0.15 * len(order))
    parts = {"train": order[:first], "validation": order[first:second], "test": order[second:]}
    indices: dict[str, list[int]] = {}
    for i, trial in enumerate(trials):
        indices.setdefault(trial, []).append(i)
    return {name: [i for trial in part for i in indices[trial]] for name, part in parts.items()}
