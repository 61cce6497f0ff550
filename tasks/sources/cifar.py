"""CIFAR-10 and CIFAR-100 in their binary version.

Every record is the label (for CIFAR-100 the coarse and the fine label) and 3,072 bytes: the
red, green and blue planes of a 32 x 32 image. The python version of the batches is pickled,
which can run code when read, and is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nfn_graph.tasks.sources.images import Images
from nfn_graph.tasks.sources.labelled import SourceError

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


def has_cifar(folder: Path) -> bool:
    """Whether a folder holds batches of either version."""
    return _layout(folder) is not None or is_pickled_cifar(folder)


def is_pickled_cifar(folder: Path) -> bool:
    """Whether a folder holds the python version of the batches."""
    return (folder / "batches.meta").is_file() or any(
        (folder / name).is_file() for name in _PICKLED
    )


def read_cifar_folder(folder: Path) -> Images:
    """The batches of a folder; those that are there, at least one for training."""
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
            f"Expected training and test batches in '{folder}' (got only one kind of "
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
