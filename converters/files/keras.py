"""Reads Keras files: datasets by path as they are stored, and the model's configuration.

Files of `model.save("x.h5")` and `model.save("x.keras")` contain the configuration; files of
`model.save_weights("x.h5")` and of Keras 3's `model.save_weights("x.weights.h5")` do not. A
`.keras` file is a zip archive of the configuration and a file of weights. The meaning of the
tensors is determined in `nfn_graph.converters.keras`.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    OpenedFile,
    check_declared,
    check_tensors,
    check_unique,
    complete,
)
from nfn_graph.converters.files.hdf5 import check_heaps, read_hdf5
from nfn_graph.converters.files.npz import from_arrays, to_array

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
# Keras does not compress, and compressing weights gains little. Larger ratios are not plausible.
_MOST_TIMES, _MOST_BEYOND = 20, 2**26


@dataclass(frozen=True)
class KerasFile:
    """The contents of a Keras file.

    Attributes:
        tensors: The weights by the path of their dataset, in Keras's axis order.
        layers: The keys of the weights of every layer, or of every group in the format of Keras 3.
        is_ordered: Whether all layers are listed in order, including those without weights.
        config: The model's configuration; None for a file that contains only weights.
    """

    tensors: dict[str, Tensor]
    layers: dict[str, tuple[str, ...]]
    is_ordered: bool
    config: dict[str, Any] | None


def recognise(opened: OpenedFile) -> bool:
    """Whether a file is HDF5, or an archive with the weights of a Keras model."""
    return opened.head.startswith(b"\x89HDF\r\n\x1a\n") or "model.weights.h5" in opened.names


def read(path: Path) -> KerasFile:
    """Reads all weights of a `.h5` or `.keras` file."""
    require("h5py", "to read Keras .h5 files")
    if not _is_archive(path):
        return _read_hdf5(path)
    with _opened(path) as archive:
        config = _unpacked(path, archive, _CONFIG).read(path.stat().st_size * _MOST_TIMES)
        with _weights(path, archive) as weights, _naming(path, weights):
            file = _read_hdf5(weights)
    return replace(file, config=_config(path, config))


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _read_hdf5(path: Path) -> KerasFile:
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
    config = _config(path, contents["config"])
    return KerasFile(tensors, layers, bool(contents["is_ordered"]), config)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an archive, and turns errors into errors that name its path."""
    with complete(path, ".keras file"), zipfile.ZipFile(path) as archive:
        check_unique(path, archive.namelist())
        yield archive


def _unpacked(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    """Opens a file in an archive for reading, unless its size is implausible."""
    if name not in archive.namelist():
        raise ConversionError(f"Expected '{name}' in '{path}' (got {archive.namelist()[:5]})")
    entry = archive.getinfo(name)
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ConversionError(
            f"Expected '{name}' in '{path}' stored or deflated (got compression method "
            f"{entry.compress_type})"
        )
    most = _MOST_TIMES * path.stat().st_size + _MOST_BEYOND
    check_declared(path, name, [entry.file_size], 1, most)
    return archive.open(entry)


@contextmanager
def _weights(path: Path, archive: zipfile.ZipFile) -> Iterator[Path]:
    """Unpacks the weights of an archive into a temporary file, as the HDF5 library requires."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / _WEIGHTS
        with _unpacked(path, archive, _WEIGHTS) as source, open(weights, "wb") as target:
            shutil.copyfileobj(source, target)
        yield weights


@contextmanager
def _naming(path: Path, weights: Path) -> Iterator[None]:
    """Replaces the name of the temporary file by that of the archive in errors."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(str(error).replace(str(weights), f"{path}")) from error


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
        path: The file; `.keras` for an archive.
        tensors: Weights in Keras's axis order; the first part of a key is the layer.
        template: A file from which everything else is copied, above all the model's configuration.
            An archive requires one, which must be an archive too.
    """
    h5py = require("h5py", "to write Keras .h5 files")
    for key in tensors:
        if "/" not in key or "\0" in key or any(name in ("", ".") for name in key.split("/")):
            raise ConversionError(
                f"Expected keys 'layer/weight' that HDF5 files can hold for '{path}' (got "
                f"{key!r}). Save to .safetensors or .pt."
            )
    _check_template(path, template)
    with replacing(path) as temporary:
        if template is not None:
            read(template)  # Checks in the reader process that the file does not crash the library.
        if template is None:
            _write_new(h5py, temporary, tensors)
        elif _is_archive(template):
            _write_archive(h5py, temporary, tensors, template)
        else:
            shutil.copyfile(template, temporary)
            _overwrite_all(h5py, temporary, tensors, template)


def _check_template(path: Path, template: Path | None) -> None:
    wants_archive = path.suffix.lower() == ".keras"
    if wants_archive and template is None:
        raise ConversionError(
            f"Expected the .keras file that the graph was loaded from, as template=..., to write "
            f"'{path}' (got none; a graph does not hold the model's configuration)"
        )
    if template is not None and _is_archive(template) != wants_archive:
        raise ConversionError(
            f"Expected a template in the format of '{path}' (got '{template}', which is in "
            f"another format)"
        )


def _write_new(h5py: Any, path: Path, tensors: Mapping[str, Tensor]) -> None:
    with h5py.File(path, "w", track_order=True) as file:
        names: dict[str, list[bytes]] = {}
        for key, tensor in tensors.items():
            layer, _, weight = key.partition("/")
            names.setdefault(layer, []).append(weight.encode())
            file.create_dataset(key, data=to_array(key, tensor))
        file.attrs["layer_names"] = [layer.encode() for layer in names]
        for layer, weights in names.items():
            file[layer].attrs["weight_names"] = weights


def _write_archive(h5py: Any, path: Path, tensors: Mapping[str, Tensor], template: Path) -> None:
    with (
        _opened(template) as archive,
        _weights(template, archive) as weights,
        zipfile.ZipFile(path, "w") as new,
    ):
        _overwrite_all(h5py, weights, tensors, template)
        for entry in archive.infolist():
            # A copy, because the entry records its position in the new archive.
            with new.open(copy.copy(entry), "w", force_zip64=True) as target:
                if entry.filename == _WEIGHTS:
                    with open(weights, "rb") as source:
                        shutil.copyfileobj(source, target)
                else:
                    with _unpacked(template, archive, entry.filename) as source:
                        shutil.copyfileobj(source, target)


def _overwrite_all(h5py: Any, path: Path, tensors: Mapping[str, Tensor], template: Path) -> None:
    with h5py.File(path, "r+") as file:
        root = file.get("model_weights", file)
        for key, tensor in tensors.items():
            _overwrite(template, root, key, tensor)


def _child(path: Path, group: Any, key: str) -> Any:
    """Returns a member of a group, which must be in this file and not behind a link."""
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
