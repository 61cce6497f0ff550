"""From a store to the networks that a model reads: by split, with labels, in batches or at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from torch_geometric.transforms import Compose

from nfn_graph import Batch, DataLoader, NetworkSpec, WeightGraph
from nfn_graph.converters import WeightDataset, open_zoo
from nfn_graph.converters.conversion.jobs import counting
from nfn_graph.converters.store.dataset import choose
from nfn_graph.converters.store.description import is_store
from nfn_graph.converters.store.table import COLUMN, DEFAULT_SHARES, SPLITS, random_splits
from nfn_graph.converters.zoos.importing import import_zoo
from nfn_graph.messages import UserError
from nfn_graph.tasks.models import fit_inputs, sizes_of
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.training.task import Options, Task
from nfn_graph.tasks.zoo.folder import open_networks

# Networks per batch where only statistics are computed.
_FIT_BATCH = 256
# The largest number of networks, and of their entries, that are kept in memory by default.
_MOST_NETWORKS = 5_000
_MOST_ENTRIES = 50_000_000


# The number of times that an epoch repeats every network with --overfit.
OVERFIT_TIMES = 64


class PreparedGraphs(Sequence[WeightGraph]):
    """Networks as a model reads them: with labels, transformed and prepared.

    They are read from the store batch by batch, so that no more than a few batches are in memory,
    unless all of them are to be kept there.

    Args:
        task: The task, which defines how networks are prepared.
        zoo: The networks.
        facts: The facts of the task about its data.
        in_memory: Whether to read and prepare all networks now, and to keep them.
        attributes: The attributes of graphs other than weights; by default those of the task.
    """

    def __init__(
        self,
        task: Task[Options],
        zoo: WeightDataset,
        facts: Mapping[str, Any],
        in_memory: bool = False,
        attributes: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.task: Task[Any] = task
        self.facts = facts
        if attributes is None:
            attributes = task.attributes(zoo, facts)
        transforms = [*_casts(zoo, task.options), task.transform(facts)]
        kept = [transform for transform in transforms if transform is not None]
        labelled = zoo.with_attributes(**attributes)
        self.networks = labelled.with_transform(Compose(kept) if kept else None)
        self._kept: list[WeightGraph] | None = None
        if in_memory:
            self._kept = [self._read(i) for i in range(len(zoo))]

    @property
    def sizes(self) -> list[int]:
        """The number of weights of every network, for `EdgeBatchSampler`."""
        return self.networks.sizes

    def __len__(self) -> int:
        return len(self.networks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._read(index) if self._kept is None else self._kept[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[WeightGraph]:
        """The networks that a loader asks for; those from the store are not prepared yet."""
        if self._kept is None:
            return self.networks.__getitems__(indices)
        return [self._kept[i] for i in indices]

    def ready(self, batch: Batch) -> WeightGraph:
        """A batch of what :meth:`__getitems__` returned, prepared."""
        return self.task.prepare(batch, self.facts) if self._kept is None else batch

    def _read(self, index: int) -> WeightGraph:
        return self.task.prepare(self.networks[index], self.facts)


def _casts(zoo: WeightDataset, options: TrainOptions) -> list[Callable[[WeightGraph], Any]]:
    """The transforms that convert weights to the precision of the computation, if needed."""
    wanted = torch.float64 if options.precision == "64-true" else torch.float32
    numbers = np.unique(zoo.architectures).tolist()
    found = {zoo.store.architecture(i).plain for i in numbers}
    # Lightning itself makes single precision double.
    is_right = all(kind is not None and kind[0] in (torch.float32, wanted) for kind in found)
    is_same = len({kind and kind[0] for kind in found}) == 1
    return [] if is_right and is_same else [partial(WeightGraph.to, dtype=wanted)]


class PreparedLoader(DataLoader):
    """Batches of prepared networks.

    Workers read them. They are prepared in the process that uses them, so that the layout of a
    batch is computed only once, for the preparation and for the model.

    Args:
        graphs: The networks.
        batches: The sampler of the indices of every batch.
        workers: The number of processes that read networks; 0 to read in this process.
    """

    def __init__(
        self, graphs: PreparedGraphs, batches: Sampler[list[int]], workers: int = 0
    ) -> None:
        super().__init__(
            graphs, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0
        )
        self.graphs = graphs

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Workers begin to read only when the first batch is requested. A resumed run learns its
        # epoch, which determines the order, after the iterator is created.
        for batch in super().__iter__():
            yield self.graphs.ready(batch)


@dataclass(frozen=True)
class TaskData:
    """The networks of a zoo by split, ready for a model.

    Attributes:
        zoos: The parts of the zoo, row for row the networks.
        graphs: Their graphs, prepared.
        facts: Further facts of the task about them, such as the names of classes.
        in_memory: Whether all networks are kept in memory.
    """

    zoos: Mapping[str, WeightDataset]
    graphs: Mapping[str, PreparedGraphs]
    facts: Mapping[str, Any] = field(default_factory=dict)
    in_memory: bool = False


def load_data(task: Task[Options]) -> TaskData:
    """The networks of the task's zoo, by split."""
    options = task.options
    whole = open_for(task, options.zoo, options.out / "zoo")
    choose(whole, options.where)
    zoos = {split: part.where(*options.where) for split, part in split_zoo(whole, options).items()}
    zoos = {split: task.usable(part) for split, part in zoos.items()}
    if options.train_networks:
        zoos["train"] = zoos["train"][: options.train_networks]
    if options.overfit:
        few = zoos["train"][: options.overfit]
        repeated = few[list(range(len(few))) * OVERFIT_TIMES] if len(few) else few
        zoos = {"train": repeated, "validation": few, "test": few}
    for split, part in zoos.items():
        if not len(part):
            raise UserError(
                f"Expected networks of split '{split}' in '{whole.folder}' (got none). Use a "
                f"larger zoo, other values of --where, or --split for random splits."
            )
    facts = task.facts(zoos)
    in_memory = options.in_memory == "yes" or (
        options.in_memory == "auto" and fits_memory(zoos.values())
    )
    graphs = {split: PreparedGraphs(task, part, facts, in_memory) for split, part in zoos.items()}
    return TaskData(zoos, graphs, facts, in_memory)


def fits_memory(zoos: Sequence[WeightDataset] | Any) -> bool:
    """Whether the networks are few and small enough to be kept in memory."""
    sizes = [zoo.sizes for zoo in zoos]
    return sum(map(len, sizes)) <= _MOST_NETWORKS and sum(map(sum, sizes)) <= _MOST_ENTRIES


def open_for(task: Task[Options], path: Path, imported: Path) -> WeightDataset:
    """The networks of a zoo, which must be of the kind that a task needs.

    Args:
        task: The task.
        path: A store, or a zoo in a published layout.
        imported: The store that a published zoo is put into first, so that batches can be read
            from it.
    """
    if path.is_dir() and not is_store(path):
        published = open_zoo(path)
        print(
            f"nfn-graph: importing '{path}' ({published.description.layout}) into '{imported}'. "
            f"Runs can share it: nfn-graph zoo import {path} --out STORE",
            file=sys.stderr,
        )
        with counting("Importing", len(published)) as count_on:
            import_zoo(published, imported, on_done=count_on)
        path = imported
    zoo = open_networks(path)
    kind = zoo.description.get("kind")
    if task.kind not in (None, kind):
        got = "a store of converted files" if kind is None else f"a zoo of kind '{kind}'"
        raise UserError(
            f"Expected a zoo of kind '{task.kind}' for {task.name} (got '{path}', {got}). Build "
            f"one with: nfn-graph zoo {task.kind} --out ..."
        )
    return zoo


def split_zoo(zoo: WeightDataset, options: TrainOptions) -> dict[str, WeightDataset]:
    """Returns the splits of a zoo: those of its table, or random ones.

    A random split depends only on the order of the table and the seed, not on the networks that are
    selected later.
    """
    if options.split is None and COLUMN in zoo.table.column_names:
        return {split: zoo.where(**{COLUMN: split}) for split in SPLITS}
    shares = options.split or DEFAULT_SHARES
    names = np.array(random_splits(len(zoo), shares, options.split_seed))
    return {split: zoo.select(names == split) for split in SPLITS}


def fitted(task: Task[Options], data: TaskData) -> tuple[nn.Module, NetworkSpec, dict[str, int]]:
    """An untrained model with the statistics of its inputs, its types and its sizes."""
    examples = [graph for part in data.graphs.values() for graph in part.networks.examples()]
    spec = NetworkSpec.union({graph.spec for graph in examples})
    sizes = sizes_of(examples)
    model = task.build(spec, sizes, data.facts)
    order = SequentialSampler(data.graphs["train"])
    fit_inputs(model, PreparedLoader(data.graphs["train"], BatchSampler(order, _FIT_BATCH, False)))
    return model, spec, sizes
