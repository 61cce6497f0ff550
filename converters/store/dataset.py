"""The networks of a store as a PyG dataset: `WeightDataset`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Dataset

from nfn_graph import WeightGraph
from nfn_graph.converters.store.arrow import arrow, compute
from nfn_graph.converters.store.batches import StoredGraphs
from nfn_graph.converters.store.bucketed import BucketedSampler
from nfn_graph.converters.store.reader import Numbers, Store
from nfn_graph.messages import UserError

Self = TypeVar("Self", bound="WeightDataset")


class WeightDataset(Dataset):
    """The networks of a store: graphs by position, subsets by metadata, batches at once.

    dataset = WeightDataset("zoo", attributes={"y": "test_accuracy"})
    small = dataset.where(split="train", width=[8, 16])
    loader = DataLoader(small, batch_size=32, shuffle=True, num_workers=2)

    `dataset[i]` is a graph with memory of its own; slices, lists and masks give a subset, as of
    any PyG dataset. `nfn_graph.DataLoader` reads the networks of a batch together and makes no
    single graphs of them, unless there is a transform. Workers map the files themselves.

    Args:
        store: The folder of a store, or an open one.
        attributes: Columns of the table that graphs get as tensors of one number, by the name
            of the attribute.
        transform: Called with every graph.
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
        """The store's folder."""
        return self.store.folder

    @property
    def description(self) -> dict[str, Any]:
        """What `store.json` says."""
        return self.store.description

    def indices(self) -> Any:
        """The positions of the networks in the store's table."""
        return range(len(self.store)) if self._indices is None else self._indices

    def _positions(self, indices: Any = slice(None)) -> Numbers:
        """The positions of some of the networks."""
        if self._indices is None:
            return np.arange(len(self.store))[indices]
        return self._indices[indices]

    def len(self) -> int:
        """How many networks the store has."""
        return len(self.store)

    def __len__(self) -> int:
        return len(self.store) if self._indices is None else len(self._indices)

    @property
    def table(self) -> Any:
        """The metadata of the networks, a `pyarrow.Table`."""
        table = self.store.table
        return table if self._indices is None else table.take(arrow().array(self._indices))

    @property
    def architectures(self) -> Numbers:
        """A number for the architecture of every network: the same for the same shapes."""
        return self.store.places.architecture[self._positions()]

    @property
    def sizes(self) -> list[int]:
        """The number of weights of every network, for `EdgeBatchSampler`; none is read."""
        store = self.store
        sizes = [
            store.architecture(i).layout.num_entries for i in range(len(store.architecture_names))
        ]
        return np.array(sizes)[self.architectures].tolist()

    def where(self: Self, **values: Any) -> Self:
        """The networks whose columns have these values, or one of a list of values."""
        table, is_chosen = self.table, None
        for name, value in values.items():
            column = _column(table, name)
            wanted = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
            try:
                options = arrow().array(wanted).cast(column.type)
            except (arrow().ArrowException, ValueError) as error:
                raise UserError(
                    f"Expected values of column '{name}', which are {column.type} (got {value!r})"
                ) from error
            found = compute().is_in(column, value_set=options)
            is_chosen = found if is_chosen is None else compute().and_(is_chosen, found)
        if is_chosen is None:
            return self
        return self.select(np.flatnonzero(is_chosen.to_numpy()))

    def select(self: Self, indices: Sequence[int] | Numbers | Tensor) -> Self:
        """Some of the networks, by position or by a mask."""
        return self.index_select(np.asarray(indices))

    def index_select(self: Self, idx: Any) -> Self:
        """As PyG's: a slice, positions, or a mask of all networks."""
        if isinstance(idx, slice):
            found: Any = super().index_select(idx)
            found._indices = np.asarray(found._indices, dtype=np.int64)
            return found
        chosen = np.asarray(idx).flatten()
        if chosen.dtype == bool:
            if len(chosen) != len(self):
                raise IndexError(
                    f"Expected a mask of {len(self)} networks (got one of {len(chosen)})"
                )
            chosen = np.flatnonzero(chosen)
        if len(chosen) and chosen.dtype.kind not in "iu":
            raise IndexError(f"Expected positions of networks (got {idx!r})")
        subset = copy.copy(self)
        subset._indices = self._positions(chosen.astype(np.int64))
        return subset

    def __getitem__(self, idx: Any) -> Any:
        return super().__getitem__(idx)

    def __iter__(self) -> Iterator[WeightGraph]:
        return (self[i] for i in range(len(self)))

    def get(self, idx: int) -> WeightGraph:
        """The graph at a position of the store's table."""
        graph = self.store.graph(int(idx))
        for name, values in self.attributes.items():
            graph[name] = values[idx : idx + 1].clone()
        return graph

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Several networks, read together; what a `DataLoader` calls for a batch."""
        if self.transform is not None:
            return [self[i] for i in indices]
        chosen = self._positions(np.asarray(indices, dtype=np.int64))
        at = torch.from_numpy(chosen)
        labels = {name: values.index_select(0, at) for name, values in self.attributes.items()}
        return StoredGraphs.read(self.store, chosen, labels)

    def bucketed(
        self, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> BucketedSampler:
        """A batch sampler that keeps networks of the same shapes together."""
        return BucketedSampler(self.architectures, batch_size, shuffle, seed, drop_last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, {len(self)} networks)"


def _column(table: Any, name: str) -> Any:
    if name not in table.column_names:
        raise UserError(f"Expected a column of the store: {table.column_names} (got '{name}')")
    return table.column(name)


def _numbers(table: Any, name: str, column: str) -> Tensor:
    """A column as a tensor; numbers with a fraction in torch's own precision."""
    values = _column(table, column)
    types = arrow().types
    is_number = types.is_boolean(values.type) or types.is_integer(values.type)
    if (not is_number and not types.is_floating(values.type)) or values.null_count:
        raise UserError(
            f"Expected numbers without gaps in column '{column}' for the attribute '{name}' "
            f"(got {values.type} with {values.null_count} gaps)"
        )
    if "index" in name or "batch" in name or name in ("layout", "ptr"):
        raise UserError(
            f"Expected another name of an attribute, which PyG does not treat as a pointer "
            f"(got '{name}')"
        )
    found = torch.from_numpy(values.to_numpy().copy())
    return found.to(torch.get_default_dtype()) if found.is_floating_point() else found
