"""What a model is made of, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


# Which of the settings that can be chosen a model reads.
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


@dataclass(frozen=True)
class ModelSettings:
    """The sizes and parts of a model; each model takes those that it has.

    Attributes:
        channels: Of the NF-Layers, or of the layers of a PyG model.
        head: Hidden sizes of the MLP behind them; of `statnn` and `mlp`, of the whole model.
        head_dropout: In that MLP.
        io_encoding: Whether position encodings tell input and output neurons apart.
        fourier_features: Number of Fourier features of the weights; 0 for none.
        fourier_scale: Their scale.
        norm: Whether channels are normalised between NF-Layers.
        residual: Whether NF-Layers that keep the number of channels add their input.
        activation: Between NF-Layers, by its name in `torch.nn`.
        probes: How many inputs the networks are run on, by models that do so; 0 for an editor
            that reads weights alone.
        probe_channels: The channels of an editor that say what every neuron does there.
        statistics: Whether models that run the networks also read the entropies of their
            outputs and the statistics of their weights, as for the accuracy of classifiers.
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
