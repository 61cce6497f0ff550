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
from nfn_graph.converters.files.arrays import to_array
from nfn_graph.converters.files.checks import check_path
from nfn_graph.tasks.sources.images import Images, SourceError


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
        test = (
            (_pixels(path, "x_test", arrays["x_test"]), _labels(path, "y_test", arrays["y_test"]))
            if "x_test" in arrays
            else None
        )
        train = (
            _pixels(path, "x_train", arrays["x_train"]),
            _labels(path, "y_train", arrays["y_train"]),
        )
        return Images.joined(name, train, test)
    if "images" in arrays and "labels" in arrays:
        pixels = _pixels(path, "images", arrays["images"])
        labels = _labels(path, "labels", arrays["labels"])
        images = Images.joined(name, (pixels, labels), None)
        if "is_test" in arrays:
            is_test = torch.from_numpy(arrays["is_test"].astype(bool))
            return Images(name, pixels, labels, is_test, images.classes)
        return images
    raise SourceError(
        f"Expected the arrays x_train, y_train (and x_test, y_test), or images, labels (and "
        f"is_test) in '{path}' (got {sorted(arrays) or 'none'})"
    )


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


def _labels(path: Path, key: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "iu":
        raise SourceError(f"Expected integers in '{key}' of '{path}' (got {array.dtype})")
    return torch.from_numpy(array.astype(np.int64)).flatten()
