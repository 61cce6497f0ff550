"""Elements of the neuron permutation groups, and their action on graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nfn_graph.data import Layout, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, Symmetry

__all__ = ["Permutation", "sample"]


@dataclass(frozen=True, eq=False)
class Permutation:
    r"""An element :math:`\sigma` of the group of a graph or batch.

    Attributes:
        index: For every permuted neuron type, :math:`\sigma^{-1}` as rows of that type: the neuron
            that moves to each place. Neurons stay within their network and layer.

    Example:
        >>> from nfn_graph import NetworkSpec, symmetry
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> permutation = symmetry.sample(graph, "hnp")
        >>> moved = permutation.apply(graph)
        >>> permutation.inverse().apply(moved)["hidden1"].x.equal(graph["hidden1"].x)
        True
    """

    index: dict[str, Tensor]

    @property
    def is_identity(self) -> bool:
        """Whether this element leaves every neuron in its place."""
        return all(
            torch.equal(i, torch.arange(len(i), device=i.device)) for i in self.index.values()
        )

    def inverse(self) -> Permutation:
        """The inverse of this element."""
        return Permutation({name: index.argsort() for name, index in self.index.items()})

    def apply(self, graph: WeightGraph) -> WeightGraph:
        r"""Puts the neurons of a network into another order (the paper's Eq. 1).

        .. math:: [\sigma W]^{(i)}_{jk} = W^{(i)}_{\sigma_i^{-1}(j), \sigma_{i-1}^{-1}(k)}
        """
        raw = graph.features()
        moved: dict[Key, Tensor] = {}
        for key, x in raw.tensors():
            if isinstance(key, str):
                moved[key] = x[self.index[key]] if key in self.index else x
            else:
                rows = raw.rows(key)
                target = self._moved(key[2], rows.targets.index.long())
                source = self._moved(key[0], rows.sources.index.long())
                moved[key] = x[raw.incidence.lookup(key, target, source)]
        permuted = graph.with_features(moved)
        if any(layout.aside for layout in graph.layouts):
            layouts = self._carrying(graph)
            permuted.layout = layouts[0] if isinstance(graph.layout, Layout) else layouts
        return permuted

    def _carrying(self, graph: WeightGraph) -> list[Layout]:
        """The layouts in which the tensors that were left out of the graph are permuted as well."""
        layouts = []
        start = dict.fromkeys(self.index, 0)
        for layout in graph.layouts:
            end = {name: begin + layout.num_rows(name) for name, begin in start.items()}
            own = {name: i[start[name] : end[name]] - start[name] for name, i in self.index.items()}
            layouts.append(layout.noting(carried={**layout.carried, **_moved_aside(layout, own)}))
            start = end
        return layouts

    def _moved(self, name: str, rows: Tensor) -> Tensor:
        return self.index[name][rows] if name in self.index else rows


def _moved_aside(layout: Layout, index: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Permutes the axes of the tensors of a network that are not part of its graph."""
    found = {key: layout.carried[key].clone() for key in layout.aside}
    for key, placements in layout.aside.items():
        for p in placements:
            ends = (p.store,) if isinstance(p.store, str) else (p.store[2], p.store[0])
            counts = [layout.num_rows(name) for name in ends]
            if math.prod(counts) != p.count:
                raise UserError(
                    f"Expected the neurons that '{key}', left out of the graph, was made for (got "
                    f"{dict(zip(ends, counts, strict=True))}). Undo transforms first."
                )
            rows = p.take(layout.carried[key]).reshape(*counts, p.taps)
            for axis, name in enumerate(ends):
                if name in index:
                    rows = rows.index_select(axis, index[name].to(rows.device))
            p.put(rows.reshape(p.count, p.taps, 1), found[key].unsqueeze(-1))
    return found


def sample(
    graph: WeightGraph, symmetry: Symmetry, generator: torch.Generator | None = None
) -> Permutation:
    """A random element of a graph's (or batch's) group, uniform over the whole group.

    `"np"` permutes all layers, `"hnp"` all but those of fixed types. Neurons with a parent are
    permuted within it and move together with it.

    Example:
        >>> from nfn_graph import NetworkSpec, symmetry
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> moved = symmetry.sample(graph, "hnp").apply(graph)
        >>> moved["hidden1"].x.sort(0).values.equal(graph["hidden1"].x.sort(0).values)
        True
    """
    return from_orders(graph, symmetry, lambda size: torch.randperm(size, generator=generator))


def from_orders(
    graph: WeightGraph, symmetry: Symmetry, order: Callable[[int], Tensor]
) -> Permutation:
    """Makes a group element from `order(size)` for each set that is permuted independently."""
    places = {}
    for name, sizes in layer_sizes(graph, symmetry).items():
        places[name] = torch.cat([torch.empty(0, dtype=torch.long), *map(order, sizes)])
    return from_places(graph, places)


def layer_sizes(graph: WeightGraph, symmetry: Symmetry) -> dict[str, list[int]]:
    """The sizes of the sets that a group permutes independently, for every index.

    These sets are the layers of a type, or the neurons inside each parent.
    """
    if symmetry not in ("np", "hnp"):
        raise UserError(f"Expected the symmetry 'np' or 'hnp' (got {symmetry!r})")
    found: dict[str, list[int]] = {}
    for neuron in graph.spec.neurons:
        if (symmetry == "hnp" and neuron.fixed) or len(neuron.parents) == 2:
            continue
        found[neuron.name] = []
        for sizes in (layout.sizes for layout in graph.layouts):
            for size in sizes.get(neuron.name, ()):
                parents = math.prod(sum(sizes[name]) for name in neuron.parents)
                found[neuron.name] += [size // parents] * parents
    return found


def from_places(graph: WeightGraph, places: Mapping[str, Tensor]) -> Permutation:
    """Makes a group element from the position of the neuron that moves to each place.

    Positions are counted in a layer or inside a parent, and given for some types that have an index
    of their own.
    """
    raw, spec = graph.features(), graph.spec
    index: dict[str, Tensor] = {}
    for neuron in spec.neurons:
        position = raw.incidence.positions[neuron.name].long()
        own = torch.arange(len(position), device=raw.device)
        moved = [parent for parent in neuron.parents if parent in index]
        if neuron.name not in places and not moved:
            continue
        place = places.get(neuron.name, position).to(raw.device)
        if neuron.parents:
            index[neuron.name] = raw.incidence.moved(neuron.name, index, {neuron.name: place})
        else:
            index[neuron.name] = own - position + place
    return Permutation(index)
