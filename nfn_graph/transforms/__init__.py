"""PyG-style transforms that bring different networks together.

Each turns a network into an equivalent one, and `inverse` undoes a :class:`ReversibleTransform`. A
batch never pads silently: it raises an error that names the transform to apply. Canonical forms
unify networks that have different weights but compute the same function.

    grow = GrowKernels.to_largest(graphs)
    batch = Batch.from_data_list([grow(g) for g in graphs])
    edited = grow.inverse(model(batch).to_graph()[0])
"""

from nfn_graph.transforms._canonical import CanonicalForm, CanonicalPhases, Moved
from nfn_graph.transforms._fan_in import ScaleByFanIn
from nfn_graph.transforms._fill_biases import FillBiases
from nfn_graph.transforms._grow_kernels import GrowKernels
from nfn_graph.transforms._reversible import ReversibleTransform
from nfn_graph.transforms._role_types import RoleTypes

__all__ = [
    "CanonicalForm",
    "CanonicalPhases",
    "FillBiases",
    "GrowKernels",
    "Moved",
    "ReversibleTransform",
    "RoleTypes",
    "ScaleByFanIn",
]
