"""What all zoo builders share: options, shards in turn, networks in groups, the store."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from tyro.conf import arg

from nfn_graph import WeightGraph
from nfn_graph.converters import from_module
from nfn_graph.converters.conversion.jobs import Engine, JobPart, counting, run_jobs
from nfn_graph.converters.store.architecture import Network
from nfn_graph.converters.store.description import is_store, none_publishing, read_description
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.data import Layout, gather_tensors
from nfn_graph.messages import UserError
from nfn_graph.spec import Key
from nfn_graph.tasks.option_checks import (
    Integers,
    Interval,
    Share,
    Shares,
    check_at_least,
    check_interval,
    check_networks,
    check_share,
    check_split,
    choices,
    flag,
)
from nfn_graph.tasks.zoo.optimisers import Optimiser, Parameters, stack

Split = Literal["train", "validation", "test"]
Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "float64"]
Row = dict[str, Any]
OnSteps = Callable[[int], None]
# The number of entries of the largest activation in one training step, so that it fits the cache.
_MOST_ENTRIES = 2**20
# Options that say how and where to build a zoo, not what is in it.
_NEUTRAL = ("out", "shard", "engine", "device", "together")


@dataclass(frozen=True)
class BuildOptions:
    """Options of every zoo.

    Attributes:
        out: The output folder. Finished parts are kept, so a build that was interrupted resumes
            when the command is run again.
        seed: The random seed of the whole zoo; the same seed gives the same networks.
        shard_size: The number of networks per file. It does not change the networks.
        shard: The part of the zoo to build, such as 2/4 on the second of four machines.
        engine: Where to build: in this process, in one process per core, or on a Ray cluster whose
            machines share the output folder.
        device: The device to train on.
        dtype: The floating-point type of training and of the files.
        together: The number of networks that are trained in one computation; 0 chooses it by
            their size.
        validation_share: The share of networks (for INRs, of training images) in the validation
            split.
    """

    out: Path
    seed: int = 0
    shard_size: int = 500
    shard: Annotated[str, arg(metavar="I/N")] = "1/1"
    engine: Engine = "local"
    device: Device = "cpu"
    dtype: Dtype = "float32"
    together: int = 0
    validation_share: Share = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        check_at_least("shard_size", self.shard_size, 1)
        check_at_least("together", self.together, 0)
        check_share("validation_share", self.validation_share)
        self.part()

    def part(self) -> JobPart:
        """Which part of the shards to build, from 0, and of how many."""
        return JobPart.parse(self.shard)


@dataclass(frozen=True)
class ImageZooOptions(BuildOptions):
    """Options of zoos of networks that classify images.

    Attributes:
        data: The images: digits (they come with scikit-learn), an .npz file, or a folder with the
            idx files of MNIST, with CIFAR batches, or with pictures in a subfolder per class.
        grey: Whether to replace the colours of the images by their mean.
        networks: The number of networks to train.
        batch_size: The number of images per training step.
        test_share: The share of networks in the test split.
    """

    data: str = "digits"
    grey: bool = False
    networks: int = 500
    batch_size: int = 64
    test_share: Share = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_networks("networks", self.networks)
        check_at_least("batch_size", self.batch_size, 1)
        check_split(self.validation_share, self.test_share)


@dataclass(frozen=True)
class SampledZooOptions(ImageZooOptions):
    """Options of zoos whose networks are trained with random hyperparameters.

    Attributes:
        init_scale: The range of a factor of the initial weights, sampled log-uniformly.
        optimisers: Optimisers; one is sampled for every network.
        learning_rate: The range of learning rates, sampled log-uniformly; ten times as large for
            sgd.
        l2: The range of the penalty on the sum of squared weights, sampled log-uniformly; 0 0 is
            no penalty.
        train_fractions: Shares of the training images that a network sees; one is sampled for
            every network.
        epochs: The range of the number of epochs, sampled uniformly.
    """

    init_scale: Interval = (0.3, 3.0)
    optimisers: Annotated[tuple[Optimiser, ...], arg(metavar=choices(Optimiser))] = (
        "sgd",
        "adam",
        "rmsprop",
    )
    learning_rate: Interval = (5e-4, 5e-2)
    l2: Interval = (1e-8, 1e-2)
    train_fractions: Shares = (0.1, 0.25, 0.5, 1.0)
    epochs: Integers = (4, 40)

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        self.check_choices("optimisers", "train_fractions")
        for name in ("init_scale", "learning_rate", "l2", "epochs"):
            # No penalty at all is a range, too.
            if (name, self.l2) != ("l2", (0.0, 0.0)):
                check_interval(name, getattr(self, name), above=0)
        for value in self.train_fractions:
            check_share("train_fractions", value)

    def check_choices(self, *names: str) -> None:
        """Raises for options without a value to choose from."""
        for name in names:
            if not getattr(self, name):
                raise UserError(f"Expected at least one value of {flag(name)} (got none)")


def split_of(draw: float, validation_share: float, test_share: float) -> Split:
    """The split that a random number within [0, 1) falls into."""
    if draw < test_share:
        return "test"
    return "validation" if draw < test_share + validation_share else "train"


class Numbered(Protocol):
    """A network of a zoo, before it is trained."""

    @property
    def network(self) -> int:
        """Its number in the zoo."""


Options = TypeVar("Options", bound=BuildOptions)
Item = TypeVar("Item", bound=Numbered)
Source = TypeVar("Source")


@dataclass(frozen=True)
class Built(Generic[Item]):
    """A network that was trained, or a checkpoint of it.

    Attributes:
        item: The network.
        row: Its row in the table.
        parameters: Its parameters, by key.
        masks: The masks of a winning ticket, by key; parameters without a mask are kept.
    """

    item: Item
    row: Row
    parameters: Parameters
    masks: Parameters | None = None


_BUILDERS: dict[type[BuildOptions], type[ZooBuilder[Any, Any, Any]]] = {}


def build_zoo(options: BuildOptions, *, source: Any = None, progress: bool = False) -> Path:
    """Trains the networks of a zoo, or what is missing of it.

    Args:
        options: The options of the zoo; their type determines the kind of zoo.
        source: The images or point clouds, if they are not to be read from `options.data`.
        progress: Whether to show a progress bar.

    Returns:
        The zoo's folder, for `open_zoo_folder`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = CnnZooOptions(Path(folder) / "zoo", networks=3, epochs=(1, 1))
        ...     len(open_zoo_folder(build_zoo(options)))
        3
    """
    if type(options) not in _BUILDERS:
        names = ", ".join(kind.__name__ for kind in _BUILDERS)
        raise TypeError(f"Expected options of a zoo: {names} (got {type(options).__name__})")
    return _BUILDERS[type(options)](options, source).build(progress=progress)


class ZooBuilder(ABC, Generic[Options, Source, Item]):
    """Builds a zoo of one kind, or what is missing of it.

    Subclasses say what is particular to their kind: which networks there are, how those of one
    kind are trained together, and what module each of them is.

    Args:
        options: The options of the zoo.
        source: The data; by default they are read from `options.data`.
    """

    kind: ClassVar[str]
    OPTIONS: ClassVar[type[BuildOptions]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "OPTIONS" in vars(cls):
            _BUILDERS[cls.OPTIONS] = cls

    def __init__(self, options: Options, source: Source | None = None) -> None:
        options.check()
        self.options = options
        self.device, self.dtype = device_of(options), dtype_of(options)
        self.source: Source = self.open_source() if source is None else source
        self._layouts: dict[Hashable, Layout] = {}

    @abstractmethod
    def open_source(self) -> Source:
        """The data that the options name."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts that readers of the zoo need beyond the options: data, checksums, conventions."""

    @abstractmethod
    def list_networks(self) -> Sequence[Item]:
        """All networks of the zoo, in the order of their numbers."""

    @abstractmethod
    def steps(self, item: Item) -> int:
        """The number of training steps of a network."""

    @abstractmethod
    def alike(self, item: Item) -> Hashable:
        """What networks must have in common to be trained together and to share a layout."""

    @abstractmethod
    def name(self, item: Item) -> str:
        """The name of a network's architecture, for the table."""

    @abstractmethod
    def largest_activation(self, item: Item) -> int:
        """The number of entries of a network's largest activation in a training step."""

    @abstractmethod
    def module(self, item: Item) -> tuple[nn.Module, tuple[int, ...]]:
        """A network as an ordinary module, and the shape of one of its inputs.

        Only its code and the shapes of its parameters count; it is made on the meta device.
        """

    @abstractmethod
    def train(self, group: list[Item], on_steps: OnSteps) -> Iterable[Built[Item]]:
        """Trains networks that are alike, each as if it were alone.

        Args:
            group: The networks, ordered by their numbers of steps.
            on_steps: Called with the number of steps made, summed over networks.
        """

    def transform(self, graph: WeightGraph) -> WeightGraph:
        """What is done to graphs before they are written; it must treat all channels alike."""
        return graph

    def build(self, *, progress: bool = False) -> Path:
        """Trains the networks of every missing shard of this machine's part and publishes it."""
        options, items = self.options, self.list_networks()
        writer = ZooWriter(Path(options.out), self.kind, dataclasses.asdict(options), self.facts())
        part, parts = options.part()
        size = options.shard_size
        count = math.ceil(len(items) / size)
        shards = [s for s in range(count) if s % parts == part]
        if not shards:
            raise UserError(
                f"Expected --shard to name at most {count} parts, as many as the zoo has shards "
                f"(got '{options.shard}'). Choose a smaller --shard-size."
            )
        missing = [s for s in shards if not writer.is_done(s)]
        work = {s: items[s * size : (s + 1) * size] for s in missing}
        steps = {s: sum(map(self.steps, chosen)) for s, chosen in work.items()}
        with counting(f"{options.out}", sum(steps.values()), shown=progress) as on_steps:
            if options.engine == "local":
                for shard in missing:
                    built = self._trained(work[shard], on_steps)
                    writer.publish(shard, self._written(writer, built))
                return writer.folder
            # As many parts as shards: a worker builds exactly one.
            jobs = {f"{shard + 1}/{count}": shard for shard in missing}
            local = dataclasses.replace(options, engine="local")
            alone = partial(_build_part, type(self), local, self.source)
            gpus = int(options.device == "cuda")
            for job, _ in run_jobs(alone, list(jobs), options.engine, gpus=gpus):
                on_steps(steps[jobs[job]])
        return writer.folder

    def _trained(self, items: Sequence[Item], on_steps: OnSteps) -> list[Built[Item]]:
        """Trains networks in groups; returns them in the order of their numbers."""
        built = [b for group in self._groups(items) for b in self.train(group, on_steps)]
        return sorted(built, key=lambda b: b.item.network)

    def _groups(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Networks that are trained together. Those that take about as long finish together."""
        for found in _by(self.alike, sorted(items, key=self.steps)).values():
            together = self.options.together
            if not together:
                # On a GPU, launches cost more than memory.
                most = _MOST_ENTRIES * (1 if self.options.device == "cpu" else 64)
                together = max(1, min(1024, most // self.largest_activation(found[0])))
            pieces = math.ceil(len(found) / together)
            size = math.ceil(len(found) / pieces)
            yield from (found[i : i + size] for i in range(0, len(found), size))

    def _written(
        self, writer: ZooWriter, built: Sequence[Built[Item]]
    ) -> list[tuple[Row, Network]]:
        """Networks as they are written; those that are alike are put into place together."""
        found: dict[int, Network] = {}
        for places in _by(lambda i: self.alike(built[i].item), range(len(built))).values():
            networks = self._placed(writer, [built[i] for i in places])
            found.update(zip(places, networks, strict=True))
        return [({**b.row, "group": self.name(b.item)}, found[i]) for i, b in enumerate(built)]

    def _placed(self, writer: ZooWriter, built: Sequence[Built[Item]]) -> list[Network]:
        """Networks of one layout, whose tensors are all put into their places at once."""
        layout, count = self._layout(built[0].item), len(built)
        channels = [stack([b.parameters for b in built])]
        if built[0].masks is not None:
            ones = {key: torch.ones_like(x) for key, x in channels[0].items()}
            masks = stack([b.masks or {} for b in built])
            channels.append({key: masks.get(key, x).to(x.dtype) for key, x in ones.items()})
            dtypes = {key: x.dtype for key, x in ones.items()}
            layout = layout.noting(channels={"mask": dtypes})
        place = torch.vmap(partial(gather_tensors, layout), out_dims=-1)
        # Every channel of every network is a channel of one graph for a moment.
        stores = [place(tensors) for tensors in channels]
        joined: dict[Key, Tensor] = {
            key: torch.cat([placed[key] for placed in stores], 2).flatten(2) for key in stores[0]
        }
        like = next(iter(joined.values()))
        for key in layout.spec.neuron:
            if key not in joined:
                joined[key] = like.new_empty(layout.num_rows(key), 0, like.shape[-1])
        whole = self.transform(WeightGraph().rebuilt(layout, joined))
        features = dict(whole.features().tensors())
        each = {
            key: x.unflatten(-1, (len(channels), count)).movedim(-1, 0).contiguous()
            for key, x in features.items()
        }
        first = WeightGraph().rebuilt(whole.layout, {key: x[0] for key, x in each.items()})
        architecture = writer.describe(first).architecture
        keys = {entries.place: key for key, entries in architecture.features.items()}
        ordered = [each[keys[entries.place]] for entries in architecture.entries]
        return [Network(architecture, [x[i] for x in ordered], None) for i in range(count)]

    def empty_graph(self, item: Item) -> WeightGraph:
        """The graph of a network without values, from its code."""
        with torch.device("meta"):
            module, shape = self.module(item)
            example = torch.empty(1, *shape, dtype=self.dtype)
        return from_module(module.to(self.dtype), example)

    def _layout(self, item: Item) -> Layout:
        """The layout of a network, and of all that are alike."""
        key = self.alike(item)
        if key not in self._layouts:
            self._layouts[key] = self.empty_graph(item).layout
        return self._layouts[key]


def _build_part(
    kind: type[ZooBuilder[Options, Source, Item]], options: Options, source: Source, shard: str
) -> Path:
    """Builds one shard of a zoo, on whatever machine it is called."""
    return kind(dataclasses.replace(options, shard=shard), source).build()


def _by(key: Callable[[Any], Hashable], values: Iterable[Any]) -> dict[Hashable, list[Any]]:
    """Values in groups of one key each, in the order of their first values."""
    groups: dict[Hashable, list[Any]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def device_of(options: BuildOptions) -> torch.device:
    """Returns the device, or raises if it is not available."""
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there[options.device]:
        raise UserError(f"Expected --device to be available (got '{options.device}'). Use cpu.")
    return torch.device(options.device)


def dtype_of(options: BuildOptions) -> torch.dtype:
    """The precision of training."""
    return torch.float64 if options.dtype == "float64" else torch.float32


class ZooWriter:
    """Writes the shards of a zoo by their numbers, or the missing ones of a zoo that was begun.

    Args:
        folder: The zoo's folder, made if need be.
        kind: `cnn`, `inr`, `tickets` or `transformer`.
        options: What was asked for, as plain values.
        facts: What else a reader must know: data, checksums, conventions.
    """

    def __init__(
        self, folder: Path, kind: str, options: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        chosen = {k: _plain(v) for k, v in options.items() if k not in _NEUTRAL}
        description = {"kind": kind, "options": chosen, **_plain(dict(facts))}
        if is_store(folder):
            _check_same(folder, description)
        self._writer = StoreWriter(folder, description)
        self.describe = self._writer.describe

    def is_done(self, shard: int) -> bool:
        """Whether a shard was published."""
        return self._writer.is_done(_name(shard))

    def publish(
        self,
        shard: int,
        networks: Sequence[tuple[Row, WeightGraph]] | Sequence[tuple[Row, Network]],
    ) -> None:
        """Writes a shard: every network with its row of the table.

        A shard that another process has published in the meantime stays as it is.
        """
        with none_publishing(self.folder):
            if not self.is_done(shard):
                self._writer.publish(_name(shard), networks)


def _name(shard: int) -> str:
    return f"{shard:05d}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _check_same(folder: Path, description: Mapping[str, Any]) -> None:
    """Raises if a zoo was begun differently; where its data lie does not matter."""
    found = read_description(folder)
    if "options" not in found:
        raise UserError(
            f"Expected a zoo in '{folder}' (got a store of converted files). Choose another folder."
        )
    found = {k: v for k, v in found.items() if k not in ("format", "version")}
    for before, after in ((found, description), (found["options"], description["options"])):
        for name in {**before, **after}:
            if name not in ("options", "data") and before.get(name) != after.get(name):
                raise UserError(
                    f"Expected what the zoo in '{folder}' was begun with: "
                    f"{name.replace('_', '-')} = {before.get(name)} (got {after.get(name)}). "
                    f"Choose another folder, or delete that one."
                )
