"""Torch operations that mix or resize positions: pooling, padding, upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nfn_graph.converters.pytorch.registry import (
    HANDLERS,
    Handler,
    handles,
)
from nfn_graph.converters.wiring import (
    Neurons,
    Part,
    Positions,
    Signal,
    Value,
    Wiring,
)
from nfn_graph.converters.wiring.axes import product
from nfn_graph.converters.wiring.values import Split


def _pool(spatial: int, with_indices: bool = False) -> Handler:
    def handler(w: Wiring, input: Value, *args: Any, **kwargs: Any) -> Any:
        pooled = w.pool(input, spatial)
        # Every neuron has places of its own.
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
    """Resizes all axes after the channels."""
    return w.pool(input, input.rank - 2) if isinstance(input, Signal) else w.opaque([input])


@handles("pad")
def pad(
    w: Wiring, input: Value, pad: Sequence[int], mode: str = "constant", *_: Any, **__: Any
) -> Value:
    """Padding of positions; padded channels are neurons of their own, all alike."""
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
        if (left or right) and isinstance(axis, Neurons) and w.is_placed(input, at):
            axis = input.axes[at]
        if isinstance(axis, Positions):
            known = None if axis.size is None else axis.size + left + right
            stored[at] = Positions(known)
        elif left or right:
            if min(left, right) < 0:
                w.refuse("Expected padding of channels (got negative padding)")
            ends = [Neurons(()) if not n else w.fresh(n) for n in (left, right)]
            inner = w.neurons(input, at)
            stored[at] = Neurons((*ends[0].segments, *inner, *ends[1].segments))
    return replace(input, stored=tuple(stored))


@handles("constant_pad_nd", "zero_pad2d")
def constant_pad(w: Wiring, input: Value, padding: Sequence[int], *_: Any, **__: Any) -> Value:
    """Padding with one number."""
    return pad(w, input, padding)


@handles("pixel_shuffle")
def pixel_shuffle(w: Wiring, input: Value, upscale_factor: int) -> Value:
    """`upscale_factor ** 2` entries of the channel axis become positions of one neuron."""
    if not isinstance(input, Signal) or input.shape[-3] is None:
        return w.refuse("Expected channels to shuffle (got an unknown shape)")
    positions = upscale_factor**2
    w.mixes(input, [-2, -1])
    split = Split(w.neurons(input, -3), (input.shape[-3] // positions, positions))
    split.choose(0)
    return replace(input, stored=(*input.stored[:-3], Part(split, 0), Positions(), Positions()))


@handles("pixel_unshuffle")
def pixel_unshuffle(w: Wiring, input: Value, downscale_factor: int) -> Value:
    """`downscale_factor ** 2` positions of one neuron become entries of the channel axis."""
    if not isinstance(input, Signal):
        return w.refuse("Expected channels to unshuffle (got an unknown shape)")
    channels = product(w.neurons(input, -3), downscale_factor**2)
    w.mixes(input, [-2, -1])
    return replace(input, stored=(*input.stored[:-3], Neurons(channels), Positions(), Positions()))


@handles("im2col")
def unfold(w: Wiring, input: Signal, kernel_size: Any, *_: Any, **__: Any) -> Value:
    """Patches: the entries of a patch are positions of each channel."""
    sizes = [kernel_size] * 2 if isinstance(kernel_size, int) else list(kernel_size)
    w.mixes(input, [-2, -1])
    channels = product(w.neurons(input, -3), sizes[0] * sizes[1])
    return Signal((*input.stored[:-3], Neurons(channels), Positions(None)))
