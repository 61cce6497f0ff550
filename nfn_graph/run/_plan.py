"""Which networks of a graph run together, and where their entries are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Computation, Layout, Placement, WeightGraph
from nfn_graph.run._operations import ENTRYWISE
from nfn_graph.run._ragged import Stored
from nfn_graph.run._tensors import first_rows, read_entries
from nfn_graph.spec import Key

#: Plans that are kept: most training repeats few mixtures of networks.
_MOST_PLANS = 32
#: Indices of more entries than this are made anew every time.
_MOST_INDICES = 2**24

_plans: OrderedDict[tuple[int, ...], Plan] = OrderedDict()
_lock = Lock()


def plan_of(graph: WeightGraph) -> Plan:
    """The plan for the networks of a graph, made once for the same layouts."""
    layouts = graph.layouts
    # A plan keeps its layouts alive, so that no other object gets their numbers.
    key = tuple(map(id, layouts))
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    plan = Plan(graph)
    with _lock:
        _plans[key] = plan
        while len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
    return plan


class Plan:
    """How the networks of a graph are run.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: WeightGraph) -> None:
        self.layouts = graph.layouts
        spec = graph.spec
        self.keys: list[Key] = [*spec.neuron, *spec.weight]
        self.like = spec.weights[0].key
        self.kinds, self.kind_of = _kinds(self.layouts)
        members: dict[Computation, dict[int, list[int]]] = {}
        by_kind: list[list[int]] = [[] for _ in self.kinds]
        for network, kind in enumerate(self.kind_of):
            by_kind[kind].append(network)
        for kind, networks in enumerate(by_kind):
            members.setdefault(self.kinds[kind].computation, {})[kind] = networks
        self.groups = [Group(self, own) for own in members.values()]
        order = [network for group in self.groups for network in group.networks]
        is_sorted = order == list(range(len(order)))
        self._back = None if is_sorted else sorted(range(len(order)), key=order.__getitem__)
        self._indices: dict[Any, Tensor | None] = {}

    @property
    def reason(self) -> tuple[int, str] | None:
        """The first network whose computation is not known, and why."""
        unknown = [i for i, layout in enumerate(self.kinds) if layout.computation.reason]
        if not unknown:
            return None
        number = min(map(self.kind_of.index, unknown))
        return number, str(self.kinds[self.kind_of[number]].computation.reason)

    def counts(self, key: Key) -> Tensor:
        """How many rows of a store every network has."""
        own = torch.tensor([layout.num_rows(key) for layout in self.kinds])
        return own[torch.tensor(self.kind_of)]

    def restored(self, parts: Sequence[Tensor]) -> Tensor:
        """Values of the networks of all groups, one after the other, in the graph's order."""
        joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if self._back is None:
            return joined
        return joined.index_select(0, torch.tensor(self._back, device=joined.device))

    def restored_rows(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Rows of a neuron type of all groups, one after the other, in the graph's order."""
        joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if self._back is None:
            return joined
        place = (name, joined.device)
        if place not in self._indices:
            order = torch.cat([group.own_rows(name) for group in self.groups])
            self._indices[place] = order.argsort().to(joined.device)
        index = self._indices[place]
        return joined if index is None else joined.index_select(0, index)


class Group:
    """Networks that compute alike, those of equal sizes next to each other.

    Args:
        plan: The plan that they are a part of.
        members: Their places in the graph, by their kinds.
    """

    def __init__(self, plan: Plan, members: Mapping[int, Sequence[int]]) -> None:
        self._plan = plan
        self.networks = [network for networks in members.values() for network in networks]
        self.kinds = [(plan.kinds[kind], len(networks)) for kind, networks in members.items()]
        self.computation = self.kinds[0][0].computation
        #: Whether all that it computes is known for networks of different sizes.
        self.is_ragged = True
        #: Whether it computes nothing but linear layers and functions of single entries.
        self.is_dense = all(
            step.operation in ("input", "parameter", "constant", "linear")
            or step.operation in ENTRYWISE
            for step in self.computation.steps
        )
        self._is_whole = self.networks == list(range(len(plan.layouts)))
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._indices: dict[Any, Tensor | None] = {}

    @property
    def count(self) -> int:
        """How many networks there are."""
        return len(self.networks)

    def tensor(self, number: int, stores: Mapping[Key, Tensor]) -> Stored:
        """A tensor of all networks, by its number, read from the stores of the graph."""
        if number not in self._shapes:
            own = [(layout.sources[number][0].shape, n) for layout, n in self.kinds]
            self._shapes[number] = tuple(shape for shape, n in own for _ in range(n))
        return Stored(self._entries(number, stores), self._shapes[number])

    def rows(self, key: Key, x: Tensor) -> Tensor:
        """The rows of all networks in a store of the graph."""
        if self._is_whole:
            return x
        place = (key, x.device)
        index = self._indices.get(place)
        if index is None:
            index = self.own_rows(key).to(x.device)
            self._keep(place, index)
        return x.index_select(0, index)

    def own_rows(self, key: Key) -> Tensor:
        """The places of all networks' rows in a store of the graph."""
        counts, chosen = self._plan.counts(key), torch.tensor(self.networks)
        own = counts[chosen]
        # What lies before a network's rows here is not what lies before them there.
        shift = (counts.cumsum(0) - counts)[chosen] - (own.cumsum(0) - own)
        return torch.arange(int(own.sum())) + shift.repeat_interleave(own)

    def _entries(self, number: int, stores: Mapping[Key, Tensor]) -> Tensor:
        place = self._straight_place(number)
        if place is not None:
            x = self.rows(place.store, stores[place.store])
            return x[:, place.tap : place.tap + place.taps].reshape(-1)
        # Otherwise by the places of the entries, which are read like the entries themselves.
        keys = list(dict.fromkeys(p.store for own, _ in self.kinds for p in own.sources[number]))
        flat = torch.cat([self.rows(key, stores[key]).reshape(-1) for key in keys])
        index = self._indices.get((number, flat.device))
        if index is None:
            index = self._places(number, keys, stores).to(flat.device)
            self._keep((number, flat.device), index)
        return flat.index_select(0, index)

    def _straight_place(self, number: int) -> Placement | None:
        """The only place of a tensor that lies there in its own order, in all networks."""
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
            found = read_entries(layout.sources[number], own, first_rows(layout))
            places.append(found.reshape(-1))
        return torch.cat(places)

    def _keep(self, place: Any, index: Tensor) -> None:
        if index.numel() <= _MOST_INDICES:
            self._indices[place] = index


def _kinds(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    """The different layouts, and for every network its number among them."""
    by_object: dict[tuple[int, int], int] = {}
    by_value: dict[tuple[Any, ...], int] = {}
    kinds: list[Layout] = []
    kind_of = []
    for layout in layouts:
        # Copies of a layout for another batch share these.
        number = (id(layout.placements), id(layout.computation))
        if number not in by_object:
            value = (layout.spec, layout.shape, layout.placements, layout.computation)
            if value not in by_value:
                by_value[value] = len(kinds)
                kinds.append(layout)
            by_object[number] = by_value[value]
        kind_of.append(by_object[number])
    return kinds, kind_of
