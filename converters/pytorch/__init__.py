"""The torch front-end: modules and their computations in the words of `wiring`."""

from nfn_graph.converters.pytorch.shapes import as_inputs, map_tensors
from nfn_graph.converters.pytorch.tracing import trace
from nfn_graph.converters.pytorch.wrappers import unwrapped_module

__all__ = ["as_inputs", "map_tensors", "trace", "unwrapped_module"]
