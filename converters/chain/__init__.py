"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.joining import FlattenOrder, check_activation
from nfn_graph.converters.chain.layers import Hints, read_chain
from nfn_graph.converters.chain.names import ASK_FOR_ARCH

__all__ = ["ASK_FOR_ARCH", "FlattenOrder", "Hints", "check_activation", "read_chain"]
