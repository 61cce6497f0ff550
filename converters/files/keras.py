"""Keras `.h5` files: datasets by path, as they are stored.

Read are the files of `model.save("x.h5")`, with the model's configuration, of
`model.save_weights("x.h5")` and of Keras 3's `model.save_weights("x.weights.h5")`. What the
tensors mean is settled in `nfn_graph.converters.keras`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.arrays import from_arrays, to_array
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import check_tensors, check_unique
from nfn_graph.converters.files.hdf5 import read_hdf5
from nfn_graph.converters.files.hdf5_heap import check_heaps
from nfn_graph.converters.optional import require


@dataclass(frozen=True)
class KerasFile:
    """What a Keras file holds.

    Attributes:
        tensors: The weights by the path of their dataset, in Keras's axis order.
        layers: For every layer with weights, in the order of the file, the keys of its weights.
        config: The model's configuration, None in a file of weights only.
    """

    tensors: dict[str, Tensor]
    layers: dict[str, tuple[str, ...]]
    config: dict[str, Any] | None


def read(path: Path) -> KerasFile:
    """All weights of the file."""
    require("h5py", "to read Keras .h5 files")
    check_heaps(path)
    contents, arrays = read_hdf5(path)
    layers = {str(layer): tuple(keys) for layer, keys in contents["layers"]}
    check_unique(path, [key for keys in layers.values() for key in keys])
    tensors = from_arrays(path, arrays)
    if not tensors:
        raise ConversionError(
            f"Expected the weights of a Keras model in '{path}' (got an HDF5 file without "
            f"'layer_names' and without layers)"
        )
    check_tensors(path, {key: x for key, x in tensors.items() if x.is_complex()})
    return KerasFile(tensors, layers, _config(path, contents["config"]))


def _config(path: Path, text: Any) -> dict[str, Any] | None:
    try:
        config = None if text is None else json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversionError(
            f"Expected the configuration of a Keras model as JSON in '{path}' (got "
            f"{type(error).__name__}: {error}). It is damaged."
        ) from error
    return config if isinstance(config, dict) else None


def write(path: Path, tensors: Mapping[str, Tensor], template: Path | None = None) -> None:
    """Writes weights by the path of their dataset.

    Args:
        path: The file.
        tensors: Weights in Keras's axis order; the first part of a key is the layer.
        template: A file to copy all else from, above all the model's configuration.
    """
    h5py = require("h5py", "to write Keras .h5 files")
    for key in tensors:
        if "/" not in key or "\0" in key or any(name in ("", ".") for name in key.split("/")):
            raise ConversionError(
                f"Expected keys 'layer/weight' that HDF5 files can hold for '{path}' (got "
                f"{key!r}). Save to .safetensors or .pt."
            )
    with replacing(path) as temporary:
        if template is not None:
            read(template)  # What ends the process that reads it must not be opened here.
            shutil.copyfile(template, temporary)
            with h5py.File(temporary, "r+") as file:
                root = file.get("model_weights", file)
                for key, tensor in tensors.items():
                    _overwrite(template, root, key, tensor)
            return
        with h5py.File(temporary, "w", track_order=True) as file:
            names: dict[str, list[bytes]] = {}
            for key, tensor in tensors.items():
                layer, _, weight = key.partition("/")
                names.setdefault(layer, []).append(weight.encode())
                file.create_dataset(key, data=to_array(key, tensor))
            file.attrs["layer_names"] = [layer.encode() for layer in names]
            for layer, weights in names.items():
                file[layer].attrs["weight_names"] = weights


def _child(path: Path, group: Any, key: str) -> Any:
    """A member of a group, which must lie in this file."""
    h5py = require("h5py", "to read Keras .h5 files")
    for name in key.split("/"):
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise ConversionError(
                f"Expected '{key}' in '{path}' (got {'nothing' if link is None else 'a link'})"
            )
        group = group[name]
    return group


def _overwrite(template: Path, root: Any, key: str, tensor: Tensor) -> None:
    dataset = _child(template, root, key)
    array = to_array(key, tensor)
    if dataset.shape != array.shape or dataset.dtype.newbyteorder("=") != array.dtype:
        raise ConversionError(
            f"Expected '{key}' with shape {list(dataset.shape)} and type {dataset.dtype} as in "
            f"'{template}' (got {list(array.shape)} and {array.dtype})"
        )
    dataset[...] = array
