"""Elements of the neuron permutation groups, and their action on graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nfn_graph.data._graph import WeightGraph
from nfn_graph.spec._types import Symmetry

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
        weights, neurons = {}, {}
        for name, x in raw.neurons.items():
            neurons[name] = x[self.index[name]] if name in self.index else x
        for key, x in raw.weights.items():
            edges = raw.incidence.weights[key]
            target = self._moved(key[2], edges.target)
            source = self._moved(key[0], edges.source)
            weights[key] = x[raw.incidence.lookup(key, target, source)]
        return graph.with_features(weights, neurons)

    def _moved(self, name: str, rows: Tensor) -> Tensor:
        return self.index[name][rows] if name in self.index else rows


def sample(
    graph: WeightGraph,
    symmetry: Symmetry,
    generator: torch.Generator | None = None,
) -> Permutation:
    """A random element of a graph's (or batch's) group, uniform over the whole group.

    `"np"` permutes all layers, `"hnp"` all but those of fixed types.
    """
    if symmetry not in ("np", "hnp"):
        raise ValueError(f"Expected the symmetry 'np' or 'hnp' (got {symmetry!r})")
    spec = graph.spec
    shapes = [layout.shape_in(spec) for layout in graph.layouts]
    device = next(iter(graph.edge_stores)).edge_attr.device
    index = {}
    for i, neuron in enumerate(spec.neurons):
        if symmetry == "hnp" and neuron.fixed:
            continue
        layers, start = [], 0
        for size in [n for shape in shapes for n in shape.sizes[i]]:
            layers.append(torch.randperm(size, generator=generator) + start)
            start += size
        none = torch.empty(0, dtype=torch.long)
        index[neuron.name] = (torch.cat(layers) if layers else none).to(device)
    return Permutation(index)
