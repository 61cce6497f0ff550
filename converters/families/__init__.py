"""State dicts of well-known transformers: recognised by their names, shapes and number of heads.

A :class:`Family` is a table of names. What it describes becomes a network on the meta device with
these names, whose computation is followed like that of any other.
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
