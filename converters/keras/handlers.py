"""The layers of Keras, each in the words of `wiring`.

Activations keep the axes that they have in Keras: `(batch, *positions, channels)`, or, with
`data_format="channels_first"`, `(batch, channels, *positions)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.along_time import (
    RECURRENT,
    bidirectional,
    recurrent,
    time_distributed,
)
from nfn_graph.converters.keras.applied import Applied, Operation, Sizes, activated
from nfn_graph.converters.keras.keys import DEPTHWISE_ORDER, KERNEL_ORDER
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight


def _same(layer: Applied) -> Value:
    return layer.x


def _activation(layer: Applied) -> Value:
    return activated(layer, layer.x)


def _dense(layer: Applied) -> Value:
    y = layer.wiring.linear(layer.x, layer.weight("kernel"), layer.bias(), target=1, source=0)
    return activated(layer, y)


def _embedding(layer: Applied) -> Value:
    """A linear map of one-hot inputs: one input neuron per row."""
    x, table = layer.x, layer.weight("embeddings")
    if not isinstance(x, Opaque):
        raise ConversionError("Expected indices that come from the input (got computed ones)")
    shape = (None, None) if x.shape is None else x.shape
    rows = layer.wiring.opaque([x], (*shape, table.shape[0]))
    return layer.wiring.linear(rows, table, target=1, source=0)


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
    """A convolution with a kernel in PyTorch's order, of whatever order of axes."""
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


def _depthwise(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, axis, positions = layer.image(spatial)
        y = _each_channel(layer, x, axis, layer.weight("depthwise_kernel", "kernel"), layer.bias())
        return activated(layer, _slid(layer, y, x, positions))

    return operation


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


def _each_channel(
    layer: Applied, x: Value, axis: int, kernel: Weight, bias: Weight | None = None
) -> Value:
    """A convolution of each channel on its own, with one or several results."""
    kernel = _ordered(kernel, len(x.shape or ()) - 2, DEPTHWISE_ORDER)
    # Channel i has the results i * m to i * m + m - 1, as those of a group in a transposed one.
    y = _convolved(layer, x, axis, kernel, None, groups=kernel.shape[0], transposed=True)
    return y if bias is None else layer.wiring.channelwise(y, [bias], axis)


def _slid(layer: Applied, y: Value, x: Value, positions: range) -> Value:
    """The result of a depthwise kernel with the sizes that its positions have."""
    kernel = layer.weight("depthwise_kernel", "kernel")
    return layer.resized(y, positions, _windowed(layer, x, positions, kernel.shape[:-2]))


def _windowed(
    layer: Applied, x: Value, axes: Sequence[int], windows: Sizes, transposed: bool = False
) -> list[int | None]:
    """The sizes that a kernel leaves of positions."""
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


def _pool(spatial: int) -> Operation:
    def operation(layer: Applied) -> Value:
        x, _, positions = layer.image(spatial)
        name = "pool_size" if "pool_size" in layer.layer.options else "pool_length"
        windows = layer.spread(name, spatial, 2)
        if layer.layer.options.get("strides") is None:
            layer.layer.options = {**layer.layer.options, "strides": windows}
        return layer.resized(x, positions, _windowed(layer, x, positions, windows))

    return operation


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


def _moved(spatial: int) -> Operation:
    """Padding, cropping and upsampling: positions come, go or are repeated."""

    def operation(layer: Applied) -> Value:
        x, _, positions = layer.image(spatial)
        return layer.resized(x, positions, [None] * spatial)

    return operation


def _flatten(layer: Applied) -> Value:
    """The axes behind the batch as one; channels that come first are moved to the end before."""
    x = layer.x
    if x.shape is None:
        if isinstance(x, Opaque):
            return layer.wiring.opaque([x])
        raise ConversionError("Expected an input of known axes to flatten (got an unknown one)")
    rank = len(x.shape)
    if isinstance(x, Opaque):
        sizes = x.shape[1:]
        return layer.wiring.opaque([x], (None, _product(sizes)))
    if layer.layer.text("data_format", "") == "channels_first" and rank > 2:
        x = layer.wiring.permute(x, [0, *range(2, rank), 1])
    return layer.wiring.flatten(x, 1) if rank > 1 else x


def _product(sizes: Sizes) -> int | None:
    total = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total


def _reshape(layer: Applied) -> Value:
    sizes = layer.layer.integers("target_shape", [])
    x = layer.x
    if isinstance(x, Opaque):
        known = None if -1 in sizes else (None, *sizes)
        return layer.wiring.opaque([x], known)
    return layer.wiring.reshape(x, [None, *sizes])


def _permute(layer: Applied) -> Value:
    dims = layer.layer.integers("dims", [])
    x = layer.x
    if isinstance(x, Opaque):
        shape = x.shape
        known = shape is not None and sorted(dims) == [*range(1, len(shape))]
        return layer.wiring.opaque(
            [x], [None, *(shape[i] for i in dims)] if known and shape is not None else None
        )
    return layer.wiring.permute(x, [0, *dims])


def _repeat(layer: Applied) -> Value:
    x = layer.wiring.unsqueeze(layer.x, 1)
    return layer.resized(x, [1], [layer.layer.integer("n", 1)]) if x.shape else x


def _batch_norm(layer: Applied) -> Value:
    return _channelwise(layer, "moving_mean", "gamma", "beta", "moving_mean", "moving_variance")


def _normalization(layer: Applied) -> Value:
    return _channelwise(layer, "mean", "mean", "variance")


def _rescaling(layer: Applied) -> Value:
    numbers = [layer.layer.options.get(name) for name in ("scale", "offset")]
    if isinstance(layer.x, Signal) and any(isinstance(x, list | dict) for x in numbers):
        raise ConversionError("Expected one scale for all neurons (got one for each)")
    return layer.x


def _channelwise(layer: Applied, needed: str, *roles: str) -> Value:
    axes = layer.layer.integers("axis", [-1])
    if len(axes) != 1:
        raise ConversionError(f"Expected a norm along one axis (got {axes})")
    layer.weight(needed)
    return layer.wiring.channelwise(layer.x, layer.weights(*roles), axes[0])


def _layer_norm(layer: Applied) -> Value:
    axes = layer.layer.integers("axis", [-1])
    rank = len(layer.x.shape or ()) or 2
    behind = sorted(rank - axis if axis >= 0 else -axis for axis in axes)
    if behind != [*range(1, len(axes) + 1)]:
        raise ConversionError(f"Expected a norm along the last axes (got axes {axes} of {rank})")
    return layer.wiring.layer_norm(layer.x, layer.weights("gamma", "beta", "scale"), len(axes))


def _group_norm(layer: Applied) -> Value:
    (axis, *_), x = layer.layer.integers("axis", [-1]), layer.x
    if not isinstance(x, Signal):
        raise ConversionError("Expected neurons to normalise (got inputs)")
    groups = layer.layer.integer("groups", 32)
    axis = axis % x.rank
    y = layer.wiring.move(x, [axis], [1])
    channels = y.shape[1] if y.shape else None
    y = layer.wiring.group_norm(
        y, channels if groups == -1 and channels else groups, layer.weights("gamma", "beta")
    )
    return layer.wiring.move(y, [1], [axis])


def _prelu(layer: Applied) -> Value:
    return layer.wiring.combine(layer.x, layer.weight("alpha"))


def _along_axis(layer: Applied) -> Value:
    axes = layer.layer.integers("axis", [-1])
    return layer.wiring.statistics(layer.x, axes) if isinstance(layer.x, Signal) else layer.x


def _merge(layer: Applied) -> Value:
    """An operation entry by entry; one number beside a value changes no symmetry."""
    most = 1 if len(layer.values) == 1 else 0
    numbers = [other for other in layer.others if isinstance(other, int | float)]
    if not layer.values or not len(numbers) == len(layer.others) <= most:
        raise ConversionError(
            f"Expected values of the network, or one and a number (got {len(layer.values)} and "
            f"{len(layer.others)} other arguments)"
        )
    ranks = {len(value.shape) for value in layer.values if value.shape is not None}
    if len(ranks) > 1:
        raise ConversionError(f"Expected values with as many axes (got {sorted(ranks)})")
    return reduce(layer.wiring.combine, layer.values)


def _concatenate(layer: Applied) -> Value:
    if layer.others:
        raise ConversionError("Expected values of the network (got something else)")
    return layer.wiring.concat(layer.values, layer.layer.integer("axis", -1))


_IDENTITIES = (
    "ReLU LeakyReLU ELU ThresholdedReLU Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D "
    "AlphaDropout GaussianDropout GaussianNoise ActivityRegularization Identity "
    # Functions that Keras 3 writes like layers.
    "Relu Relu6 Sigmoid Silu Gelu Tanh Elu Selu Softplus Softsign Exp Log Sqrt Square Abs Absolute "
    "Negative"
)

#: What the layers of a class do.
LAYERS: dict[str, Operation] = {
    **dict.fromkeys(_IDENTITIES.split(), _same),
    **dict.fromkeys(["Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"], _merge),
    "Activation": _activation,
    "Dense": _dense,
    "Embedding": _embedding,
    "Flatten": _flatten,
    "Rescaling": _rescaling,
    "Reshape": _reshape,
    "Permute": _permute,
    "RepeatVector": _repeat,
    "BatchNormalization": _batch_norm,
    "Normalization": _normalization,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "UnitNormalization": _along_axis,
    "Softmax": _along_axis,
    "Masking": _along_axis,
    "PReLU": _prelu,
    "Concatenate": _concatenate,
    **dict.fromkeys(RECURRENT, recurrent),
    "Bidirectional": bidirectional,
    "TimeDistributed": time_distributed(_dense),
}
for _n in (1, 2, 3):
    LAYERS[f"Conv{_n}D"] = LAYERS[f"Convolution{_n}D"] = _conv(_n)
    LAYERS[f"Conv{_n}DTranspose"] = LAYERS[f"Deconvolution{_n}D"] = _conv(_n, transposed=True)
    LAYERS[f"DepthwiseConv{_n}D"] = _depthwise(_n)
    LAYERS[f"SeparableConv{_n}D"] = _separable(_n)
    for _kind in ("Max", "Average"):
        LAYERS[f"{_kind}Pooling{_n}D"] = _pool(_n)
        LAYERS[f"Global{_kind}Pooling{_n}D"] = _global_pool(_n)
    for _kind in ("ZeroPadding", "Cropping", "UpSampling"):
        LAYERS[f"{_kind}{_n}D"] = _moved(_n)

# Layers without a graph, which their network as a module does not have either.
_WITHOUT_GRAPH = {
    r".*(LSTM|GRU|RNN).*": "a recurrence over time other than LSTM, GRU and SimpleRNN",
    r".*Attention.*": "attention",
}


def refusal(class_name: str, is_custom: bool = False) -> ConversionError:
    """Why the layers of a class cannot be followed."""
    for pattern, what in _WITHOUT_GRAPH.items():
        if re.fullmatch(pattern, class_name):
            return ConversionError(f"Expected a layer whose graph of weights is known (got {what})")
    what = f"the class {class_name}, which is {'none of Keras' if is_custom else 'not known'}"
    if class_name == "Lambda":
        what = "code of the author's, which is never run"
    return ConversionError(
        f"Expected a layer whose symmetry is known (got {what}). Give the network as a PyTorch "
        f"module: arch=..."
    )
