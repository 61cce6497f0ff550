"""Networks as PyG graphs: layouts, graphs, batches, loaders."""

from nfn_graph.data._batch import Batch, DataLoader, GraphList
from nfn_graph.data._graph import WeightGraph, stored_tensors
from nfn_graph.data._layout import (
    Layout,
    Placement,
    PlacementAxis,
    gather_tensors,
    scatter_tensors,
)
from nfn_graph.data._samplers import EdgeBatchSampler, network_sizes
from nfn_graph.spec import Shape

__all__ = [
    "Batch",
    "DataLoader",
    "EdgeBatchSampler",
    "GraphList",
    "Layout",
    "Placement",
    "PlacementAxis",
    "Shape",
    "WeightGraph",
    "gather_tensors",
    "network_sizes",
    "scatter_tensors",
    "stored_tensors",
]
