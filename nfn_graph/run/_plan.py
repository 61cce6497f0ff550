"""Which networks of a graph run together, and where their entries are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Computation, Layout, Placement, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.run._operations import ENTRYWISE
from nfn_graph.run._ragged import Shapes, Stored
from nfn_graph.spec import Key, NetworkSpec

#: The number of cached plans: most training runs repeat few mixtures of networks.
_MOST_PLANS = 32
#: Indices with more entries than this are not cached.
_MOST_INDICES = 2**24

#: The largest factor by which zeros may enlarge the tensors of networks with convolutions.
_MOST_PADDING = 2.0
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_plans: dict[tuple[int, ...], Plan] = {}
_lock = Lock()


def plan_of(graph: WeightGraph) -> Plan:
    """The plan for the networks of a graph, which is cached by their layouts."""
    # A plan keeps its layouts alive, so no other object can get their ids.
    key = tuple(map(id, graph.layouts))
    with _lock:
        plan = _plans.get(key)
    # Threads with other networks do not wait while a plan is made.
    plan = Plan(graph) if plan is None else plan
    with _lock:
        # The plan that was used last comes last. If another thread made it first, that one is kept.
        plan = _plans[key] = _plans.pop(key, plan)
        if len(_plans) > _MOST_PLANS:
            del _plans[next(iter(_plans))]
    return plan


class Plan:
    """The groups of networks of a graph that run together."""

    def __init__(self, graph: WeightGraph) -> None:
        self.layouts = graph.layouts
        spec = graph.spec
        self.keys: list[Key] = [*spec.neuron, *spec.weight]
        self.like = spec.weights[0].key
        self.kinds, self.kind_of = _kinds(self.layouts)
        members: dict[Computation, dict[int, list[int]]] = {}
        for network, kind in enumerate(self.kind_of):
            own = members.setdefault(self.kinds[kind].computation, {})
            own.setdefault(kind, []).append(network)
        self.groups = [Group(self, own) for own in members.values()]
        order = [network for group in self.groups for network in group.networks]
        self._is_sorted = order == sorted(order)
        reasons = (layout.computation.reason for layout in self.layouts)
        #: The first network whose computation is not known, and the reason.
        self.unknown = next(((i, why) for i, why in enumerate(reasons) if why is not None), None)
        self._indices: dict[Any, Tensor] = {}

    def restored(self, key: int | str, joined: Tensor) -> Tensor:
        """Puts an output, or the rows of a neuron type, of all groups into the graph's order."""
        if self._is_sorted:
            return joined
        place = (key if isinstance(key, str) else None, joined.device)
        if place not in self._indices:
            # Autograd cannot save a tensor that was made in inference mode.
            with torch.inference_mode(False):
                order = [
                    group.own_rows(key) if isinstance(key, str) else torch.tensor(group.networks)
                    for group in self.groups
                ]
                self._indices[place] = torch.cat(order).argsort().to(joined.device)
        return joined.index_select(0, self._indices[place])


class Group:
    """Networks with the same computation; those of equal sizes are next to each other.

    Args:
        plan: The plan that the group belongs to.
        members: For every kind of network in the group, the places of its networks in the graph.
    """

    def __init__(self, plan: Plan, members: Mapping[int, Sequence[int]]) -> None:
        self._plan = plan
        self.computation = plan.kinds[next(iter(members))].computation
        kinds = [(plan.kinds[kind], len(networks)) for kind, networks in members.items()]
        sizes = _padded_sizes(kinds)
        own = zip(sizes or [()] * len(kinds), kinds, members.values(), strict=True)
        in_order = sorted(own, key=itemgetter(0))
        #: The sizes to which the networks of each kind are padded, if that is worthwhile.
        self.padded = None if sizes is None else sorted(sizes)
        self.kinds = [kind for _, kind, _ in in_order]
        self.networks = [network for _, _, networks in in_order for network in networks]
        #: Whether all of its operations support networks of different sizes.
        self.is_ragged = True
        #: Whether it consists only of linear layers and functions of single entries.
        self.is_dense = all(
            step.operation in ("input", "parameter", "constant", "linear")
            or step.operation in ENTRYWISE
            for step in self.computation.steps
        )
        self._is_whole = self.networks == list(range(len(plan.layouts)))
        self._shapes: dict[tuple[int, bool], Shapes] = {}
        self._straight: dict[int, Placement | None] = {}
        self._indices: dict[Any, Tensor] = {}

    @property
    def count(self) -> int:
        """The number of networks."""
        return len(self.networks)

    def tensor(self, number: int, stores: Mapping[Key, Tensor], is_padded: bool) -> Stored:
        """Reads a tensor of all networks from the stores of the graph.

        Args:
            number: The number of the tensor.
            stores: The entries of all networks.
            is_padded: Whether to pad the tensor with zeros.
        """
        flat = self._entries(number, stores)
        own = self._shapes_of(number, False)
        shapes = self._shapes_of(number, True) if is_padded else own
        if shapes == own:
            return Stored(flat, own, own)
        zeros = flat.new_zeros(sum(map(math.prod, shapes)))
        places = self._index(("padded", number), flat.device, lambda: self._padded_places(number))
        return Stored(zeros.index_copy(0, places, flat), shapes, own)

    def parts(self, most: int, is_padded: bool) -> list[int]:
        """The numbers of networks to run at a time: at most `most`, and of one size if padded."""
        sizes = self.padded if is_padded and self.padded else [()] * len(self.kinds)
        found = []
        pairs = zip(sizes, self.kinds, strict=True)
        for _, same in itertools.groupby(pairs, lambda pair: pair[0]):
            count = sum(n for _, (_, n) in same)
            # The parts have nearly equal lengths.
            number = -(-count // most)
            found += [(count + i) // number for i in range(number)]
        return found

    def _shapes_of(self, number: int, is_padded: bool) -> Shapes:
        """The shapes of a tensor in all networks, perhaps after it is padded with zeros."""
        place = number, is_padded
        if place not in self._shapes:
            each = [layout.sources[number][0].shape for layout, _ in self.kinds]
            if is_padded:
                each = [shape for _, shape, _ in self._padded_views(number)]
            kinds = zip(each, self.kinds, strict=True)
            self._shapes[place] = tuple(shape for shape, (_, n) in kinds for _ in range(n))
        return self._shapes[place]

    def _padded_places(self, number: int) -> Tensor:
        """The places of the original entries of a tensor after it is padded with zeros."""
        found, begin = [], 0
        for (own, _, view), (_, n) in zip(self._padded_views(number), self.kinds, strict=True):
            end = begin + n * math.prod(view)
            places = torch.arange(begin, end).reshape(n, *view)
            found.append(places[(slice(None), *map(slice, own))].reshape(-1))
            begin = end
        return torch.cat(found)

    def _padded_views(self, number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The view of a tensor, and its shape and view after padding, in each kind of network."""
        for (layout, _), sizes in zip(self.kinds, self.padded or (), strict=True):
            (placement,) = layout.sources[number]
            yield placement.view, *_padded_view(placement, layout.spec, sizes)

    def rows(self, key: Key, x: Tensor) -> Tensor:
        """Selects the rows of the group's networks from a store of the graph."""
        if self._is_whole:
            return x
        return x.index_select(0, self._index(key, x.device, lambda: self.own_rows(key)))

    def own_rows(self, key: Key) -> Tensor:
        """The places of the rows of the group's networks in a store of the graph."""
        by_kind = torch.tensor([layout.num_rows(key) for layout in self._plan.kinds])
        counts, chosen = by_kind[self._plan.kind_of], torch.tensor(self.networks)
        own = counts[chosen]
        # The rows before those of a network differ between the group and the graph.
        shift = (counts.cumsum(0) - counts)[chosen] - (own.cumsum(0) - own)
        return torch.arange(int(own.sum())) + shift.repeat_interleave(own)

    def _entries(self, number: int, stores: Mapping[Key, Tensor]) -> Tensor:
        if number not in self._straight:
            self._straight[number] = self._straight_place(number)
        place = self._straight[number]
        if place is not None:
            x = self.rows(place.store, stores[place.store])
            return x[:, place.tap : place.tap + place.taps].reshape(-1)
        # Otherwise, the places of the entries are read like the entries, and used as an index.
        keys = list(dict.fromkeys(p.store for own, _ in self.kinds for p in own.sources[number]))
        flat = torch.cat([self.rows(key, stores[key]).reshape(-1) for key in keys])
        index = self._index(number, flat.device, lambda: self._places(number, keys, stores))
        return flat.index_select(0, index)

    def _straight_place(self, number: int) -> Placement | None:
        """The placement of a tensor that every network stores in its own order, or None."""
        first = self.kinds[0][0].sources[number][0]
        for layout, _ in self.kinds:
            own = layout.sources[number]
            p = own[0]
            is_alike = (p.store, p.tap, p.taps) == (first.store, first.tap, first.taps)
            fills = layout.num_rows(p.store) == p.count
            if not (len(own) == 1 and p.is_straight and is_alike and fills):
                return None
        return first

    def _places(self, number: int, keys: Sequence[Key], stores: Mapping[Key, Tensor]) -> Tensor:
        sizes = [
            sum(layout.num_rows(key) * n for layout, n in self.kinds) * stores[key].shape[1]
            for key in keys
        ]
        begin = dict(zip(keys, accumulate(sizes[:-1], initial=0), strict=True))
        places = []
        for layout, networks in self.kinds:
            own: dict[Key, Tensor] = {}
            for key in keys:
                rows, taps = layout.num_rows(key), stores[key].shape[1]
                end = begin[key] + networks * rows * taps
                own[key] = torch.arange(begin[key], end).reshape(networks, rows, taps)
                begin[key] = end
            places.append(read_entries(layout, number, own).reshape(-1))
        return torch.cat(places)

    def _index(self, place: Any, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """An index on a device, which is made once unless it is large."""
        index = self._indices.get((place, device))
        if index is None:
            with torch.inference_mode(False):  # As above.
                index = make().to(device)
            if index.numel() <= _MOST_INDICES:
                self._indices[place, device] = index
        return index


def _padded_sizes(kinds: Sequence[tuple[Layout, int]]) -> list[tuple[int, ...]] | None:
    """The sizes of neuron types to which networks with convolutions are padded with zeros.

    Only a few different sizes then remain, and torch's own convolutions run many networks of each
    size side by side. None if padding is not possible or would add too many zeros.

    Args:
        kinds: The different layouts of the networks, and the number of networks with each.
    """
    layouts = [layout for layout, _ in kinds]
    steps = layouts[0].computation.steps
    if len(layouts) == 1 or not any(step.operation in _CONVOLUTIONS for step in steps):
        return None
    if not all(map(_can_be_padded, layouts)):
        return None
    sizes = [tuple(n for (n,) in layout.shape.sizes) for layout in layouts]
    differ = [len(set(own)) > 1 for own in zip(*sizes, strict=True)]
    padded = [
        tuple(_rounded(n) if d else n for n, d in zip(own, differ, strict=True)) for own in sizes
    ]
    before = after = 0
    for (layout, count), own in zip(kinds, padded, strict=True):
        for (placement,) in layout.sources:
            _, view = _padded_view(placement, layout.spec, own)
            is_split = len(view) != len(placement.shape)
            if is_split and any(a == 1 < b for a, b in zip(placement.view, view, strict=True)):
                # A layer of one neuron could belong to either axis of the tensor.
                return None
            before += count * math.prod(placement.view)
            after += count * math.prod(view)
    return padded if after <= _MOST_PADDING * before else None


def _rounded(size: int) -> int:
    """The next larger size with fast convolutions."""
    return 4 if size <= 4 else 8 if size <= 8 else -(-size // 16) * 16


def _can_be_padded(layout: Layout) -> bool:
    """Whether every tensor belongs to a single layer or pair of layers that is not nested."""
    if any(neuron.parents for neuron in layout.spec.neurons):
        return False
    if any(len(own) != 1 for own in layout.shape.sizes):
        return False
    for placements in layout.sources:
        first = placements[0]
        roles = [axis for axis in first.axes if axis != "tap"]
        if len(placements) > 1 or not first.is_whole or len(set(roles)) < len(roles):
            return False
    return True


def _padded_view(
    placement: Placement, spec: NetworkSpec, sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape that a tensor has in a network of other sizes, and the shape of its view."""
    by_name = dict(zip(spec.neuron, sizes, strict=True))
    store = placement.store
    source, target = (store, store) if isinstance(store, str) else (store[0], store[2])
    view = tuple(
        n if axis == "tap" else by_name[source if axis == "source" else target]
        for axis, n in zip(placement.axes, placement.view, strict=True)
    )
    return tuple(math.prod(view[i] for i in axes) for axes in placement.view_axes), view


def _kinds(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    """The different layouts, and for every network the number of its layout."""
    by_object: dict[tuple[int, int], int] = {}
    by_value: dict[tuple[Any, ...], int] = {}
    kinds: list[Layout] = []
    kind_of = []
    for layout in layouts:
        # Copies of a layout for another batch share these objects.
        number = (id(layout.placements), id(layout.computation))
        if number not in by_object:
            value = (layout.spec, layout.shape, layout.placements, layout.computation)
            if value not in by_value:
                by_value[value] = len(kinds)
                kinds.append(layout)
            by_object[number] = by_value[value]
        kind_of.append(by_object[number])
    return kinds, kind_of


def read_entries(layout: Layout, number: int, stores: Mapping[Key, Tensor]) -> Tensor:
    """Reads a tensor `[networks, *shape]` of networks of one layout.

    Args:
        layout: The layout.
        number: The number of the tensor.
        stores: The values of every store, `[networks, rows, taps]`.
    """
    placements = layout.sources[number]
    first = placements[0]
    tensor: Tensor | None = None
    for placement in placements:
        rows = stores[placement.store]
        begin = layout.first_rows[placement.store, placement.block]
        taps = slice(placement.tap, placement.tap + placement.taps)
        part = placement.ordered(rows[:, begin : begin + placement.count, taps])
        if placement.is_whole:
            return part.reshape(rows.shape[0], *first.shape)
        if tensor is None:
            tensor = rows.new_zeros(rows.shape[0], *first.shape)
        placement.viewed(tensor)[(slice(None), *placement.slices)] = part
    if tensor is None:
        raise UserError("Expected placements of a tensor (got none)")
    return tensor
