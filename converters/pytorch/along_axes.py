"""Torch operations along axes: reductions, and operations that move entries or resize positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nfn_graph.converters.pytorch.handling import HANDLERS, Handler, flat, handles, ints
from nfn_graph.converters.wiring import (
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    SplitAxis,
    Value,
    Weight,
    Wiring,
    position_of,
)
from nfn_graph.converters.wiring.axes import product
from nfn_graph.converters.wiring.values import Split


class Extremum(NamedTuple):
    """Entries along an axis and their positions, as torch returns them."""

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
    """Handles a symmetric function along axes; a norm takes its order before them."""
    rest = list(args[1:] if name.endswith("norm") else args)
    dims = axis if dim is None else dim
    if dims is None and rest and not isinstance(rest[0], bool):
        dims = rest.pop(0)
    flags = [flag for flag in rest if isinstance(flag, bool)]
    if name in ("var", "std"):
        # The first flag is whether the estimate is unbiased.
        flags = flags[1:]
    axes = None if dims is None else ints(dims)
    return w.reduce(input, axes or None, keepdim or keepdims or any(flags))


@handles("var_mean", "std_mean")
def spread_and_mean(w: Wiring, input: Value, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    """Handles two symmetric functions along the same axes."""
    return reduction(w, "var", input, *args, **kwargs), reduction(w, "var", input, *args, **kwargs)


@handles("cosine_similarity")
def cosine_similarity(w: Wiring, x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """Handles a sum along an axis over pairs of entries."""
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
    """Handles the largest entries along an axis and their positions, or those of two values."""
    dim = other if other is not None else axis if dim is None else dim
    if isinstance(dim, Signal | Opaque | Weight):
        return w.combine(input, dim)
    if dim is None:
        return w.reduce(input)
    keepdim = keepdim or keepdims
    return Extremum(w.reduce(input, [dim], keepdim), w.places(input, [dim], keepdim))


@handles("mode")
def mode(w: Wiring, input: Value, dim: int = -1, keepdim: bool = False) -> Any:
    """Handles the most frequent entries along an axis."""
    return extremum(w, input, dim, keepdim)


@handles("kthvalue")
def kthvalue(w: Wiring, input: Value, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Handles the k-th smallest entries along an axis."""
    return extremum(w, input, dim, keepdim)


@handles("aminmax")
def aminmax(
    w: Wiring, input: Value, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    """Handles the smallest and the largest entries."""
    axes = None if dim is None else [dim]
    return w.reduce(input, axes, keepdim), w.reduce(input, axes, keepdim)


@handles("argmax", "argmin")
def argmax(
    w: Wiring, input: Value, dim: int | None = None, keepdim: bool = False, **_: Any
) -> Value:
    """Handles the positions of the largest entries."""
    return w.places(input, None if dim is None else [dim], keepdim)


@handles("topk")
def topk(w: Wiring, input: Value, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
    """Handles the largest entries along an axis in sorted order, and their positions."""
    return Extremum(*w.largest(input, dim, k))


@handles("sort")
def sort(w: Wiring, input: Value, dim: int = -1, *_: Any, **__: Any) -> Any:
    """Handles all entries along an axis in sorted order, and their previous positions."""
    size = input.shape[position_of(dim, input.rank)] if isinstance(input, Signal) else None
    return Extremum(*w.largest(input, dim, size))


@handles("argsort")
def argsort(w: Wiring, input: Value, dim: int = -1, *_: Any, **__: Any) -> Value:
    """Handles the positions of the entries along an axis in sorted order."""
    places: Value = sort(w, input, dim)[1]
    return places


@handles("flip")
def flip(w: Wiring, input: Value, *dims: Any, **kwargs: Any) -> Value:
    """Handles reversed entries along axes."""
    return w.mixes(input, flat([*dims, *kwargs.values()]))


@handles("fliplr")
def fliplr(w: Wiring, input: Value) -> Value:
    """Handles reversed entries along axis 1."""
    return w.mixes(input, [1])


@handles("roll")
def roll(w: Wiring, input: Value, shifts: Any, dims: Any = ()) -> Value:
    """Handles entries moved along axes, or through the whole tensor if none are given."""
    return w.mixes(input, ints(dims) if dims not in (None, (), []) else None)


@handles("cumsum", "cumprod", "logcumsumexp")
def cumulate(w: Wiring, input: Value, dim: Any = None, *, axis: Any = None, **_: Any) -> Value:
    """Handles cumulative sums and products."""
    return w.mixes(input, [axis if dim is None else dim])


@handles("softmax", "log_softmax", "softmin", "_softmax", "_log_softmax")
def softmax(w: Wiring, input: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    """Handles the joint normalisation of entries along an axis."""
    if not isinstance(dim, int):
        # Without an axis, torch uses the first or the second one.
        dim = 0 if isinstance(input, Signal) and input.rank in (0, 1, 3) else 1
    return w.statistics(input, [dim])


@handles("normalize")
def normalize(w: Wiring, input: Value, p: float = 2.0, dim: Any = 1, *_: Any, **__: Any) -> Value:
    """Handles entries along an axis divided by their norm."""
    return w.statistics(input, ints(dim))


def _pool(spatial: int, with_indices: bool = False) -> Handler:
    def handler(w: Wiring, input: Value, *args: Any, **kwargs: Any) -> Any:
        pooled = w.pool(input, spatial)
        # Every neuron has its own positions.
        return (pooled, pooled) if kwargs.get("return_indices") or with_indices else pooled

    return handler


def _adaptive_pool(spatial: int, with_indices: bool = False) -> Handler:
    def handler(w: Wiring, input: Value, output_size: Any, *_: Any, **__: Any) -> Any:
        sizes = [output_size] * spatial if isinstance(output_size, int) else list(output_size)
        pooled = w.pool(input, spatial, sizes)
        return (pooled, pooled) if with_indices else pooled

    return handler


for _n in (1, 2, 3):
    for _kind in ("max", "avg", "lp", "fractional_max"):
        HANDLERS[f"{_kind}_pool{_n}d"] = _pool(_n)
        HANDLERS[f"{_kind}_pool{_n}d_with_indices"] = _pool(_n, with_indices=True)
    for _kind in ("max", "avg"):
        HANDLERS[f"adaptive_{_kind}_pool{_n}d"] = _adaptive_pool(_n)
        HANDLERS[f"aten.adaptive_{_kind}_pool{_n}d"] = _adaptive_pool(_n, with_indices=True)
    for _kind in ("reflection", "replication"):
        HANDLERS[f"{_kind}_pad{_n}d"] = _pool(_n)
for _kind in ("nearest", "linear", "bilinear", "trilinear", "bicubic"):
    for _n in (1, 2, 3):
        HANDLERS[f"upsample_{_kind}{_n}d"] = _pool(_n)


@handles("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
def interpolate(w: Wiring, input: Value, *_: Any, **__: Any) -> Value:
    """Handles resizing all axes after the channels."""
    return w.pool(input, input.rank - 2) if isinstance(input, Signal) else w.opaque([input])


@handles("pad")
def pad(
    w: Wiring, input: Value, pad: Sequence[int], mode: str = "constant", *_: Any, **__: Any
) -> Value:
    """Handles padding of positions; padded channels are new neurons, all alike."""
    if not isinstance(input, Signal):
        return w.opaque([input])
    padded = [i for i, n in enumerate(pad) if n]
    w.settle(input, [-1 - i // 2 for i in padded])
    stored = list(input.stored)
    for i, (left, right) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        at = input.rank - 1 - i
        axis = input.axes[at]
        if mode != "constant" and (left or right):
            w.mixes(input, [at])
        if (left or right) and isinstance(axis, NeuronAxis) and w.is_placed(input, at):
            axis = input.axes[at]
        if isinstance(axis, Positions):
            known = None if axis.size is None else axis.size + left + right
            stored[at] = Positions(known)
        elif left or right:
            if min(left, right) < 0:
                w.refuse("Expected padding of channels (got negative padding)")
            ends = [NeuronAxis(()) if not n else w.fresh(n) for n in (left, right)]
            inner = w.neurons(input, at)
            stored[at] = NeuronAxis((*ends[0].segments, *inner, *ends[1].segments))
    return replace(input, stored=tuple(stored))


@handles("constant_pad_nd", "zero_pad2d")
def constant_pad(w: Wiring, input: Value, padding: Sequence[int], *_: Any, **__: Any) -> Value:
    """Handles padding with one number."""
    return pad(w, input, padding)


@handles("pixel_shuffle")
def pixel_shuffle(w: Wiring, input: Value, upscale_factor: int) -> Value:
    """Turns `upscale_factor ** 2` entries of the channel axis into positions of one neuron."""
    if not isinstance(input, Signal) or input.shape[-3] is None:
        return w.refuse("Expected channels to shuffle (got an unknown shape)")
    positions = upscale_factor**2
    w.mixes(input, [-2, -1])
    split = Split(w.neurons(input, -3), (input.shape[-3] // positions, positions))
    split.choose(0)
    return replace(
        input, stored=(*input.stored[:-3], SplitAxis(split, 0), Positions(), Positions())
    )


@handles("pixel_unshuffle")
def pixel_unshuffle(w: Wiring, input: Value, downscale_factor: int) -> Value:
    """Turns `downscale_factor ** 2` positions of one neuron into entries of the channel axis."""
    if not isinstance(input, Signal):
        return w.refuse("Expected channels to unshuffle (got an unknown shape)")
    channels = product(w.neurons(input, -3), downscale_factor**2)
    w.mixes(input, [-2, -1])
    return replace(
        input, stored=(*input.stored[:-3], NeuronAxis(channels), Positions(), Positions())
    )


@handles("im2col")
def unfold(w: Wiring, input: Signal, kernel_size: Any, *_: Any, **__: Any) -> Value:
    """Handles patches, whose entries are positions of each channel."""
    sizes = [kernel_size] * 2 if isinstance(kernel_size, int) else list(kernel_size)
    w.mixes(input, [-2, -1])
    channels = product(w.neurons(input, -3), sizes[0] * sizes[1])
    return Signal((*input.stored[:-3], NeuronAxis(channels), Positions(None)))
