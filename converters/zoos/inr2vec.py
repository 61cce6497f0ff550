"""The INRs of inr2vec (De Luigi et al.): shapes as sine networks, flattened into vectors.

    {train,val,test}/{i}.h5   `params` and `class_id`, beside the shape that was fitted

Published with CVLAB-Unibo/inr2vec. The files do not contain the architecture of the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files.checks import check_path
from nfn_graph.converters.files.hdf5 import read_hdf5
from nfn_graph.converters.files.npz import from_arrays
from nfn_graph.converters.zoos.files import files_in, folders_in
from nfn_graph.converters.zoos.networks import make_siren, siren_layers
from nfn_graph.converters.zoos.splits import SPLIT_NAMES, refuse_split_file
from nfn_graph.converters.zoos.zoo import Checkpoint, Network, Row, ZooDescription, ZooSource

_FILE = re.compile(r"(\d+)\.h5")
_INPUTS, _OUTPUTS = 3, 1
#: The published width, which is preferred if the length of a vector fits several.
WIDTH = 512
_DEEPEST = 16
_W0 = 30.0


def is_inr2vec(path: Path) -> bool:
    """Whether a folder holds `{train,val,test}/{i}.h5`."""
    return any(
        _FILE.fullmatch(name)
        for split in folders_in(path)
        if split in SPLIT_NAMES
        for name in files_in(path / split, ".h5")
    )


class Inr2vecSource(ZooSource):
    """The files of a zoo of inr2vec."""

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        refuse_split_file(path, split_file)
        self.path = path
        rows: list[Row] = []
        splits: dict[str, list[int]] = {}
        for split in (name for name in SPLIT_NAMES if (path / name).is_dir()):
            names = files_in(path / split, ".h5")
            found = sorted((int(m[1]), name) for name in names if (m := _FILE.fullmatch(name)))
            numbers = [number for number, _ in found]
            if numbers != list(range(len(names))):
                raise ConversionError(
                    f"Expected the files 0.h5 to {len(names) - 1}.h5 in '{path / split}' (got "
                    f"{len(found)} numbers up to {max(numbers, default='none')}). Some are missing"
                )
            splits[SPLIT_NAMES[split]] = list(range(len(rows), len(rows) + len(found)))
            rows += [{"path": f"{split}/{name}", "set": split} for _, name in found]
        self.rows, self.splits = rows, splits
        self.description = ZooDescription(
            layout="inr2vec",
            kind="inr",
            label="class_id",
            splits="by folder",
            w0=_W0,
            output_offset=0.0,
            coordinates="(x, y, z) within [-1, 1]",
            outputs="for a mesh, logits p of its signed distance: 0.2 * sigmoid(p) - 0.1; for a "
            "point cloud or voxels, logits as they were fitted",
            assumptions=(
                f"{_INPUTS} inputs, {_OUTPUTS} output, hidden layers of one width: {WIDTH} as "
                f"published, or the only one that fits the length of the vector",
                "the vector is weight and bias of each layer in turn, weights row by row",
            ),
        )

    def details(self, index: int) -> Row:
        """Returns the class, for which the file is opened."""
        return {"class_id": self._arrays(index, "class_id")["class_id"].item()}

    def read(self, index: int) -> Checkpoint:
        """Reads one file: the vector split into tensors, and the class."""
        arrays = self._arrays(index, "params", "class_id")
        vector = arrays["params"]
        if vector.dim() != 1 or not vector.is_floating_point():
            raise ConversionError(
                f"Expected a vector of numbers as 'params' in {self.name(index)} (got shape "
                f"{list(vector.shape)} of {vector.dtype})"
            )
        widths = widths_of(len(vector), self.name(index))
        tensors: dict[str, Tensor] = {}
        position = 0
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
            for part, shape in shapes.items():
                end = position + math.prod(shape)
                tensors[f"layers.{i}.{part}"] = vector[position:end].view(shape)
                position = end
        return Checkpoint(tensors, {"class_id": arrays["class_id"].item()})

    def _arrays(self, index: int, *keys: str) -> dict[str, Tensor]:
        require("h5py", "to read .h5 files")
        path = check_path(self.path / self.rows[index]["path"])
        _, arrays = read_hdf5(path, keys)
        found = from_arrays(path, arrays)
        label = found["class_id"]
        if label.numel() != 1 or label.is_floating_point():
            raise ConversionError(
                f"Expected one integer as 'class_id' in '{path}' (got shape "
                f"{list(label.shape)} of {label.dtype})"
            )
        return found

    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns a SIREN with the widths by which the vector was split."""
        keys = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in tensors))
        return make_siren(siren_layers(tensors, keys), _W0, 0.0)


def widths_of(length: int, name: Any = "the vector") -> tuple[int, ...]:
    r"""Returns the widths of the layers whose parameters fill a vector.

    With :math:`k` maps between hidden layers of width :math:`h`, the number of parameters is
    :math:`(3 + 1) h + k (h + 1) h + (h + 1)`.
    """
    rest = length - _OUTPUTS
    found = {}
    for width in range(2, math.isqrt(max(length, 0)) + 1):
        hidden, remainder = divmod(rest - (_INPUTS + 1 + _OUTPUTS) * width, width * (width + 1))
        if remainder == 0 and 1 <= hidden < _DEEPEST:
            found[width] = hidden
    width = WIDTH if WIDTH in found else next(iter(found), 0)
    if not found or (len(found) > 1 and width != WIDTH):
        several = ", ".join(f"{k + 1} of {h}" for h, k in found.items())
        raise ConversionError(
            f"Expected a number of parameters in {name} that hidden layers of one width have "
            f"between {_INPUTS} inputs and {_OUTPUTS} output (got {length}, which fits "
            f"{several or 'no number of layers'})"
        )
    return (_INPUTS, *([width] * (found[width] + 1)), _OUTPUTS)
