"""A zoo as its users see it: a table, and a graph for every row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.state_dict import from_state_dict
from nfn_graph.tasks.zoo.arrow import arrow, parquet
from nfn_graph.tasks.zoo.store import Row, read_description

# What the keys of masks end in, in a zoo of winning tickets.
MASK = "_mask"


def open_zoo_folder(path: str | Path) -> ZooFolder:
    """The zoo in a folder; shards that are not built yet are left out."""
    return ZooFolder(Path(path))


class ZooFolder(Sequence[WeightGraph]):
    """The networks of a zoo, in the order of its table.

    Weights are mapped into memory; a network is read when it is asked for. `zoo[i]` is its
    graph, with its row as the attribute `row`; of a zoo of winning tickets, with the mask as
    a second channel.

    Args:
        folder: The zoo's folder.
        table: A part of its table (`pyarrow.Table`); all of it if None.
    """

    def __init__(self, folder: Path, table: Any = None) -> None:
        self.folder = folder
        self.description = read_description(folder)
        self.table = _read_table(folder) if table is None else table
        self._shards: dict[int, Mapping[str, Tensor]] = {}

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table as dicts."""
        rows: list[Row] = self.table.to_pylist()
        return rows

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        masks = self.masks(index)
        graph = from_state_dict(
            self.state_dict(index),
            flatten=self.description.get("flatten"),
            example_input=self._example,
            channels={"mask": masks} if masks else None,
        )
        graph.row = self.rows[index]
        return graph

    def __iter__(self) -> Iterator[WeightGraph]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def _example(self) -> Tensor | None:
        """An input of convolutional networks; only its shape counts."""
        if self.description["options"].get("arch") != "cnn":
            return None
        return torch.empty(1, *self.description["image_shape"], device="meta")

    def state_dict(self, index: int) -> dict[str, Tensor]:
        """The checkpoint of one network."""
        found = self._tensors(index)
        return {key: found[key] for key in sorted(found, key=_layer) if not key.endswith(MASK)}

    def masks(self, index: int) -> dict[str, Tensor]:
        """Of a zoo of winning tickets, where each parameter of a network is kept."""
        found = self._tensors(index)
        if not any(key.endswith(MASK) for key in found):
            return {}
        # Biases have no mask of their own: all of them are kept.
        return {
            key: found.get(f"{key}{MASK}", torch.ones_like(x)).to(x.dtype)
            for key, x in self.state_dict(index).items()
        }

    def _tensors(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        prefix = f"{row['group']}/"
        stacks = self._shard(row["shard"])
        return {
            key.removeprefix(prefix): tensor[row["row"]].clone()
            for key, tensor in stacks.items()
            if key.startswith(prefix)
        }

    def select(self, indices: Sequence[int]) -> ZooFolder:
        """Some of the networks, as a zoo."""
        return self._with(self.table.take(arrow().array(list(indices), arrow().int64())))

    def where(self, **values: Any) -> ZooFolder:
        """The networks whose columns have these values: `where(split="train", width=16)`."""
        for name in values:
            if name not in self.table.column_names:
                raise ValueError(
                    f"Expected a column of the zoo: {self.table.column_names} (got '{name}')"
                )
        rows = self.rows
        return self.select(
            [i for i, row in enumerate(rows) if all(row[k] == v for k, v in values.items())]
        )

    def _with(self, table: Any) -> ZooFolder:
        part = ZooFolder(self.folder, table)
        part._shards = self._shards
        return part

    def _shard(self, number: int) -> Mapping[str, Tensor]:
        if number not in self._shards:
            path = self.folder / "weights" / f"{number:05d}.safetensors"
            self._shards[number] = safetensors.read(path)
        return self._shards[number]


def _read_table(folder: Path) -> Any:
    paths = sorted((folder / "metadata").glob("[0-9]*.parquet"))
    if not paths:
        raise ValueError(f"Expected at least one finished shard of the zoo '{folder}' (got none)")
    pq, pa = parquet(), arrow()
    try:
        return pa.concat_tables([pq.read_table(path) for path in paths])
    except pa.ArrowException as error:
        raise ValueError(
            f"Expected complete tables in '{folder}/metadata' (got: {error})"
        ) from error


def _layer(key: str) -> tuple[int, str]:
    """Layers in order, the weight before the bias."""
    _, number, name = key.split(".")
    return int(number), "" if name == "weight" else name


def stack_state_dicts(zoo: ZooFolder, indices: Sequence[int]) -> dict[str, Tensor]:
    """The parameters of networks of one architecture along a first axis."""
    groups = {zoo.rows[i]["group"] for i in indices}
    if len(groups) != 1:
        raise ValueError(f"Expected networks of one architecture (got {sorted(groups)})")
    found = [zoo.state_dict(i) for i in indices]
    return {key: torch.stack([f[key] for f in found]) for key in found[0]}
