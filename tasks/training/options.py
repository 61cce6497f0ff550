"""The options of every training task; the command line is made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from tyro.conf import arg

from nfn_graph.converters.commands import Where
from nfn_graph.converters.store.table import check_shares
from nfn_graph.messages import UserError
from nfn_graph.tasks.models import READ_BY, ModelName, ModelSettings
from nfn_graph.tasks.option_checks import (
    Share,
    check_above,
    check_at_least,
    check_part,
    check_several,
    flag,
)

Options = TypeVar("Options", bound="TrainOptions")
Schedule = Literal["constant", "cosine"]
# Options that say how to run, not what is computed.
NEUTRAL = ("out", "accelerator", "devices", "nodes", "workers", "in_memory", "zoo")
_PRESET = "(default: that of the preset)"
_INTEGER = arg(metavar="INT", help_behavior_hint=_PRESET)
_INTEGERS = arg(metavar="INT ...", help_behavior_hint=_PRESET)
_NUMBER = arg(metavar="FLOAT", help_behavior_hint=_PRESET)
_SHARE = arg(metavar="0..1", help_behavior_hint=_PRESET)
_SHARES = arg(metavar="TRAIN VALIDATION TEST", help_behavior_hint="(default: the zoo's own)")
_CHOICE = arg(metavar="{constant,cosine}", help_behavior_hint=_PRESET)


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Attributes:
        model: The parts of the model.
        epochs: The number of epochs.
        batch_size: The number of networks per training step.
        learning_rate: The learning rate of Adam.
        schedule: See :class:`TrainOptions`.

    Example:
        >>> from nfn_graph.tasks.models import ModelSettings
        >>> from nfn_graph.tasks.training import Preset
        >>> model = ModelSettings((16, 16), (32,))
        >>> Preset(model, epochs=10, batch_size=32, learning_rate=1e-3).schedule
        'constant'
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
        out: The folder of the run. A run that was interrupted resumes when the command is run
            again.
        model: The model: an NFN with one of three symmetries, a baseline that reads weights, or a
            model that runs the networks on learned inputs (probe) or on a fixed grid (probe-grid).
        seed: The random seed of the initial weights, the order of the networks and everything
            else that is random.
        where: The networks of the zoo to use, by the values of columns: width=8 or width=8,16.
        split: The shares of training, validation and test networks in a random split. By default
            the zoo's column 'split' is used; without one, the shares are 0.8 0.1 0.1.
        split_seed: The seed of the random split.
        train_networks: The number of training networks to use, from the first on; 0 for all.
        overfit: The number of networks for a check that the model can learn at all: it is trained
            and evaluated on the same few networks, and the command says whether it has memorised
            them; 0 for ordinary training.
        channels: The channels of each NF-Layer. gine, pna and transformer have the same number of
            layers, all with the first number of channels.
        head: The hidden sizes of the MLP after these layers; for statnn and mlp, of the whole
            model.
        head_dropout: The dropout probability in that MLP.
        fourier_features: The number of Fourier features of the weights; 0 for none.
        probes: The number of inputs that probe and probe-grid run the networks on. Editors get the
            activations of every neuron at these inputs; 0 for editors that only read weights.
        epochs: The number of epochs.
        batch_size: The number of networks per training step, over all devices.
        max_edges: The largest number of weights in a batch on one device, for networks of very
            different sizes; 0 for batches of --batch-size networks.
        learning_rate: The learning rate of Adam.
        schedule: The schedule of the learning rate: constant, or cosine, which rises over the first
            tenth of all training steps and then falls to almost zero.
        weight_decay: The weight decay of AdamW; 0 for Adam.
        patience: The number of epochs without a better validation metric after which training
            stops; 0 for no early stopping.
        minutes: The time limit of training in minutes; 0 for no limit.
        noise: Augmentation: noise on the weights, as a share of their standard deviation.
        drop: Augmentation: the probability that a weight is set to zero.
        compile: Whether to compile the model with torch.compile.
        precision: The floating-point precision, as Lightning names it.
        accelerator: The device to train on; auto uses a GPU if there is one.
        devices: The number of devices per machine, or of processes on the CPU.
        nodes: The number of machines. Start the command on each, with the variables that Lightning
            or the scheduler expects (NODE_RANK, MASTER_ADDR, MASTER_PORT).
        workers: The number of processes that load data; 0 to load in the main process.
        in_memory: Whether to read and prepare all networks before training and keep them in
            memory, or to read every batch from the store; auto keeps small zoos in memory.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.regress import RegressOptions
        >>> options = RegressOptions(Path("zoo"), Path("run"), model="statnn", preset="tiny")
        >>> options.resolved().epochs  # from the preset
        2
    """

    PRESETS: ClassVar[Mapping[str, Preset]] = {}

    zoo: Path
    out: Path
    model: ModelName = "nfn-np"
    preset: str = "small"
    seed: int = 0
    where: Where = ()
    split: Annotated[tuple[float, float, float] | None, _SHARES] = None
    split_seed: int = 0
    train_networks: int = 0
    overfit: int = 0
    channels: Annotated[tuple[int, ...] | None, _INTEGERS] = None
    head: Annotated[tuple[int, ...] | None, _INTEGERS] = None
    head_dropout: Annotated[float | None, _SHARE] = None
    fourier_features: Annotated[int | None, _INTEGER] = None
    probes: Annotated[int | None, _INTEGER] = None
    epochs: Annotated[int | None, _INTEGER] = None
    batch_size: Annotated[int | None, _INTEGER] = None
    max_edges: int = 0
    learning_rate: Annotated[float | None, _NUMBER] = None
    schedule: Annotated[Schedule | None, _CHOICE] = None
    weight_decay: float = 0.0
    patience: int = 0
    minutes: float = 0.0
    noise: float = 0.0
    drop: Share = 0.0
    compile: bool = False
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int = 1
    nodes: int = 1
    workers: int = 0
    in_memory: Literal["auto", "yes", "no"] = "auto"

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        if self.preset not in self.PRESETS:
            raise UserError(f"Expected --preset: {', '.join(self.PRESETS)} (got '{self.preset}')")
        for name in ("epochs", "batch_size", "devices", "nodes"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in (
            *("split_seed", "train_networks", "overfit", "max_edges", "patience", "minutes"),
            *("noise", "workers", "weight_decay", "fourier_features", "probes"),
        ):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 0)
        for name in ("channels", "head"):
            # A head may have no hidden layer.
            if getattr(self, name) or (name == "channels" and self.channels is not None):
                check_several(name, getattr(self, name), 1)
        for name in ("drop", "head_dropout"):
            if getattr(self, name) is not None:
                check_part(name, getattr(self, name))
        if self.learning_rate is not None:
            check_above("learning_rate", self.learning_rate, 0)
        if self.split is not None:
            check_shares(self.split)
        self._check_overfit()
        self._check_batches()
        self._check_parts()

    def _check_overfit(self) -> None:
        """Raises for options that keep a model from memorising networks with --overfit."""
        for name in ("train_networks", "noise", "drop", "mixup", "rotate", "shift"):
            if self.overfit and getattr(self, name, 0):
                raise UserError(
                    f"Expected no {flag(name)} with --overfit, which trains on a few networks as "
                    f"they are (got {getattr(self, name)})"
                )

    def _check_batches(self) -> None:
        processes = self.devices * self.nodes
        if self.max_edges:
            if self._is_chosen("batch_size"):
                raise UserError(
                    f"Expected --batch-size or --max-edges, not both (got {self.batch_size} and "
                    f"{self.max_edges})"
                )
        elif self.batch_size is not None and self.batch_size < processes:
            raise UserError(
                f"Expected --batch-size of at least one network for each of {processes} devices "
                f"(got {self.batch_size})"
            )

    def _check_parts(self) -> None:
        """Raises for options that the model does not use."""
        read = self.parts()
        for name in ("channels", "head", "head_dropout", "fourier_features", "probes"):
            if name not in read and self._is_chosen(name):
                raise UserError(
                    f"Expected no {flag(name)} with --model {self.model}, which does not use it "
                    f"(got {getattr(self, name)})"
                )

    def parts(self) -> tuple[str, ...]:
        """The settings that the model of this task reads, among those that are options."""
        return READ_BY.get(self.model, ())

    def _is_chosen(self, name: str) -> bool:
        """Whether an option was given another value than the preset's."""
        preset = self.PRESETS[self.preset]
        holder = preset if hasattr(preset, name) else preset.model
        return getattr(self, name) not in (None, getattr(holder, name))

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
        raise UserError(f"Expected options of {kind.__name__} (got {unknown})")
    ready: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for name in ("zoo", "out"):
        ready[name] = Path(ready[name])
    return kind(**ready)
