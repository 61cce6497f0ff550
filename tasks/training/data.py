"""From a zoo to graphs that are ready for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from nfn_graph import WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.tasks.training.task import Options, Task, TaskData
from nfn_graph.tasks.zoo.folder import ZooFolder, open_zoo_folder
from nfn_graph.tasks.zoo.options import Split


def load_data(task: Task[Options]) -> TaskData:
    """The networks of the task's zoo, by split."""
    zoo = open_for(task, task.options.zoo, task.options.where)
    zoos = {split: zoo.where(split=split) for split in get_args(Split)}
    most = task.options.train_networks
    if most:
        zoos["train"] = zoos["train"][:most]
    for split, part in zoos.items():
        if not len(part):
            raise UserError(
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
        raise UserError(
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
            raise UserError(
                f"Expected --where as NAME=VALUE with a column of the zoo: "
                f"{', '.join(zoo.table.column_names)} (got '{condition}')"
            )
        wanted = values.split(",")
        zoo = zoo.select([i for i, row in enumerate(zoo.rows) if _text(row[name]) in wanted])
        if not len(zoo):
            raise UserError(f"Expected networks with {condition} in '{zoo.folder}' (got none)")
    return zoo


def load_graphs(task: Task[Options], zoo: ZooFolder, facts: Mapping[str, Any]) -> list[WeightGraph]:
    """The graphs of a part of a zoo, ready for a model."""
    graphs = []
    for graph, row in zip(zoo, zoo.rows, strict=True):
        del graph.row
        graphs.append(task.prepare(graph, row, facts))
    return graphs


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
