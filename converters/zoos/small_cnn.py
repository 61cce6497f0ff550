"""The Small CNN Zoo of Unterthiner et al.: one matrix of weights, one row per checkpoint.

    weights.npy      [checkpoints, weights], float32
    layout.csv       the columns of every TensorFlow tensor
    metrics.csv.gz   hyperparameters, step, accuracies
    *_split.csv      the order of the rows in which neural functionals are compared (optional)

Published in google-research/dnn_predict_accuracy. The rule for splits is that of the package
`nfn`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.checks import check_regular, complete
from nfn_graph.converters.keras.keys import KERNEL_ORDER
from nfn_graph.converters.zoos.files import read_table
from nfn_graph.converters.zoos.networks import make_plain_cnn, weight_layers
from nfn_graph.converters.zoos.zoo import Checkpoint, Network, Row, ZooDescription, ZooSource

FILES = ("weights.npy", "layout.csv", "metrics.csv.gz")
_LAYOUT = ("varname", "start_idx", "end_idx", "shape")
_METRICS = ("config.activation", "step", "test_accuracy")
_SHAPE = re.compile(r"\(\s*\d+\s*(,\s*\d+\s*)*,?\s*\)")
_VARIABLE = re.compile(r"(?:.*/)?([^/]+)/(kernel|bias):0")
#: The last training step. The published split uses only checkpoints of this step.
LAST_STEP = 86
# It only affects the shape of the last feature map, which is averaged.
_IMAGE_SIZE = 28


class Variable(NamedTuple):
    """A TensorFlow tensor: its name in PyTorch's terms, its columns, and its original shape."""

    key: str
    start: int
    stop: int
    shape: tuple[int, ...]


def is_small_cnn(path: Path) -> bool:
    """Whether a folder holds the files of this layout."""
    return any((path / name).is_file() for name in (FILES[0], FILES[2]))


class SmallCnnSource(ZooSource):
    """The files of a Small CNN Zoo."""

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        self.path = path
        for name in FILES:
            if not (path / name).is_file():
                raise FileNotFoundError(f"Expected '{name}' in '{path}' (got no such file)")
        self.variables = read_layout(path / "layout.csv")
        table = read_table(path / "metrics.csv.gz", _METRICS)
        self.rows = table
        self._weights: np.ndarray[Any, Any] | None = None
        self._check_weights()
        order_file = split_file or _order_file(path)
        order: Sequence[int] = range(len(table))
        rule = "in the order of the table, which is not the published one"
        if order_file is not None:
            order, rule = read_order(order_file, len(table)), f"in the order of '{order_file}'"
        self.splits = published_splits(order, table.columns["step"])
        self.description = ZooDescription(
            layout="Small CNN Zoo",
            kind="cnn",
            label="test_accuracy",
            splits=f"step {LAST_STEP}, {rule}; test: the second half; validation: a fifth of the "
            f"first half",
            assumptions=(
                "3 x 3 convolutions with stride 2 and without padding, each followed by the "
                "activation; then the mean over positions and a dense layer",
            ),
        )

    def __getstate__(self) -> dict[str, Any]:
        # A mapped file would be copied to other processes in full.
        return {**self.__dict__, "_weights": None}

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        """The matrix, mapped into memory."""
        if self._weights is None:
            file = check_regular(self.path / "weights.npy")
            with complete(file, ".npy file"):
                self._weights = np.lib.format.open_memmap(file, mode="r")
        return self._weights

    def _check_weights(self) -> None:
        file, weights = self.path / "weights.npy", self.weights
        expected = (len(self.rows), self.variables[-1].stop)
        if weights.shape != expected or weights.dtype != np.dtype("<f4"):
            raise ConversionError(
                f"Expected {expected[0]} rows as in metrics.csv.gz and {expected[1]} columns as "
                f"in layout.csv, of float32, in '{file}' (got shape {list(weights.shape)} of "
                f"{weights.dtype.str})"
            )
        end = getattr(weights, "offset", 0) + weights.nbytes
        if not weights.flags.c_contiguous or file.stat().st_size != end:
            raise ConversionError(
                f"Expected rows one after the other, {end} bytes in all, in '{file}' (got "
                f"{file.stat().st_size} bytes, or columns). It is truncated or damaged."
            )

    def name(self, index: int) -> str:
        """Names the row of the matrix."""
        return f"row {index} of '{self.path / 'weights.npy'}'"

    def read(self, index: int) -> Checkpoint:
        """Reads one row, split into tensors with PyTorch's axis order."""
        row = torch.from_numpy(np.array(self.weights[index]))
        tensors = {}
        for key, start, stop, shape in self.variables:
            tensor = row[start:stop].view(shape)
            tensors[key] = tensor.permute(KERNEL_ORDER[len(shape)]) if len(shape) > 1 else tensor
        return Checkpoint({key: x.contiguous() for key, x in tensors.items()}, {})

    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns a network of convolutions, a mean and a dense layer."""
        keys = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in tensors))
        layers = weight_layers(tensors, keys)
        strided = tuple(x._replace(stride=2) if len(x.shape) == 4 else x for x in layers)
        return make_plain_cnn(strided, str(row["config.activation"]), True, _IMAGE_SIZE)


def read_layout(path: Path) -> list[Variable]:
    """Reads the tensors of a row of the matrix, which they must fill without gaps."""
    variables: list[Variable] = []
    position = 0
    for number, row in enumerate(read_table(path, _LAYOUT), start=1):
        text, variable = str(row["shape"]), _VARIABLE.fullmatch(str(row["varname"]))
        shape = tuple(map(int, re.findall(r"\d+", text))) if _SHAPE.fullmatch(text) else ()
        start, stop = row["start_idx"], row["end_idx"]
        fits = start == position and isinstance(stop, int) and stop - start == math.prod(shape)
        dims = 0 if variable is None else {"kernel": len(shape), "bias": 1}[variable[2]]
        if variable is None or not fits or dims not in KERNEL_ORDER | {1: ()} or not shape:
            raise ConversionError(
                f"Expected a kernel or bias with one column per entry of its shape, starting at "
                f"column {position}, in record {number} of '{path}' (got {dict(row)})"
            )
        part = {"kernel": "weight", "bias": "bias"}[variable[2]]
        variables.append(Variable(f"{variable[1]}.{part}", start, stop, shape))
        position = stop
    found = {variable.key for variable in variables}
    layers = {key.rsplit(".", 1)[0] for key in found}
    if not found or found != {f"{x}.{part}" for x in layers for part in ("weight", "bias")}:
        raise ConversionError(
            f"Expected a kernel and a bias for every layer in '{path}' (got {sorted(found)})"
        )
    return variables


def _order_file(path: Path) -> Path | None:
    files = sorted(path.glob("*_split.csv"))
    if len(files) > 1:
        raise ConversionError(
            f"Expected one file *_split.csv in '{path}' (got {', '.join(f.name for f in files)}). "
            f"Pass one of them as split_file"
        )
    return files[0] if files else None


def read_order(path: Path, count: int) -> list[int]:
    """Reads the order of the rows, with one number per line.

    The published files begin with a header line `0`, which the published code reads as a row
    number, so row 0 occurs twice. We do the same to obtain the splits of the published results.
    """
    order = []
    text = check_regular(path).read_text("utf-8", "replace")
    for number, line in enumerate(text.split(), start=1):
        if not line.isdecimal() or int(line) >= count:
            raise ConversionError(
                f"Expected the number of one of {count} rows in line {number} of '{path}' (got "
                f"'{line[:40]}')"
            )
        order.append(int(line))
    rows = order[1:] if len(order) == count + 1 and order[:1] == [0] else order
    if len(rows) != count or len(set(rows)) != count:
        raise ConversionError(
            f"Expected each of {count} rows once in '{path}' (got {len(order)} numbers, "
            f"{len(set(rows))} different). The file is damaged, or belongs to another zoo"
        )
    return order


def published_splits(order: Sequence[int], steps: Sequence[int]) -> dict[str, list[int]]:
    """Splits the last checkpoints: the second half for testing, the first half shuffled 80/20."""
    final = [i for i in order if steps[i] == LAST_STEP]
    half = len(final) // 2
    first = list(range(half))
    random.Random(0).shuffle(first)
    cut = int(0.8 * half)
    return {
        "train": [final[i] for i in first[:cut]],
        "validation": [final[i] for i in first[cut:]],
        "test": final[half:],
    }
