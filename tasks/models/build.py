"""Building a model by its name, and the learning rates of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from nfn_graph import (
    NFN,
    NetworkSpec,
    NFLinear,
    Probe,
    ProbeEncoding,
    ProbeNet,
    Standardize,
    WeightGraph,
)
from nfn_graph.messages import UserError
from nfn_graph.tasks.models.baselines import (
    FlatMLP,
    PlainGraphModel,
    ProbeStatNN,
    Statistics,
    StatNN,
)

ModelName = Literal[
    "nfn-np",
    "nfn-hnp",
    "nfn-pointwise",
    "statnn",
    "mlp",
    "mlp-aug",
    "gine",
    "pna",
    "transformer",
    "probe",
    "probe-grid",
]


# The settings that each model uses.
_NFN = ("channels", "head", "head_dropout", "fourier_features")
_PYG = ("channels", "head", "head_dropout")
_MLP = ("head", "head_dropout")
_PROBE = (*_MLP, "probes")
READ_BY: Mapping[ModelName, tuple[str, ...]] = {
    "nfn-np": _NFN,
    "nfn-hnp": _NFN,
    "nfn-pointwise": _NFN,
    "statnn": _MLP,
    "mlp": _MLP,
    "mlp-aug": _MLP,
    "gine": _PYG,
    "pna": _PYG,
    "transformer": _PYG,
    "probe": _PROBE,
    "probe-grid": _PROBE,
}
# The most neurons of each type that any network has.
Sizes = Mapping[str, int]
# The factor of the learning rate of probes, chosen on validation networks. Probes that start as
# random images must change a lot; random points may stay close to where they start.
_IMAGES, _COORDINATES = 10.0, 0.3


@dataclass(frozen=True)
class ModelSettings:
    """The sizes and parts of a model. Each model uses the parts that it has.

    Attributes:
        channels: The channels of the NF-Layers, or of the layers of a PyG model.
        head: The hidden sizes of the MLP after them; for `statnn` and `mlp`, of the whole model.
        head_dropout: The dropout probability in that MLP.
        io_encoding: Whether position encodings tell input and output neurons apart.
        fourier_features: The number of Fourier features of the weights; 0 for none.
        fourier_scale: The scale of the Fourier features.
        norm: Whether channels are normalised between NF-Layers.
        residual: Whether NF-Layers that keep the number of channels add their input.
        activation: The activation function between NF-Layers, by its name in `torch.nn`.
        probes: The number of inputs that the networks are run on; 0 for an editor that only reads
            weights.
        probe_channels: The channels in which an editor reads the activations at these inputs.
        statistics: Whether models that run the networks also read the entropies of their
            outputs and the statistics of their weights, as for the accuracy of classifiers.

    Example:
        >>> from nfn_graph.tasks.models import ModelSettings
        >>> ModelSettings(channels=(16, 16), head=(64,), head_dropout=0.1).norm
        False
    """

    channels: tuple[int, ...]
    head: tuple[int, ...]
    head_dropout: float = 0.0
    io_encoding: bool = False
    fourier_features: int = 0
    fourier_scale: float = 1.0
    norm: bool = False
    residual: bool = False
    activation: str = "ReLU"
    probes: int = 256
    probe_channels: int = 16
    statistics: bool = False


def build_model(
    name: ModelName,
    settings: ModelSettings,
    spec: NetworkSpec,
    sizes: Sizes,
    out_features: int,
    input_shape: Sequence[int] | None = None,
) -> nn.Module:
    """Builds an untrained model.

    Args:
        name: The name of the model.
        settings: The sizes and parts of the model.
        spec: The types of all networks that it will see.
        sizes: The largest number of neurons of each type, which only the MLP depends on.
        out_features: The number of outputs per network.
        input_shape: The shape of an input of the networks, for models that run them; by default,
            one value for every input neuron.

    Example:
        >>> import torch
        >>> from nfn_graph import Batch, WeightGraph
        >>> from nfn_graph.tasks.models import ModelSettings, build_model, fit_inputs, sizes_of
        >>> shapes = [((w, 2), (1, w)) for w in (3, 5)]
        >>> graphs = [WeightGraph.from_tensors([*map(torch.randn, pair)]) for pair in shapes]
        >>> settings = ModelSettings(channels=(4,), head=(8,))
        >>> spec, sizes = graphs[0].spec, sizes_of(graphs)
        >>> model = build_model("nfn-np", settings, spec, sizes, out_features=2)
        >>> fit_inputs(model, [Batch.from_data_list(graphs)])
        >>> model(Batch.from_data_list(graphs)).shape
        torch.Size([2, 2])
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
        return NFN(
            spec,
            settings.channels,
            out_features=out_features,
            head=settings.head,
            head_dropout=settings.head_dropout,
            **nfn_options(name, settings),
        )
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
    """The options that the invariant and the equivariant NFN of a name share."""
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
    """The largest number of neurons of each type over all networks.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.tasks.models import sizes_of
        >>> shapes = [((w, 2), (1, w)) for w in (3, 5)]
        >>> graphs = [WeightGraph.from_tensors([*map(torch.randn, pair)]) for pair in shapes]
        >>> sizes_of(graphs)
        {'input': 2, 'hidden1': 5, 'output': 1}
    """
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

    Example:
        >>> import torch
        >>> from nfn_graph import NFN, WeightGraph
        >>> from nfn_graph.tasks.models import fit_inputs
        >>> graph = WeightGraph.from_tensors([torch.randn(3, 2), torch.randn(1, 3)])
        >>> model = NFN(graph.spec, channels=(4,), out_features=2, standardize=True)
        >>> fit_inputs(model, [graph])
    """
    for part in model.modules():
        if isinstance(part, (Standardize, Statistics, ProbeNet, ProbeEncoding)):
            part.fit(batches)


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def fast_probes(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The parameters of a model, with a learning rate of their own for its probes.

    Args:
        model: Any module; only the inputs of the probes in it are treated differently, and do
            not decay.
        lr: The learning rate of all other parameters.

    Returns:
        Groups with `params` and `lr`, for an optimiser. Every parameter is in one of them.
    """
    probes = [part for part in model.modules() if isinstance(part, Probe)]
    inputs = {id(probe.inputs) for probe in probes}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inputs]
    return [{"params": rest, "lr": lr}] + [
        {
            "params": [probe.inputs],
            "lr": lr * (_IMAGES if len(probe.input_shape) > 1 else _COORDINATES),
            "weight_decay": 0.0,
        }
        for probe in probes
    ]


def slow_aggregates(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The parameters of a model that returns weights, with a learning rate for each group.

    The maps of an :class:`NFLinear` from neurons and from the network read aggregates, and the
    mean of many weights is nearly a constant. Adam moves every entry of a map by about the
    learning rate, so the sum over all constants moves by the rate times the number of taps that
    are read: about thirty if kernels have nine, so each step shifts the level of all features. Here
    such a map learns at the rate divided by its number of taps. If the outputs
    depend on statistics of the networks, which the aggregates are, this only slows learning down.

    Args:
        model: Any module; only the NF-Layers in it are treated differently.
        lr: The learning rate of all other parameters.

    Returns:
        Groups with `params` and `lr`, for an optimiser. Every parameter is in one of them.
    """
    taps = {
        id(matrix): matrix.shape[1] // layer.in_channels
        for layer in model.modules()
        if isinstance(layer, NFLinear)
        for site, matrix in zip(layer.spec.sites, layer.site_maps(), strict=True)
        if matrix is not None and isinstance(site.key, str)
    }
    by_taps: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_taps.setdefault(max(1, taps.get(id(parameter), 1)), []).append(parameter)
    return [{"params": group, "lr": lr / count} for count, group in sorted(by_taps.items())]
