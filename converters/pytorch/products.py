"""Products that are written as equations: `torch.einsum` with one stored tensor."""

from __future__ import annotations

from typing import Any

from nfn_graph.converters.pytorch.registry import flat, handles
from nfn_graph.converters.wiring import Signal, Value, Weight, Wiring


@handles("einsum")
def einsum(w: Wiring, equation: str, *operands: Any) -> Value:
    """A linear map by a stored matrix, or a scale by a stored tensor, of any axis."""
    values = flat(operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or len(values) != 2 or len(names) != 2:
        return _refuse(w, equation)
    if isinstance(values[0], Weight):
        values, names = values[::-1], names[::-1]
    x, weight = values
    if not isinstance(weight, Weight) or isinstance(x, Weight):
        return _refuse(w, equation)
    own = names[1]
    if not own.isalpha() or not all(_is_plain(part) for part in (*names, output)):
        return _refuse(w, equation)
    return _product(w, equation, (x, names[0]), (weight, own), output)


def _product(
    w: Wiring, equation: str, value: tuple[Value, str], stored: tuple[Weight, str], output: str
) -> Value:
    (x, names), (weight, own) = value, stored
    source = [name for name in own if name in names and name not in output]
    target = [name for name in own if name not in names and name in output]
    behind = names.partition("...")[2] if "." in names else names
    if names == output and all(name in behind for name in own):
        return w.combine(x, weight.view([own.index(n) if n in own else None for n in behind]))
    if (len(source), len(target)) != (1, 1) or len(own) != 2:
        return _refuse(w, equation)
    if "." not in names:
        x = w.ranked(x, len(names))
    axis = _axis(names, source[0])
    y = w.linear(x, weight, axis=axis, target=own.index(target[0]), source=own.index(source[0]))
    found = names.replace(source[0], target[0])
    if found == output:
        return y
    return _reordered(w, equation, y, found, output)


def _reordered(w: Wiring, equation: str, y: Signal, found: str, output: str) -> Value:
    if "." in found or len(found) != y.rank or set(found) != set(output):
        return _refuse(w, equation)
    return w.permute(y, [found.index(name) for name in output])


def _is_plain(names: str) -> bool:
    """Whether no axis is named twice, as a diagonal would be."""
    return len(set(names)) == len(names.replace("...", "."))


def _axis(names: str, name: str) -> int:
    """An axis counted from the end, unless the axes that have no name come after it."""
    front, dots, back = names.partition("...")
    if not dots or name in back:
        return names.index(name) - len(names)
    return front.index(name)


def _refuse(w: Wiring, equation: str) -> Any:
    w.refuse(
        f"Expected an einsum of an activation with one stored matrix along one axis (got "
        f"'{equation}'). Use matmul or linear"
    )
