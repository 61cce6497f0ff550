"""Torch operations along axes: reductions, maxima and their places, what moves entries."""

from __future__ import annotations

from typing import Any, NamedTuple

from nfn_graph.converters.pytorch.registry import (
    flat,
    handles,
    ints,
)
from nfn_graph.converters.wiring import (
    Opaque,
    Signal,
    Value,
    Weight,
    Wiring,
    position_of,
)


class Extremum(NamedTuple):
    """Entries along an axis and their places, as torch returns them."""

    values: Value
    indices: Value


def reduction(
    w: Wiring,
    name: str,
    input: Value,
    *args: Any,
    dim: Any = None,
    keepdim: bool = False,
    axis: Any = None,
    keepdims: bool = False,
    **_: Any,
) -> Value:
    """A symmetric function along axes; a norm takes its order before them."""
    rest = list(args[1:] if name.endswith("norm") else args)
    dims = axis if dim is None else dim
    if dims is None and rest and not isinstance(rest[0], bool):
        dims = rest.pop(0)
    flags = [flag for flag in rest if isinstance(flag, bool)]
    if name in ("var", "std"):
        # The first flag says whether the estimate is unbiased.
        flags = flags[1:]
    axes = None if dims is None else ints(dims)
    return w.reduce(input, axes or None, keepdim or keepdims or any(flags))


@handles("var_mean", "std_mean")
def spread_and_mean(w: Wiring, input: Value, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    """Two symmetric functions along the same axes."""
    return reduction(w, "var", input, *args, **kwargs), reduction(w, "var", input, *args, **kwargs)


@handles("cosine_similarity")
def cosine_similarity(w: Wiring, x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """A sum along an axis over pairs of entries."""
    return w.reduce(w.combine(x1, x2), [dim])


@handles("max", "min", "median", "nanmedian")
def extremum(
    w: Wiring,
    input: Value,
    dim: Any = None,
    keepdim: bool = False,
    *,
    other: Any = None,
    axis: Any = None,
    keepdims: bool = False,
    **_: Any,
) -> Any:
    """The largest entries along an axis and where they are, or of two values."""
    dim = other if other is not None else axis if dim is None else dim
    if isinstance(dim, Signal | Opaque | Weight):
        return w.combine(input, dim)
    if dim is None:
        return w.reduce(input)
    keepdim = keepdim or keepdims
    return Extremum(w.reduce(input, [dim], keepdim), w.places(input, [dim], keepdim))


@handles("mode")
def mode(w: Wiring, input: Value, dim: int = -1, keepdim: bool = False) -> Any:
    """The commonest entries along an axis."""
    return extremum(w, input, dim, keepdim)


@handles("kthvalue")
def kthvalue(w: Wiring, input: Value, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest entries along an axis."""
    return extremum(w, input, dim, keepdim)


@handles("aminmax")
def aminmax(
    w: Wiring, input: Value, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    """The smallest and the largest entries."""
    axes = None if dim is None else [dim]
    return w.reduce(input, axes, keepdim), w.reduce(input, axes, keepdim)


@handles("argmax", "argmin")
def argmax(
    w: Wiring, input: Value, dim: int | None = None, keepdim: bool = False, **_: Any
) -> Value:
    """Where the largest entries are."""
    return w.places(input, None if dim is None else [dim], keepdim)


@handles("topk")
def topk(w: Wiring, input: Value, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
    """The largest entries along an axis in their order, and where they are."""
    return Extremum(*w.largest(input, dim, k))


@handles("sort")
def sort(w: Wiring, input: Value, dim: int = -1, *_: Any, **__: Any) -> Any:
    """All entries along an axis in their order, and where they were."""
    size = input.shape[position_of(dim, input.rank)] if isinstance(input, Signal) else None
    return Extremum(*w.largest(input, dim, size))


@handles("argsort")
def argsort(w: Wiring, input: Value, dim: int = -1, *_: Any, **__: Any) -> Value:
    """Where the entries along an axis are in their order."""
    places: Value = sort(w, input, dim)[1]
    return places


@handles("flip")
def flip(w: Wiring, input: Value, *dims: Any, **kwargs: Any) -> Value:
    """Entries along axes in reverse."""
    return w.mixes(input, flat([*dims, *kwargs.values()]))


@handles("fliplr")
def fliplr(w: Wiring, input: Value) -> Value:
    """Entries along axis 1 in reverse."""
    return w.mixes(input, [1])


@handles("roll")
def roll(w: Wiring, input: Value, shifts: Any, dims: Any = ()) -> Value:
    """Entries moved along axes, or through the whole tensor if none are given."""
    return w.mixes(input, ints(dims) if dims not in (None, (), []) else None)


@handles("cumsum", "cumprod", "logcumsumexp")
def cumulate(w: Wiring, input: Value, dim: Any = None, *, axis: Any = None, **_: Any) -> Value:
    """Sums of all entries up to each."""
    return w.mixes(input, [axis if dim is None else dim])


@handles("softmax", "log_softmax", "softmin", "_softmax", "_log_softmax")
def softmax(w: Wiring, input: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    """Entries along an axis that are normalised together."""
    if not isinstance(dim, int):
        # Without an axis, torch takes the first or the second one.
        dim = 0 if isinstance(input, Signal) and input.rank in (0, 1, 3) else 1
    return w.statistics(input, [dim])


@handles("normalize")
def normalize(w: Wiring, input: Value, p: float = 2.0, dim: Any = 1, *_: Any, **__: Any) -> Value:
    """Entries along an axis, divided by their norm."""
    return w.statistics(input, ints(dim))
