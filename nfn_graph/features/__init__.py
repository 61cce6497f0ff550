"""The features that layers pass to each other, and which rows of a batch belong together."""

from nfn_graph.features._features import WeightFeatures
from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import Grouping, LargeBlock, Rows, group_of_rows

__all__ = [
    "Grouping",
    "Incidence",
    "LargeBlock",
    "Rows",
    "WeightFeatures",
    "group_of_rows",
]
