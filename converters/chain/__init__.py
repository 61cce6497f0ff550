"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.joining import FlattenOrder
from nfn_graph.converters.chain.layers import Hints, read_chain
from nfn_graph.converters.chain.topology import ASK_FOR_ARCH

__all__ = ["ASK_FOR_ARCH", "FlattenOrder", "Hints", "read_chain"]
