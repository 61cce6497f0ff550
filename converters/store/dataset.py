"""`WeightDataset`, the networks of a store as a PyG dataset, and batches of equal shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch_geometric.data import Dataset

from nfn_graph import WeightGraph
from nfn_graph.converters.state_dict import to_state_dict
from nfn_graph.converters.store.reader import Numbers, Store, StoredGraphs, rows_of
from nfn_graph.converters.store.table import arrow, compute
from nfn_graph.messages import UserError


class BucketedSampler(Sampler[list[int]]):
    """A batch sampler whose batches each hold networks of a single architecture.

    In every epoch, the networks of each architecture are shuffled and divided into batches, and
    then the batches are shuffled. The order depends only on the seed and the epoch.

    Args:
        architectures: The number of the architecture of every network.
        batch_size: The number of networks per batch; the last batch of an architecture may be
            smaller.
        shuffle: Whether to shuffle; otherwise architectures and networks keep their order.
        seed: The seed of the order.
        drop_last: Whether to leave out batches that are not full.
    """

    def __init__(
        self,
        architectures: Numbers,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or seed < 0:
            raise UserError(
                f"Expected a batch size of at least 1 and a seed of at least 0 (got {batch_size} "
                f"and {seed})"
            )
        numbers = np.unique(architectures)
        self.buckets = [torch.from_numpy(np.flatnonzero(architectures == n)) for n in numbers]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    @property
    def sampler(self) -> BucketedSampler:
        """The sampler itself. Lightning sets the epoch of the `sampler` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order. Every pass increases it by one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        (state,) = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state))
        self.epoch += 1
        batches = []
        for bucket in self.buckets:
            if self.shuffle:
                bucket = bucket[torch.randperm(len(bucket), generator=generator)]
            found = bucket.split(self.batch_size)
            batches += [b for b in found if len(b) == self.batch_size or not self.drop_last]
        order = torch.arange(len(batches))
        if self.shuffle:
            order = torch.randperm(len(batches), generator=generator)
        return (batches[i].tolist() for i in order.tolist())

    def __len__(self) -> int:
        if self.drop_last:
            return sum(len(bucket) // self.batch_size for bucket in self.buckets)
        return sum(-(-len(bucket) // self.batch_size) for bucket in self.buckets)


Self = TypeVar("Self", bound="WeightDataset")


class WeightDataset(Dataset):
    """The networks of a store: graphs by position, subsets by metadata, whole batches.

    `dataset[i]` is a graph with its own memory. Slices, lists and masks return a subset, as with
    any PyG dataset. `nfn_graph.DataLoader` reads the networks of a batch together and creates
    single graphs only if there is a transform. Worker processes map the files themselves.

    Args:
        store: The folder of a store, or an open store.
        attributes: Columns of the table that become attributes of the graphs (tensors of one
            number), by the name of the attribute.
        transform: A function that is applied to every graph.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from nfn_graph import DataLoader
        >>> from nfn_graph.converters import WeightDataset, build_store, from_module
        >>> def network(width):
        ...     return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
        >>> graphs = [(from_module(network(w)), {"width": w}) for w in (4, 8, 8)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = build_store(graphs, f"{folder}/store")
        ...     dataset = WeightDataset(f"{folder}/store", attributes={"y": "width"})
        ...     batch = next(iter(DataLoader(dataset.where("width=8"), batch_size=2)))
        >>> len(dataset), batch.y.tolist()
        (3, [8, 8])
    """

    def __init__(
        self,
        store: str | Path | Store,
        *,
        attributes: Mapping[str, str] | None = None,
        transform: Callable[[WeightGraph], Any] | None = None,
    ) -> None:
        super().__init__(None, transform)
        self.store = store if isinstance(store, Store) else Store(store)
        self.attributes = {
            name: _numbers(self.store.table, name, column)
            for name, column in (attributes or {}).items()
        }
        self._indices: Any = None

    @property
    def folder(self) -> Path:
        """The folder of the store."""
        return self.store.folder

    @property
    def description(self) -> dict[str, Any]:
        """The contents of `store.json`."""
        return self.store.description

    def indices(self) -> Any:
        """Returns the positions of the networks in the store's table."""
        return range(len(self.store)) if self._indices is None else self._indices

    def _positions(self, indices: Any = slice(None)) -> Numbers:
        """Returns the positions of some of the networks."""
        if self._indices is None:
            return np.arange(len(self.store))[indices]
        return self._indices[indices]

    def len(self) -> int:
        """Returns the number of networks in the store."""
        return len(self.store)

    def __len__(self) -> int:
        return len(self.store) if self._indices is None else len(self._indices)

    @property
    def table(self) -> Any:
        """The metadata of the networks as a `pyarrow.Table`."""
        table = self.store.table
        return table if self._indices is None else table.take(arrow().array(self._indices))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table as dicts."""
        return rows_of(self.folder, self.table)

    def column(self, name: str) -> Any:
        """Returns one column of the table as a `pyarrow.ChunkedArray`."""
        column = _column(self.store.table, name)
        return column if self._indices is None else column.take(arrow().array(self._indices))

    @property
    def fingerprint(self) -> str:
        """A checksum of the table and the weights of the whole store."""
        return self.store.fingerprint

    @property
    def architectures(self) -> Numbers:
        """The number of the architecture of every network, equal for equal shapes."""
        return self.store.places.architecture[self._positions()]

    @property
    def sizes(self) -> list[int]:
        """The number of weights of every network, for `EdgeBatchSampler`. No weights are read."""
        store = self.store
        sizes = [
            store.architecture(i).layout.num_entries for i in range(len(store.architecture_names))
        ]
        return np.array(sizes)[self.architectures].tolist()

    def where(self: Self, *conditions: str, **values: Any) -> Self:
        """Selects the networks that meet all conditions.

        Values are converted to the type of their column: `"train_fraction=1.0"` finds the number 1.

        Args:
            conditions: Conditions as on the command line: `"width=8"`, or `"width=8,16"` for one of
                several values.
            values: The value of a column, or a list of allowed values, by the name of the column.
        """
        found = None
        for name, wanted in [*map(_parsed, conditions), *values.items()]:
            is_chosen = _is_in(self.column(name), name, wanted)
            found = is_chosen if found is None else found & is_chosen
        return self if found is None else self.select(found)

    def select(self: Self, indices: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> Self:
        """Selects networks by position or by a mask."""
        return self.index_select(np.asarray(indices))

    def index_select(self: Self, idx: Any) -> Self:
        """Selects networks by a slice, positions or a mask, as in PyG."""
        if isinstance(idx, slice):
            return self._subset(self._positions()[idx])
        chosen = np.asarray(idx).flatten()
        if chosen.dtype == bool:
            if len(chosen) != len(self):
                raise IndexError(
                    f"Expected a mask of {len(self)} networks (got one of {len(chosen)})"
                )
            chosen = np.flatnonzero(chosen)
        if len(chosen) and chosen.dtype.kind not in "iu":
            raise IndexError(f"Expected positions of networks (got {idx!r})")
        return self._subset(self._positions(chosen.astype(np.int64)))

    def _subset(self: Self, positions: Numbers) -> Self:
        subset = copy.copy(self)
        subset._indices = positions
        subset.__dict__.pop("rows", None)
        return subset

    def examples(self) -> list[WeightGraph]:
        """Returns one network of every architecture."""
        _, first = np.unique(self.architectures, return_index=True)
        return [self[int(i)] for i in np.sort(first)]

    def with_attributes(self: Self, **values: Tensor) -> Self:
        """Returns the same networks with further attributes: tensors with one row per network."""
        found = copy.copy(self)
        found.attributes = dict(self.attributes)
        at = torch.from_numpy(self._positions())
        for name, rows in values.items():
            _check_attribute(name)
            if len(rows) != len(self):
                raise UserError(
                    f"Expected {len(self)} rows of '{name}', one per network (got {len(rows)})"
                )
            found.attributes[name] = rows.new_zeros(len(self.store), *rows.shape[1:])
            found.attributes[name][at] = rows
        return found

    def with_transform(self: Self, transform: Callable[[WeightGraph], Any] | None) -> Self:
        """Returns the same networks with a function that is applied to every graph."""
        found = copy.copy(self)
        found.transform = transform
        return found

    def state_dict(self, index: int, channel: str | None = None) -> dict[str, Tensor]:
        """Returns the checkpoint of one network, with the weights or the values of a channel."""
        return to_state_dict(self.store.graph(self.indices()[index]), channel)

    def __getitem__(self, idx: Any) -> Any:
        return super().__getitem__(idx)

    def __iter__(self) -> Iterator[WeightGraph]:
        return (self[i] for i in range(len(self)))

    def get(self, idx: int) -> WeightGraph:
        """Returns the graph at a position of the store's table."""
        graph = self.store.graph(int(idx))
        for name, values in self.attributes.items():
            graph[name] = values[idx : idx + 1].clone()
        return graph

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns several networks, read together. A `DataLoader` calls this for every batch."""
        if self.transform is not None:
            return [self[i] for i in indices]
        chosen = self._positions(np.asarray(indices, dtype=np.int64))
        at = torch.from_numpy(chosen)
        labels = {name: values.index_select(0, at) for name, values in self.attributes.items()}
        return StoredGraphs.read(self.store, chosen, labels)

    def bucketed(
        self, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> BucketedSampler:
        """Returns a batch sampler that groups networks of the same shapes."""
        return BucketedSampler(self.architectures, batch_size, shuffle, seed, drop_last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, {len(self)} networks)"


def _column(table: Any, name: str) -> Any:
    if name not in table.column_names:
        raise UserError(f"Expected a column of the store: {table.column_names} (got '{name}')")
    return table.column(name)


def _parsed(condition: str) -> tuple[str, list[str]]:
    name, equals, values = condition.partition("=")
    if not equals:
        raise UserError(f"Expected a condition as NAME=VALUE, such as width=8 (got '{condition}')")
    return name, values.split(",")


def _is_in(column: Any, name: str, value: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns a mask of where a column has a value, or one of several."""
    several = isinstance(value, list | tuple | set | frozenset)
    wanted = list(value) if several else [value]
    try:
        options = arrow().array(wanted).cast(column.type)
    except (arrow().ArrowException, ValueError) as error:
        got = ",".join(map(str, wanted))
        raise UserError(
            f"Expected values of column '{name}', which are {column.type} (got '{got}')"
        ) from error
    found: np.ndarray[Any, np.dtype[np.bool_]]
    found = compute().is_in(column, value_set=options).to_numpy()
    return found


def choose(dataset: Self, conditions: Sequence[str]) -> Self:
    """Returns the networks that meet the conditions of `--where`, and raises if there are none."""
    chosen = dataset.where(*conditions)
    if not len(chosen):
        found = f"with {' '.join(conditions)} " if conditions else ""
        raise UserError(f"Expected networks {found}in '{dataset.folder}' (got none)")
    return chosen


def _numbers(table: Any, name: str, column: str) -> Tensor:
    """Converts a column to a tensor; floats get torch's default dtype."""
    values = _column(table, column)
    types = arrow().types
    is_number = types.is_boolean(values.type) or types.is_integer(values.type)
    if (not is_number and not types.is_floating(values.type)) or values.null_count:
        raise UserError(
            f"Expected numbers without gaps in column '{column}' for the attribute '{name}' "
            f"(got {values.type} with {values.null_count} gaps)"
        )
    _check_attribute(name)
    found = torch.from_numpy(values.to_numpy().copy())
    return found.to(torch.get_default_dtype()) if found.is_floating_point() else found


def _check_attribute(name: str) -> None:
    if "index" in name or "batch" in name or name in ("layout", "ptr"):
        raise UserError(
            f"Expected another name of an attribute, which PyG does not treat as a pointer "
            f"(got '{name}')"
        )
