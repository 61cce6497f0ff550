"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.layers import FlattenOrder, Hints, chain_layout

__all__ = ["FlattenOrder", "Hints", "chain_layout"]
