"""Elements of the neuron permutation groups, and their action on graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nfn_graph.data import WeightGraph
from nfn_graph.spec import Key, Symmetry

__all__ = ["Permutation", "sample"]


@dataclass(frozen=True, eq=False)
class Permutation:
    r"""An element :math:`\sigma` of the group of a graph or batch.

    Attributes:
        index: For every permuted neuron type, :math:`\sigma^{-1}` as rows of that type: the
            neuron that comes to each place. It stays within networks and layers.
    """

    index: dict[str, Tensor]

    @property
    def is_identity(self) -> bool:
        """Whether it moves no neuron."""
        return all(
            torch.equal(i, torch.arange(len(i), device=i.device)) for i in self.index.values()
        )

    def inverse(self) -> Permutation:
        """The element that undoes this one."""
        return Permutation({name: index.argsort() for name, index in self.index.items()})

    def apply(self, graph: WeightGraph) -> WeightGraph:
        r"""The same network with its neurons in another order (the paper's Eq. 1).

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
        return graph.with_features(moved)

    def _moved(self, name: str, rows: Tensor) -> Tensor:
        return self.index[name][rows] if name in self.index else rows


def sample(
    graph: WeightGraph,
    symmetry: Symmetry,
    generator: torch.Generator | None = None,
) -> Permutation:
    """A random element of a graph's (or batch's) group, uniform over the whole group.

    `"np"` permutes all layers, `"hnp"` all but those of fixed types. Neurons with a parent are
    permuted inside of it, and go along with it.
    """
    places = {}
    for name, sizes in layer_sizes(graph, symmetry).items():
        found = [torch.randperm(size, generator=generator) for size in sizes]
        places[name] = torch.cat(found) if found else torch.empty(0, dtype=torch.long)
    return from_places(graph, places)


def layer_sizes(graph: WeightGraph, symmetry: Symmetry) -> dict[str, list[int]]:
    """For every index that a group permutes, the sizes of what it permutes by itself: the
    layers of a type, or the neurons inside each parent."""
    if symmetry not in ("np", "hnp"):
        raise ValueError(f"Expected the symmetry 'np' or 'hnp' (got {symmetry!r})")
    spec = graph.spec
    shapes = [
        dict(zip(spec.neuron, layout.shape_in(spec).sizes, strict=True)) for layout in graph.layouts
    ]
    found: dict[str, list[int]] = {}
    for neuron in spec.neurons:
        if (symmetry == "hnp" and neuron.fixed) or len(neuron.parents) == 2:
            continue
        found[neuron.name] = []
        for sizes in shapes:
            for size in sizes[neuron.name]:
                parents = [n for parent in neuron.parents for n in sizes[parent]]
                inside = parents[0] if parents else 1
                found[neuron.name] += [size // inside] * inside
    return found


def from_places(graph: WeightGraph, places: Mapping[str, Tensor]) -> Permutation:
    """The group element that permutes the neurons of each layer, or inside each parent.

    Args:
        graph: The graph or batch.
        places: For some neuron types with an index of their own, for every place the position,
            in its layer or inside its parent, of the neuron that comes there.
    """
    raw, spec = graph.features(), graph.spec
    index: dict[str, Tensor] = {}
    for neuron in spec.neurons:
        position = raw.incidence.positions[neuron.name].long()
        own = torch.arange(len(position), device=raw.device)
        moved = [parent for parent in neuron.parents if parent in index]
        if neuron.name not in places and not moved:
            continue
        digits = {neuron.name: places.get(neuron.name, position).to(raw.device)}
        if not neuron.parents:
            index[neuron.name] = own - position + digits[neuron.name]
        else:
            index[neuron.name] = raw.incidence.moved(neuron.name, index, digits)
    return Permutation(index)
