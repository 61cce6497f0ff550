"""The torch front-end: modules and their computations in the words of `wiring`."""

from nfn_graph.converters.pytorch.tracing import as_inputs, trace

__all__ = ["as_inputs", "trace"]
