"""MNIST-style idx files, plain or compressed with gzip.

Big endian: two zero bytes, the type (8 for uint8), the number of axes, the size of each axis,
then the values.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from nfn_graph.tasks.sources.images import Images
from nfn_graph.tasks.sources.labelled import SourceError

_UINT8 = 8
_MAX_AXES = 4
NAMES = {
    "train images": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "train labels": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "test images": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "test labels": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}


def has_idx(folder: Path) -> bool:
    """Whether a folder holds such files."""
    return any(_find(folder, what) is not None for what in NAMES)


def read_idx_folder(folder: Path) -> Images:
    """The four files of a folder, named as in MNIST."""
    found = {}
    for what, names in NAMES.items():
        path = _find(folder, what)
        if path is None:
            raise SourceError(
                f"Expected the {what} in '{folder}', as '{names[0]}' or '{names[0]}.gz' (got no "
                f"such file). Put all four files of the dataset into one folder."
            )
        found[what] = read_idx(path)
        axes = 1 if "labels" in what else 3
        if found[what].dim() != axes:
            raise SourceError(
                f"Expected {axes} axes in '{path}' (got shape {list(found[what].shape)})"
            )
    return Images.joined(
        str(folder),
        (found["train images"].unsqueeze(1), found["train labels"]),
        (found["test images"].unsqueeze(1), found["test labels"]),
    )


def read_idx(path: Path) -> Tensor:
    """One idx file of uint8 values."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if compressed else open(path, "rb") as stream:
        try:
            head = stream.read(4)
            axes = head[3] if len(head) == 4 else 0
            if head[:3] != bytes([0, 0, _UINT8]) or not 1 <= axes <= _MAX_AXES:
                raise SourceError(
                    f"Expected an idx file of uint8 values in '{path}' (got the first bytes "
                    f"{head.hex() or 'none'})"
                )
            head = stream.read(4 * axes)
            sizes = np.frombuffer(head[: len(head) // 4 * 4], ">u4").tolist()
            count = math.prod(sizes)
            # One byte more than declared, so that neither too few nor too many go unnoticed.
            values = _read_up_to(stream, count + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise SourceError(
                f"Expected a complete gzip file in '{path}' (got: {error})"
            ) from error
    if len(sizes) != axes or len(values) != count:
        more = "more" if len(values) > count else f"{len(values):,}"
        raise SourceError(
            f"Expected {count:,} values of shape {sizes} in '{path}' (got {more}). The file is "
            f"truncated or damaged."
        )
    return torch.frombuffer(values, dtype=torch.uint8).reshape(sizes)


def _read_up_to(stream: BinaryIO | gzip.GzipFile, count: int) -> bytearray:
    """Reads in pieces: a damaged header must not make us allocate what it declares."""
    values = bytearray()
    while len(values) < count:
        piece = stream.read(min(count - len(values), 2**24))
        if not piece:
            break
        values += piece
    return values


def _find(folder: Path, what: str) -> Path | None:
    for name in NAMES[what]:
        for suffix in ("", ".gz"):
            if (path := folder / f"{name}{suffix}").is_file():
                return path
    return None
