"""The features that layers pass to each other, and which rows of a batch belong together."""

from nfn_graph.features._features import WeightFeatures
from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import Block, Grouping, Rows, group_of_rows

__all__ = [
    "Block",
    "Grouping",
    "Incidence",
    "Rows",
    "WeightFeatures",
    "group_of_rows",
]
