"""Determines which neurons are nested: channels in groups, dimensions in heads.

Permuting a parent moves its children along, and the children of each parent are permuted
independently. That is a symmetry of a network if every value and every tensor that is indexed by
the children is also indexed by the parent, because every operation on them then stays inside one
parent. So nothing about nesting needs to be recorded while a network is followed. A sum over the
dimensions of a head leaves the heads. A sum over heads, however, or a scale that all heads share,
leaves dimensions without heads, and then the dimensions are not children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from nfn_graph.converters.wiring.axes import Factor, Layer, Nest, Segment, Segments, resolve
from nfn_graph.converters.wiring.values import NeuronAxis, Signal, SplitAxis, settled
from nfn_graph.data import PlacementAxis


class Ends(NamedTuple):
    """The layers along the axes of a part of a tensor.

    Attributes:
        layers: The layers in the order of the axes.
        roles: The role of each layer: target or source neurons.
        is_named: Whether the computation determines the roles.
    """

    layers: Nest
    roles: tuple[PlacementAxis, ...]
    is_named: bool = True

    @property
    def target(self) -> Nest:
        """The layers of target neurons, or of the neurons that the tensor belongs to."""
        return tuple(n for n, role in zip(*self[:2], strict=True) if role == "target")

    @property
    def source(self) -> Nest:
        """The layers of source neurons; empty for a tensor that belongs to neurons."""
        return tuple(n for n, role in zip(*self[:2], strict=True) if role == "source")


class Nesting:
    """The parents of all layers.

    Args:
        values: All values with neurons.
        tensors: The layers of all tensors, part by part.
        mixed: The layers of tensors whose entries are mixed along some axes before they are used,
            for example by a norm of their rows.
    """

    def __init__(
        self, values: Iterable[Signal], tensors: Sequence[Ends], mixed: Iterable[Layer] = ()
    ) -> None:
        self._together: dict[Layer, set[Layer]] = {}
        for value in values:
            for chosen in _layers_together(value):
                self._meet_axes(chosen)
        for ends in tensors:
            self._meet(ends.layers)
        for layer in mixed:
            self._meet([layer])
        for ends in tensors:
            self._keep_order(ends)
        self.parent: dict[Layer, Layer] = {}
        self._choose_parents()

    def chain(self, layer: Layer) -> Nest:
        """Returns a layer after all layers in which it is nested."""
        parent = self.parent.get(layer)
        return (layer,) if parent is None else (*self.chain(parent), layer)

    def parents(self, nest: Nest) -> tuple[Nest, ...]:
        """Returns the types in which the neurons of a type are nested: none, one or two."""
        if nest != self.chain(nest[-1]):
            return nest[:-1], self.chain(nest[-1])
        return (nest[:-1],) if len(nest) > 1 else ()

    def named(self, ends: Ends) -> Ends:
        """Returns the same layers with the roles that they have in a graph.

        Parents shared by target and source count as parents of the target. A tensor that only
        belongs to nested neurons has no source.
        """
        above = {a for layer in ends.target for a in self.chain(layer)} - set(ends.target)
        below = {a for layer in ends.source for a in self.chain(layer)} - set(ends.source)
        is_nested = bool(above & set(ends.source) or below & set(ends.target))
        is_one = not ends.target or (is_nested and not ends.is_named)
        roles: list[PlacementAxis] = [
            "target" if is_one or layer in above else role
            for layer, role in zip(ends.layers, ends.roles, strict=True)
        ]
        return Ends(ends.layers, tuple(roles))

    def types(self, ends: Ends) -> list[Nest]:
        """Returns the types of a tensor's target and source neurons, or of its own neurons."""
        ends = self.named(ends)
        if not ends.source:
            return [ends.target] if ends.target else []
        above = [a for layer in ends.source for a in self.chain(layer) if a not in ends.source]
        return [ends.target, tuple(dict.fromkeys([*above, *ends.source]))]

    def conflict(self, ends: Ends) -> list[Layer]:
        """Returns the layers that must keep their order so that a tensor has a place, if any.

        A weight cannot connect the neurons of all groups with those of the same groups, nor nested
        neurons with themselves. If either a group or its children could stay free, the larger one
        does.
        """
        target = tuple(layer for layer in ends.target if not layer.fixed)
        source = tuple(layer for layer in ends.source if not layer.fixed)
        twice = [layer for layer in target if layer in source]
        if target == source == tuple(twice) and len(twice) == 1 and not self.parent.get(twice[0]):
            return []
        for layers in (target, source):
            twice += [layer for layer in layers if layers.count(layer) > 1]
        if not twice:
            return []
        top = min((self.chain(layer)[0] for layer in twice), key=lambda layer: layer.order)
        inside = [n for n in dict.fromkeys(ends.layers) if n is not top and top in self.chain(n)]
        if not inside or target.count(top) > 1 or source.count(top) > 1:
            return [top]
        return [top] if top.size < max(layer.size for layer in inside) else inside

    def _meet(self, found: Iterable[Layer]) -> None:
        # Nothing can be nested in a single neuron.
        layers = {layer for layer in found if not layer.fixed and layer.size > 1}
        for layer in layers:
            if layer in self._together:
                self._together[layer] &= layers
            else:
                self._together[layer] = set(layers)

    def _meet_axes(self, chosen: Sequence[Counter[Layer]]) -> None:
        """Records an entry of a value with these layers along its axes.

        If a layer is on two axes, entries of two of its neurons meet. It is then a parent only of
        layers that are beside it on each of these axes.
        """
        every = sum(chosen, Counter[Layer]())
        free = [layer for layer in every if not layer.fixed and layer.size > 1]
        for layer in free:
            beside = {
                other
                for other in free
                if other is layer
                or every[other] == 1
                or all(axis[other] == 1 for axis in chosen if axis[layer])
            }
            self._together[layer] = self._together.get(layer, beside) & beside

    def _keep_order(self, ends: Ends) -> None:
        """Enforces the order of rows: parents first, target before source, no axes transposed."""
        for place, (layer, role) in enumerate(zip(*ends[:2], strict=True)):
            later = zip(ends.layers[place + 1 :], ends.roles[place + 1 :], strict=True)
            out_of_order = {n for n, r in later if (role, r) != ("source", "target")}
            earlier = {layer, *ends.layers[:place]}
            self._together.get(layer, set()).difference_update(out_of_order - earlier)

    def _choose_parents(self) -> None:
        above = {
            layer: {
                other
                for other in together
                if other is not layer
                and (layer not in self._together[other] or other.order < layer.order)
            }
            for layer, together in self._together.items()
        }
        for layer in sorted(above, key=lambda layer: (len(above[layer]), layer.order)):
            chains = [self.chain(other) for other in above[layer] if layer not in self.chain(other)]
            fitting = [chain for chain in chains if set(chain) <= above[layer]]
            if fitting:
                self.parent[layer] = max(fitting, key=lambda chain: (len(chain), chain[-1].order))[
                    -1
                ]


def without_fixed(segments: Segments, whole: dict[Segment, Layer]) -> Segments:
    """Turns layers of an axis that keep their order into positions of the free layers beside them.

    Args:
        segments: The axis.
        whole: The layers for products in which all layers are fixed; new ones are added.
    """
    found: list[Segment] = []
    for segment in resolve(segments):
        first, *others = segment.layers or (None,)
        if first is not None and others:
            if all(layer.fixed for layer in segment.layers):
                if segment not in whole:
                    whole[segment] = first.part(segment.size or 1, 0)
                segment = Segment((whole[segment],))
            else:
                placed = Segment(tuple(map(_as_positions, segment.factors)))
                segment = placed if placed.layers else Segment((first,))
        found.append(segment)
    return resolve(tuple(found))


def _as_positions(factor: Factor) -> Factor:
    if isinstance(factor, Layer):
        return factor.size if factor.fixed or factor.size == 1 else factor
    if isinstance(factor, tuple):
        return tuple(Segment(tuple(map(_as_positions, s.factors))) for s in factor)
    return factor


def _layers_together(value: Signal) -> Iterator[tuple[Counter[Layer], ...]]:
    """Yields, for every kind of entry of a value, how often each layer is on each of its axes."""
    axes = [settled(axis) for axis in value.stored]
    choices = [
        list(_choices(resolve(a.segments if isinstance(a, NeuronAxis) else a.split.segments)))
        for a in axes
        if isinstance(a, NeuronAxis | SplitAxis)
    ]
    return product(*choices)


def _choices(segments: Segments) -> Iterator[Counter[Layer]]:
    for segment in segments:
        inner = [
            [Counter([factor])] if isinstance(factor, Layer) else list(_choices(factor))
            for factor in segment.factors
            if isinstance(factor, Layer | tuple)
        ]
        for chosen in product(*inner):
            yield sum(chosen, Counter[Layer]())
