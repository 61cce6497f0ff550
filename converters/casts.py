"""Conversion between floating-point types that keeps every bit of a NaN.

A cast of the processor makes every signalling NaN a quiet one. Where a store holds tensors of
several types, all are kept in the widest of them, and must come back as they were.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Format(NamedTuple):
    """How the bits of a type are laid out: sign, exponent of all ones for a NaN, fraction."""

    integer: torch.dtype
    bits: int
    fraction: int

    @property
    def exponent(self) -> int:
        return (1 << (self.bits - 1)) - (1 << self.fraction)


# Of the types of 8 bits, the only one with more NaNs than signs.
_FORMATS = {
    torch.float8_e5m2: _Format(torch.int8, 8, 2),
    torch.float16: _Format(torch.int16, 16, 10),
    torch.bfloat16: _Format(torch.int16, 16, 7),
    torch.float32: _Format(torch.int32, 32, 23),
    torch.float64: _Format(torch.int64, 64, 52),
}


def promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The type that holds the values of both; torch knows it of all but those of 8 bits."""
    if first == second:
        return first
    wide = [
        torch.float32 if x.is_floating_point and x.itemsize == 1 else x for x in (first, second)
    ]
    return torch.promote_types(*wide)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another type; the leading bits of a NaN's fraction stay as they are."""
    if tensor.dtype == dtype:
        return tensor
    values = tensor.to(dtype)
    if tensor.dtype not in _FORMATS or dtype not in _FORMATS or tensor.is_meta:
        return values
    with torch.no_grad():
        odd = tensor.isnan()
        if bool(odd.any()):
            own, other = _FORMATS[tensor.dtype], _FORMATS[dtype]
            # As whole numbers: torch moves numbers of 16 bits by way of casts.
            whole = values.contiguous().view(other.integer).clone()
            whole[odd] = _cast_nan(tensor.contiguous().view(own.integer)[odd], own, other)
            values = whole.view(dtype)
    return values


def _cast_nan(nan: Tensor, own: _Format, other: _Format) -> Tensor:
    """The bits of NaNs in another format."""
    bits = nan.to(torch.int64)
    fraction = bits & ((1 << own.fraction) - 1)
    shift = other.fraction - own.fraction
    fraction = fraction << shift if shift >= 0 else fraction >> -shift
    # Without any bit in its fraction, it would be an infinity.
    fraction = torch.where(fraction == 0, 1 << (other.fraction - 1), fraction)
    magnitude = (fraction | other.exponent).to(other.integer)
    lowest = torch.tensor(-(1 << (other.bits - 1)), dtype=other.integer, device=nan.device)
    return torch.where(bits < 0, magnitude | lowest, magnitude)
