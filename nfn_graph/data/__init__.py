"""Networks as PyG graphs: layouts, graphs, batches, loaders."""

from nfn_graph.data._batch import Batch, DataLoader, GraphList
from nfn_graph.data._computation import Argument, Computation, Neurons, Range, Ref, Step, View
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
    "Argument",
    "Batch",
    "Computation",
    "DataLoader",
    "EdgeBatchSampler",
    "GraphList",
    "Layout",
    "Neurons",
    "Placement",
    "PlacementAxis",
    "Range",
    "Ref",
    "Shape",
    "Step",
    "View",
    "WeightGraph",
    "gather_tensors",
    "network_sizes",
    "scatter_tensors",
    "stored_tensors",
]
