"""Images in a NumPy archive.

Keys: `x_train`, `y_train` and, both or neither, `x_test`, `y_test` (as Keras's `mnist.npz`); or
`images`, `labels` and, if there is a split, `is_test`. Images are `[count, height, width]`, or
with one or three channels as the second or the last axis; uint8, or floating point within
[0, 1].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import npz
from nfn_graph.converters.files.checks import check_path
from nfn_graph.converters.files.npz import to_array
from nfn_graph.tasks.sources.images import Images
from nfn_graph.tasks.sources.labelled import SourceError, numbered_classes


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
            raise SourceError(f"Expected 'x_test' and 'y_test' in '{path}', or neither (got one)")
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
