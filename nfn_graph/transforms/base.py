"""What the transforms share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor
from torch_geometric.transforms import BaseTransform

from nfn_graph.graph import WeightGraph
from nfn_graph.layout import Layout
from nfn_graph.spec import Key

Stores = dict[Key, Tensor]


class ReversibleTransform(BaseTransform):
    """A transform of a graph that can be undone."""

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Transforms a graph (not a batch)."""
        if not isinstance(data, WeightGraph) or not isinstance(data.layout, Layout):
            raise TypeError(
                f"Expected one WeightGraph (got {type(data).__name__}). Transform networks "
                f"before they are batched."
            )
        layout, stores = self._forward(data.layout, _stores(data))
        return data.rebuilt(replace(layout, before=(self._name, data.layout)), stores)

    def inverse(self, graph: WeightGraph) -> WeightGraph:
        """The network that the transform was applied to, with the graph's present values."""
        name, before = graph.layout.before or ("none", None)
        if name != self._name or before is None:
            raise ValueError(
                f"Expected a graph made by {self._name} (got one whose last transform is "
                f"{name}). Undo transforms last first."
            )
        return graph.rebuilt(before, self._inverse(graph.layout, before, _stores(graph)))

    @property
    def _name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        """The new layout and stores."""

    @abstractmethod
    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        """The stores of the layout before, from those of the layout after."""


def _stores(graph: WeightGraph) -> Stores:
    spec = graph.layout.spec
    stores: Stores = {name: graph[name].x for name in spec.neuron}
    stores.update({key: graph[key].edge_attr for key in spec.weight})
    return stores
