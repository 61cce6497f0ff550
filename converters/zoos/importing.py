"""Imports a published zoo into a store, with its labels and splits as columns of the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters.store.description import is_store, none_publishing, read_description
from nfn_graph.converters.store.shards import PLACE
from nfn_graph.converters.store.table import COLUMN, SPLITS
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.converters.zoos.zoo import Row, Zoo
from nfn_graph.messages import UserError

#: The number of networks per shard of the store.
SHARD_SIZE = 1000


class Imported(NamedTuple):
    """The result of an import.

    Attributes:
        networks: The number of networks in the store.
        left_out: The number of networks that are in none of the published splits and were left out.
    """

    networks: int
    left_out: int


def import_zoo(
    zoo: Zoo,
    out: Path,
    *,
    train_split: str = "train",
    everything: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Imported:
    """Imports the networks of a published zoo into a store, and resumes if it was interrupted.

    The table contains the zoo's metadata of every network, its split, whether its weights are
    finite and, for INRs, `w0` and `output_offset`. Nested values are spread over columns
    (`config.seed`) or written as JSON. A network that the published splits list twice is stored
    twice.

    Args:
        zoo: An open zoo.
        out: The folder of the store, which is new or was begun by an earlier call.
        train_split: The published split to train on, such as `train_augmented`.
        everything: Whether to also import networks that are in none of the splits.
        on_done: A function that is called with the number of networks finished since the last call.
    """
    entries = _entries(zoo, train_split, everything)
    about = zoo.description
    description = {
        "published": about.layout,
        "label": about.label,
        "splits": about.splits,
        "train_split": train_split,
        "networks": len(entries),
        **({"assumptions": list(about.assumptions)} if about.assumptions else {}),
    }
    if is_store(out):
        _check_same(out, description)
    writer = StoreWriter(out, description)
    source = Zoo(zoo.source, zoo.indices, check_finite=False)
    for first in range(0, len(entries), SHARD_SIZE):
        name, some = f"{first // SHARD_SIZE:06d}", entries[first : first + SHARD_SIZE]
        if not writer.is_done(name):
            networks = list(_networks(source, some))
            with none_publishing(out):
                if not writer.is_done(name):
                    writer.publish(name, networks)
        if on_done is not None:
            on_done(len(some))
    return Imported(len(entries), len(zoo) - len({index for index, _ in entries}))


def _entries(zoo: Zoo, train_split: str, everything: bool) -> list[tuple[int, str | None]]:
    """Returns the networks to import, by position in the zoo, each with its split."""
    if zoo.splits and train_split not in zoo.splits:
        raise UserError(
            f"Expected a published split to train on: {', '.join(zoo.splits)} (got '{train_split}')"
        )
    position = {at: i for i, at in enumerate(zoo.indices)}
    names = {split: train_split if split == "train" else split for split in SPLITS}
    found: list[tuple[int, str | None]] = [
        (position[at], split)
        for split, published in names.items()
        for at in zoo.splits.get(published, ())
        if at in position
    ]
    if everything or not found:
        named = {i for i, _ in found}
        found += [(i, None) for i in range(len(zoo)) if i not in named]
    return found


def _networks(
    zoo: Zoo, chosen: Sequence[tuple[int, str | None]]
) -> Iterator[tuple[Row, WeightGraph]]:
    about = zoo.description
    for index, split in chosen:
        graph = zoo[index]
        row: Row = {"network": int(zoo.indices[index]), **_plain(graph.row)}
        del graph.row
        if zoo.splits:
            row[COLUMN] = split
        if about.w0 is not None:
            row |= {"w0": about.w0, "output_offset": about.output_offset or 0.0}
        entries = [store.x for store in graph.node_stores]
        entries += [store.edge_attr for store in graph.edge_stores]
        row["is_finite"] = all(bool(torch.isfinite(x).all()) for x in entries)
        yield row, graph


def _plain(row: Row, prefix: str = "") -> Row:
    """Converts values to those that a table supports: numbers, booleans and text."""
    found: Row = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _plain(value, f"{name}.")
            continue
        if not isinstance(value, str | int | float | bool | None):
            value = json.dumps(value, default=str)
        found[f"published_{name}" if name in (*PLACE, COLUMN) else name] = value
    return found


def _check_same(folder: Path, description: dict[str, Any]) -> None:
    """Raises if a store was begun with other settings."""
    found = read_description(folder)
    for name, value in description.items():
        if found.get(name) != value:
            raise UserError(
                f"Expected the settings that the import into '{folder}' was begun with: {name} = "
                f"{found.get(name)!r} (got {value!r}). Choose another folder, or delete that one."
            )
