"""Image operations with OpenCV, which make the targets of edited INRs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import require
from nfn_graph.messages import UserError

Operation = Literal["dilate", "erode", "contrast", "blur", "invert", "rotate"]
# Default amounts: pixels, pixels, a factor, pixels, none, degrees.
_AMOUNTS = {
    "dilate": 3.0,
    "erode": 3.0,
    "contrast": 1.5,
    "blur": 1.0,
    "invert": 0.0,
    "rotate": 45.0,
}


def edit_images(images: Tensor, operation: Operation, amount: float = 0.0) -> Tensor:
    """The images after an operation, within [0, 1].

    Args:
        images: `[count, 1 or 3, height, width]`; values are first clipped to [0, 1].
        operation: `dilate` and `erode` take the largest and the smallest value within a square,
            `contrast` stretches values around middle grey, `blur` is Gaussian, `invert` turns
            white to black, `rotate` turns counterclockwise about the centre.
        amount: The side of the square, the factor of the contrast, the standard deviation of
            the blur, or the degrees; 0 for 3, 1.5, 1 and 45.
    """
    check_operation(operation, amount)
    cv2 = require("cv2", "to edit images", "tasks")
    apply = _function(cv2, operation, amount or _AMOUNTS[operation])
    shown = images.detach().clamp(0, 1).permute(0, 2, 3, 1).cpu().to(torch.float32).numpy()
    # OpenCV leaves out the last axis of images with one channel.
    edited = [apply(np.ascontiguousarray(x)).reshape(x.shape) for x in shown]
    found = torch.from_numpy(np.stack(edited)).permute(0, 3, 1, 2).clamp(0, 1)
    return found.contiguous().to(images.device, images.dtype)


def check_operation(operation: str, amount: float) -> None:
    """Raises for an unknown operation, or an amount that makes no sense for it."""
    if operation not in _AMOUNTS:
        raise UserError(
            f"Expected --operation: {', '.join(get_args(Operation))} (got '{operation}')"
        )
    if not math.isfinite(amount):
        raise UserError(f"Expected a finite --amount (got {amount})")
    if operation == "invert" and amount:
        raise UserError(f"Expected no --amount of --operation invert (got {amount})")
    if operation in ("dilate", "erode") and (amount < 0 or amount != round(amount)):
        raise UserError(
            f"Expected --amount of --operation {operation} as a number of pixels (got {amount})"
        )
    if operation in ("contrast", "blur") and amount < 0:
        raise UserError(f"Expected --amount of --operation {operation} above 0 (got {amount})")


def _function(cv2: Any, operation: str, amount: float) -> Callable[[Any], Any]:
    """The operation on one image `[height, width, channels]`."""
    if operation in ("dilate", "erode"):
        square = np.ones((round(amount),) * 2, np.uint8)
        return lambda image: getattr(cv2, operation)(image, square)
    if operation == "contrast":
        return lambda image: cv2.addWeighted(image, amount, image, 0.0, 0.5 * (1 - amount))
    if operation == "blur":
        return lambda image: cv2.GaussianBlur(image, (0, 0), amount)
    if operation == "rotate":
        return lambda image: _rotated(cv2, image, amount)
    return lambda image: 1 - image


def _rotated(cv2: Any, image: Any, degrees: float) -> Any:
    height, width = image.shape[:2]
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    return cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE)
