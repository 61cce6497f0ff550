"""Recognises state dicts of well-known transformers by their names and shapes.

A :class:`Family` is a table of names. A network with these names is created on the meta device, and
its computation is followed like that of any other network.
"""

from nfn_graph.converters.families.network import family_network
from nfn_graph.converters.families.recognition import (
    Heads,
    find_family,
    heads_beside,
    is_named,
    may_share,
)
from nfn_graph.converters.families.tables import FAMILIES, Family

__all__ = [
    "FAMILIES",
    "Family",
    "Heads",
    "family_network",
    "find_family",
    "heads_beside",
    "is_named",
    "may_share",
]
