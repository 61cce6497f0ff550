"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.joining import FlattenOrder
from nfn_graph.converters.chain.layers import Hints, chain_layout

__all__ = ["FlattenOrder", "Hints", "chain_layout"]
