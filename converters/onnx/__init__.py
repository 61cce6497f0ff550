"""Follows ONNX models node by node with the methods of `wiring`."""

from nfn_graph.converters.onnx.model import from_onnx

__all__ = ["from_onnx"]
