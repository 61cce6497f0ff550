"""ONNX models: their nodes, one after another, in the words of `wiring`."""

from nfn_graph.converters.onnx.model import from_onnx

__all__ = ["from_onnx"]
