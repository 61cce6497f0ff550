"""Follows and records Keras layers that resize positions: convolutions, pooling, padding.

Activations keep their axes in Keras: `(batch, *positions, channels)`, or, with
`data_format="channels_first"`, `(batch, channels, *positions)`. On the tape, channels are moved to
their place in PyTorch before a convolution, and back after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.applied import Applied, Handler, Operation, Record, Sizes, activated
from nfn_graph.converters.keras.keys import DEPTHWISE_ORDER, KERNEL_ORDER
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight
from nfn_graph.converters.wiring.tape import Unrecordable


def _convolved(
    layer: Applied,
    x: Value,
    axis: int,
    kernel: Weight,
    bias: Weight | None,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> Signal:
    """Handles a convolution with a kernel in PyTorch's order, for values of any axis order."""
    channels = kernel.shape[0] if transposed else kernel.shape[1] * groups
    claimed = layer.wiring.claim(x, axis, channels)
    y = layer.wiring.conv(
        layer.wiring.move(claimed, [axis], [1]), kernel, bias, groups=groups, transposed=transposed
    )
    back = layer.wiring.move(y, [1], [axis])
    if not isinstance(back, Signal):
        raise ConversionError("Expected an activation (got a value without neurons)")
    return back


def _ordered(kernel: Weight, spatial: int, orders: dict[int, tuple[int, ...]]) -> Weight:
    if kernel.rank != spatial + 2 or kernel.rank not in orders:
        raise ConversionError(
            f"Expected a kernel with {spatial + 2} axes (got '{kernel.parts[0][0]}' of shape "
            f"{list(kernel.shape)})"
        )
    return kernel.view(orders[kernel.rank])


def _windowed(
    layer: Applied, x: Value, axes: Sequence[int], windows: Sizes, transposed: bool = False
) -> list[int | None]:
    """Returns the numbers of positions after a kernel or a window."""
    old = [None if x.shape is None else x.shape[axis] for axis in axes]
    strides = layer.spread("strides", len(old))
    dilations = layer.spread("dilation_rate", len(old))
    is_known = "padding" in layer.layer.options and "output_padding" not in {
        name for name, value in layer.layer.options.items() if value is not None
    }
    if not is_known or not len(old) == len(strides) == len(dilations) == len(windows):
        return [None] * len(old)
    is_valid = layer.layer.text("padding", "valid") == "valid"
    found: list[int | None] = []
    for size, window, stride, dilation in zip(old, windows, strides, dilations, strict=True):
        if size is None or window is None or min(stride, dilation) < 1:
            found.append(None)
            continue
        width = (window - 1) * dilation + 1
        if transposed:
            found.append(size * stride + (max(width - stride, 0) if is_valid else 0))
        else:
            found.append((size - width) // stride + 1 if is_valid else -(-size // stride))
    return found


def _conv(spatial: int, transposed: bool = False) -> Operation:
    def operation(layer: Applied) -> Value:
        x, axis, positions = layer.image(spatial)
        kernel = layer.weight("kernel")
        if layer.layer.text("dim_ordering", "") == "th":
            turned = kernel.view([1, 0, *range(2, kernel.rank)]) if transposed else kernel
        else:
            turned = _ordered(kernel, spatial, KERNEL_ORDER)
        groups = layer.layer.integer("groups", 1)
        y = _convolved(layer, x, axis, turned, layer.bias(), groups=groups, transposed=transposed)
        sizes = _windowed(layer, x, positions, turned.shape[2:], transposed)
        return activated(layer, layer.resized(y, positions, sizes))

    return operation


def _record_conv(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        if r.layer.text("dim_ordering", "") == "th":
            raise Unrecordable("its kernels have an axis order of Keras 1")
        kernel = r.call("permute", r.tensor("kernel"), KERNEL_ORDER[spatial + 2])
        groups = r.layer.integer("groups", 1)
        return r.record_activation(
            _record_slid(r, spatial, r.ref, kernel, r.tensor("bias"), groups, "kernel")
        )

    return record


def _record_transposed(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        sizes = r.weight("kernel").shape[:spatial]
        strides = r.spread("strides", spatial)
        if r.layer.options.get("output_padding") is not None:
            raise Unrecordable("its transposed convolutions choose their own padding")
        if set(r.spread("dilation_rate", spatial)) != {1}:
            raise Unrecordable("its transposed convolutions are dilated")
        kernel = r.call("permute", r.tensor("kernel"), KERNEL_ORDER[spatial + 2])
        more = tuple(max(s - n, 0) for n, s in zip(sizes, strides, strict=True))
        y = r.channels_first(r.ref, spatial)
        rest = [tuple(strides), (0,) * spatial, more]
        y = r.call(f"conv_transpose{spatial}d", y, kernel, r.tensor("bias"), *rest)
        if r.is_same():
            cuts = [max(n - s, 0) for n, s in zip(sizes, strides, strict=True)]
            inner = [slice(n // 2, -(n - n // 2) if n else None) for n in cuts]
            y = r.call("getitem", y, (slice(None), slice(None), *inner))
        return r.record_activation(r.back(y, spatial))

    return record


def _record_slid(
    r: Applied, spatial: int, x: Any, kernel: Any, bias: Any, groups: int, role: str
) -> Any:
    """Records a convolution of values that have their channels where the layer has them."""
    sizes = r.weight(role, "kernel").shape[:spatial]
    strides = r.spread("strides", spatial)
    dilations = r.spread("dilation_rate", spatial)
    y = r.channels_first(x, spatial)
    if r.layer.text("padding", "") == "causal":
        y = r.call("pad", y, ((sizes[0] - 1) * dilations[0], 0))
    elif r.is_same():
        widths = [(n - 1) * d + 1 for n, d in zip(sizes, dilations, strict=True)]
        y = r.padded(y, widths, strides, 0.0)
    rest = [tuple(strides), (0,) * spatial, tuple(dilations), groups]
    return r.back(r.call(f"conv{spatial}d", y, kernel, bias, *rest), spatial)


def _depthwise(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, axis, positions = layer.image(spatial)
        y = _each_channel(layer, x, axis, layer.weight("depthwise_kernel", "kernel"), layer.bias())
        return activated(layer, _slid(layer, y, x, positions))

    return operation


def _record_depthwise(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        return r.record_activation(_record_each_channel(r, spatial, r.tensor("bias")))

    return record


def _each_channel(
    layer: Applied, x: Value, axis: int, kernel: Weight, bias: Weight | None = None
) -> Value:
    """Convolves each channel separately, with one or several results."""
    kernel = _ordered(kernel, len(x.shape or ()) - 2, DEPTHWISE_ORDER)
    # Channel i has the results i * m to i * m + m - 1, like a group of a transposed convolution.
    y = _convolved(layer, x, axis, kernel, None, groups=kernel.shape[0], transposed=True)
    return y if bias is None else layer.wiring.channelwise(y, [bias], axis)


def _record_each_channel(r: Applied, spatial: int, bias: Any) -> Any:
    *sizes, channels, _ = r.weight("depthwise_kernel", "kernel").shape
    kernel = r.call("permute", r.tensor("depthwise_kernel", "kernel"), DEPTHWISE_ORDER[spatial + 2])
    kernel = r.call("reshape", kernel, (-1, 1, *sizes))
    return _record_slid(r, spatial, r.ref, kernel, bias, channels, "depthwise_kernel")


def _slid(layer: Applied, y: Value, x: Value, positions: range) -> Value:
    """Returns the result of a depthwise kernel with the new numbers of positions."""
    kernel = layer.weight("depthwise_kernel", "kernel")
    return layer.resized(y, positions, _windowed(layer, x, positions, kernel.shape[:-2]))


def _separable(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, axis, positions = layer.image(spatial)
        y = _slid(
            layer, _each_channel(layer, x, axis, layer.weight("depthwise_kernel")), x, positions
        )
        pointwise = _ordered(layer.weight("pointwise_kernel"), spatial, KERNEL_ORDER)
        sizes = [None if y.shape is None else y.shape[i] for i in positions]
        y = _convolved(layer, y, axis, pointwise, layer.bias())
        return activated(layer, layer.resized(y, positions, sizes))

    return operation


def _record_separable(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        y = r.channels_first(_record_each_channel(r, spatial, None), spatial)
        kernel = r.call("permute", r.tensor("pointwise_kernel"), KERNEL_ORDER[spatial + 2])
        y = r.call(f"conv{spatial}d", y, kernel, r.tensor("bias"))
        return r.record_activation(r.back(y, spatial))

    return record


def _windows(layer: Applied, spatial: int) -> list[int]:
    name = "pool_size" if "pool_size" in layer.layer.options else "pool_length"
    return layer.spread(name, spatial, 2)


def _pool(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, _, positions = layer.image(spatial)
        windows = _windows(layer, spatial)
        if layer.layer.options.get("strides") is None:
            layer.layer.options = {**layer.layer.options, "strides": windows}
        return layer.resized(x, positions, _windowed(layer, x, positions, windows))

    return operation


def _record_pool(kind: str, spatial: int) -> Record:
    def record(r: Applied) -> Any:
        window, strides = _windows(r, spatial), r.spread("strides", spatial)
        x = r.channels_first(r.ref, spatial)
        rest = [tuple(window), tuple(strides)]
        pool = f"{kind}_pool{spatial}d"
        if not r.is_same():
            return r.back(r.call(pool, x, *rest), spatial)
        if kind == "max":
            y = r.padded(x, window, strides, -math.inf)
            return r.back(r.call(pool, y, *rest), spatial)
        # The average is over the values in the window, without the padding.
        ones = r.padded(r.call("ones_like", x), window, strides, 0.0)
        total = r.call(pool, r.padded(x, window, strides, 0.0), *rest)
        return r.back(r.call("truediv", total, r.call(pool, ones, *rest)), spatial)

    return record


def _global_pool(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, _, positions = layer.image(spatial)
        keep = layer.layer.flag("keepdims", False)
        if isinstance(x, Opaque):
            return replace(x, shape=_without(x.shape or (), positions, keep))
        return layer.wiring.reduce(x, positions, keep)

    return operation


def _without(shape: Sizes, axes: range, keep: bool) -> tuple[int | None, ...]:
    return tuple(1 if i in axes else size for i, size in enumerate(shape) if keep or i not in axes)


def _record_global_pool(kind: str, spatial: int) -> Record:
    def record(r: Applied) -> Any:
        first = 2 if r.is_first else 1
        axes = tuple(range(first, first + spatial))
        return r.call(
            "amax" if kind == "max" else "mean", r.ref, axes, r.layer.flag("keepdims", False)
        )

    return record


def _moved(spatial: int) -> Operation:
    """Handles padding, cropping and upsampling, which add, remove or repeat positions."""

    def operation(layer: Applied) -> Value:
        x, _, positions = layer.image(spatial)
        return layer.resized(x, positions, [None] * spatial)

    return operation


def _ends(r: Applied, name: str, spatial: int) -> list[tuple[int, int]]:
    """Returns the numbers of entries added or removed at both ends of every axis."""
    value = r.layer.options.get(name, 1)
    items = value if isinstance(value, list) else [value] * spatial
    if spatial == 1 and len(items) == 2 and all(isinstance(n, int) for n in items):
        items = [items]
    pairs = [tuple(n) if isinstance(n, list) else (n, n) for n in items]
    if len(pairs) != spatial or not all(
        len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair) for pair in pairs
    ):
        raise Unrecordable(f"its layer '{r.layer.name}' has {value!r:.40} as '{name}'")
    return [(pair[0], pair[1]) for pair in pairs]


def _record_padding(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        pads = [n for pair in reversed(_ends(r, "padding", spatial)) for n in pair]
        behind = [] if r.is_first else [0, 0]
        return r.call("pad", r.ref, (*behind, *pads))

    return record


def _record_cropping(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        ends = _ends(r, "cropping", spatial)
        before = 2 if r.is_first else 1
        parts = [slice(a, -b if b else None) for a, b in ends]
        return r.call("getitem", r.ref, (*[slice(None)] * before, *parts))

    return record


def _record_upsampling(spatial: int) -> Record:
    def record(r: Applied) -> Any:
        if r.layer.text("interpolation", "nearest") != "nearest":
            raise Unrecordable("its upsampling interpolates")
        first, x = 2 if r.is_first else 1, r.ref
        for i, times in enumerate(r.spread("size", spatial, 2)):
            x = r.call("repeat_interleave", x, times, first + i)
        return x

    return record


#: Handlers by the class of the layer.
SPATIAL: dict[str, Handler] = {}
for _n in (1, 2, 3):
    SPATIAL[f"Convolution{_n}D"] = Handler(_conv(_n))
    SPATIAL[f"Conv{_n}D"] = Handler(_conv(_n), _record_conv(_n))
    SPATIAL[f"Deconvolution{_n}D"] = Handler(_conv(_n, transposed=True))
    SPATIAL[f"Conv{_n}DTranspose"] = Handler(_conv(_n, transposed=True), _record_transposed(_n))
    SPATIAL[f"DepthwiseConv{_n}D"] = Handler(
        _depthwise(_n), _record_depthwise(_n) if _n < 3 else None
    )
    SPATIAL[f"SeparableConv{_n}D"] = Handler(
        _separable(_n), _record_separable(_n) if _n < 3 else None
    )
    for _kind, _name in (("Max", "max"), ("Average", "avg")):
        SPATIAL[f"{_kind}Pooling{_n}D"] = Handler(_pool(_n), _record_pool(_name, _n))
        SPATIAL[f"Global{_kind}Pooling{_n}D"] = Handler(
            _global_pool(_n), _record_global_pool(_name, _n)
        )
    SPATIAL[f"ZeroPadding{_n}D"] = Handler(_moved(_n), _record_padding(_n))
    SPATIAL[f"Cropping{_n}D"] = Handler(_moved(_n), _record_cropping(_n))
    SPATIAL[f"UpSampling{_n}D"] = Handler(_moved(_n), _record_upsampling(_n))
