"""A layer of Keras with the values that it is applied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import KerasLayer, keys_by_role
from nfn_graph.converters.wiring import Opaque, Part, Positions, Signal, Value, Weight, Wiring

Sizes = Sequence[int | None]

# Functions of single entries, without the underscores of their names.
_POINTWISE = (
    "celu elu exponential gelu hardshrink hardsigmoid hardsilu hardswish hardtanh leakyrelu linear "
    "logsigmoid mish relu relu6 selu sigmoid silu softshrink softplus softsign sparseplus "
    "sparsesigmoid squareplus swish tanh tanhshrink threshold"
)
_ALONG_THE_LAST = frozenset({"softmax", "log_softmax", "sparsemax"})


class Applied:
    """A layer with the values that it is applied to.

    Args:
        wiring: The network so far.
        layer: The layer.
        values: What it reads.
        others: Arguments beside them.
    """

    def __init__(
        self, wiring: Wiring, layer: KerasLayer, values: Sequence[Value], others: Sequence[Any] = ()
    ) -> None:
        self.wiring, self.layer, self.values, self.others = wiring, layer, values, others

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
        if isinstance(x, Signal) and isinstance(x.axes[axis], Part):
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


Operation = Callable[[Applied], "Value | list[Value]"]


def activated(layer: Applied, x: Value) -> Value:
    """What the activation function that a layer was made with gives."""
    function = layer.layer.options.get("activation")
    if isinstance(function, dict):
        inner = function.get("config")
        name = str(inner if isinstance(inner, str) else function.get("class_name"))
    else:
        name = "linear" if function is None else str(function)
    # Keras 3 may write an activation as a layer: LeakyReLU.
    if name.lower().replace("_", "") in _POINTWISE.split():
        return x
    if name.lower() in _ALONG_THE_LAST:
        return layer.wiring.statistics(x, [-1]) if isinstance(x, Signal) else x
    raise ConversionError(
        f"Expected an activation function of Keras (got '{name}', which may do anything)"
    )
