"""Builds a layout from the axes of all tensors: names of layers, placements of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Factor,
    Layer,
    Nest,
    Segment,
    Segments,
    describe,
    size_of,
    take,
)
from nfn_graph.converters.wiring.nesting import Ends, Nesting, without_fixed
from nfn_graph.converters.wiring.tape import Tape
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.converters.wiring.values import Signal
from nfn_graph.data import Layout, Placement, PlacementAxis, Shape
from nfn_graph.spec import NetworkSpec, NeuronType, WeightKey, WeightType

SCALARS = "scalars"


@dataclass
class Use:
    """The meaning of the axes of one stored tensor: neurons in a role, or taps.

    Args:
        key: The tensor.
        shape: Its shape.
        dtype: Its dtype.
        roles: The role of every axis; None if it is not known yet.
        neurons: The layers along every axis of neurons.
        rows: The bounds of the entries along the first axis, if only a part of them is meant.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: list[PlacementAxis | None] = field(default_factory=list)
    neurons: list[Segments | None] = field(default_factory=list)
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, key: str, tensor: Tensor, rows: tuple[int, int] | None = None) -> Use:
        """Returns a use of a tensor whose axes are not known yet."""
        if not tensor.is_floating_point():
            raise ConversionError(
                f"Expected floating-point weights (got '{key}' of {tensor.dtype}). Convert "
                f"quantised or complex networks to real floating-point ones first"
            )
        rank = tensor.dim()
        return cls(key, tuple(tensor.shape), tensor.dtype, [None] * rank, [None] * rank, rows)

    def set_taps(self, axis: int) -> None:
        """Marks an axis as taps."""
        if self.roles[axis] not in (None, "tap"):
            self._contradict(axis)
        self.roles[axis] = "tap"

    def set_neurons(self, axis: int, role: PlacementAxis, segments: Segments) -> None:
        """Marks an axis as neurons; if it is used again, its neurons are tied to the first ones."""
        known = self.neurons[axis]
        if self.roles[axis] == "tap":
            self._contradict(axis)
        if known is not None:
            tie(known, segments)
            return
        self.roles[axis], self.neurons[axis] = role, segments

    @property
    def row_bounds(self) -> tuple[int, int]:
        """The bounds of the entries along the first axis."""
        return self.rows or (0, self.shape[0] if self.shape else 1)

    def absorb(self, other: Use) -> None:
        """Merges the use of some rows of the same tensor in another place."""
        offset = self.row_bounds[0]
        start, stop = (bound - offset for bound in other.row_bounds)
        for axis, (role, segments) in enumerate(zip(other.roles, other.neurons, strict=True)):
            own = self.neurons[axis]
            if role == "tap":
                self.set_taps(axis)
            elif axis and role is not None and segments is not None:
                self.set_neurons(axis, role, segments)
            elif segments is not None:
                if own is None:
                    self._contradict(axis)
                else:
                    tie(take(own, start, stop), segments)

    def neuron_roles(self) -> list[PlacementAxis]:
        """Returns whether each axis holds target or source neurons; taps count as targets."""
        found = [axis for axis, segments in enumerate(self.neurons) if segments is not None]
        roles: list[PlacementAxis] = ["target"] * len(self.shape)
        if len(found) == 2:
            first, second = found
            is_turned = self.roles[first] == "source" or self.roles[second] == "target"
            roles[first if is_turned else second] = "source"
        else:
            for axis in found:
                roles[axis] = "source" if self.roles[axis] == "source" else "target"
        return roles

    @property
    def is_named(self) -> bool:
        """Whether the computation determines which axes are targets and sources."""
        return "target" in self.roles or "source" in self.roles

    def _contradict(self, axis: int) -> None:
        raise ConversionError(
            f"Expected one use of axis {axis} of '{self.key}' (got neurons in one place and "
            f"positions in another)"
        )


class Leaf(NamedTuple):
    """A part of a tensor's axis as axes of a placement, each of a layer or of taps."""

    layers: tuple[Layer | None, ...]
    cut: tuple[int, int]
    view: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


class TensorPart(NamedTuple):
    """A part of a tensor that belongs to one layer or pair of layers."""

    leaves: tuple[Leaf, ...]
    ends: Ends


def build_layout(
    uses: Mapping[str, Use],
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, Sequence[str]],
    values: Sequence[Signal],
    mixed: Collection[str],
    tape: Tape,
) -> Layout:
    """Builds the spec, sizes and placements of a network whose tensors' axes are known."""
    pieces, nesting = _settled(uses, values, mixed)
    types = _types(nesting, [piece.ends for parts in pieces.values() for piece in parts])
    names = _names(types, nesting)
    taps: dict[str | WeightKey, int] = dict.fromkeys(names.values(), 0)
    parallel: Counter[tuple[str, str]] = Counter()
    placements = []
    known: dict[str, dict[tuple[str, str], WeightKey]] = {}
    # The rows of a tensor are placed together, whether they are used together or in parts.
    first = {key: i for i, key in enumerate(dict.fromkeys(use.key for use in uses.values()))}
    in_rows = sorted(uses.items(), key=lambda item: (first[item[1].key], item[1].rows or (0, 0)))
    for key, use in in_rows:
        stores = known.setdefault(use.key, {})
        for piece in pieces[key]:
            ends = [names[nest] for nest in nesting.types(piece.ends)]
            store = _store(ends, parallel, stores)
            named = TensorPart(piece.leaves, nesting.named(piece.ends))
            others = tied.get(use.key, ())
            placement = _placement(use, named, store, taps.get(store, 0), others)
            taps[store] = placement.tap + placement.taps
            placements.append(placement)
    neurons = [
        NeuronType(
            names[nest],
            taps[names[nest]],
            nest[0].size if nest[0].fixed else None,
            parents=tuple(names[parent] for parent in nesting.parents(nest)),
        )
        for nest in types
    ]
    sizes = [(math.prod(layer.size for layer in nest),) for nest in types]
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


def _settled(
    uses: Mapping[str, Use], values: Sequence[Signal], mixed: Collection[str]
) -> tuple[dict[str, list[TensorPart]], Nesting]:
    """Returns the parts of all tensors, and the nesting in which every part has a place."""
    whole: dict[Segment, Layer] = {}
    while True:
        pieces = {key: list(_pieces(use, whole)) for key, use in uses.items()}
        found = [piece.ends for parts in pieces.values() for piece in parts]
        apart = [n for key in mixed for piece in pieces.get(key, ()) for n in piece.ends.layers]
        nesting = Nesting(values, found, apart)
        crossed = next((layers for ends in found if (layers := nesting.conflict(ends))), None)
        if crossed is None:
            return pieces, nesting
        for layer in crossed:
            layer.is_fixed = True


def _types(nesting: Nesting, ends: Sequence[Ends]) -> list[Nest]:
    """Returns the layers, and pairs of layers, that tensors belong to, parents first."""
    wanted = dict.fromkeys(nest for e in ends for nest in nesting.types(e))
    found: dict[Nest, None] = {}

    def add(nest: Nest) -> None:
        for parent in nesting.parents(nest):
            add(parent)
        found.setdefault(nest)

    for nest in sorted(wanted, key=lambda nest: [layer.order for layer in reversed(nest)]):
        add(nest)
    return list(found)


def _names(types: Sequence[Nest], nesting: Nesting) -> dict[Nest, str]:
    """Names the types `input`, `hidden1`, ..., `output`; repeated names are numbered.

    Layers in which others are nested are groups, such as attention heads.
    """
    counts: dict[str, int] = {}
    names = {}
    groups = {nesting.parents(nest)[0] for nest in types if nesting.parents(nest)}
    for nest in types:
        layer = nest[-1]
        kind = "input" if layer.is_input else "output" if layer.is_output else "hidden"
        if layer.is_fixed and kind == "hidden":
            kind = "fixed"
        if len(nesting.parents(nest)) == 2:
            kind = "pair"
        elif nest in groups:
            kind = "group"
        counts[kind] = number = counts.get(kind, 0) + 1
        is_single = number == 1 and kind in ("input", "output", "fixed")
        names[nest] = kind if is_single else f"{kind}{number}"
    return names


def _pieces(use: Use, whole: dict[Segment, Layer]) -> Iterator[TensorPart]:
    """Yields the parts of a tensor, each within one layer or pair of layers."""
    axes: list[list[Leaf]] = []
    for size, segments in zip(use.shape, use.neurons, strict=True):
        first, last = use.rows if use.rows and not axes else (0, size)
        if segments is None:
            count = last - first
            axes.append([Leaf((None,), (first, last), (count,), (0,), (count,))])
        else:
            axes.append(list(_leaves(without_fixed(segments, whole), first, last)))
    for chosen in product(*axes):
        leaves = _one_of_fixed(chosen, use.neuron_roles())
        found = [
            (layer, role)
            for leaf, role in zip(leaves, use.neuron_roles(), strict=True)
            for layer in leaf.layers
            if layer is not None
        ]
        layers, roles = tuple(n for n, _ in found), tuple(role for _, role in found)
        yield TensorPart(leaves, Ends(layers, roles, use.is_named))


def _one_of_fixed(leaves: Sequence[Leaf], roles: Sequence[PlacementAxis]) -> tuple[Leaf, ...]:
    """Turns fixed layers on several axes into taps of the free layers, or of the last fixed one."""
    found = list(leaves)
    for role in ("target", "source"):
        layers = [
            n for leaf, r in zip(leaves, roles, strict=True) for n in leaf.layers if n and r == role
        ]
        kept = [n for n in layers if not n.fixed] or layers[-1:]
        for place, leaf in enumerate(leaves):
            if roles[place] == role:
                found[place] = leaf._replace(
                    layers=tuple(n if n in kept else None for n in leaf.layers)
                )
    return tuple(found)


def _leaves(segments: Segments, first: int, last: int) -> Iterator[Leaf]:
    """Yields the layers of an axis, or of its entries `first:last`."""
    offset = first
    for segment in segments:
        length = segment.size or 1
        if len(segment.factors) == 1:
            # Whole layers one after another are slices and need no view.
            layer, inner = _layer(segment.factors[0]), offset - first
            yield Leaf((layer,), (first, last), (last - first,), (inner,), (inner + length,))
        else:
            cut = (offset, offset + length)
            view = tuple(size_of(factor) or 1 for factor in segment.factors)
            for chosen in product(*map(_choices, segment.factors)):
                layers, starts, stops = zip(*chosen, strict=True)
                yield Leaf(layers, cut, view, starts, stops)
        offset += length


def _choices(factor: Factor) -> list[tuple[Layer | None, int, int]]:
    """Returns the parts of an axis inside a product, each with its bounds."""
    if not isinstance(factor, tuple):
        return [(_layer(factor), 0, size_of(factor) or 1)]
    found = []
    offset = 0
    for segment in factor:
        stop = offset + (segment.size or 1)
        if len(segment.factors) > 1:
            raise ConversionError(
                f"Expected the layers of an axis to alternate in one way (got "
                f"{describe(factor)}, which no view of the tensor can take apart)"
            )
        found.append((_layer(segment.factors[0]), offset, stop))
        offset = stop
    return found


def _layer(factor: Factor) -> Layer | None:
    return factor if isinstance(factor, Layer) else None


def _store(
    ends: Sequence[str], parallel: Counter[tuple[str, str]], own: dict[tuple[str, str], WeightKey]
) -> str | WeightKey:
    """Returns the type of a part of a tensor; parallel tensors between two layers are numbered."""
    if not ends:
        return SCALARS
    if len(ends) == 1:
        return ends[0]
    pair = ends[1], ends[0]
    if pair not in own:
        parallel[pair] += 1
        number = parallel[pair]
        own[pair] = (pair[0], "weight" if number == 1 else f"weight{number}", pair[1])
    return own[pair]


def _placement(
    use: Use, piece: TensorPart, store: str | WeightKey, tap: int, tied: Sequence[str]
) -> Placement:
    leaves, roles = piece.leaves, iter(piece.ends.roles)
    cut = tuple(leaf.cut for leaf in leaves)
    axes: list[PlacementAxis] = [
        "tap" if layer is None else next(roles) for leaf in leaves for layer in leaf.layers
    ]
    if store == SCALARS:
        leaves, axes = (Leaf((None,), (0, 1), (1,), (0,), (1,)), *leaves), ["neuron", *axes]
    if isinstance(store, str):
        axes = ["tap" if axis == "tap" else "neuron" for axis in axes]
    whole = all(c == (0, n) for c, n in zip(cut, use.shape, strict=True))
    view = tuple(n for leaf in leaves for n in leaf.view)
    if math.prod(view) == 0:
        raise ConversionError(f"Expected a tensor with entries (got '{use.key}' {use.shape})")
    return Placement(
        (use.key, *tied),
        use.shape,
        use.dtype,
        store,
        view,
        tuple(axes),
        tuple(n for leaf in leaves for n in leaf.start),
        tuple(n for leaf in leaves for n in leaf.stop),
        tap,
        cut=None if whole else cut,
    )
