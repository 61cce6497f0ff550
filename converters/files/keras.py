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

import numpy as np
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.arrays import from_array, to_array
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    MAX_COMPRESSION,
    check_declared,
    check_tensors,
    check_unique,
)
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
    h5py = require("h5py", "to read Keras .h5 files")
    check_heaps(path)
    try:
        with h5py.File(path, "r") as file:
            root = _child(path, file, "model_weights") if "model_weights" in file else file
            layers = _named_layers(path, root) or _numbered_layers(h5py, path, root)
            check_unique(path, [key for keys in layers.values() for key in keys])
            tensors = {
                key: _read_dataset(h5py, path, root, key)
                for keys in layers.values()
                for key in keys
            }
            config = file.attrs.get("model_config")
            loaded = None if config is None else json.loads(config)
    except ConversionError:
        raise
    except Exception as error:  # h5py raises many kinds on damaged files
        raise ConversionError(
            f"Expected a complete Keras .h5 file in '{path}' (got one that cannot be read: "
            f"{type(error).__name__}: {error}). It is truncated or damaged."
        ) from error
    if not tensors:
        raise ConversionError(
            f"Expected the weights of a Keras model in '{path}' (got an HDF5 file without "
            f"'layer_names' and without layers)"
        )
    check_tensors(path, {key: x for key, x in tensors.items() if x.is_complex()})
    return KerasFile(tensors, layers, loaded if isinstance(loaded, dict) else None)


def write(path: Path, tensors: Mapping[str, Tensor], template: Path | None = None) -> None:
    """Writes weights by the path of their dataset.

    Args:
        path: The file.
        tensors: Weights in Keras's axis order; the first part of a key is the layer.
        template: A file to copy all else from, above all the model's configuration.
    """
    h5py = require("h5py", "to write Keras .h5 files")
    with replacing(path) as temporary:
        if template is not None:
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


def _named_layers(path: Path, root: Any) -> dict[str, tuple[str, ...]]:
    layers = {}
    for layer in _names(root.attrs, "layer_names"):
        group = _child(path, root, layer)
        keys = tuple(f"{layer}/{weight}" for weight in _names(group.attrs, "weight_names"))
        if keys:
            layers[layer] = keys
    return layers


def _numbered_layers(h5py: Any, path: Path, root: Any) -> dict[str, tuple[str, ...]]:
    """The layout of Keras 3: `layers/<layer>/vars/<number>`."""
    layers: dict[str, tuple[str, ...]] = {}
    if "layers" not in root:
        return layers
    group = _child(path, root, "layers")
    for layer in group:
        if "vars" in _child(path, group, layer):
            variables = _child(path, group, f"{layer}/vars")
            keys = tuple(f"layers/{layer}/vars/{n}" for n in sorted(variables, key=int))
            if keys:
                layers[layer] = keys
        elif any(isinstance(child, h5py.Group) for child in group[layer].values()):
            raise ConversionError(
                f"Expected a model without models inside in '{path}' (got layer '{layer}' with "
                f"layers of its own). Save it with model.save('name.h5')."
            )
    return layers


def _names(attributes: Any, name: str) -> list[str]:
    """A list of names; long ones are spread over several attributes."""
    found: list[Any] = list(attributes.get(name, []))
    number = 0
    while f"{name}{number}" in attributes:
        found += list(attributes[f"{name}{number}"])
        number += 1
    return [x.decode() if isinstance(x, bytes) else str(x) for x in found]


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


def _read_dataset(h5py: Any, path: Path, root: Any, key: str) -> Tensor:
    dataset = _child(path, root, key)
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise ConversionError(f"Expected an array '{key}' in '{path}' (got {dataset})")
    if dataset.external or dataset.is_virtual:
        raise ConversionError(
            f"Expected the data of '{key}' inside '{path}' (got data in another file, which is "
            f"not followed)"
        )
    if dataset.dtype.kind not in "biufcV":
        raise ConversionError(
            f"Expected numbers in array '{key}' of '{path}' (got the type {dataset.dtype})"
        )
    stored = min(dataset.id.get_storage_size(), path.stat().st_size)
    available = stored * (1 if dataset.chunks is None else MAX_COMPRESSION)
    check_declared(path, key, dataset.shape, dataset.dtype.itemsize, available)
    return from_array(path, key, np.asarray(dataset[()]))


def _overwrite(template: Path, root: Any, key: str, tensor: Tensor) -> None:
    dataset = _child(template, root, key)
    array = to_array(key, tensor)
    if dataset.shape != array.shape or dataset.dtype != array.dtype:
        raise ConversionError(
            f"Expected '{key}' with shape {list(dataset.shape)} and type {dataset.dtype} as in "
            f"'{template}' (got {list(array.shape)} and {array.dtype})"
        )
    dataset[...] = array
