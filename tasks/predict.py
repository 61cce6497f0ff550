"""Applying a trained model to networks without labels: `nfn-graph predict`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters.conversion import Options, find_files, load_file
from nfn_graph.converters.store.description import is_store
from nfn_graph.messages import UserError, reason_of
from nfn_graph.tasks.supervised import SupervisedTask
from nfn_graph.tasks.training.checkpoints import load_model
from nfn_graph.tasks.training.data import PreparedGraphs
from nfn_graph.tasks.training.run import network_names, predict
from nfn_graph.tasks.training.task import Predictions
from nfn_graph.tasks.zoo.folder import open_networks

# The number of files that are read before the model is applied to them.
_TOGETHER = 64


@dataclass
class Answers:
    """The predictions of a model for networks.

    Attributes:
        rows: The file of every network, and its prediction.
        failed: The reason for every file that could not be read or whose network was refused.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, names: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
        """Adds a row for each of several networks."""
        for name, *values in zip(names, *columns.values(), strict=True):
            if all(math.isfinite(x) for x in values if isinstance(x, float)):
                self.rows.append({"file": name, **dict(zip(columns, values, strict=True))})
            else:
                self.failed[name] = "Expected a network with finite weights (got NaN or infinity)"


def predict_files(
    run: Path,
    paths: Sequence[Path],
    options: Options | None = None,
    *,
    on_done: Callable[[int], None] = lambda count: None,
) -> Answers:
    """Predicts the labels of the networks in files with the best model of a run.

    Args:
        run: The folder of a run of a task with one label per network.
        paths: Checkpoint files in any readable format, folders of them, or stores.
        options: The options for reading the files.
        on_done: Called with the number of files or stores that were done since the last call.
    """
    task, model, facts = load_model(run)
    if not isinstance(task, SupervisedTask):
        raise UserError(
            f"Expected a run of a task that predicts a label, such as regress or classify (got "
            f"'{run}', a run of {task.name})"
        )
    reader, answers = _Reader(task, model, facts), Answers()
    stores = [path for path in paths if is_store(path)]
    for store in stores:
        answers.add(*reader.read_store(store))
        on_done(1)
    others = [path for path in paths if path not in stores]
    files = iter(find_files(others).files if others else [])
    while some := list(islice(files, _TOGETHER)):
        networks: dict[str, WeightGraph] = {}
        for path in some:
            try:
                networks[str(path)] = reader.prepared(load_file(path, options or Options()))
            except Exception as error:  # One bad file must not stop the others.
                answers.failed[str(path)] = reason_of(error)
        for names, found in reader.judged(networks):
            if isinstance(found, Exception):
                answers.failed[names[0]] = reason_of(found)
            else:
                answers.add(names, found)
        on_done(len(some))
    return answers


@dataclass(frozen=True)
class _Reader:
    """A trained model, and the preparation of networks for it."""

    task: SupervisedTask[Any]
    model: nn.Module
    facts: Mapping[str, Any]

    def prepared(self, graph: WeightGraph) -> WeightGraph:
        """One network as the model reads it."""
        graph = graph.to(next(self.model.parameters()).dtype)
        transform = self.task.transform(self.facts)
        return self.task.prepare(transform(graph) if transform else graph, self.facts)

    def read_store(self, path: Path) -> tuple[list[str], dict[str, list[Any]]]:
        """The names of the networks of a store, and their predictions."""
        zoo = open_networks(path)
        graphs = PreparedGraphs(
            self.task, zoo, self.facts, attributes=self.task.inputs(zoo, self.facts)
        )
        found = predict(self.task, self.model, graphs, labelled=False)
        names = [f"{path}/{name}" for name in network_names(zoo)[1]]
        return names, self.task.written(found, self.facts)

    def judged(
        self, networks: Mapping[str, WeightGraph]
    ) -> Iterator[tuple[list[str], dict[str, list[Any]] | Exception]]:
        """The predictions for some networks, or the errors of those that the model rejects."""
        if not networks:
            return
        try:
            found = self._answer(list(networks.values()))
            yield list(networks), self.task.written(found, self.facts)
        except ValueError as error:
            if len(networks) == 1:
                yield list(networks), error
                return
            for name, graph in networks.items():
                yield from self.judged({name: graph})

    @torch.no_grad()
    def _answer(self, graphs: Sequence[WeightGraph]) -> Predictions:
        batch = Batch.from_data_list(graphs).to(next(self.model.parameters()).device)
        return {name: x.cpu() for name, x in self.task.answer(self.model(batch)).items()}
