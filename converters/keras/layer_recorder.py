"""The layers of a Keras model on tape, so that the graph can be run.

Values keep the axes that they have in Keras, with the channels at the end unless the layers say
otherwise; around a convolution they are moved to where PyTorch has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nfn_graph.converters.keras.applied import Applied
from nfn_graph.converters.keras.config import KerasLayer, keys_by_role
from nfn_graph.converters.keras.keys import DEPTHWISE_ORDER, KERNEL_ORDER
from nfn_graph.converters.wiring import Value, Wiring
from nfn_graph.converters.wiring.tape import Tape, Unrecordable, recording
from nfn_graph.data import Ref

#: Activation functions by their names without underscores, with the arguments after the value.
_FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "celu": ("celu", ()),
    "elu": ("elu", ()),
    "exponential": ("exp", ()),
    "gelu": ("gelu", ()),
    "hardsilu": ("hardswish", ()),
    "hardswish": ("hardswish", ()),
    "hardtanh": ("hardtanh", ()),
    "leakyrelu": ("leaky_relu", (0.2,)),
    "logsigmoid": ("logsigmoid", ()),
    "mish": ("mish", ()),
    "relu": ("relu", ()),
    "relu6": ("relu6", ()),
    "selu": ("selu", ()),
    "sigmoid": ("sigmoid", ()),
    "silu": ("silu", ()),
    "swish": ("silu", ()),
    "softplus": ("softplus", ()),
    "softsign": ("softsign", ()),
    "tanh": ("tanh", ()),
    "tanhshrink": ("tanhshrink", ()),
    "softmax": ("softmax", (-1,)),
    "logsoftmax": ("log_softmax", (-1,)),
    # Functions that Keras 3 writes like layers.
    "exp": ("exp", ()),
    "log": ("log", ()),
    "sqrt": ("sqrt", ()),
    "square": ("square", ()),
    "abs": ("abs", ()),
    "absolute": ("abs", ()),
    "negative": ("neg", ()),
}
_AS_LAYERS = (
    "Relu Relu6 Sigmoid Silu Gelu Tanh Elu Selu Softplus Softsign Exp Log Sqrt Square Abs Absolute "
    "Negative"
)
_NOTHING = (
    "Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D AlphaDropout GaussianDropout "
    "GaussianNoise ActivityRegularization Identity"
)
_MERGES = {
    "Add": "add", "Subtract": "sub", "Multiply": "mul", "Average": "add", "Maximum": "maximum",
    "Minimum": "minimum",
}  # fmt: skip


class KerasRecorder:
    """Writes the layers of a model on the tape of its wiring.

    Args:
        wiring: The wiring that follows the model.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._tape = wiring.tape

    def input(self) -> Any:
        """The next input of the network."""
        return self._tape.input()

    def output(self, ref: Any) -> None:
        """An output of the network."""
        self._tape.output(ref)

    def lose(self, reason: str) -> None:
        """Says why nothing can be recorded."""
        self._tape.lose(reason)

    def record(self, applied: Applied, refs: Sequence[Any], value: Value) -> Any:
        """Writes a layer down.

        Args:
            applied: The layer with what it is applied to.
            refs: The results that it reads.
            value: What is known of the axes of its result.
        """
        ref = recording(self._tape, lambda: self._record(applied, refs))
        self._tape.note(ref, value)
        return ref

    def _record(self, applied: Applied, refs: Sequence[Any]) -> Any:
        kind = applied.layer.class_name
        if kind in _NOTHING.split():
            return refs[0]
        if kind in _AS_LAYERS.split():
            return _function(self._tape, kind.lower(), refs[0])
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise Unrecordable(f"it uses '{kind}' of Keras, which cannot be run from a graph")
        return handler(Recorded(self._tape, applied, refs))


class Recorded:
    """A layer that is being written down.

    Args:
        tape: What it is written on.
        applied: The layer with what it is applied to.
        refs: The results that it reads.
    """

    def __init__(self, tape: Tape, applied: Applied, refs: Sequence[Any]) -> None:
        self.tape, self.applied, self.refs = tape, applied, refs
        self.layer: KerasLayer = applied.layer
        self._keys = keys_by_role(applied.layer)

    @property
    def x(self) -> Any:
        """The one result that it reads."""
        return self.refs[0]

    def call(self, operation: str, *args: Any) -> Ref:
        """The result of an operation."""
        return self.tape.call(operation, *args)

    def tensor(self, *roles: str) -> Any:
        """The tensor with one of these roles; None if there is none."""
        key = next((self._keys[role] for role in roles if role in self._keys), None)
        return None if key is None else self.tape.parameter(key)

    def number(self, *names: str, default: float) -> float:
        """An option that is a number, under one of several names."""
        for name in names:
            value = self.layer.options.get(name)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            if value is not None:
                raise Unrecordable(f"its layer '{self.layer.name}' has {value!r:.40} as '{name}'")
        return default

    def activated(self, x: Any) -> Any:
        """What the activation function that the layer was made with gives."""
        function = self.layer.options.get("activation")
        if isinstance(function, dict):
            inner = function.get("config")
            if isinstance(inner, dict) and inner.keys() - {"name", "dtype", "trainable"}:
                raise Unrecordable(f"its activation function has options: {inner!r:.60}")
            function = inner if isinstance(inner, str) else function.get("class_name")
        return _function(self.tape, "linear" if function is None else str(function), x)

    def channels_first(self, x: Any, spatial: int) -> Any:
        """A value with its channels before its positions."""
        if self.applied.is_first:
            return x
        return self.call("permute", x, (0, spatial + 1, *range(1, spatial + 1)))

    def back(self, x: Any, spatial: int) -> Any:
        """The value with its channels where the layer has them."""
        if self.applied.is_first:
            return x
        return self.call("permute", x, (0, *range(2, spatial + 2), 1))

    def is_same(self) -> bool:
        """Whether zeros around the positions keep their number."""
        name = self.layer.text("padding", self.layer.text("border_mode", "valid"))
        if name not in ("same", "valid"):
            raise Unrecordable(f"its layer '{self.layer.name}' has the padding '{name}'")
        return name == "same"

    def padded(self, x: Any, window: Sequence[int], strides: Sequence[int], value: float) -> Any:
        """Channels-first values with as much around them as "same" asks for."""
        pads: list[Any] = []
        for i in reversed(range(len(window))):
            width, stride = window[i], strides[i]
            if width == 1:
                pads += [0, 0]
                continue
            if width < stride:
                raise Unrecordable("its windows are narrower than their distance")
            total: Any = width - 1
            if stride > 1:
                # The last window ends where the values end, or behind them.
                size = self.call("size", x, i + 2)
                total = self.call("sub", total, self._last(size, stride))
                before: Any = self.call("floordiv", total, 2)
                pads += [before, self.call("sub", total, before)]
            else:
                pads += [total // 2, total - total // 2]
        return x if pads == [0] * len(pads) else self.call("pad", x, tuple(pads), "constant", value)

    def _last(self, size: Any, stride: int) -> Any:
        return self.call("mod", self.call("sub", size, 1), stride)


Handler = Callable[[Recorded], Any]


def _function(tape: Tape, name: str, x: Any) -> Any:
    plain = name.lower().replace("_", "")
    if plain == "linear":
        return x
    if plain not in _FUNCTIONS:
        raise Unrecordable(
            f"its activation function '{name}' is not known, or differs between versions of Keras"
        )
    function, rest = _FUNCTIONS[plain]
    return tape.call(function, x, *rest)


def _dense(r: Recorded) -> Any:
    weight = r.call("permute", r.tensor("kernel"), (1, 0))
    return r.activated(r.call("linear", r.x, weight, r.tensor("bias")))


def _conv(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        if r.layer.text("dim_ordering", "") == "th":
            raise Unrecordable("its kernels are in an order of Keras 1")
        kernel = r.call("permute", r.tensor("kernel"), KERNEL_ORDER[spatial + 2])
        groups = r.layer.integer("groups", 1)
        return r.activated(_slid(r, spatial, r.x, kernel, r.tensor("bias"), groups, "kernel"))

    return record


def _slid(r: Recorded, spatial: int, x: Any, kernel: Any, bias: Any, groups: int, role: str) -> Any:
    """A convolution of values with the channels where the layer has them."""
    sizes = r.applied.weight(role, "kernel").shape[:spatial]
    strides = r.applied.spread("strides", spatial)
    dilations = r.applied.spread("dilation_rate", spatial)
    y = r.channels_first(x, spatial)
    if r.layer.text("padding", "") == "causal":
        y = r.call("pad", y, ((sizes[0] - 1) * dilations[0], 0))
    elif r.is_same():
        widths = [(n - 1) * d + 1 for n, d in zip(sizes, dilations, strict=True)]
        y = r.padded(y, widths, strides, 0.0)
    rest = [tuple(strides), (0,) * spatial, tuple(dilations), groups]
    return r.back(r.call(f"conv{spatial}d", y, kernel, bias, *rest), spatial)


def _depthwise(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        return r.activated(_each_channel(r, spatial, r.tensor("bias")))

    return record


def _each_channel(r: Recorded, spatial: int, bias: Any) -> Any:
    *sizes, channels, _ = r.applied.weight("depthwise_kernel", "kernel").shape
    kernel = r.call("permute", r.tensor("depthwise_kernel", "kernel"), DEPTHWISE_ORDER[spatial + 2])
    kernel = r.call("reshape", kernel, (-1, 1, *sizes))
    return _slid(r, spatial, r.x, kernel, bias, channels, "depthwise_kernel")


def _separable(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        y = r.channels_first(_each_channel(r, spatial, None), spatial)
        kernel = r.call("permute", r.tensor("pointwise_kernel"), KERNEL_ORDER[spatial + 2])
        y = r.call(f"conv{spatial}d", y, kernel, r.tensor("bias"))
        return r.activated(r.back(y, spatial))

    return record


def _transposed(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        sizes = r.applied.weight("kernel").shape[:spatial]
        strides = r.applied.spread("strides", spatial)
        if r.layer.options.get("output_padding") is not None:
            raise Unrecordable("its transposed convolutions choose their own padding")
        if set(r.applied.spread("dilation_rate", spatial)) != {1}:
            raise Unrecordable("its transposed convolutions are dilated")
        kernel = r.call("permute", r.tensor("kernel"), KERNEL_ORDER[spatial + 2])
        more = tuple(max(s - n, 0) for n, s in zip(sizes, strides, strict=True))
        y = r.channels_first(r.x, spatial)
        rest = [tuple(strides), (0,) * spatial, more]
        y = r.call(f"conv_transpose{spatial}d", y, kernel, r.tensor("bias"), *rest)
        if r.is_same():
            cuts = [max(n - s, 0) for n, s in zip(sizes, strides, strict=True)]
            inner = [slice(n // 2, -(n - n // 2) if n else None) for n in cuts]
            y = r.call("getitem", y, (slice(None), slice(None), *inner))
        return r.activated(r.back(y, spatial))

    return record


def _pool(kind: str, spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        name = "pool_size" if "pool_size" in r.layer.options else "pool_length"
        window = r.applied.spread(name, spatial, 2)
        given = r.layer.options.get("strides") is not None
        strides = r.applied.spread("strides", spatial) if given else window
        x = r.channels_first(r.x, spatial)
        rest = [tuple(window), tuple(strides)]
        pool = f"{kind}_pool{spatial}d"
        if not r.is_same():
            return r.back(r.call(pool, x, *rest), spatial)
        if kind == "max":
            y = r.padded(x, window, strides, -math.inf)
            return r.back(r.call(pool, y, *rest), spatial)
        # The average is over what lies in the window, without what was put around it.
        ones = r.padded(r.call("ones_like", x), window, strides, 0.0)
        total = r.call(pool, r.padded(x, window, strides, 0.0), *rest)
        return r.back(r.call("truediv", total, r.call(pool, ones, *rest)), spatial)

    return record


def _global_pool(kind: str, spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        first = 2 if r.applied.is_first else 1
        axes = tuple(range(first, first + spatial))
        return r.call(
            "amax" if kind == "max" else "mean", r.x, axes, r.layer.flag("keepdims", False)
        )

    return record


def _ends(r: Recorded, name: str, spatial: int) -> list[tuple[int, int]]:
    """What is added or taken at both ends of every axis."""
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


def _zeros_around(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        pads = [n for pair in reversed(_ends(r, "padding", spatial)) for n in pair]
        behind = [] if r.applied.is_first else [0, 0]
        return r.call("pad", r.x, (*behind, *pads))

    return record


def _cropped(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        ends = _ends(r, "cropping", spatial)
        before = 2 if r.applied.is_first else 1
        parts = [slice(a, -b if b else None) for a, b in ends]
        return r.call("getitem", r.x, (*[slice(None)] * before, *parts))

    return record


def _repeated(spatial: int) -> Handler:
    def record(r: Recorded) -> Any:
        if r.layer.text("interpolation", "nearest") != "nearest":
            raise Unrecordable("its upsampling interpolates")
        first, x = 2 if r.applied.is_first else 1, r.x
        for i, times in enumerate(r.applied.spread("size", spatial, 2)):
            x = r.call("repeat_interleave", x, times, first + i)
        return x

    return record


def _flatten(r: Recorded) -> Any:
    rank = len(r.applied.x.shape or ())
    x = r.x
    if r.layer.text("data_format", "") == "channels_first":
        if not rank:
            raise Unrecordable("it flattens a value whose axes are not known")
        x = r.call("permute", x, (0, *range(2, rank), 1)) if rank > 2 else x
    return r.call("flatten", x, 1) if rank != 1 else r.call("unsqueeze", x, -1)


def _reshape(r: Recorded) -> Any:
    sizes = r.layer.integers("target_shape", [])
    return r.call("reshape", r.x, (r.call("size", r.x, 0), *sizes))


def _permute(r: Recorded) -> Any:
    return r.call("permute", r.x, (0, *r.layer.integers("dims", [])))


def _repeat(r: Recorded) -> Any:
    return r.call("expand", r.call("unsqueeze", r.x, 1), -1, r.layer.integer("n", 1), -1)


def _axis(r: Recorded) -> tuple[int, int]:
    """The axis of a norm, counted from the front, and the number of axes."""
    rank = len(r.applied.x.shape or ())
    (axis, *more) = r.layer.integers("axis", [-1])
    if more or (not rank and axis != -1):
        raise Unrecordable(f"its layer '{r.layer.name}' has an axis that is not known")
    return (axis % rank, rank) if rank else (-1, 0)


def _batch_norm(r: Recorded) -> Any:
    axis, rank = _axis(r)
    eps = r.number("epsilon", default=1e-3)
    mean, variance = r.tensor("moving_mean"), r.tensor("moving_variance")
    if axis == 1 and rank > 2:
        tensors = [mean, variance, r.tensor("gamma"), r.tensor("beta")]
        return r.call("batch_norm", r.x, *tensors, False, 0.0, eps)
    if axis != rank - 1:
        raise Unrecordable("its norm is along an axis between others")
    y = r.call("sub", r.x, mean)
    y = r.call("mul", y, r.call("rsqrt", r.call("add", variance, eps)))
    return _scaled(r, y)


def _scaled(r: Recorded, y: Any) -> Any:
    gamma, beta = r.tensor("gamma"), r.tensor("beta")
    y = y if gamma is None else r.call("mul", y, gamma)
    return y if beta is None else r.call("add", y, beta)


def _layer_norm(r: Recorded) -> Any:
    axes = r.layer.integers("axis", [-1])
    known = r.applied.weights("gamma", "beta", "scale")
    if r.layer.flag("rms_scaling", False) or not known:
        raise Unrecordable("its layer norm has no size of its own, or is none")
    shape = known[0].shape
    if len(shape) != len(axes):
        raise Unrecordable("its layer norm has another shape than its axes")
    if r.layer.class_name == "RMSNormalization":
        return r.call("rms_norm", r.x, shape, r.tensor("scale"), r.number("epsilon", default=1e-6))
    eps = r.number("epsilon", default=1e-3)
    return r.call("layer_norm", r.x, shape, r.tensor("gamma"), r.tensor("beta"), eps)


def _group_norm(r: Recorded) -> Any:
    axis, rank = _axis(r)
    if rank < 3 or axis not in (1, rank - 1):
        raise Unrecordable("its group norm is along an axis between others")
    behind = axis == rank - 1
    known = r.applied.weights("gamma", "beta")
    groups = r.layer.integer("groups", 32)
    if groups == -1 and not known:
        raise Unrecordable("its group norm has no size of its own")
    count = known[0].shape[0] if groups == -1 else groups
    x = r.call("permute", r.x, (0, rank - 1, *range(1, rank - 1))) if behind else r.x
    eps = r.number("epsilon", default=1e-3)
    y = r.call("group_norm", x, count, r.tensor("gamma"), r.tensor("beta"), eps)
    return r.call("permute", y, (0, *range(2, rank), 1)) if behind else y


def _rescaling(r: Recorded) -> Any:
    y = r.call("mul", r.x, r.number("scale", default=1.0))
    return r.call("add", y, r.number("offset", default=0.0))


def _relu(r: Recorded) -> Any:
    slope = r.number("negative_slope", default=0.0)
    if r.number("threshold", default=0.0):
        raise Unrecordable("its ReLU has a threshold")
    y = r.call("leaky_relu", r.x, slope) if slope else r.call("relu", r.x)
    most = r.layer.options.get("max_value")
    return y if most is None else r.call("clamp_max", y, r.number("max_value", default=0.0))


def _prelu(r: Recorded) -> Any:
    below = r.call("mul", r.tensor("alpha"), r.call("relu", r.call("neg", r.x)))
    return r.call("sub", r.call("relu", r.x), below)


def _merge(r: Recorded) -> Any:
    kind = r.layer.class_name
    operands = [*r.refs, *r.applied.others]
    y = operands[0]
    for other in operands[1:]:
        y = r.call(_MERGES[kind], y, other)
    return r.call("truediv", y, len(operands)) if kind == "Average" else y


def _softmax(r: Recorded) -> Any:
    return r.call("softmax", r.x, r.layer.integer("axis", -1))


_HANDLERS: dict[str, Handler] = {
    "Activation": lambda r: r.activated(r.x),
    "Dense": _dense,
    "Embedding": lambda r: r.call("embedding", r.x, r.tensor("embeddings")),
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Permute": _permute,
    "RepeatVector": _repeat,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "Rescaling": _rescaling,
    "ReLU": _relu,
    "LeakyReLU": lambda r: r.call(
        "leaky_relu", r.x, r.number("negative_slope", "alpha", default=0.3)
    ),
    "ELU": lambda r: r.call("elu", r.x, r.number("alpha", default=1.0)),
    "ThresholdedReLU": lambda r: r.call("threshold", r.x, r.number("theta", default=1.0), 0.0),
    "PReLU": _prelu,
    "Softmax": _softmax,
    "Concatenate": lambda r: r.call("cat", tuple(r.refs), r.layer.integer("axis", -1)),
    **dict.fromkeys(_MERGES, _merge),
    **{f"Conv{n}D": _conv(n) for n in (1, 2, 3)},
    **{f"Conv{n}DTranspose": _transposed(n) for n in (1, 2, 3)},
    **{f"DepthwiseConv{n}D": _depthwise(n) for n in (1, 2)},
    **{f"SeparableConv{n}D": _separable(n) for n in (1, 2)},
    **{f"MaxPooling{n}D": _pool("max", n) for n in (1, 2, 3)},
    **{f"AveragePooling{n}D": _pool("avg", n) for n in (1, 2, 3)},
    **{f"GlobalMaxPooling{n}D": _global_pool("max", n) for n in (1, 2, 3)},
    **{f"GlobalAveragePooling{n}D": _global_pool("avg", n) for n in (1, 2, 3)},
    **{f"ZeroPadding{n}D": _zeros_around(n) for n in (1, 2, 3)},
    **{f"Cropping{n}D": _cropped(n) for n in (1, 2, 3)},
    **{f"UpSampling{n}D": _repeated(n) for n in (1, 2, 3)},
}
