"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.layers import Hints, chain_layout

__all__ = ["Hints", "chain_layout"]
