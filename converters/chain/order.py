"""The one order in which the weights of a state dict can follow one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nfn_graph.converters.chain.names import Name
from nfn_graph.converters.chain.norms import VectorGroup
from nfn_graph.converters.chain.topology import ASK_FOR_ARCH
from nfn_graph.converters.errors import ConversionError

_MOST_STEPS = 10_000


@dataclass
class ChainLayer:
    """A weight tensor of a chain, with its bias and the vectors behind it."""

    key: str
    shape: tuple[int, ...]
    name: Name
    bias: str | None = None
    vectors: list[VectorGroup] = field(default_factory=list)

    @property
    def spatial(self) -> int:
        """Axes of the kernel; 0 for a linear layer."""
        return len(self.shape) - 2

    def follows(self, before: ChainLayer, channels: int) -> bool:
        """Whether it can read the `channels` outputs of another layer."""
        if self.spatial:
            fits = self.shape[1] == channels or self.is_depthwise(channels)
            return fits and self.spatial == before.spatial
        inputs = self.shape[1]
        return inputs == channels or bool(before.spatial and inputs % channels == 0)

    def is_depthwise(self, channels: int) -> bool:
        """Whether it convolves each of several channels on its own."""
        one = self.spatial > 0 and self.shape[1] == 1 < channels
        return one and self.shape[0] % channels == 0


def only_order(layers: Sequence[ChainLayer]) -> list[ChainLayer]:
    """The one order in which the weights form a chain."""
    found: list[list[ChainLayer]] = []
    for order in _orders(layers):
        found.append(order)
        if len(found) > 3:
            break
    if len(found) == 1:
        return found[0]
    if not found:
        shown = ", ".join(f"'{n.key}' {list(n.shape)}" for n in _by_name(layers))
        raise ConversionError(
            f"Expected weights [out, in, ...] that form a chain (got shapes that do not: "
            f"{shown}). {ASK_FOR_ARCH}"
        )
    readings = "; or ".join(" -> ".join(n.key for n in order) for order in found[:3])
    raise ConversionError(
        f"Expected keys and shapes that tell the order of the layers (got several readings: "
        f"{readings}{'; ...' if len(found) > 3 else ''}). {ASK_FOR_ARCH}"
    )


def _orders(layers: Sequence[ChainLayer]) -> Iterator[list[ChainLayer]]:
    ordered = _by_name(layers)
    later = {
        n.key: [m for m in ordered if m.name.template == n.name.template and m.name < n.name]
        for n in ordered
    }
    steps = 0
    stack: list[tuple[list[ChainLayer], int]] = [([], 0)]
    while stack:
        steps += 1
        if steps > _MOST_STEPS:
            raise ConversionError(
                f"Expected keys and shapes that tell the order of the layers (got more than "
                f"{_MOST_STEPS} partial readings). {ASK_FOR_ARCH}"
            )
        order, channels = stack.pop()
        if len(order) == len(ordered):
            yield order
            continue
        used = {n.key for n in order}
        for layer in reversed(ordered):
            if layer.key in used or any(m.key not in used for m in later[layer.key]):
                continue
            if not order or layer.follows(order[-1], channels):
                stack.append(([*order, layer], layer.shape[0]))


def _by_name(layers: Sequence[ChainLayer]) -> list[ChainLayer]:
    return sorted(layers, key=lambda n: (n.name.template, n.name.numbers))
