"""The files in which MNIST and CIFAR are published.

MNIST-style idx files are plain or compressed with gzip, and big endian: two zero bytes, the type
(8 for uint8), the number of axes, the size of each axis, then the values.

A record of CIFAR's binary version is the label (for CIFAR-100 the coarse and the fine label) and
3,072 bytes: the red, green and blue planes of a 32 x 32 image. The python version of the batches is
pickled, which can run code when read, and is refused.
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

from nfn_graph.tasks.sources.images import Images, SourceError

_UINT8 = 8
_MAX_AXES = 4
NAMES = {
    "train images": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "train labels": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "test images": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "test labels": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}
_PLANES = 3 * 32 * 32
_BINARY_10 = ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"], 1)
_BINARY_100 = (["train.bin"], ["test.bin"], 2)
_PICKLED = ("data_batch_1", "test_batch", "train", "test")
HOW_TO_CONVERT = (
    "They are pickles, which can run code when they are read. Use the binary version "
    "(cifar-10-binary.tar.gz from the dataset's page), or convert files that you trust once: "
    "python -c \"import numpy as np, pickle; load = lambda n: pickle.load(open(n, 'rb'), "
    "encoding='bytes'); parts = [load(f'data_batch_{i}') for i in range(1, 6)]; test = "
    "load('test_batch'); image = lambda d: d[b'data'].reshape(-1, 3, 32, 32); "
    "np.savez('cifar10.npz', x_train=np.concatenate([image(p) for p in parts]), "
    "y_train=np.concatenate([p[b'labels'] for p in parts]), x_test=image(test), "
    "y_test=np.array(test[b'labels']))\" and pass cifar10.npz"
)


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
    """Reads in pieces, so that a damaged header cannot cause a huge allocation."""
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


def has_cifar(folder: Path) -> bool:
    """Whether a folder holds batches of either version."""
    return _layout(folder) is not None or is_pickled_cifar(folder)


def is_pickled_cifar(folder: Path) -> bool:
    """Whether a folder holds the python version of the batches."""
    return (folder / "batches.meta").is_file() or any(
        (folder / name).is_file() for name in _PICKLED
    )


def read_cifar_folder(folder: Path) -> Images:
    """Reads the batches that a folder has; at least one must be for training."""
    layout = _layout(folder)
    if layout is None:
        raise SourceError(
            f"Expected CIFAR batches in binary form in '{folder}' (got the python version). "
            f"{HOW_TO_CONVERT}"
        )
    train_names, test_names, labels = layout
    train = [_read(folder / n, labels) for n in train_names if (folder / n).is_file()]
    test = [_read(folder / n, labels) for n in test_names if (folder / n).is_file()]
    if not train or not test:
        raise SourceError(
            f"Expected training and test batches in '{folder}' (got only one of the two among "
            f"{', '.join([*train_names, *test_names])})"
        )
    return Images.joined(str(folder), _cat(train), _cat(test))


def _layout(folder: Path) -> tuple[list[str], list[str], int] | None:
    for layout in (_BINARY_10, _BINARY_100):
        if any((folder / name).is_file() for name in (*layout[0], *layout[1])):
            return layout
    return None


def _read(path: Path, labels: int) -> tuple[Tensor, Tensor]:
    size = path.stat().st_size
    record = labels + _PLANES
    if size == 0 or size % record:
        raise SourceError(
            f"Expected records of {record:,} bytes in '{path}' (got {size:,} bytes). The file "
            f"is truncated or not the binary version."
        )
    records = torch.from_numpy(np.fromfile(path, np.uint8)).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def _cat(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])
