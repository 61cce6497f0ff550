"""Descriptions of a family of networks without tensors: types, sites and symmetry."""

from nfn_graph.spec._sites import NETWORK, Below, FoldedSpec, Part, Piece, Site
from nfn_graph.spec._types import (
    PRIME,
    Key,
    NetworkSpec,
    NeuronType,
    Shape,
    Symmetry,
    WeightKey,
    WeightType,
    module_name,
    type_label,
)

__all__ = [
    "NETWORK",
    "PRIME",
    "Below",
    "FoldedSpec",
    "Key",
    "NetworkSpec",
    "NeuronType",
    "Part",
    "Piece",
    "Shape",
    "Site",
    "Symmetry",
    "WeightKey",
    "WeightType",
    "module_name",
    "type_label",
]
