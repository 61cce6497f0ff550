"""Writes a store, shard by shard, each completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.store.architecture import (
    Architecture,
    Network,
    architecture_file,
    describe,
)
from nfn_graph.converters.store.description import create, is_store
from nfn_graph.converters.store.shards import (
    METADATA,
    PLACE,
    SHARDS,
    WEIGHTS,
    Shard,
    file_of,
    publish,
)
from nfn_graph.converters.store.table import arrow, parquet
from nfn_graph.messages import UserError

Row = dict[str, Any]


class StoreWriter:
    """Publishes shards of networks in a folder.

    Several processes may write to one store if the names of their shards differ. Shards that a
    killed process has not published are ignored.

    Args:
        folder: The folder of the store; a new or empty folder becomes a new store.
        description: The description of a new store, in `store.json`.
        types: The Arrow types of some columns; the types of others follow from their values.

    Example:
        >>> import pathlib, tempfile
        >>> from torch import nn
        >>> from nfn_graph.converters import WeightDataset, from_module
        >>> from nfn_graph.converters.store import StoreWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = StoreWriter(pathlib.Path(folder, "store"), {"about": "two linear layers"})
        ...     networks = [({"seed": i}, from_module(nn.Linear(2, 1))) for i in range(2)]
        ...     shard = writer.publish("first", networks)
        ...     print(writer.is_done("first"), len(WeightDataset(writer.folder)))
        True 2
    """

    def __init__(
        self, folder: Path, description: Mapping[str, Any], types: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.types = dict(types or {})
        self._known: dict[Any, Architecture] = {}
        if not is_store(folder):
            create(folder, description)

    def is_done(self, name: str) -> bool:
        """Whether a shard was published."""
        return file_of(self.folder, SHARDS, name).exists()

    def describe(self, graph: WeightGraph) -> Network:
        """Converts a graph to the form in which it is written; raises if that is impossible."""
        return describe(graph, self._known)

    def publish(self, name: str, networks: Iterable[tuple[Row, WeightGraph | Network]]) -> Shard:
        """Writes a shard of graphs, each with its row of the table.

        Args:
            name: The name of the shard, which must not be published yet.
            networks: Rows and graphs. Rows must not have the columns in `PLACE`.
        """
        self.clean(name)
        rows: list[Row] = []
        groups: dict[str, list[Network]] = {}
        for row, graph in networks:
            taken = [column for column in PLACE if column in row]
            if taken:
                raise UserError(
                    f"Expected columns other than {', '.join(PLACE)}, which lead to a network (got "
                    f"'{taken[0]}' in a row for shard '{name}'). Rename it"
                )
            network = graph if isinstance(graph, Network) else self.describe(graph)
            group = groups.setdefault(network.architecture.name, [])
            place = (name, network.architecture.name, len(group), network.notes)
            rows.append({**row, **dict(zip(PLACE, place, strict=True))})
            group.append(network)
        if not rows:
            raise UserError(f"Expected networks for shard '{name}' (got none)")
        tensors: dict[str, Tensor] = {}
        for group in groups.values():
            self._keep(group[0].architecture)
            tensors.update(_stack(group))
        # Sorted as the format sorts them, so that the same networks result in the same bytes.
        by_rule = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
        ordered = {key: tensors[key] for key in by_rule}
        safetensors.write(file_of(self.folder, WEIGHTS, name), ordered)
        # Arrow takes the columns of a list of rows from the first row.
        columns = dict.fromkeys(column for row in rows for column in row)
        table = arrow().Table.from_pylist([{**dict.fromkeys(columns), **row} for row in rows])
        # A column without a value in any row has no type.
        for column, type_ in {**self.types, "notes": arrow().string()}.items():
            at = table.column_names.index(column)
            table = table.set_column(at, column, table.column(column).cast(type_))
        with replacing(file_of(self.folder, METADATA, name)) as temporary:
            parquet().write_table(table, temporary)
        return publish(self.folder, name, len(rows), tuple(groups))

    def clean(self, *names: str) -> None:
        """Deletes files of shards that a killed process did not publish."""
        for name in names:
            if self.is_done(name):
                raise UserError(f"Expected a new shard (got '{name}', which is already published)")
            for part in (SHARDS, METADATA, WEIGHTS):
                path = file_of(self.folder, part, name)
                for left in (path, *path.parent.glob(f".{name}.*")):
                    left.unlink(missing_ok=True)

    def _keep(self, architecture: Architecture) -> None:
        path = architecture_file(self.folder, architecture.name)
        content = architecture.text.encode()
        # A damaged file is repaired.
        if not path.is_file() or path.read_bytes() != content:
            with replacing(path) as temporary:
                temporary.write_bytes(content)


def record_key(architecture: str, dtype: torch.dtype) -> str:
    """Returns the name of the records `[networks, entries]` of one type in a weights file."""
    return f"{architecture}/{str(dtype).removeprefix('torch.')}"


def _stack(networks: list[Network]) -> dict[str, Tensor]:
    """Stacks the records of networks of one architecture."""
    architecture = networks[0].architecture
    stacks = {}
    for dtype, size in architecture.record_sizes.items():
        stack = torch.empty(len(networks), size, dtype=dtype)
        for row, network in zip(stack, networks, strict=True):
            for entry, tensor in zip(architecture.entries, network.tensors, strict=True):
                if entry.dtype == dtype:
                    row[entry.begin : entry.end] = tensor.detach().reshape(-1)
        stacks[record_key(architecture.name, dtype)] = stack
    return stacks
