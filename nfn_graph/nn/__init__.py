"""Layers and models on weight-space features.

Each is an `nn.Module` that takes :class:`~nfn_graph.WeightFeatures` and commutes with the group:
one file per layer, the NF-Layer in `linear` and its equations in `message_passing`, the model
of all of them in `nfn`. All names are also those of :mod:`nfn_graph` itself.
"""

from nfn_graph.nn.elementwise import Activation, Dropout, Residual
from nfn_graph.nn.encoding import FourierFeatures, IOEncoding
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.models import NFN
from nfn_graph.nn.norm import ChannelNorm, Standardize
from nfn_graph.nn.pool import Pool
from nfn_graph.nn.probe import Probe, ProbeNet

__all__ = [
    "NFN",
    "Activation",
    "ChannelNorm",
    "Dropout",
    "FourierFeatures",
    "IOEncoding",
    "NFLinear",
    "Pool",
    "Probe",
    "ProbeNet",
    "Residual",
    "Standardize",
]
