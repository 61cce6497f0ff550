"""Networks that were read together, and their batch without a graph for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters.store.architecture import Architecture
from nfn_graph.converters.store.reader import Numbers, Store
from nfn_graph.data import GraphList, Layout
from nfn_graph.spec import Key, NetworkSpec

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoredGraphs(GraphList):
    """Networks in memory of their own, one after another.

    Args:
        architectures: Of every network.
        entries: The entries of all networks by type, network after network.
        notes: What single networks hold that is no tensor, as JSON; none if empty.
        attributes: Further attributes, one row per network.
    """

    def __init__(
        self,
        architectures: list[Architecture],
        entries: Mapping[torch.dtype, Tensor],
        notes: Sequence[str | None],
        attributes: Mapping[str, Tensor],
    ) -> None:
        self.architectures = architectures
        self.entries = entries
        self.notes = notes
        self.attributes = attributes

    @classmethod
    def read(
        cls, store: Store, positions: Numbers, attributes: Mapping[str, Tensor]
    ) -> StoredGraphs:
        """Reads networks at positions of a store's table."""
        numbers = store.places.architecture[positions].tolist()
        kinds = {number: store.architecture(number) for number in set(numbers)}
        return cls(
            [kinds[number] for number in numbers],
            {dtype: torch.cat(records) for dtype, records in store.records(positions).items()},
            [store.notes(i) for i in positions.tolist()] if store.has_notes else [],
            attributes,
        )

    def __len__(self) -> int:
        return len(self.architectures)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        graph = self._graph(number)
        for name, values in self.attributes.items():
            graph[name] = values[number : number + 1]
        return graph

    def collate(self) -> Batch:
        """The batch of all networks, as `Batch.from_data_list` makes it."""
        features = self._features()
        if features is None or any(self.notes):
            return Batch.from_data_list(list(self))
        layouts = [a.layout for a in self.architectures]
        if any(a.has_own_layouts for a in self.architectures):
            layouts = [self._layout(i) for i in range(len(self))]
        return Batch.from_stores(layouts, features, self.attributes)

    def _features(self) -> dict[Key, Tensor] | None:
        """The features of all networks by type; None where only single graphs can tell them."""
        kinds = list({id(a): a for a in self.architectures}.values())
        plain = {kind.plain for kind in kinds}
        if len(plain) > 1 or None in plain:
            return None
        ((dtype, channels),) = (found for found in plain if found is not None)
        flat = self.entries[dtype]
        if len(kinds) > 1:
            # Says what keeps the networks apart, such as kernels of different sizes.
            NetworkSpec.union(kind.layout.spec for kind in kinds)
            return self._mixed(flat, dtype, channels, kinds)
        rows = flat.view(len(self), -1)
        return {
            key: rows[:, e.begin : e.end].reshape(len(self) * e.shape[0], *e.shape[1:])
            for key, e in kinds[0].features.items()
        }

    def _mixed(
        self,
        flat: Tensor,
        dtype: torch.dtype,
        channels: int,
        kinds: Sequence[Architecture],
    ) -> dict[Key, Tensor]:
        """The features of networks of several architectures: one permutation, type after type."""
        taps = {key: e.shape[1] for kind in kinds for key, e in kind.features.items()}
        spans = np.array([[kind.span(key) for key in taps] for kind in kinds])
        number = {id(kind): i for i, kind in enumerate(kinds)}
        which = [number[id(architecture)] for architecture in self.architectures]
        records = np.array([kind.record_sizes[dtype] for kind in kinds])[which]
        first = records.cumsum() - records
        # Type by type and network by network: where its entries lie, and how many they are.
        begin = (spans[which, :, 0] + first[:, None]).T.ravel()
        count = spans[which, :, 1].T.ravel()
        index = np.repeat(begin - (count.cumsum() - count), count)
        index += np.arange(len(index))
        # As whole numbers, which all types can be copied as.
        whole = flat.view(_INTEGERS[dtype.itemsize])
        moved = whole.index_select(0, torch.from_numpy(index)).view(dtype)
        sizes = count.reshape(len(taps), -1).sum(1).tolist()
        found: dict[Key, Tensor] = {}
        for (key, of_each), part in zip(taps.items(), moved.split(sizes), strict=True):
            # Of neurons without a bias there are no entries that could be counted.
            rows = -1 if len(part) else sum(a.layout.num_rows(key) for a in self.architectures)
            found[key] = part.view(rows, of_each, channels)
        return found

    @cached_property
    def _records(self) -> list[dict[torch.dtype, Tensor]]:
        """The entries of every network by type."""
        found: list[dict[torch.dtype, Tensor]] = [{} for _ in self.architectures]
        for dtype, flat in self.entries.items():
            sizes = [a.record_sizes.get(dtype, 0) for a in self.architectures]
            for records, part in zip(found, flat.split(sizes), strict=True):
                records[dtype] = part
        return found

    def _graph(self, number: int) -> WeightGraph:
        notes = self.notes[number] if self.notes else None
        return self.architectures[number].graph(self._records[number], notes)

    def _layout(self, number: int) -> Layout:
        architecture = self.architectures[number]
        return architecture.own_layout(architecture.tensors(self._records[number]), [])
