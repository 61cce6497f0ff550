"""What all zoo builders share: shards in turn, progress, networks in groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nfn_graph.converters.conversion.jobs import counting, run_jobs
from nfn_graph.messages import UserError
from nfn_graph.tasks.zoo.options import BuildOptions
from nfn_graph.tasks.zoo.store import Row, ZooWriter

Item = TypeVar("Item")
Options = TypeVar("Options", bound=BuildOptions)
OnSteps = Callable[[int], None]
BuiltNetwork = tuple[Row, str, Mapping[str, Tensor]]
# Numbers that the largest activation of one training step should hold: they stay in the cache.
_MOST_ENTRIES = 2**20


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
