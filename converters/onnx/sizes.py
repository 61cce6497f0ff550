"""Sizes that an ONNX model computes: shapes, parts of them, and numbers derived from them.

They describe the layout of positions and contain no weights. Sizes that depend on an input of
unknown shape, such as a batch size, are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nfn_graph.converters.onnx.node import Node

Number = int | float | None

_MOST = 64  # No shape has more entries.


class Sizes(NamedTuple):
    """One number, or a row of numbers.

    Attributes:
        values: The numbers.
        is_row: Whether the tensor that holds them has an axis.
        is_measured: Whether they come from the shape of a value, and not only from the file.
    """

    values: tuple[Number, ...]
    is_row: bool = True
    is_measured: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds them."""
        return (len(self.values),) if self.is_row else ()

    @property
    def is_one(self) -> bool:
        """Whether it is a single number, with or without an axis."""
        return len(self.values) == 1


def stored_sizes(tensor: Tensor) -> Sizes | None:
    """Returns the numbers of a small integer tensor, which may be sizes, axes or indices."""
    if tensor.is_floating_point():
        return None
    return _numbers(tensor)


def computed_sizes(node: Node, kind: str, known: Mapping[str, Sizes]) -> Sizes | None:
    """Returns the result of a node that computes sizes; None for other nodes."""
    if kind == "Shape":
        shape = node.shape(0)
        part = slice(node.integer("start", 0), node.integer("end", _MOST))
        return None if shape is None else Sizes(tuple(shape)[part], is_measured=True)
    if kind == "Size":
        shape = node.shape(0)
        return None if shape is None else Sizes((_product(shape),), False, True)
    rule = _RULES.get(kind)
    is_measured = any(name in known and known[name].is_measured for name in node.names)
    operands = []
    for name in node.names:
        found = known.get(name)
        if found is None and name in node.tensors and is_measured:
            # A stored number by which sizes are multiplied, such as the scale of an upsampling.
            found = _numbers(node.tensors[name])
        if found is None:
            return None
        operands.append(found)
    try:
        found = None if rule is None or not operands else rule(node, operands)
    except (ArithmeticError, ValueError, TypeError, LookupError):
        return None  # Numbers that cannot be computed with, such as a step of 0.
    return None if found is None else found._replace(is_measured=is_measured)


def _numbers(tensor: Tensor) -> Sizes | None:
    if tensor.dim() > 1 or tensor.numel() > _MOST:
        return None
    return Sizes(tuple(tensor.reshape(-1).tolist()), tensor.dim() == 1)


def _product(numbers: Sequence[Number]) -> Number:
    found = [n for n in numbers if n is not None]
    return math.prod(found) if len(found) == len(numbers) else None


def _each(function: Callable[..., Number]) -> Callable[[Node, Sequence[Sizes]], Sizes | None]:
    """Handles an entrywise operation, also of a number and a row."""

    def rule(node: Node, operands: Sequence[Sizes]) -> Sizes | None:
        count = max(len(x.values) for x in operands)
        if any(len(x.values) not in (1, count) for x in operands):
            return None
        rows = [x.values * count if len(x.values) == 1 else x.values for x in operands]
        return Sizes(
            tuple(
                None if None in entries else function(*entries)
                for entries in zip(*rows, strict=True)
            ),
            any(x.is_row for x in operands),
        )

    return rule


def _divided(a: Any, b: Any) -> Number:
    """Divides as ONNX does: integers are rounded towards zero."""
    if b == 0:
        return None
    return math.trunc(a / b) if isinstance(a, int) and isinstance(b, int) else a / b


def _cast(node: Node, operands: Sequence[Sizes]) -> Sizes:
    is_float = node.integer("to", 0) in (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16
    numbers = operands[0].values
    kind: type[int] | type[float] = float if is_float else int
    return Sizes(tuple(None if n is None else kind(n) for n in numbers), operands[0].is_row)


def _gather(node: Node, operands: Sequence[Sizes]) -> Sizes | None:
    values, indices = operands[0].values, operands[1].values
    if any(not isinstance(i, int) or not -len(values) <= i < len(values) for i in indices):
        return None
    return Sizes(tuple(values[i] for i in indices if isinstance(i, int)), operands[1].is_row)


def _slice(node: Node, operands: Sequence[Sizes]) -> Sizes | None:
    bounds = [x.values for x in operands[1:]] or [
        tuple(node.integers(name) or ()) for name in ("starts", "ends")
    ]
    if any(len(bound) != 1 for bound in bounds) or any(bound[0] is None for bound in bounds):
        return None
    start, stop = (int(bound[0] or 0) for bound in bounds[:2])
    step = int(bounds[3][0] or 1) if len(bounds) > 3 else 1
    return Sizes(operands[0].values[start:stop:step])


def _as_number(node: Node, operands: Sequence[Sizes]) -> Sizes | None:
    return Sizes(operands[0].values, False) if len(operands[0].values) == 1 else None


def _filled(node: Node, operands: Sequence[Sizes]) -> Sizes | None:
    count = operands[0].values
    if len(count) != 1 or not isinstance(count[0], int) or not 0 <= count[0] <= _MOST:
        return None
    return Sizes((node.number("value", 0),) * count[0])


def _multiplied(node: Node, operands: Sequence[Sizes]) -> Sizes:
    return Sizes((_product(operands[0].values),), bool(node.integer("keepdims", 1)))


_RULES: dict[str, Callable[[Node, Sequence[Sizes]], Sizes | None]] = {
    "Add": _each(lambda a, b: a + b),
    "Sub": _each(lambda a, b: a - b),
    "Mul": _each(lambda a, b: a * b),
    "Div": _each(_divided),
    "Max": _each(max),
    "Min": _each(min),
    "Equal": _each(lambda a, b: int(a == b)),
    "Where": _each(lambda chosen, a, b: a if chosen else b),
    "Neg": _each(lambda a: -a),
    "Floor": _each(math.floor),
    "Ceil": _each(math.ceil),
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "Identity": lambda node, operands: operands[0],
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda node, operands: Sizes(tuple(n for x in operands for n in x.values)),
    "Unsqueeze": lambda node, operands: None if operands[0].is_row else Sizes(operands[0].values),
    "Squeeze": _as_number,
    "ReduceProd": _multiplied,
}
