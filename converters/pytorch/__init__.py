"""The torch front-end: follows modules and their computations with the methods of `wiring`."""

from nfn_graph.converters.pytorch.shapes import as_inputs, map_tensors
from nfn_graph.converters.pytorch.tensors import unwrapped_module
from nfn_graph.converters.pytorch.tracing import trace

__all__ = ["as_inputs", "map_tensors", "trace", "unwrapped_module"]
