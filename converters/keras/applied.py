"""A Keras layer with its inputs, which the wiring follows and its tape records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import KerasLayer, keys_by_role
from nfn_graph.converters.wiring import Opaque, Positions, Signal, SplitAxis, Value, Weight, Wiring
from nfn_graph.converters.wiring.tape import Unrecordable
from nfn_graph.data import Ref

Sizes = Sequence[int | None]

_NAMES = (
    "celu elu gelu hardswish hardtanh logsigmoid mish relu relu6 selu sigmoid silu softplus "
    "softsign tanh tanhshrink"
)
_OTHER_NAMES = {
    "exponential": "exp", "hardsilu": "hardswish", "leakyrelu": "leaky_relu", "swish": "silu"
}  # fmt: skip
# Functions that differ between versions of Keras, or that torch does not have.
_UNRECORDED = "hardshrink hardsigmoid softshrink sparseplus sparsesigmoid squareplus threshold"
#: Entrywise functions, without the underscores in their names, and their names in torch.
_POINTWISE: dict[str, str | None] = {
    **{name: name for name in _NAMES.split()},
    **_OTHER_NAMES,
    **dict.fromkeys(_UNRECORDED.split()),
}
_ALONG_THE_LAST = {"softmax": "softmax", "log_softmax": "log_softmax", "sparsemax": None}
# Further arguments of functions, with the values of Keras.
_ARGUMENTS = {"leaky_relu": (0.2,), "softmax": (-1,), "log_softmax": (-1,)}
#: Functions that Keras 3 writes as layers.
AS_LAYERS = {
    "Relu": "relu", "Relu6": "relu6", "Sigmoid": "sigmoid", "Silu": "silu", "Gelu": "gelu",
    "Tanh": "tanh", "Elu": "elu", "Selu": "selu", "Softplus": "softplus", "Softsign": "softsign",
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Square": "square", "Abs": "abs",
    "Absolute": "abs", "Negative": "neg",
}  # fmt: skip


class Applied:
    """A layer with the values that it is applied to.

    Args:
        wiring: The network so far.
        layer: The layer.
        values: The values that it reads.
        others: Its other arguments.
        refs: The references to the values on the tape.
    """

    def __init__(
        self,
        wiring: Wiring,
        layer: KerasLayer,
        values: Sequence[Value],
        others: Sequence[Any] = (),
        refs: Sequence[Any] = (),
    ) -> None:
        self.wiring, self.layer, self.values, self.others = wiring, layer, values, others
        self.refs = refs

    @cached_property
    def _keys(self) -> dict[str, str]:
        return keys_by_role(self.layer)

    @property
    def x(self) -> Value:
        """The only value that it reads."""
        if len(self.values) != 1 or self.others:
            raise ConversionError(
                f"Expected one input (got {len(self.values)} and {len(self.others)} other "
                f"arguments)"
            )
        return self.values[0]

    def weight(self, *roles: str) -> Weight:
        """Returns the tensor with one of these roles, and raises if there is none."""
        found = self.weights(*roles)
        if not found:
            raise ConversionError(
                f"Expected a tensor '{roles[0]}' (got {list(self._keys.values()) or 'none'})"
            )
        return found[0]

    def weights(self, *roles: str) -> list[Weight]:
        """Returns the existing tensors with these roles."""
        return [self.wiring.parameter(self._keys[role]) for role in roles if role in self._keys]

    def bias(self) -> Weight | None:
        """Returns the bias, if there is one."""
        return next(iter(self.weights("bias")), None)

    @property
    def is_first(self) -> bool:
        """Whether channels come before positions."""
        # Keras 1 has another name for this option.
        return (
            self.layer.text("data_format", "") == "channels_first"
            or self.layer.text("dim_ordering", "") == "th"
        )

    def image(self, spatial: int) -> tuple[Value, int, range]:
        """Returns the input with `spatial` axes of positions, its channel axis, and these axes."""
        x = self.wiring.ranked(self.x, spatial + 2)
        if len(x.shape or ()) != spatial + 2:
            raise ConversionError(
                f"Expected an input with {spatial + 2} axes (got {len(x.shape or ())})"
            )
        axis = 1 if self.is_first else spatial + 1
        if isinstance(x, Signal) and isinstance(x.axes[axis], SplitAxis):
            self.wiring.neurons(x, axis)  # Settles a reshape that left this axis open.
        return x, axis, range(2, spatial + 2) if self.is_first else range(1, spatial + 1)

    def resized(self, x: Value, axes: Sequence[int], sizes: Sizes) -> Value:
        """Returns a value whose positions along some axes were mixed and now have these sizes."""
        x = self.wiring.mixes(x, axes)
        if isinstance(x, Signal):
            stored = list(x.stored)
            for axis, size in zip(axes, sizes, strict=True):
                stored[axis] = Positions(size)
            return replace(x, stored=tuple(stored))
        if isinstance(x, Opaque) and x.shape is not None:
            new = list(x.shape)
            for axis, size in zip(axes, sizes, strict=True):
                new[axis] = size
            return replace(x, shape=tuple(new))
        return x

    def spread(self, name: str, count: int, default: int = 1) -> list[int]:
        """Returns an option with one number for every axis of positions, or one for all."""
        values = self.layer.integers(name, [default])
        return values * count if len(values) == 1 else values

    # The following methods record the layer on the tape.

    @property
    def ref(self) -> Any:
        """The reference to the only value that it reads."""
        return self.refs[0]

    def call(self, operation: str, *args: Any) -> Ref:
        """Records an operation."""
        return self.wiring.tape.call(operation, *args)

    def tensor(self, *roles: str) -> Any:
        """Records the tensor with one of these roles; None if there is none."""
        key = next((self._keys[role] for role in roles if role in self._keys), None)
        return None if key is None else self.wiring.tape.parameter(key)

    def record_activation(self, x: Any) -> Any:
        """Records the activation function of the layer."""
        function = self.layer.options.get("activation")
        inner = function.get("config") if isinstance(function, dict) else None
        if isinstance(inner, dict) and inner.keys() - {"name", "dtype", "trainable"}:
            raise Unrecordable(f"its activation function has options: {inner!r:.60}")
        name = _activation_name(self.layer)
        plain = name.lower().replace("_", "")
        if plain == "linear":
            return x
        found = _POINTWISE.get(plain) or _ALONG_THE_LAST.get(name.lower())
        if found is None:
            raise Unrecordable(
                f"its activation function '{name}' is not known, or differs between versions of "
                f"Keras"
            )
        return self.call(found, x, *_ARGUMENTS.get(found, ()))

    def number(self, *names: str, default: float) -> float:
        """Returns a numeric option that has one of several names."""
        for name in names:
            value = self.layer.options.get(name)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            if value is not None:
                raise Unrecordable(f"its layer '{self.layer.name}' has {value!r:.40} as '{name}'")
        return default

    def channels_first(self, x: Any, spatial: int) -> Any:
        """Moves the channels of a value before its positions."""
        if self.is_first:
            return x
        return self.call("permute", x, (0, spatial + 1, *range(1, spatial + 1)))

    def back(self, x: Any, spatial: int) -> Any:
        """Moves the channels of a value back to where the layer has them."""
        if self.is_first:
            return x
        return self.call("permute", x, (0, *range(2, spatial + 2), 1))

    def is_same(self) -> bool:
        """Whether the padding keeps the number of positions."""
        name = self.layer.text("padding", self.layer.text("border_mode", "valid"))
        if name not in ("same", "valid"):
            raise Unrecordable(f"its layer '{self.layer.name}' has the padding '{name}'")
        return name == "same"

    def padded(self, x: Any, window: Sequence[int], strides: Sequence[int], value: float) -> Any:
        """Pads channels-first values as the padding "same" requires."""
        pads: list[Any] = []
        for i in reversed(range(len(window))):
            width, stride = window[i], strides[i]
            if width == 1:
                pads += [0, 0]
                continue
            if width < stride:
                raise Unrecordable("its windows are narrower than their strides")
            total: Any = width - 1
            if stride > 1:
                # The last window ends at the end of the values, or after it.
                size = self.call("size", x, i + 2)
                total = self.call("sub", total, self._last(size, stride))
                before: Any = self.call("floordiv", total, 2)
                pads += [before, self.call("sub", total, before)]
            else:
                pads += [total // 2, total - total // 2]
        return x if pads == [0] * len(pads) else self.call("pad", x, tuple(pads), "constant", value)

    def _last(self, size: Any, stride: int) -> Any:
        return self.call("mod", self.call("sub", size, 1), stride)


Operation = Callable[[Applied], "Value | list[Value]"]
Record = Callable[[Applied], Any]


class Handler(NamedTuple):
    """The functions that follow and, if possible, record the layers of a class."""

    follow: Operation
    record: Record | None = None


def _activation_name(layer: KerasLayer) -> str:
    function = layer.options.get("activation")
    if isinstance(function, dict):
        inner = function.get("config")
        return str(inner if isinstance(inner, str) else function.get("class_name"))
    return "linear" if function is None else str(function)


def activated(layer: Applied, x: Value) -> Value:
    """Applies the activation function of a layer to a value."""
    name = _activation_name(layer.layer)
    # Keras 3 may write an activation as a layer, such as LeakyReLU.
    plain = name.lower().replace("_", "")
    if plain == "linear" or plain in _POINTWISE:
        return x
    if name.lower() in _ALONG_THE_LAST:
        return layer.wiring.statistics(x, [-1]) if isinstance(x, Signal) else x
    raise ConversionError(
        f"Expected an activation function of Keras (got '{name}', which may do anything)"
    )
