"""Reads a store: its table at once, and its weights from files that are mapped when needed.

Networks that are read together become a batch without a graph for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.store.architecture import (
    Architecture,
    architecture_file,
    read_architecture,
)
from nfn_graph.converters.store.description import FILE, read_description
from nfn_graph.converters.store.shards import (
    METADATA,
    WEIGHTS,
    Shard,
    damage_error,
    damaged,
    file_of,
    list_shards,
    read_shards,
    seal_of,
)
from nfn_graph.converters.store.table import arrow, compute
from nfn_graph.converters.store.writer import record_key
from nfn_graph.data import GraphList, Layout
from nfn_graph.messages import UserError, one_line
from nfn_graph.spec import Key, NetworkSpec

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Places(NamedTuple):
    """The places of the networks of a table: numbers of shards and architectures, and rows."""

    shard: Numbers
    architecture: Numbers
    row: Numbers


class Store:
    """The networks of a store that are published when it is opened.

    Opening a store reads the table of all networks and compares its checksum and the sizes of all
    files. `find_damage` compares everything else. Open files are never pickled, because every
    process maps them itself.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from nfn_graph.converters import build_store, from_module
        >>> from nfn_graph.converters.store import Store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     networks = [(from_module(nn.Linear(2, 1)), {"loss": i / 2}) for i in range(3)]
        ...     report = build_store(networks, f"{folder}/store")
        ...     store = Store(f"{folder}/store")
        >>> store.table.column("loss").to_pylist()
        [0.0, 0.5, 1.0]
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.description = read_description(self.folder)
        found = read_shards(self.folder)
        if not found:
            raise UserError(f"Expected at least one finished shard in '{self.folder}' (got none)")
        self.shards = [shard for shard, _ in found]
        self.table = _concatenated(self.folder, [table for _, table in found])
        key = self.description.get("key")
        if key is not None:
            self.table = _newest(self.folder, self.table, key)
        self.places, self.architecture_names = _places(self.table, self.shards)
        self._architectures: dict[int, Architecture] = {}
        self._mapped: dict[int, list[dict[torch.dtype, Tensor]]] = {}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table as dicts."""
        return rows_of(self.folder, self.table)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the table and the weights, computed from those of the shards."""
        checksums = {shard.name: shard.checksums for shard in self.shards}
        return seal_of(checksums)[:32]

    @cached_property
    def _notes(self) -> list[str | None]:
        """The values of networks that are not tensors, as JSON."""
        found: list[str | None] = self.table.column("notes").to_pylist()
        return found

    @cached_property
    def has_notes(self) -> bool:
        """Whether any network has values that are not tensors."""
        return int(self.table.column("notes").null_count) < len(self)

    def notes(self, position: int) -> str | None:
        """Returns the values of a network that are not tensors, as JSON."""
        return self._notes[position] if self.has_notes else None

    def architecture(self, number: int) -> Architecture:
        """Returns an architecture by its number in `places`."""
        found = self._architectures.get(number)
        if found is None:
            name = self.architecture_names[number]
            found = read_architecture(architecture_file(self.folder.absolute(), name))
            self._architectures[number] = found
        return found

    def records(self, positions: Sequence[int] | Numbers) -> dict[torch.dtype, list[Tensor]]:
        """Returns the entries of networks by type, in the mapped memory of their files.

        Networks without entries of a type are missing from its list.
        """
        chosen = np.asarray(positions, dtype=np.int64)
        columns = (column[chosen].tolist() for column in self.places)
        found: dict[torch.dtype, list[Tensor]] = {}
        for shard, architecture, row in zip(*columns, strict=True):
            mapped = self._mapped.get(shard)
            if mapped is None:
                mapped = self._map(shard)
            for dtype, stack in mapped[architecture].items():
                found.setdefault(dtype, []).append(stack[row])
        return found

    def graph(self, position: int) -> WeightGraph:
        """Reads one network into new memory."""
        records = self.records([position])
        architecture = self.architecture(int(self.places.architecture[position]))
        own = {dtype: record.clone() for dtype, (record,) in records.items()}
        return architecture.graph(own, self.notes(position))

    def _map(self, number: int) -> list[dict[torch.dtype, Tensor]]:
        """Maps the records of a shard, by number of the architecture."""
        shard = self.shards[number]
        path = file_of(self.folder, WEIGHTS, shard.name)
        # There are few files, so even small ones may be mapped.
        try:
            tensors = safetensors.read_file(path, map_from=0).tensors
        except FileNotFoundError as error:
            if shard.name in list_shards(self.folder):
                raise damaged(path, "none") from error
            raise ConversionError(
                f"Expected '{path}' as it was when the store was opened (got none: its networks "
                f"were converted again). Open the store again."
            ) from error
        found: list[dict[torch.dtype, Tensor]] = [{} for _ in self.architecture_names]
        is_here = self.places.shard == number
        for i in np.unique(self.places.architecture[is_here]).tolist():
            architecture = self.architecture(i)
            needed = self.places.row[is_here & (self.places.architecture == i)].max() + 1
            for dtype, size in architecture.record_sizes.items():
                stack = tensors.get(record_key(architecture.name, dtype), torch.empty(()))
                is_right = stack.dtype == dtype and stack.shape[1:] == (size,)
                if not is_right or len(stack) < needed:
                    raise damaged(
                        path, f"no {size} entries of {dtype} for {needed} of {architecture.name}"
                    )
                found[i][dtype] = stack
        self._mapped[number] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != "rows"}
        return {**kept, "_mapped": {}, "_architectures": {}}


def rows_of(folder: Path, table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a table as dicts."""
    try:
        found: list[dict[str, Any]] = table.to_pylist()
    except (ValueError, OverflowError) as error:
        raise ConversionError(
            f"Expected values that Python supports in the table of '{folder}' (got: "
            f"{one_line(error)})"
        ) from error
    return found


def _concatenated(folder: Path, tables: Sequence[Any]) -> Any:
    """Concatenates the tables of all shards; a column that a shard lacks is null there."""
    try:
        return arrow().concat_tables(tables, promote_options="permissive")
    except arrow().ArrowException as error:
        raise ConversionError(
            f"Expected columns of the same types in all tables of '{folder / METADATA}' (got: "
            f"{one_line(error)}). Build or convert into a new folder."
        ) from error


def _newest(folder: Path, table: Any, key: str) -> Any:
    """Returns one row per key, sorted by key: the row of the shard with the last name."""
    column = table.column(key) if key in table.column_names else None
    if column is None or column.type != arrow().string() or column.null_count:
        got = "none" if column is None else f"{column.type} with {column.null_count} gaps"
        raise damage_error(
            folder / FILE, f"names of networks in the column '{key}', which is {got}", "restore it"
        )
    order = [(key, "ascending"), ("shard", "descending")]
    table = table.take(compute().sort_indices(table, sort_keys=order))
    names = table.column(key).combine_chunks()
    if len(names) < 2:
        return table
    is_new = compute().not_equal(names[1:], names[:-1])
    is_first = arrow().concat_arrays([arrow().array([True]), is_new])
    return table.filter(is_first)


def _places(table: Any, shards: Sequence[Shard]) -> tuple[Places, list[str]]:
    def numbered(column: str) -> tuple[Numbers, list[str]]:
        encoded = table.column(column).combine_chunks().dictionary_encode()
        return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()

    shard, shard_names = numbered("shard")
    order = {entry.name: i for i, entry in enumerate(shards)}
    shard = np.array([order[name] for name in shard_names], dtype=np.int64)[shard]
    architecture, architecture_names = numbered("architecture")
    row = table.column("row").to_numpy().astype(np.int64)
    return Places(shard, architecture, row), architecture_names


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoredGraphs(GraphList):
    """Networks in their own memory, one after another.

    Args:
        architectures: The architecture of every network.
        entries: The entries of all networks by type, network after network.
        notes: The values of single networks that are not tensors, as JSON; may be empty.
        attributes: Further attributes, with one row per network.
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
        """Creates the batch of all networks, equal to that of `Batch.from_data_list`."""
        features = self._features()
        if features is None or any(self.notes):
            return Batch.from_data_list(list(self))
        layouts = [a.layout for a in self.architectures]
        if any(a.has_own_layouts for a in self.architectures):
            layouts = [self._layout(i) for i in range(len(self))]
        return Batch.from_stores(layouts, features, self.attributes)

    def _features(self) -> dict[Key, Tensor] | None:
        """Returns the features of all networks by type; None if only single graphs have them."""
        kinds = list({id(a): a for a in self.architectures}.values())
        plain = {kind.plain for kind in kinds}
        if len(plain) > 1 or None in plain:
            return None
        ((dtype, channels),) = (found for found in plain if found is not None)
        flat = self.entries[dtype]
        if len(kinds) > 1:
            # Raises an error that names the difference, such as kernels of different sizes.
            NetworkSpec.union(kind.layout.spec for kind in kinds)
            return self._mixed(flat, dtype, channels, kinds)
        rows = flat.view(len(self), -1)
        return {
            key: rows[:, e.begin : e.end].reshape(len(self) * e.shape[0], *e.shape[1:])
            for key, e in kinds[0].features.items()
        }

    def _mixed(
        self, flat: Tensor, dtype: torch.dtype, channels: int, kinds: Sequence[Architecture]
    ) -> dict[Key, Tensor]:
        """Gathers the features of networks of several architectures, type after type."""
        taps = {key: e.shape[1] for kind in kinds for key, e in kind.features.items()}
        spans = np.array([[kind.span(key) for key in taps] for kind in kinds])
        number = {id(kind): i for i, kind in enumerate(kinds)}
        which = [number[id(architecture)] for architecture in self.architectures]
        records = np.array([kind.record_sizes[dtype] for kind in kinds])[which]
        first = records.cumsum() - records
        # The positions and numbers of entries, type by type and network by network.
        begin = (spans[which, :, 0] + first[:, None]).T.ravel()
        count = spans[which, :, 1].T.ravel()
        index = np.repeat(begin - (count.cumsum() - count), count)
        index += np.arange(len(index))
        # Viewed as integers, which can be gathered for all types.
        whole = flat.view(_INTEGERS[dtype.itemsize])
        moved = whole.index_select(0, torch.from_numpy(index)).view(dtype)
        sizes = count.reshape(len(taps), -1).sum(1).tolist()
        found: dict[Key, Tensor] = {}
        for (key, of_each), part in zip(taps.items(), moved.split(sizes), strict=True):
            # Neurons without a bias have no entries that could be counted.
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
