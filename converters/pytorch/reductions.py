"""Torch operations along axes: reductions, softmax, what moves entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfn_graph.converters.pytorch.registry import (
    flat,
    handles,
    ints,
)
from nfn_graph.converters.wiring import (
    Activation,
    Opaque,
    Part,
    Value,
    Weight,
    Wiring,
    position_of,
)


def reduction(
    w: Wiring,
    input: Value,
    *args: Any,
    dim: Any = None,
    keepdim: bool = False,
    axis: Any = None,
    is_norm: bool = False,
    **_: Any,
) -> Value:
    """A symmetric function along axes; a norm takes its order before them."""
    rest = list(args[1:] if is_norm else args)
    dims = axis if dim is None else dim
    if dims is None and rest and not isinstance(rest[0], bool):
        dims = rest.pop(0)
    flags = [flag for flag in rest if isinstance(flag, bool)]
    return w.reduce(input, None if dims is None else ints(dims), keepdim or any(flags))


@handles("max", "min", "aminmax", "median", "mode")
def extremum(
    w: Wiring, input: Value, dim: Any = None, keepdim: bool = False, axis: Any = None, **_: Any
) -> Any:
    """The largest entries along an axis and where they are, or of two values."""
    dim = axis if dim is None else dim
    if isinstance(dim, Activation | Opaque | Weight):
        return w.combine(input, dim)
    if dim is None:
        return w.reduce(input)
    return w.reduce(input, [dim], keepdim), argmax(w, input, dim)


@handles("argmax", "argmin", "argsort", "topk", "kthvalue")
def argmax(w: Wiring, input: Value, *_: Any, **__: Any) -> Value:
    """Places of entries: the order of the neurons shows, as in an output."""
    w.output(input)
    return w.opaque([])


def along(w: Wiring, input: Value, *_: Any, **__: Any) -> Value:
    """A symmetric function along an axis that keeps it."""
    if isinstance(input, Activation):
        check_whole(w, input, range(input.rank))
    return input


@handles("sort")
def sort(w: Wiring, input: Value, dim: int = -1, *_: Any, **__: Any) -> tuple[Value, Value]:
    """Entries along positions in another order, and where they were."""
    _check_no_weight(w, input)
    return w.mixes(input, [dim]), w.opaque([])


def mixing(w: Wiring, input: Value, *args: Any, **kwargs: Any) -> Value:
    """An operation that moves entries along axes."""
    _check_no_weight(w, input)
    dims = kwargs.get("dims", kwargs.get("dim", args[-1] if args else None))
    if dims is None:
        w.refuse("Expected the axes along which entries move")
    return w.mixes(input, flat([dims]) if isinstance(dims, list | tuple) else [dims])


def _check_no_weight(w: Wiring, input: Value) -> None:
    if isinstance(input, Weight):
        w.refuse("Expected a weight whose entries stay in place (got one that is sorted or moved)")


def check_whole(w: Wiring, x: Value, axes: Sequence[int]) -> None:
    """Refuses statistics along an axis that a reshape has split."""
    if isinstance(x, Activation) and any(
        isinstance(x.axes[position_of(i, x.rank)], Part) for i in axes
    ):
        w.refuse("Expected statistics over whole layers (got a reshape that splits the neurons)")
