"""What a family of networks looks like, free of tensors: types, sites, symmetry."""

from nfn_graph.spec._sites import NETWORK, Bundle, FoldedSpec
from nfn_graph.spec._types import (
    Key,
    NetworkSpec,
    NeuronType,
    Shape,
    Symmetry,
    WeightKey,
    WeightType,
    module_name,
)

__all__ = [
    "NETWORK",
    "Bundle",
    "FoldedSpec",
    "Key",
    "NetworkSpec",
    "NeuronType",
    "Shape",
    "Symmetry",
    "WeightKey",
    "WeightType",
    "module_name",
]
