"""From the axes of all tensors to a layout: names of the layers, placements of the tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import Layer, Segments, resolve
from nfn_graph.converters.wiring.tape import Tape
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.data import Layout, Placement, PlacementAxis, Shape
from nfn_graph.spec import NetworkSpec, NeuronType, WeightKey, WeightType

SCALARS = "scalars"


@dataclass
class Use:
    """What the axes of one stored tensor are: neurons in a role, or taps.

    Args:
        key: The tensor.
        shape: Its shape.
        dtype: Its dtype.
        roles: What every axis is.
        neurons: The layers along every axis of neurons.
        entry: The entry along the first axis, if each is used on its own.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: list[PlacementAxis | None] = field(default_factory=list)
    neurons: list[Segments | None] = field(default_factory=list)
    entry: int | None = None

    @classmethod
    def of(cls, key: str, tensor: Tensor, entry: int | None = None) -> Use:
        """A tensor of whose axes nothing is known yet."""
        if not tensor.is_floating_point():
            raise ConversionError(
                f"Expected floating-point weights (got '{key}' of {tensor.dtype}). Convert "
                f"quantised or complex networks to real floating-point ones first"
            )
        rank = tensor.dim()
        return cls(key, tuple(tensor.shape), tensor.dtype, [None] * rank, [None] * rank, entry)

    def set_taps(self, axis: int) -> None:
        """Says that an axis holds taps."""
        if self.roles[axis] not in (None, "tap"):
            self._contradict(axis)
        self.roles[axis] = "tap"

    def set_neurons(self, axis: int, role: PlacementAxis, segments: Segments) -> None:
        """Says that an axis holds neurons; if it is used again, they are the same ones."""
        known = self.neurons[axis]
        if self.roles[axis] == "tap":
            self._contradict(axis)
        if known is not None:
            tie(known, segments)
            return
        self.roles[axis], self.neurons[axis] = role, segments

    def settle(self) -> None:
        """Names two axes of neurons target and source, if they were found one by one."""
        found = [axis for axis, segments in enumerate(self.neurons) if segments is not None]
        if len(found) == 2:
            first, second = found
            is_turned = self.roles[first] == "source" or self.roles[second] == "target"
            self.roles[first] = "source" if is_turned else "target"
            self.roles[second] = "target" if is_turned else "source"

    def _contradict(self, axis: int) -> None:
        raise ConversionError(
            f"Expected one use of axis {axis} of '{self.key}' (got neurons in one place and "
            f"positions in another)"
        )


class Leaf(NamedTuple):
    """The part of a tensor's axis that belongs to one layer, as axes of a placement."""

    layer: Layer | None
    cut: tuple[int, int]
    view: tuple[int, ...]
    axes: tuple[PlacementAxis, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


def build_layout(
    uses: Mapping[str, Use],
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, Sequence[str]],
    tape: Tape,
) -> Layout:
    """The spec, sizes and placements of a network whose tensors' axes are known."""
    for use in uses.values():
        use.settle()
    pieces = {key: list(_pieces(use)) for key, use in uses.items()}
    layers = {leaf.layer for parts in pieces.values() for part in parts for leaf in part}
    ordered = sorted((n for n in layers if n is not None), key=lambda n: n.order)
    names = _names(ordered)
    taps: dict[str | WeightKey, int] = dict.fromkeys(names.values(), 0)
    parallel: Counter[tuple[str, str]] = Counter()
    placements = []
    for key, use in uses.items():
        stores: dict[tuple[str, str], WeightKey] = {}
        for part in pieces[key]:
            store = _store(use, part, names, parallel, stores)
            others = tied.get(use.key, ())
            placement = _placement(use, part, store, taps.get(store, 0), others)
            taps[store] = placement.tap + placement.taps
            placements.append(placement)
    neurons = [NeuronType(names[n], taps[names[n]], n.size if n.fixed else None) for n in ordered]
    sizes = [(n.size,) for n in ordered]
    if SCALARS in taps:
        neurons.append(NeuronType(SCALARS, taps[SCALARS], 1))
        sizes.append((1,))
    weights = [
        WeightType(store[0], store[2], count, store[1])
        for store, count in taps.items()
        if not isinstance(store, str)
    ]
    if not weights:
        raise ConversionError("Expected a network with a weight between two layers (got none)")
    used = {name for p in placements for name in p.keys}
    stored = dict.fromkeys(use.key for use in uses.values())
    return Layout(
        NetworkSpec(tuple(neurons), tuple(weights)),
        Shape(tuple(sizes), (((0, 0),),) * len(weights)),
        tuple(placements),
        carried={key: tensor for key, tensor in tensors.items() if key not in used},
        keys=tuple(tensors),
        computation=tape.computation({key: i for i, key in enumerate(stored)}, names),
    )


def _names(layers: Sequence[Layer]) -> dict[Layer, str]:
    """`input`, `hidden1`, ..., `output`; further ones are counted."""
    counts: dict[str, int] = {}
    names = {}
    for layer in layers:
        kind = "input" if layer.is_input else "output" if layer.is_output else "hidden"
        if layer.is_fixed and kind == "hidden":
            kind = "fixed"
        counts[kind] = number = counts.get(kind, 0) + 1
        names[layer] = kind if number == 1 and kind != "hidden" else f"{kind}{number}"
    return names


def _pieces(use: Use) -> Iterator[tuple[Leaf, ...]]:
    """The parts of a tensor, each within one layer or pair of layers."""
    axes: list[list[Leaf]] = []
    for size, segments in zip(use.shape, use.neurons, strict=True):
        if not axes and use.entry is not None:
            cut = (use.entry, use.entry + 1)
            axes.append([Leaf(None, cut, (1,), ("tap",), (0,), (1,))])
        elif segments is None:
            axes.append([Leaf(None, (0, size), (size,), ("tap",), (0,), (size,))])
        else:
            role = use.roles[len(axes)]
            axes.append(list(_leaves(resolve(segments), role or "neuron", size)))
    if sum(segments is not None for segments in use.neurons) > 2:
        raise ConversionError(
            f"Expected weights between two layers (got '{use.key}' with neurons on "
            f"{sum(s is not None for s in use.neurons)} axes)"
        )
    yield from product(*axes)


def _leaves(segments: Segments, role: PlacementAxis, size: int) -> Iterator[Leaf]:
    offset = 0
    for segment in segments:
        before, after = segment.before or 1, segment.after or 1
        length = before * segment.neurons * after
        if segment.is_plain:
            # Whole layers one after another are slices; no view is needed.
            stop = offset + length
            yield Leaf(segment.layers[0], (0, size), (size,), (role,), (offset,), (stop,))
        else:
            inner = 0
            for layer in segment.layers:
                axes: tuple[PlacementAxis, ...] = ("tap", role, "tap")
                view = (before, segment.neurons, after)
                start, stops = (0, inner, 0), (before, inner + layer.size, after)
                kept = [i for i in range(3) if i == 1 or view[i] != 1]
                yield Leaf(
                    layer,
                    (offset, offset + length),
                    tuple(view[i] for i in kept),
                    tuple(axes[i] for i in kept),
                    tuple(start[i] for i in kept),
                    tuple(stops[i] for i in kept),
                )
                inner += layer.size
        offset += length


def _store(
    use: Use,
    part: tuple[Leaf, ...],
    names: Mapping[Layer, str],
    parallel: Counter[tuple[str, str]],
    own: dict[tuple[str, str], WeightKey],
) -> str | WeightKey:
    """Where a part of a tensor goes; tensors over the same pair of layers get own names."""
    roles = {
        role: names[leaf.layer]
        for role, leaf in zip(use.roles, part, strict=True)
        if leaf.layer is not None
    }
    if not roles:
        return SCALARS
    if len(roles) == 1:
        return next(iter(roles.values()))
    ends = roles["source"], roles["target"]
    if ends not in own:
        parallel[ends] += 1
        number = parallel[ends]
        own[ends] = (ends[0], "weight" if number == 1 else f"weight{number}", ends[1])
    return own[ends]


def _placement(
    use: Use, part: tuple[Leaf, ...], store: str | WeightKey, tap: int, tied: Sequence[str]
) -> Placement:
    cut = tuple(leaf.cut for leaf in part)
    if store == SCALARS:
        part = (Leaf(None, (0, 1), (1,), ("neuron",), (0,), (1,)), *part)
    axes = tuple(axis for leaf in part for axis in leaf.axes)
    if isinstance(store, str):
        axes = tuple("tap" if axis == "tap" else "neuron" for axis in axes)
    whole = all(c == (0, n) for c, n in zip(cut, use.shape, strict=True))
    view = tuple(n for leaf in part for n in leaf.view)
    if math.prod(view) == 0:
        raise ConversionError(f"Expected a tensor with entries (got '{use.key}' {use.shape})")
    return Placement(
        (use.key, *tied),
        use.shape,
        use.dtype,
        store,
        view,
        axes,
        tuple(n for leaf in part for n in leaf.start),
        tuple(n for leaf in part for n in leaf.stop),
        tap,
        cut=None if whole else cut,
    )
