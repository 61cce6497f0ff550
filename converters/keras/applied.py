"""A layer of Keras with what it is applied to: followed by the wiring, and recorded on its tape."""

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
# Those that differ between versions of Keras, or that torch does not have.
_UNRECORDED = "hardshrink hardsigmoid softshrink sparseplus sparsesigmoid squareplus threshold"
#: Functions of single entries, without the underscores of their names, and what torch calls them.
_POINTWISE: dict[str, str | None] = {
    **{name: name for name in _NAMES.split()},
    **_OTHER_NAMES,
    **dict.fromkeys(_UNRECORDED.split()),
}
_ALONG_THE_LAST = {"softmax": "softmax", "log_softmax": "log_softmax", "sparsemax": None}
# Further arguments of functions, as Keras has them.
_ARGUMENTS = {"leaky_relu": (0.2,), "softmax": (-1,), "log_softmax": (-1,)}
#: Functions that Keras 3 writes like layers.
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
        values: What it reads.
        others: Arguments beside them.
        refs: Where what it reads is on the tape.
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
        """The one value that it reads."""
        if len(self.values) != 1 or self.others:
            raise ConversionError(
                f"Expected one input (got {len(self.values)} and {len(self.others)} other "
                f"arguments)"
            )
        return self.values[0]

    def weight(self, *roles: str) -> Weight:
        """The tensor with one of these roles, which must be there."""
        found = self.weights(*roles)
        if not found:
            raise ConversionError(
                f"Expected a tensor '{roles[0]}' (got {list(self._keys.values()) or 'none'})"
            )
        return found[0]

    def weights(self, *roles: str) -> list[Weight]:
        """The tensors with these roles, as far as they are there."""
        return [self.wiring.parameter(self._keys[role]) for role in roles if role in self._keys]

    def bias(self) -> Weight | None:
        """The bias, if there is one."""
        return next(iter(self.weights("bias")), None)

    @property
    def is_first(self) -> bool:
        """Whether channels come before positions."""
        # Keras 1 called it otherwise.
        return (
            self.layer.text("data_format", "") == "channels_first"
            or self.layer.text("dim_ordering", "") == "th"
        )

    def image(self, spatial: int) -> tuple[Value, int, range]:
        """The input with so many axes of positions, the axis of its channels, and theirs."""
        x = self.wiring.ranked(self.x, spatial + 2)
        if len(x.shape or ()) != spatial + 2:
            raise ConversionError(
                f"Expected an input with {spatial + 2} axes (got {len(x.shape or ())})"
            )
        axis = 1 if self.is_first else spatial + 1
        if isinstance(x, Signal) and isinstance(x.axes[axis], SplitAxis):
            self.wiring.neurons(x, axis)  # a reshape left open which axis it is
        return x, axis, range(2, spatial + 2) if self.is_first else range(1, spatial + 1)

    def resized(self, x: Value, axes: Sequence[int], sizes: Sizes) -> Value:
        """A value whose positions along some axes were mixed, with the sizes they have now."""
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
        """An option with one number for every axis of positions, or one for all."""
        values = self.layer.integers(name, [default])
        return values * count if len(values) == 1 else values

    # What follows writes the layer on the tape.

    @property
    def ref(self) -> Any:
        """The one result that it reads."""
        return self.refs[0]

    def call(self, operation: str, *args: Any) -> Ref:
        """The result of an operation."""
        return self.wiring.tape.call(operation, *args)

    def tensor(self, *roles: str) -> Any:
        """The tensor with one of these roles on the tape; None if there is none."""
        key = next((self._keys[role] for role in roles if role in self._keys), None)
        return None if key is None else self.wiring.tape.parameter(key)

    def record_activation(self, x: Any) -> Any:
        """What the activation function that the layer was made with gives."""
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

    def channels_first(self, x: Any, spatial: int) -> Any:
        """A value with its channels before its positions."""
        if self.is_first:
            return x
        return self.call("permute", x, (0, spatial + 1, *range(1, spatial + 1)))

    def back(self, x: Any, spatial: int) -> Any:
        """The value with its channels where the layer has them."""
        if self.is_first:
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


Operation = Callable[[Applied], "Value | list[Value]"]
Record = Callable[[Applied], Any]


class Handler(NamedTuple):
    """What the layers of a class do: to neurons, and on the tape if that has words for it."""

    follow: Operation
    record: Record | None = None


def _activation_name(layer: KerasLayer) -> str:
    function = layer.options.get("activation")
    if isinstance(function, dict):
        inner = function.get("config")
        return str(inner if isinstance(inner, str) else function.get("class_name"))
    return "linear" if function is None else str(function)


def activated(layer: Applied, x: Value) -> Value:
    """What the activation function that a layer was made with gives."""
    name = _activation_name(layer.layer)
    # Keras 3 may write an activation as a layer: LeakyReLU.
    plain = name.lower().replace("_", "")
    if plain == "linear" or plain in _POINTWISE:
        return x
    if name.lower() in _ALONG_THE_LAST:
        return layer.wiring.statistics(x, [-1]) if isinstance(x, Signal) else x
    raise ConversionError(
        f"Expected an activation function of Keras (got '{name}', which may do anything)"
    )
