"""A zoo as its users see it: a table, and a graph for every row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.state_dict import to_state_dict
from nfn_graph.tasks.zoo.store import Row


def open_zoo_folder(path: str | Path) -> ZooFolder:
    """The zoo in a folder; shards that are not built yet are left out."""
    zoo = ZooFolder(path)
    if "kind" not in zoo.description:
        raise ValueError(
            f"Expected a zoo (got '{path}', a store of converted files). See it with: nfn-graph "
            f"store {path}; build a zoo with: nfn-graph zoo"
        )
    return zoo


class ZooFolder(WeightDataset):
    """The networks of a zoo, in the order of its table.

    `zoo[i]` is a graph with its row as the attribute `row`; of a zoo of winning tickets, with
    the mask as a second channel.
    """

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table as dicts."""
        return [self.store.rows[i] for i in self.indices()]

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of all that decides the networks: two zoos of the same images differ in it."""
        about = {**self.description, "options": {**self.description["options"], "data": None}}
        return hashlib.blake2b(
            json.dumps(about, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def get(self, idx: int) -> WeightGraph:
        """The graph at a position of the store's table."""
        graph = super().get(idx)
        graph.row = self.store.rows[idx]
        return graph

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Several graphs, with their rows."""
        return [self[i] for i in indices]

    def index_select(self, idx: Any) -> ZooFolder:
        """Some of the networks, as a zoo."""
        part = super().index_select(idx)
        part.__dict__.pop("rows", None)
        return part

    def state_dict(self, index: int) -> dict[str, Tensor]:
        """The checkpoint of one network."""
        return to_state_dict(self.store.graph(self.indices()[index]))

    def masks(self, index: int) -> dict[str, Tensor]:
        """Of a zoo of winning tickets, where each parameter of a network is kept."""
        graph = self.store.graph(self.indices()[index])
        return to_state_dict(graph, "mask") if "mask" in graph.layout.channels else {}
