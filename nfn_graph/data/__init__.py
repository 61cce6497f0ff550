"""Networks as PyG graphs: layouts, graphs, batches, loaders."""

import torch
from torch_geometric.data.storage import BaseStorage, NodeStorage

from nfn_graph.data._batch import Batch, DataLoader, GraphList
from nfn_graph.data._computation import Argument, Computation, Neurons, Range, Ref, Step, View
from nfn_graph.data._graph import WeightGraph, WeightStorage, stored_tensors
from nfn_graph.data._layout import Layout, Placement, PlacementAxis, gather_tensors, scatter_tensors
from nfn_graph.data._samplers import EdgeBatchSampler, network_sizes
from nfn_graph.spec import NetworkSpec, NeuronType, Shape, WeightType

# The classes in a saved graph, which `torch.load` may construct without being told to trust the
# file. They contain nothing but data.
torch.serialization.add_safe_globals(
    [
        *(BaseStorage, NodeStorage, WeightStorage, WeightGraph, Batch),
        *(NetworkSpec, NeuronType, WeightType, Shape, Layout, Placement),
        *(Computation, Step, Ref, Range, Neurons),
    ]
)

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
