r"""Checks of the symmetry laws, for the layers here and for your own.

:func:`assert_equivariant` checks :math:`f(\sigma U) = \sigma f(U)`, :func:`assert_invariant`
:math:`f(\sigma U) = f(U)`, and :func:`assert_complete` checks that a linear layer can express *all*
equivariant matrices: the rank of the span of its matrices is the number of orbits of the group on
pairs of entries.
"""

from nfn_graph.testing._completeness import (
    Completeness,
    assert_complete,
    completeness,
    matrices_of,
    orbit_labels,
)
from nfn_graph.testing._laws import assert_equivariant, assert_invariant
from nfn_graph.testing._random import random_graph

__all__ = [
    "Completeness",
    "assert_complete",
    "assert_equivariant",
    "assert_invariant",
    "completeness",
    "matrices_of",
    "orbit_labels",
    "random_graph",
]
