"""A zoo as its users see it: a table, and a graph for every row."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.state_dict import to_state_dict
from nfn_graph.converters.store.arrow import arrow
from nfn_graph.converters.store.description import FILE
from nfn_graph.messages import UserError
from nfn_graph.tasks.zoo.store import Row

_NUMBER = (int, float)
# What tasks read of zoos, by kind: options and facts in store.json, columns of the table.
_OPTIONS: dict[str, dict[str, Any]] = {
    "cnn": {},
    "inr": {"w0": _NUMBER},
    "tickets": {"sparsity": _NUMBER, "scope": str},
}
_FACTS: dict[str, dict[str, Any]] = {
    "cnn": {"fingerprint": str},
    "inr": {"fingerprint": str, "classes": list, "signal": str, "output_offset": _NUMBER},
    "tickets": {"fingerprint": str},
}
_COLUMNS = {
    "cnn": {"width": "integer", "is_finite": "boolean", "test_accuracy": "floating"},
    "inr": {"label": "integer", "w0": "floating", "output_offset": "floating", "mse": "floating"},
    "tickets": {"seed": "integer", "is_finite": "boolean", "scope": "string"},
}
# Networks are drawn at this size, which memory must allow; no image is larger.
_MAX_PIXELS = 2**28
_EVERY_COLUMN = {"network": "integer", "split": "string", "group": "string"}


def open_zoo_folder(path: str | Path) -> ZooFolder:
    """The zoo in a folder; shards that are not built yet are left out."""
    zoo = ZooFolder(path)
    if "kind" not in zoo.description:
        raise UserError(
            f"Expected a zoo (got '{path}', a store of converted files). See it with: nfn-graph "
            f"store {path}; build a zoo with: nfn-graph zoo"
        )
    _check_description(zoo)
    _check_columns(zoo)
    return zoo


def _check_description(zoo: ZooFolder) -> None:
    """Raises unless the description says what tasks ask of it."""
    about, where = zoo.description, zoo.folder / FILE
    kind, options = about["kind"], about.get("options")
    if kind not in tuple(_FACTS) or not isinstance(options, dict):
        raise ConversionError(
            f"Expected a zoo of kind {', '.join(_FACTS)} with its options in '{where}' (got kind "
            f"{kind!r}). It is damaged, or of another version."
        )
    for holder, needed in ((about, _FACTS[kind]), (options, _OPTIONS[kind])):
        for name, type_ in needed.items():
            if not isinstance(holder.get(name), type_):
                raise _missing(f"'{name}' of the zoo in '{where}'", holder.get(name))
    shape: Any = about.get("image_shape")
    is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if about.get("signal") == "image" and not (
        is_shape and len(shape) == 3 and math.prod(shape) <= _MAX_PIXELS
    ):
        raise _missing(f"'image_shape' of the zoo in '{where}'", shape)


def _check_columns(zoo: ZooFolder) -> None:
    table = zoo.store.table
    for name, type_ in {**_EVERY_COLUMN, **_COLUMNS[zoo.description["kind"]]}.items():
        what = f"the column '{name}' in the table of the zoo '{zoo.folder}'"
        if name not in table.column_names:
            raise _missing(what, None)
        column, types = table.column(name), arrow().types
        # Whole numbers are numbers.
        is_right = getattr(types, f"is_{type_}")(column.type) or (
            type_ == "floating" and types.is_integer(column.type)
        )
        if not is_right or column.null_count:
            raise _missing(what, f"{column.type} with {column.null_count} gaps")


def _missing(what: str, got: object) -> ConversionError:
    return ConversionError(
        f"Expected {what} (got {got!r}). The zoo is damaged, or of another version: build it again."
    )


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
