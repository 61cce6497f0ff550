"""What all zoo builders share: options, shards in turn, progress, networks in groups, the store."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.conversion.jobs import Engine, Part, counting, run_jobs
from nfn_graph.converters.state_dict import from_state_dict
from nfn_graph.converters.store.description import is_store, none_publishing, read_description
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import Share, check_at_least, check_share
from nfn_graph.tasks.zoo.steps import computation_of

Split = Literal["train", "validation", "test"]
Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "float64"]
Item = TypeVar("Item")
Row = dict[str, Any]
OnSteps = Callable[[int], None]
BuiltNetwork = tuple[Row, str, Mapping[str, Tensor]]
# Numbers that the largest activation of one training step should hold: they stay in the cache.
_MOST_ENTRIES = 2**20
# What the keys of masks end in, among the tensors of a winning ticket.
MASK = "_mask"
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
    shard: str = "1/1"
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

    def part(self) -> Part:
        """Which part of the shards to build, from 0, and of how many."""
        return Part.parse(self.shard)


Options = TypeVar("Options", bound=BuildOptions)


def split_of(draw: float, validation_share: float, test_share: float) -> Split:
    """The part that a number within [0, 1) falls into."""
    if draw < test_share:
        return "test"
    return "validation" if draw < test_share + validation_share else "train"


def build_shards(
    options: Options,
    writer: ZooWriter,
    items: Sequence[Item],
    steps_of: Callable[[Item], int],
    train: Callable[[Sequence[Item], OnSteps], list[BuiltNetwork]],
    build: Callable[[Options], Path],
    *,
    progress: bool,
) -> Path:
    """Trains the networks of every missing shard of this machine's part and publishes it.

    Args:
        options: What to build.
        writer: Of the zoo.
        items: All networks.
        steps_of: Training steps of a network.
        train: Trains the networks of a shard in this process.
        build: Builds a part of the zoo, for a worker on another machine.
        progress: Whether to show a progress bar.
    """
    part, parts = options.part()
    size = options.shard_size
    count = math.ceil(len(items) / size)
    shards = [s for s in range(count) if s % parts == part]
    if not shards:
        raise UserError(
            f"Expected --shard to name at most {count} parts, as many as the zoo has shards (got "
            f"'{options.shard}'). Choose a smaller --shard-size."
        )
    missing = [s for s in shards if not writer.is_done(s)]
    work = {s: items[s * size : (s + 1) * size] for s in missing}
    steps = {s: sum(map(steps_of, chosen)) for s, chosen in work.items()}
    with counting(f"{options.out}", sum(steps.values()), shown=progress) as on_steps:
        if options.engine == "local":
            for shard in missing:
                writer.publish(shard, train(work[shard], on_steps))
            return Path(options.out)
        # As many parts as shards: a worker builds exactly one.
        jobs = {f"{shard + 1}/{count}": shard for shard in missing}
        alone = _OneShard(build, dataclasses.replace(options, engine="local"))
        gpus = int(options.device == "cuda")
        for job, _ in run_jobs(alone, list(jobs), options.engine, gpus=gpus):
            on_steps(steps[jobs[job]])
    return Path(options.out)


@dataclass(frozen=True)
class _OneShard(Generic[Options]):
    """Builds one shard of a zoo, wherever it is called."""

    build: Callable[[Options], Path]
    options: Options

    def __call__(self, shard: str) -> Path:
        return self.build(dataclasses.replace(self.options, shard=shard))


def grouped(
    items: Sequence[Item],
    key: Callable[[Item], Hashable],
    order: Callable[[Item], Any],
    together: Callable[[Item], int],
) -> Iterator[list[Item]]:
    """Items of one key, sorted, in groups that are trained together."""
    groups: dict[Hashable, list[Item]] = {}
    for item in sorted(items, key=order):
        groups.setdefault(key(item), []).append(item)
    for found in groups.values():
        pieces = math.ceil(len(found) / together(found[0]))
        size = math.ceil(len(found) / pieces)
        yield from (found[i : i + size] for i in range(0, len(found), size))


def networks_together(options: BuildOptions, entries: int) -> int:
    """How many networks to train at once, if the largest activation of one has so many."""
    if options.together:
        return options.together
    # On a GPU, launches cost more than memory.
    most = _MOST_ENTRIES if options.device == "cpu" else _MOST_ENTRIES * 64
    return max(8, min(1024, most // entries))


def plain_options(options: BuildOptions) -> dict[str, Any]:
    """The options as plain values."""
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def device_of(options: BuildOptions) -> torch.device:
    """The device, if it is there."""
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
    """Writes the shards of a zoo, or the missing ones of a zoo that was begun.

    Args:
        folder: The zoo's folder, made if need be.
        kind: `cnn`, `inr`, `tickets` or `transformer`.
        options: What was asked for, as plain values.
        facts: What else a reader must know: data, checksums, conventions.
        graph_of: The graph of the tensors of a group, for networks that are no chains of layers.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        options: Mapping[str, Any],
        facts: Mapping[str, Any],
        graph_of: Callable[[str, Mapping[str, Tensor]], WeightGraph] | None = None,
    ) -> None:
        self._graph_of = graph_of
        chosen = {k: _plain(v) for k, v in options.items() if k not in _NEUTRAL}
        self.description = {"kind": kind, "options": chosen, **_plain(dict(facts))}
        if is_store(folder):
            _check_same(folder, self.description)
        self._writer = StoreWriter(folder, self.description)

    def is_done(self, shard: int) -> bool:
        """Whether a shard was published."""
        return self._writer.is_done(_name(shard))

    def publish(
        self, shard: int, networks: Sequence[tuple[Row, str, Mapping[str, Tensor]]]
    ) -> None:
        """Writes a shard: for every network its row, its group and its parameters.

        A shard that another process has published in the meantime stays as it is.
        """
        found = [
            ({**row, "group": group}, self._running(self._graph(parameters, group), row))
            for row, group, parameters in networks
        ]
        with none_publishing(self._writer.folder):
            if not self.is_done(shard):
                self._writer.publish(_name(shard), found)

    def _running(self, graph: WeightGraph, row: Row) -> WeightGraph:
        """The same graph, with what its network computes."""
        computation = computation_of(graph.layout, self.description["kind"], row)
        graph.layout = graph.layout.noting(computation=computation)
        return graph

    def _graph(self, parameters: Mapping[str, Tensor], group: str) -> WeightGraph:
        """The graph of a network; the masks of a winning ticket are a second channel."""
        if self._graph_of is not None:
            return self._graph_of(group, parameters)
        own = {key: x for key, x in parameters.items() if not key.endswith(MASK)}
        channels = None
        if len(own) < len(parameters):
            # Biases have no mask of their own: all of them are kept.
            masks = {k: parameters.get(f"{k}{MASK}", torch.ones_like(x)) for k, x in own.items()}
            channels = {"mask": {k: masks[k].to(x.dtype) for k, x in own.items()}}
        example = None
        if self.description["options"].get("arch") == "cnn":
            # Only its shape counts.
            example = torch.empty(1, *self.description["image_shape"], device="meta")
        return from_state_dict(
            own,
            flatten=self.description.get("flatten"),
            example_input=example,
            channels=channels,
        )


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
