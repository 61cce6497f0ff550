"""Reading the files of a zoo, with errors that name the file and the record."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import pytorch
from nfn_graph.converters.files.checks import check_regular, repeated
from nfn_graph.converters.formats import PYTORCH, detect
from nfn_graph.messages import UserError

#: The folders in which runs of Ray Tune keep their checkpoints, by their number.
CHECKPOINT = re.compile(r"checkpoint_(\d+)")


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """What torch.save wrote, after the checksums in the file have been compared.

    PyTorch writes a checksum for every tensor, but does not look at it when it reads.
    """
    format_, opened = detect(path)
    if format_ is not PYTORCH:
        raise ConversionError(f"Expected a file of torch.save in '{path}' (got {format_.name})")
    if opened.is_archive:
        _check_archive(path)
    return pytorch.read_opened(opened)


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises many kinds on damaged archives
        raise ConversionError(
            f"Expected a complete file of torch.save in '{path}' (got one that cannot be read: "
            f"{type(error).__name__}: {error}). It is damaged."
        ) from error
    if damaged is not None:
        raise ConversionError(
            f"Expected the checksum of '{damaged}' in '{path}' to fit (got another one). The "
            f"file is damaged."
        )


def state_dict_in(path: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name, and nothing else."""
    for key, value in tensors.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConversionError(
                f"Expected floating-point tensors in '{path}' (got '{key}' of {kind})"
            )
    return dict(tensors)


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return parse_json(path, _text(path))


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one per line, with the numbers of their lines."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        found = parse_json(path, line, f"line {number} of ")
        if not isinstance(found, dict):
            raise ConversionError(
                f"Expected an object in line {number} of '{path}' (got {type(found).__name__})"
            )
        yield number, found


def parse_json(path: Path, text: str, where: str = "") -> Any:
    """JSON without repeated keys; `where` says which part of the file it is."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise UserError(f"'{repeated([key for key, _ in pairs])[0]}' twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(
            f"Expected complete JSON in {where}'{path}' (got: {error}). It is damaged."
        ) from error


def _text(path: Path) -> str:
    try:
        return check_regular(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"Expected text in UTF-8 in '{path}' (got byte {error.object[error.start]:#04x} at "
            f"position {error.start}). It is damaged."
        ) from error


def folders_in(path: Path) -> list[str]:
    """The names of the folders in a folder, in order."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def files_in(path: Path, suffix: str = "") -> list[str]:
    """The names of the files in a folder that end so, in order."""
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.name.endswith(suffix) and e.is_file())


def first_folders(path: Path, depth: int, most: int = 20) -> list[Path]:
    """Some folders that lie so deep in a folder: enough to recognise a layout."""
    found = [path]
    for _ in range(depth):
        found = [parent / name for parent in found for name in folders_in(parent)[:most]]
    return found


def has_checkpoints(path: Path, file: str) -> bool:
    """Whether a folder holds runs with `checkpoint_*/<file>`."""
    return any(
        CHECKPOINT.fullmatch(folder.name) and (folder / file).is_file()
        for folder in first_folders(path, 2)
    )


def checkpoints_in(path: Path, file: str) -> Iterator[tuple[str, str]]:
    """Every run in a folder with each of its folders `checkpoint_*`, which hold a file."""
    for run in folders_in(path):
        folders = [name for name in folders_in(path / run) if CHECKPOINT.fullmatch(name)]
        if not folders:
            raise ConversionError(
                f"Expected folders checkpoint_* in every run (got none in '{path / run}')"
            )
        for folder in folders:
            if not (path / run / folder / file).is_file():
                raise FileNotFoundError(
                    f"Expected '{file}' in '{path / run / folder}' (got no such file)"
                )
            yield run, folder


def only_file(folder: Path, suffix: str) -> str:
    """The name of the one file in a folder that ends so."""
    names = files_in(folder, suffix) if folder.is_dir() else []
    if len(names) != 1:
        raise ConversionError(
            f"Expected one file *{suffix} in '{folder}' (got {', '.join(names) or 'none'})"
        )
    return names[0]
