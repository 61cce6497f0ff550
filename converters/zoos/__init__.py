"""Reads published zoos in their own layouts through one interface."""

from nfn_graph.converters.zoos.opening import open_zoo
from nfn_graph.converters.zoos.zoo import Zoo, ZooDescription

__all__ = ["Zoo", "ZooDescription", "open_zoo"]
