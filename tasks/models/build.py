"""Making a model by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from torch import nn

from nfn_graph import (
    NFN,
    NetworkSpec,
    Probe,
    ProbeEncoding,
    ProbeNet,
    Standardize,
    WeightGraph,
)
from nfn_graph.messages import UserError
from nfn_graph.tasks.models.flat import FlatMLP
from nfn_graph.tasks.models.pyg import PlainGraphModel
from nfn_graph.tasks.models.settings import ModelName, ModelSettings
from nfn_graph.tasks.models.statistics import ProbeStatNN, Statistics, StatNN

# The most neurons of each type that any network has.
Sizes = Mapping[str, int]


def build_model(
    name: ModelName,
    settings: ModelSettings,
    spec: NetworkSpec,
    sizes: Sizes,
    out_features: int,
    input_shape: Sequence[int] | None = None,
) -> nn.Module:
    """An untrained model.

    Args:
        name: Which one.
        settings: Its parts.
        spec: The types of all networks that it will see.
        sizes: The most neurons of each type; only the MLP is bound by it.
        out_features: Outputs per network.
        input_shape: The shape of an input of the networks, for models that run them; by default,
            one value for every input neuron.
    """
    if name in ("probe", "probe-grid"):
        is_grid = name == "probe-grid"
        probe = Probe(
            spec,
            settings.probes,
            input_shape=input_shape,
            start="grid" if is_grid else "uniform",
            learned=not is_grid,
        )
        kind = ProbeStatNN if settings.statistics else ProbeNet
        return kind(probe, out_features, settings.head, settings.head_dropout)
    if name in ("nfn-np", "nfn-hnp", "nfn-pointwise"):
        model = NFN(
            spec,
            settings.channels,
            out_features=out_features,
            head=settings.head,
            head_dropout=settings.head_dropout,
            **nfn_options(name, settings),
        )
        return model
    if name == "statnn":
        return StatNN(spec, out_features, settings.head, settings.head_dropout)
    if name in ("mlp", "mlp-aug"):
        return FlatMLP(spec, sizes, out_features, settings.head, settings.head_dropout)
    if name in ("gine", "pna", "transformer"):
        return PlainGraphModel(
            name, spec, out_features, settings.channels, settings.head, settings.head_dropout
        )
    raise UserError(
        f"Expected the name of a model: {', '.join(get_args(ModelName))} (got '{name}')"
    )


def nfn_options(name: str, settings: ModelSettings) -> dict[str, Any]:
    """What invariant and equivariant NFNs of a name have in common."""
    return {
        "symmetry": "hnp" if name == "nfn-hnp" else "np",
        "pointwise": name == "nfn-pointwise",
        "io_encoding": "sinusoidal" if settings.io_encoding else None,
        "fourier_features": settings.fourier_features,
        "fourier_scale": settings.fourier_scale,
        "standardize": True,
        "norm": settings.norm,
        "residual": settings.residual,
        "act": settings.activation,
    }


def sizes_of(graphs: Iterable[WeightGraph]) -> dict[str, int]:
    """The most neurons of each type over all networks."""
    most: dict[str, int] = {}
    for graph in graphs:
        for name in graph.spec.neuron:
            most[name] = max(most.get(name, 0), graph.layout.num_rows(name))
    return most


def fit_inputs(model: nn.Module, batches: Iterable[WeightGraph]) -> None:
    """Sets the statistics by which a model standardizes its input.

    Args:
        model: The model.
        batches: Batches of networks, which are read once for every part that needs them.
    """
    for part in model.modules():
        if isinstance(part, (Standardize, Statistics, ProbeNet, ProbeEncoding)):
            part.fit(batches)


def count_parameters(model: nn.Module) -> int:
    """The number of trained numbers."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
