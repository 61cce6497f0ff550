"""The base class of the transforms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor
from torch_geometric.transforms import BaseTransform

from nfn_graph.data import Layout, WeightGraph, stored_tensors
from nfn_graph.messages import UserError
from nfn_graph.spec import Key

Stores = dict[Key, Tensor]


class ReversibleTransform(BaseTransform):
    """A transform of a graph that can be undone.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import RoleTypes
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(4, 4), torch.ones(1, 4)])
        >>> roles = RoleTypes()
        >>> roles.inverse(roles(graph)).spec == graph.spec
        True
    """

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Transforms a graph (not a batch)."""
        _check_single(data)
        if any(neuron.role for neuron in data.spec.neurons):
            raise UserError(
                f"Expected a network without role types (got {data.spec}). Apply RoleTypes last."
            )
        layout, stores = self._forward(data.layout, stored_tensors(data, data.layout.spec))
        return data.rebuilt(replace(layout, before=(repr(self), data.layout)), stores)

    def inverse(self, graph: WeightGraph) -> WeightGraph:
        """Restores the original network, with the present values of the graph."""
        _check_single(graph)
        name, before = graph.layout.before or ("none", None)
        if name != repr(self) or before is None:
            raise UserError(
                f"Expected a graph made by {self!r} (got one whose last transform is "
                f"{name}). Undo transforms in reverse order."
            )
        stores = stored_tensors(graph, graph.layout.spec)
        return graph.rebuilt(before, self._inverse(graph.layout, before, stores))

    @abstractmethod
    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        """The new layout and stores."""

    @abstractmethod
    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        """Computes the stores of the original layout from those of the new one."""


def _check_single(graph: WeightGraph) -> None:
    if not isinstance(graph, WeightGraph) or not isinstance(graph.layout, Layout):
        raise TypeError(
            f"Expected one WeightGraph (got {type(graph).__name__}). Transform networks before "
            f"batching, and take them out with batch[i] to undo it."
        )
