"""The options of every training task; the command line is made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from nfn_graph.tasks.models import ModelName, ModelSettings

Options = TypeVar("Options", bound="TrainOptions")
Schedule = Literal["constant", "cosine"]
# Options that say how to run, not what is computed.
NEUTRAL = ("out", "accelerator", "devices", "nodes", "workers", "zoo")


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Attributes:
        model: The parts of the model.
        epochs: How often it sees every network.
        batch_size: Networks per step.
        learning_rate: Of Adam.
        schedule: See :class:`TrainOptions`.
    """

    model: ModelSettings
    epochs: int
    batch_size: int
    learning_rate: float
    schedule: Schedule = "constant"


@dataclass(frozen=True)
class TrainOptions:
    """Options of every task. Values that are not given are those of the preset.

    Attributes:
        zoo: The folder of the zoo to train on.
        out: The folder of the run; a run that was stopped goes on where it was.
        model: The model.
        seed: Decides the initial weights, the order of the networks and all else that is drawn.
        where: Which networks of the zoo to use, such as width=16 or width=8,16.
        train_networks: How many networks to train on, the first ones; 0 for all.
        channels: Of the NF-Layers.
        head: Hidden sizes of the MLP behind them; of statnn and mlp, of the whole model.
        head_dropout: In that MLP.
        fourier_features: Number of Fourier features of the weights; 0 for none.
        epochs: How often the model sees every network.
        batch_size: Networks per step, over all devices.
        max_edges: The most weights of a batch on one device, instead of a number of networks: for
            networks of very different sizes. 0 for batches of --batch-size networks.
        learning_rate: Of Adam.
        schedule: The learning rate over a training: constant, or cosine, which rises over the
            first tenth of all steps and then falls to almost nothing.
        weight_decay: Of AdamW; 0 for Adam.
        patience: Epochs without a better validation metric after which training ends; 0 for never.
        minutes: The most time that training may take; 0 for no limit.
        noise: Augmentation: noise on the weights, as a share of their standard deviation.
        drop: Augmentation: the probability of a weight to be set to zero.
        compile: Whether to compile the model with torch.compile.
        precision: Of the computation, as Lightning calls them.
        accelerator: Where to train.
        devices: How many devices of a machine, or processes on the CPU.
        nodes: How many machines; the command is started on each, as Lightning or the scheduler
            says (NODE_RANK, MASTER_ADDR, MASTER_PORT).
        workers: Processes that load data; 0 to load in the main process.
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {}

    zoo: Path
    out: Path
    model: ModelName = "nfn-hnp"
    preset: str = "paper"
    seed: int = 0
    where: tuple[str, ...] = ()
    train_networks: int = 0
    channels: tuple[int, ...] | None = None
    head: tuple[int, ...] | None = None
    head_dropout: float | None = None
    fourier_features: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    max_edges: int = 0
    learning_rate: float | None = None
    schedule: Schedule | None = None
    weight_decay: float = 0.0
    patience: int = 0
    minutes: float = 0.0
    noise: float = 0.0
    drop: float = 0.0
    compile: bool = False
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int = 1
    nodes: int = 1
    workers: int = 0

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        if self.preset not in self.PRESETS:
            raise ValueError(f"Expected --preset: {', '.join(self.PRESETS)} (got '{self.preset}')")
        for name in ("epochs", "batch_size", "devices", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Expected --{name.replace('_', '-')} of at least 1 (got {value})")
        at_least_0 = ("train_networks", "max_edges", "patience", "minutes", "noise", "workers")
        for name in (*at_least_0, "weight_decay", "fourier_features"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"Expected --{name.replace('_', '-')} of at least 0 (got {value})")
        processes = self.devices * self.nodes
        if not self.max_edges and self.batch_size is not None and self.batch_size < processes:
            raise ValueError(
                f"Expected --batch-size of at least one network for each of {processes} devices "
                f"(got {self.batch_size})"
            )
        for name in ("channels", "head"):
            values = getattr(self, name)
            if values is not None and any(value < 1 for value in values):
                raise ValueError(f"Expected --{name} of at least 1 each (got {values})")
        if self.channels == ():
            raise ValueError("Expected --channels of at least one layer (got none)")
        for name in ("drop", "head_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(
                    f"Expected --{name.replace('_', '-')} within 0 and 1 (got {value})"
                )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"Expected --learning-rate above 0 (got {self.learning_rate})")

    def resolved(self: Options) -> Options:
        """The options with the values of the preset where none was given."""
        preset = self.PRESETS[self.preset]
        values = {**dataclasses.asdict(preset), **dataclasses.asdict(preset.model)}
        missing = {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is None and field.name in values
        }
        return dataclasses.replace(self, **missing)

    def model_settings(self) -> ModelSettings:
        """The parts of the model, after :meth:`resolved`."""
        settings = self.PRESETS[self.preset].model
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(settings)
            if hasattr(self, field.name)
        }
        return dataclasses.replace(settings, **given)


def to_plain(options: TrainOptions) -> dict[str, Any]:
    """The options as plain values for a JSON file."""
    found = dataclasses.asdict(options)
    return {k: str(v) if isinstance(v, Path) else v for k, v in found.items()}


def from_plain(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """The options that :func:`to_plain` wrote down."""
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"Expected options of {kind.__name__} (got {unknown})")
    ready: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for name in ("zoo", "out"):
        ready[name] = Path(ready[name])
    return kind(**ready)
