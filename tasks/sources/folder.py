"""A folder of pictures: one subfolder per class, or `train/` and `test/` with such subfolders.

Without the latter, every fifth picture of each class is for testing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import require
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.tasks.sources.images import Images
from nfn_graph.tasks.sources.labelled import SourceError, every_fifth

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".webp", ".tif", ".tiff")


def read_image_folder(folder: Path, size: int | None = None) -> Images:
    """The pictures of a folder.

    Args:
        folder: The folder.
        size: Height and width to scale all of them to; without it they must agree.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = _classes(folder / "train")
        train = _read_split(folder / "train", classes, size)
        test = _read_split(folder / "test", classes, size)
        channels = max(train[0].shape[1], test[0].shape[1])
        parts = [(_with_channels(x, channels), y) for x, y in (train, test)]
        return Images.joined(str(folder), parts[0], parts[1], classes)
    classes = _classes(folder)
    pixels, labels = _read_split(folder, classes, size)
    return Images(str(folder), pixels, labels, _test_of_each(labels), tuple(classes))


def _test_of_each(labels: Tensor) -> Tensor:
    """A fifth of every class. Classes come in turn, so a fifth of all would be a few of them."""
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().squeeze(1)
        # From another place in each, so that small classes have some in the test split as well.
        is_test[own] = every_fifth(torch.arange(len(own)) + label)
    return is_test


def _classes(folder: Path) -> list[str]:
    classes = _subfolders(folder)
    if not classes:
        raise SourceError(
            f"Expected images in '{folder}': a subfolder of pictures for each class, or idx "
            f"files, or CIFAR batches (got nothing of the kind)"
        )
    return classes


def _subfolders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_split(folder: Path, classes: list[str], size: int | None) -> tuple[Tensor, Tensor]:
    """Pictures of all classes in turn, so that any stretch of them holds every class."""
    unknown = sorted(set(_subfolders(folder)) - set(classes))
    if unknown:
        raise SourceError(f"Expected the classes {classes} in '{folder}' (got {unknown[:5]})")
    by_class = [_pictures(folder / name) for name in classes]
    paths = [
        (label, found[k])
        for k in range(max(map(len, by_class)))
        for label, found in enumerate(by_class)
        if k < len(found)
    ]
    if not paths:
        raise SourceError(f"Expected pictures ({', '.join(SUFFIXES)}) in '{folder}' (got none)")
    pictures = [_read(path, size) for _, path in paths]
    channels = max(p.shape[0] for p in pictures)
    first = pictures[0].shape[1:]
    for (_, path), picture in zip(paths, pictures, strict=True):
        if picture.shape[1:] != first:
            raise SourceError(
                f"Expected pictures of {list(first)} pixels as '{paths[0][1]}' (got "
                f"{list(picture.shape[1:])} in '{path}'). Give a size to scale them to."
            )
    stacked = torch.stack([_with_channels(p[None], channels)[0] for p in pictures])
    return stacked, torch.tensor([i for i, _ in paths])


def _pictures(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if p.suffix.lower() in SUFFIXES)


def _read(path: Path, size: int | None) -> Tensor:
    pillow = require("PIL.Image", "to read pictures", "tasks")
    check_regular(path)
    try:
        with pillow.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise SourceError(
                    f"Expected a picture of 8 bits per channel in '{path}' (got mode "
                    f"'{image.mode}'). Convert it first, or store the values as .npz."
                )
            converted = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if size is not None:
                converted = converted.resize((size, size), pillow.Resampling.BILINEAR)
            array = np.array(converted)
    except SourceError:
        raise
    except Exception as error:  # Pillow raises many kinds on damaged pictures, SyntaxError too
        raise SourceError(f"Expected a picture in '{path}' (got: {error})") from error
    return torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Grey pictures among coloured ones get three equal channels."""
    return pixels.expand(-1, channels, -1, -1) if pixels.shape[1] != channels else pixels
