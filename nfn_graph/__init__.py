"""Neural functionals as message passing on typed graphs of neurons.

`spec` says which types of weights and neurons networks have and where their entries meet, `data`
holds networks as graphs, `features` carries their entries from layer to layer, and `nn` maps them.
`docs/architecture.md` walks through the rooms and names the place of every equation of `Permutation
Equivariant Neural Functionals <https://arxiv.org/abs/2302.14040>`_.
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

# The modules that give the public names, each after those that it imports. They are imported at
# first use, so that the command line can answer before torch is loaded.
_SOURCES = ("messages", "memory", "spec", "features", "data", "ops", "nn")


def __getattr__(name: str) -> typing.Any:
    if name in (*_SOURCES, "run", "symmetry"):
        return importlib.import_module(f"{__name__}.{name}")
    for source in _SOURCES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{source}")
        if hasattr(module, name):
            globals()[name] = found = getattr(module, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
