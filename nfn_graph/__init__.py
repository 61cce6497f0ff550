"""Neural functionals as message passing on typed graphs of neurons.

The three levels of the design, weights, neurons and network, run through everything:
`spec` and `folded` say what lives where, `graph` and `batch` hold it, `features` carries it
from layer to layer, `nn` maps it.

Where the equations of `Permutation Equivariant Neural Functionals
<https://arxiv.org/abs/2302.14040>`_ are:

================================================  ==========================================
the action of the group, Eq. 1 in section 2.1     `symmetry.Permutation.apply`
the NF-Layer of NP, section 2.2, appendix B.1     `nn.message_passing`
that of HNP, the tables of appendix C.1           the same, on `NetworkSpec.fold("hnp")`
IO-encoding, section 2.2                          `IOEncoding`
the invariant layer P, section 2.3                `Pool`, `summary.network_summary`
P-tilde, appendix C.2                             the same, on `NetworkSpec.fold("hnp")`
parameter sharing by orbits, appendix B           `FoldedSpec.num_orbits`,
                                                  `testing.assert_complete`
the models of appendix D, NFN_PT among them       `NFN`, `NFN(pointwise=True)`
================================================  ==========================================
"""

import importlib
import typing
from importlib.metadata import version

if typing.TYPE_CHECKING:
    from nfn_graph import symmetry
    from nfn_graph.data import Batch, DataLoader, EdgeBatchSampler, WeightGraph
    from nfn_graph.features import WeightFeatures
    from nfn_graph.memory import keep_memory
    from nfn_graph.messages import UserError
    from nfn_graph.nn import (
        NFN,
        Activation,
        ChannelNorm,
        Dropout,
        EquivariantNFN,
        Fold,
        FourierFeatures,
        InvariantNFN,
        IOEncoding,
        NFLinear,
        NFNOptions,
        Pool,
        Probe,
        ProbeEncoding,
        ProbeNet,
        Residual,
        Standardize,
    )
    from nfn_graph.ops._backends import use_backend
    from nfn_graph.spec import FoldedSpec, NetworkSpec, NeuronType, WeightType

__version__ = version("nfn-graph")

__all__ = [
    "NFN",
    "Activation",
    "Batch",
    "ChannelNorm",
    "DataLoader",
    "Dropout",
    "EdgeBatchSampler",
    "EquivariantNFN",
    "Fold",
    "FoldedSpec",
    "FourierFeatures",
    "IOEncoding",
    "InvariantNFN",
    "NFLinear",
    "NFNOptions",
    "NetworkSpec",
    "NeuronType",
    "Pool",
    "Probe",
    "ProbeEncoding",
    "ProbeNet",
    "Residual",
    "Standardize",
    "UserError",
    "WeightFeatures",
    "WeightGraph",
    "WeightType",
    "keep_memory",
    "symmetry",
    "use_backend",
]

# The rooms, and whose the names are that are not layers. All are imported when they are first
# used, so that the command line answers before torch is there.
_ROOMS = ("data", "features", "memory", "nn", "ops", "run", "spec", "symmetry")
_NAMES = {
    "data": ("Batch", "DataLoader", "EdgeBatchSampler", "WeightGraph"),
    "features": ("WeightFeatures",),
    "memory": ("keep_memory",),
    "messages": ("UserError",),
    "ops": ("use_backend",),
    "spec": ("FoldedSpec", "NetworkSpec", "NeuronType", "WeightType"),
}


def __getattr__(name: str) -> typing.Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = next((room for room, names in _NAMES.items() if name in names), "nn")
    globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
