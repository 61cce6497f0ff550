"""From a zoo to graphs that are ready for a model, and batches in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from nfn_graph import DataLoader, WeightGraph
from nfn_graph.tasks.training.task import Options, Task, TaskData
from nfn_graph.tasks.zoo.folder import ZooFolder, open_zoo_folder
from nfn_graph.tasks.zoo.seeds import generator_of

SPLITS = ("train", "validation", "test")


def load_data(task: Task[Options]) -> TaskData:
    """The networks of the task's zoo, by split."""
    zoo = open_for(task, task.options.zoo, task.options.where)
    zoos = {split: zoo.where(split=split) for split in SPLITS}
    most = task.options.train_networks
    if most:
        zoos["train"] = zoos["train"][:most]
    for split, part in zoos.items():
        if not len(part):
            raise ValueError(
                f"Expected networks of split '{split}' in '{zoo.folder}' (got none). Build a "
                f"larger zoo, or use other values of --where."
            )
    facts = task.facts(zoo)
    graphs = {split: load_graphs(task, part, facts) for split, part in zoos.items()}
    return TaskData(zoos, graphs, facts)


def open_for(task: Task[Options], path: Path, where: Sequence[str]) -> ZooFolder:
    """The networks of a zoo that a task can use."""
    zoo = open_zoo_folder(path)
    if zoo.description["kind"] != task.kind:
        raise ValueError(
            f"Expected a zoo of kind '{task.kind}' for {task.name} (got '{path}', a zoo of kind "
            f"'{zoo.description['kind']}'). Build one with: nfn-graph zoo {task.kind} --out ..."
        )
    zoo = filtered(zoo, where)
    return zoo.select([i for i, row in enumerate(zoo.rows) if task.usable(row)])


def filtered(zoo: ZooFolder, where: Sequence[str]) -> ZooFolder:
    """The networks for which every condition, such as `width=8,16`, holds."""
    for condition in where:
        name, equals, values = condition.partition("=")
        if not equals or name not in zoo.table.column_names:
            raise ValueError(
                f"Expected --where as NAME=VALUE with a column of the zoo: "
                f"{', '.join(zoo.table.column_names)} (got '{condition}')"
            )
        wanted = values.split(",")
        zoo = zoo.select([i for i, row in enumerate(zoo.rows) if _text(row[name]) in wanted])
        if not len(zoo):
            raise ValueError(f"Expected networks with {condition} in '{zoo.folder}' (got none)")
    return zoo


def load_graphs(task: Task[Options], zoo: ZooFolder, facts: Mapping[str, Any]) -> list[WeightGraph]:
    """The graphs of a part of a zoo, ready for a model."""
    graphs = []
    for graph, row in zip(zoo, zoo.rows, strict=True):
        del graph.row
        graphs.append(task.prepare(graph, row, facts))
    return graphs


def loader(
    graphs: Sequence[WeightGraph],
    batch_size: int,
    workers: int = 0,
    sampler: EpochSampler | None = None,
) -> DataLoader:
    """Batches of graphs in the order of a sampler, or in their own."""
    return DataLoader(
        graphs,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


class EpochSampler(Sampler[int]):
    """A random order that the seed and the epoch decide, and nothing else.

    Args:
        data: What to order.
        seed: Of the run.
    """

    def __init__(self, data: Sized, seed: int) -> None:
        self.count = len(data)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = generator_of(self.seed, self.epoch, "order")
        return iter(torch.randperm(self.count, generator=generator).tolist())

    def __len__(self) -> int:
        return self.count


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
