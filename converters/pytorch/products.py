"""Products written as equations (`torch.einsum`), and those of attention."""

from __future__ import annotations

from typing import Any

from nfn_graph.converters.pytorch.handling import flat, handles
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight, Wiring


@handles("einsum")
def einsum(w: Wiring, equation: str, *operands: Any) -> Value:
    """Handles a linear map or a scaling by a stored tensor, or a product of two activations."""
    values = flat(operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or len(values) != 2 or len(names) != 2:
        return _refuse(w, equation)
    if isinstance(values[0], Weight):
        values, names = values[::-1], names[::-1]
    x, weight = values
    if not all(_is_plain(part) for part in (*names, output)):
        return _refuse(w, equation)
    if isinstance(weight, Weight) and not isinstance(x, Weight) and names[1].isalpha():
        return _product(w, equation, (x, names[0]), (weight, names[1]), output)
    if "." in equation:
        return _refuse(w, equation)
    return w.contract(x, weight, (names[0], names[1]), output)


@handles("scaled_dot_product_attention")
def attention(
    w: Wiring,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Value:
    """Handles queries and keys that share their dimensions, and a weighted sum of values."""
    if enable_gqa and isinstance(query, Signal) and isinstance(key, Signal):
        heads, shared = query.shape[-3], key.shape[-3]
        if heads is None or shared is None or heads % shared:
            w.refuse("Expected query heads that share keys evenly (got other numbers of heads)")
        # A single head for all is broadcast.
        if shared not in (1, heads):
            key, value = w.repeat(key, -3, heads // shared), w.repeat(value, -3, heads // shared)
    scores = w.matmul(query, w.move(key, [-2, -1], [-1, -2]))
    if isinstance(attn_mask, Signal | Opaque | Weight):
        scores = w.combine(scores, attn_mask)
    return w.matmul(w.statistics(scores, [-1]), value)


@handles("_canonical_mask")
def mask(w: Wiring, mask: Value, *_: Any, **__: Any) -> Value:
    """Converts a boolean mask to one that is added, which does not affect neurons."""
    return mask


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
        return (
            _refuse(w, equation) if "." in equation else w.contract(x, weight, (names, own), output)
        )
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
    """Counts an axis from the end, unless axes without names come after it."""
    front, dots, back = names.partition("...")
    if not dots or name in back:
        return names.index(name) - len(names)
    return front.index(name)


def _refuse(w: Wiring, equation: str) -> Any:
    w.refuse(
        f"Expected the equation of an activation and a stored tensor, or of two activations, with "
        f"a letter for every axis (got einsum '{equation}'). Use matmul or linear"
    )
