"""Finds the only order in which the weights of a state dict can follow one another.

Shapes determine which weights can follow one another, numbers in names count them, and a file
stores them in some order. None of these is sufficient: widths repeat, `dec3, dec2, dec1` counts
down, and a file may be sorted by name. So an order is only accepted if no two of them contradict
each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from nfn_graph.converters.chain.names import ASK_FOR_ARCH, Name
from nfn_graph.converters.chain.norms import VectorGroup
from nfn_graph.converters.errors import ConversionError

_MOST_STEPS = 10_000

#: Whether names place one weight before another.
Precedes = Callable[[Name, Name], bool]


class NotChained(ConversionError):
    """Raised for shapes that form no chain in any order."""


@dataclass
class ChainLayer:
    """A weight of a chain, with its bias and the vectors that follow it."""

    key: str
    shape: tuple[int, ...]
    name: Name
    bias: str | None = None
    vectors: list[VectorGroup] = field(default_factory=list)

    @property
    def spatial(self) -> int:
        """The number of axes of the kernel; 0 for a linear layer."""
        return len(self.shape) - 2

    def follows(self, before: ChainLayer) -> bool:
        """Whether it can read the outputs of another layer."""
        inputs, channels = self.shape[1], before.shape[0]
        if self.spatial:
            fits = inputs == channels or self.is_depthwise(channels)
            return fits and self.spatial == before.spatial
        return inputs == channels or bool(before.spatial and inputs % channels == 0)

    def unflattens(self, before: ChainLayer) -> bool:
        """Whether it can be a convolution of the outputs of a linear layer."""
        return self.spatial > 0 == before.spatial and before.shape[0] % self.shape[1] == 0

    def is_depthwise(self, channels: int) -> bool:
        """Whether it convolves each of several channels separately."""
        one = self.spatial > 0 and self.shape[1] == 1 < channels
        return one and self.shape[0] % channels == 0


def only_order(stored: Sequence[ChainLayer], is_sorted: bool) -> list[ChainLayer]:
    """Returns the only order in which the weights form a chain.

    Args:
        stored: The weights in the order of the file.
        is_sorted: Whether the file is sorted by name.
    """
    found = list(islice(_orders(stored, Name.precedes), 4))
    if not found:
        shown = ", ".join(f"'{n.key}' {list(n.shape)}" for n in _by_name(stored))
        raise NotChained(
            f"Expected weights [out, in, ...] that form a chain (got shapes that do not: "
            f"{shown}). {ASK_FOR_ARCH}"
        )
    if len(found) == 1 and _is_confirmed(found[0], stored, is_sorted):
        return found[0]
    if len(found) == 1:
        readings = f"{shown_order(found[0])} by name and shape; {shown_order(stored)} as stored"
    else:
        readings = "; or ".join(map(shown_order, found[:3])) + ("; ..." if len(found) > 3 else "")
    raise ConversionError(
        f"Expected keys and shapes that determine the order of the layers (got several readings: "
        f"{readings}). {ASK_FOR_ARCH}"
    )


def can_chain(layers: Sequence[ChainLayer]) -> bool:
    """Whether the weights form a chain in some order that numbers in names allow."""
    return next(_orders(layers, Name.precedes), None) is not None


def shown_order(layers: Sequence[ChainLayer]) -> str:
    """Formats an order for messages."""
    return " -> ".join(layer.key for layer in layers)


def _is_confirmed(
    chain: Sequence[ChainLayer], stored: Sequence[ChainLayer], is_sorted: bool
) -> bool:
    """Whether nothing contradicts the order that names and shapes determine."""
    if [n.key for n in chain] == [n.key for n in stored]:
        return True
    if is_sorted:
        if len({layer.name.template for layer in chain}) == 1:
            return True
        return _is_only(stored, Name.is_indexed_before)
    return _is_only(stored, lambda first, second: False) and not _may_be_chain(stored)


def _is_only(layers: Sequence[ChainLayer], precedes: Precedes) -> bool:
    try:
        return len(list(islice(_orders(layers, precedes), 2))) == 1
    except ConversionError:  # There are too many to count.
        return False


def _may_be_chain(stored: Sequence[ChainLayer]) -> bool:
    """Whether the order of the file is that of some network.

    The network may unflatten, and weights without a bias may be transposed.
    """
    reached = _forms(stored[0])
    for layer in stored[1:]:
        reached = [
            form
            for form in _forms(layer)
            if any(form.follows(before) or form.unflattens(before) for before in reached)
        ]
    return bool(reached)


def _forms(layer: ChainLayer) -> list[ChainLayer]:
    outputs, inputs, *kernel = layer.shape
    turned = replace(layer, shape=(inputs, outputs, *kernel))
    return [layer] if layer.bias else [layer, turned]


def _orders(layers: Sequence[ChainLayer], precedes: Precedes) -> Iterator[list[ChainLayer]]:
    """Yields all orders in which every layer can follow the previous one, sorted by name."""
    ordered = _by_name(layers)
    if not ordered:
        yield []
        return
    behind = _direct_successors(ordered, precedes)
    # The number of missing direct predecessors of every layer, and the layers that miss none.
    missing = [0] * len(ordered)
    for successors in behind:
        for successor in successors:
            missing[successor] += 1
    free = [i for i, count in enumerate(missing) if not count]
    order: list[int] = []

    def take(number: int) -> None:
        order.append(number)
        del free[bisect_left(free, number)]
        for successor in behind[number]:
            missing[successor] -= 1
            if not missing[successor]:
                insort(free, successor)

    def give_back() -> None:
        number = order.pop()
        for successor in behind[number]:
            if not missing[successor]:
                del free[bisect_left(free, successor)]
            missing[successor] += 1
        insort(free, number)

    def choices() -> Iterator[int]:
        last = ordered[order[-1]] if order else None
        return iter([n for n in free if last is None or ordered[n].follows(last)])

    steps, waiting = 1, [choices()]
    while waiting:
        chosen = next(waiting[-1], None)
        if chosen is None:
            waiting.pop()
            if order:
                give_back()
            continue
        take(chosen)
        steps += 1
        if steps > _MOST_STEPS:
            raise ConversionError(
                f"Expected keys and shapes that determine the order of the layers (got more than "
                f"{_MOST_STEPS} partial readings). {ASK_FOR_ARCH}"
            )
        if len(order) == len(ordered):
            yield [ordered[n] for n in order]
            give_back()
        else:
            waiting.append(choices())


def _direct_successors(ordered: Sequence[ChainLayer], precedes: Precedes) -> list[list[int]]:
    """Returns, for every layer, the layers that must come directly after it."""
    if precedes is not Name.precedes:
        return [
            [i for i, other in enumerate(ordered) if precedes(layer.name, other.name)]
            for layer in ordered
        ]
    # Sorted by name, layers with the same template are adjacent, and so are equal numbers.
    behind: list[list[int]] = [[] for _ in ordered]
    equal: list[list[int]] = []
    for number, layer in enumerate(ordered):
        before = ordered[number - 1].name if number else None
        if before is None or before.template != layer.name.template:
            equal = [[]]
        elif before.numbers != layer.name.numbers:
            equal.append([])
        equal[-1].append(number)
        if len(equal) > 1:
            for previous in equal[-2]:
                behind[previous].append(number)
    return behind


def _by_name(layers: Sequence[ChainLayer]) -> list[ChainLayer]:
    return sorted(layers, key=lambda n: (n.name.template, n.name.numbers))
