"""Images by name or from local files: which reader a source needs, and the readers.

An `.npz` file has the keys `x_train`, `y_train` and, both or neither, `x_test`, `y_test` (as
Keras's `mnist.npz`); or `images`, `labels` and, if there is a split, `is_test`. Images are
`[count, height, width]`, or with one or three channels as the second or the last axis; uint8, or
floating point within [0, 1].

A folder of pictures has one subfolder per class, or `train/` and `test/` with such subfolders.
Without the latter, every fifth picture of each class is for testing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files import npz
from nfn_graph.converters.files.checks import check_path, check_regular
from nfn_graph.converters.files.npz import to_array
from nfn_graph.tasks.sources.image_datasets import (
    has_cifar,
    has_idx,
    read_cifar_folder,
    read_idx_folder,
)
from nfn_graph.tasks.sources.images import Images, SourceError, every_fifth, numbered_classes

KINDS = (
    "'digits' (scikit-learn's, always there), a folder with the four idx files of MNIST or "
    "FashionMNIST, a folder with CIFAR batches (binary version), an .npz file, or a folder with "
    "a subfolder of pictures for each class"
)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".webp", ".tif", ".tiff")


def open_images(source: str | Path, *, size: int | None = None) -> Images:
    """Reads images by name or from local files; nothing is downloaded.

    Args:
        source: `digits`, a folder (idx files, CIFAR batches, or pictures in a subfolder for
            each class), or an `.npz` file.
        size: The height and width that pictures of an image folder are scaled to.

    Example:
        >>> from nfn_graph.tasks.sources import open_images
        >>> open_images("digits").pixels.shape
        torch.Size([1797, 1, 8, 8])
    """
    if str(source) == "digits":
        return read_digits()
    path = Path(source)
    if path.is_dir():
        if has_idx(path):
            return read_idx_folder(path)
        if has_cifar(path):
            return read_cifar_folder(path)
        return read_image_folder(path, size)
    if not path.exists():
        raise FileNotFoundError(
            f"Expected a source of images: {KINDS} (got '{source}', which does not exist). "
            f"Nothing is downloaded: put the files of the dataset there."
        )
    if path.suffix.lower() == ".npz":
        return read_npz_images(path)
    raise SourceError(f"Expected a source of images: {KINDS} (got '{source}')")


def read_digits() -> Images:
    """The digits, every fifth of them for the test split; pixels are multiples of 1/16."""
    found = require("sklearn.datasets", "for the source 'digits'", "tasks").load_digits()
    pixels = torch.from_numpy(found.images).to(torch.float32)[:, None] / 16
    return Images.joined("digits", (pixels, torch.from_numpy(found.target)), None)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive; objects, which would be unpickled, are refused."""
    try:
        return {key: to_array(key, x) for key, x in npz.read(check_path(path)).items()}
    except ConversionError as error:
        raise SourceError(
            f"Expected a NumPy archive of plain arrays in '{path}' (got: {error})"
        ) from error


def read_npz_images(path: Path) -> Images:
    """The images of an archive."""
    arrays = read_arrays(path)
    name = str(path)
    if "x_train" in arrays and "y_train" in arrays:
        if ("x_test" in arrays) != ("y_test" in arrays):
            raise SourceError(
                f"Expected both 'x_test' and 'y_test' in '{path}', or neither (got one of them)"
            )
        test = _part(path, arrays, "x_test", "y_test") if "x_test" in arrays else None
        return Images.joined(name, _part(path, arrays, "x_train", "y_train"), test)
    if "images" in arrays and "labels" in arrays:
        pixels, labels = _part(path, arrays, "images", "labels")
        if "is_test" not in arrays:
            return Images.joined(name, (pixels, labels), None)
        is_test = torch.from_numpy(arrays["is_test"].astype(bool))
        return Images(name, pixels, labels, is_test, numbered_classes(labels))
    raise SourceError(
        f"Expected the arrays x_train, y_train (and x_test, y_test), or images, labels (and "
        f"is_test) in '{path}' (got {sorted(arrays) or 'none'})"
    )


def read_labels(path: Path, key: str, array: np.ndarray) -> Tensor:
    """The labels in an array of integers."""
    if array.dtype.kind not in "iu":
        raise SourceError(f"Expected integers in '{key}' of '{path}' (got {array.dtype})")
    return torch.from_numpy(array.astype(np.int64)).flatten()


def _part(
    path: Path, arrays: dict[str, np.ndarray], pixels: str, labels: str
) -> tuple[Tensor, Tensor]:
    """The pixels and labels of two arrays."""
    return _pixels(path, pixels, arrays[pixels]), read_labels(path, labels, arrays[labels])


def _pixels(path: Path, key: str, array: np.ndarray) -> Tensor:
    if array.dtype != np.uint8:
        if array.dtype.kind != "f":
            raise SourceError(
                f"Expected '{key}' of '{path}' as uint8 or floating point (got {array.dtype})"
            )
        array = array.astype(np.float32)
    pixels = torch.from_numpy(np.ascontiguousarray(array))
    if pixels.dim() == 3:
        return pixels.unsqueeze(1)
    if pixels.dim() == 4 and pixels.shape[1] in (1, 3):
        return pixels
    if pixels.dim() == 4 and pixels.shape[3] in (1, 3):
        return pixels.permute(0, 3, 1, 2).contiguous()
    raise SourceError(
        f"Expected '{key}' of '{path}' as images with one or three channels "
        f"(got shape {list(pixels.shape)})"
    )


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
    """Takes a fifth of every class, because every fifth of all would miss most classes."""
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().squeeze(1)
        # Every class starts at another position, so that small classes have test pictures as well.
        is_test[own] = every_fifth(torch.arange(len(own)) + label)
    return is_test


def _classes(folder: Path) -> list[str]:
    classes = _subfolders(folder)
    if not classes:
        raise SourceError(
            f"Expected images in '{folder}': a subfolder of pictures for each class, or idx "
            f"files, or CIFAR batches (got none of these)"
        )
    return classes


def _subfolders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_split(folder: Path, classes: list[str], size: int | None) -> tuple[Tensor, Tensor]:
    """Lists pictures of all classes in turn, so that any long part of the list has every class."""
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
