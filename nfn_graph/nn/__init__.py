"""Layers and models on weight-space features.

Layers take :class:`~nfn_graph.WeightFeatures` and commute with the group; :class:`Pool` and
:class:`InvariantNFN` are invariant. Probes take graphs, which they run. The NF-Layer is in
`linear`, its equations are in `_message_passing`, and `models` contains whole models, which
:func:`NFN` makes with the options of :class:`NFNOptions`. All names are also available in
:mod:`nfn_graph` itself.
"""

from nfn_graph.nn.elementwise import Activation, Dropout, Residual
from nfn_graph.nn.encoding import FourierFeatures, IOEncoding
from nfn_graph.nn.fold import Fold
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.models import NFN, EquivariantNFN, InvariantNFN, NFNOptions
from nfn_graph.nn.norm import ChannelNorm, Standardize
from nfn_graph.nn.pool import Pool
from nfn_graph.nn.probe import Probe, ProbeEncoding, ProbeNet

__all__ = [
    "NFN",
    "Activation",
    "ChannelNorm",
    "Dropout",
    "EquivariantNFN",
    "Fold",
    "FourierFeatures",
    "IOEncoding",
    "InvariantNFN",
    "NFLinear",
    "NFNOptions",
    "Pool",
    "Probe",
    "ProbeEncoding",
    "ProbeNet",
    "Residual",
    "Standardize",
]
