"""Chains of layers inferred from the keys and shapes of a state dict."""

from nfn_graph.converters.chain.layers import chain_layout

__all__ = ["chain_layout"]
