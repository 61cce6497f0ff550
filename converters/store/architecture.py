"""What all networks of an architecture share: their layout, and the order of their entries."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.converters.files.graph import (
    DTYPES,
    layout_from_json,
    put_together,
    take_apart,
    unpack,
)
from nfn_graph.converters.files.graph_checks import check_graph
from nfn_graph.converters.state_dict import to_state_dict
from nfn_graph.converters.store.shards import StoreDamageError, damage_error
from nfn_graph.data import Layout
from nfn_graph.messages import one_line
from nfn_graph.spec import Key

FOLDER = "architectures"


class Entries(NamedTuple):
    """A tensor that every network of an architecture has.

    Attributes:
        place: Its name in `GraphParts.tensors`.
        dtype: Its type. The entries of one type form one record.
        shape: Its shape.
        begin: The position of its first entry in the record.
        end: The position after its last entry.
    """

    place: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Network(NamedTuple):
    """A network, ready to be written.

    Attributes:
        architecture: The part that it shares with other networks.
        tensors: Its tensors, in the order of `architecture.entries`.
        notes: Its other values as JSON; None if there are none.
    """

    architecture: Architecture
    tensors: list[Tensor]
    notes: str | None


class Architecture:
    """The layout of many networks, and the positions of their tensors in a record.

    Args:
        text: The JSON document that describes it. Its checksum is the architecture's name, so
            damage is detected.
        path: The file that it was read from, if any.
    """

    def __init__(self, text: str, path: Path | None = None) -> None:
        self.text = text
        self.path = path
        self.name = hashlib.sha256(text.encode()).hexdigest()[:24]
        document = json.loads(text)
        self.entries: list[Entries] = []
        self.record_sizes: dict[torch.dtype, int] = {}
        for place, type_, shape in document["tensors"]:
            dtype = DTYPES[type_]
            begin = self.record_sizes.get(dtype, 0)
            end = begin + math.prod(shape)
            self.record_sizes[dtype] = end
            self.entries.append(Entries(place, dtype, tuple(shape), begin, end))
        # Every network has its own carried tensors. Here, empty tensors take their places.
        places = {entry.place: torch.empty(0) for entry in self.entries}
        self.layout = layout_from_json(document["layout"], places)

    @cached_property
    def has_own_layouts(self) -> bool:
        """Whether the layouts of single networks hold values of their own."""
        layout: Layout | None = self.layout
        while layout is not None:
            if layout.carried:
                return True
            layout = None if layout.before is None else layout.before[1]
        return False

    @cached_property
    def features(self) -> dict[Key, Entries]:
        """The entries of the features of every type."""
        found: dict[Key, Entries] = {}
        for entry in self.entries:
            kind, *store, attribute = entry.place.split("/")
            if kind == "store" and store != ["graph"] and attribute in ("x", "edge_attr"):
                found[store[0] if len(store) == 1 else (store[0], store[1], store[2])] = entry
        return found

    @cached_property
    def plain(self) -> tuple[torch.dtype, int] | None:
        """The dtype and channels of all features; None if they differ or there is other data."""
        stored = [e for e in self.entries if e.place.startswith("store/")]
        kinds = {(e.dtype, e.shape[2]) for e in self.features.values()}
        if len(stored) > len(self.features) or len(kinds) != 1 or self.layout.within is not None:
            return None
        return kinds.pop()

    def span(self, key: Key) -> tuple[int, int]:
        """Returns the position and the number of a type's feature entries in the record."""
        entry = self.features.get(key)
        return (0, 0) if entry is None else (entry.begin, entry.end - entry.begin)

    def check(self) -> None:
        """Raises `ValueError` unless the layout and the tensors are consistent."""
        tensors = {
            e.place: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in self.entries
        }
        graph = put_together(self.layout, tensors, {})
        check_graph(graph)
        if self.layout.placements:
            to_state_dict(graph)

    def tensors(self, records: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors in the records of one network."""
        return {e.place: records[e.dtype][e.begin : e.end].view(e.shape) for e in self.entries}

    def own_layout(self, tensors: Mapping[str, Tensor], notes: Sequence[Any]) -> Layout:
        """Returns the layout of one network, with its carried values."""
        if not self.has_own_layouts and not any(notes):
            return self.layout
        return _carrying(self.layout, tensors, notes, "carried")

    def graph(self, records: Mapping[torch.dtype, Tensor], notes: str | None) -> WeightGraph:
        """Builds the graph of one network, which shares memory with its records."""
        tensors = self.tensors(records)
        if not notes:
            return put_together(self.own_layout(tensors, []), tensors, {})
        try:
            carried, other = json.loads(notes)
            graph = put_together(self.own_layout(tensors, carried), tensors, other)
            # Notes may contain anything, including values in place of tensors.
            check_graph(graph)
        except Exception as error:  # Damaged notes may cause any error.
            raise ConversionError(
                f"Expected the notes that were written for a network (got {notes[:80]!r}: "
                f"{one_line(error)}). The table of the store is damaged."
            ) from error
        return graph

    def __reduce__(self) -> Any:
        # Batches are sent between processes with the name of the file instead of its content.
        if self.path is None:
            return Architecture, (self.text,)
        return read_architecture, (self.path,)


def describe(graph: WeightGraph, known: dict[Any, Architecture]) -> Network:
    """Converts a graph to the form in which it is written."""
    parts = take_apart(graph)
    carried = _take_values(parts.layout)
    tensors = [
        (place, str(tensor.dtype), tuple(tensor.shape)) for place, tensor in parts.tensors.items()
    ]
    for place, tensor in parts.tensors.items():
        if tensor.dtype not in safetensors.DTYPES or tensor.layout != torch.strided:
            raise ConversionError(
                f"Expected '{place}' of a type that safetensors files support (got a tensor of "
                f"{tensor.dtype}, {tensor.layout})"
            )
    layout: Layout = graph.layout
    # All that the document depends on. Layouts before a transform are written, but not compared.
    signature = (
        *(layout, layout.computation, layout.keys, str(layout.channels), tuple(layout.carried)),
        tuple(layout.aside.items()),
        tuple(tensors),
    )
    found = known.get(signature) if layout.before is None else None
    if found is None:
        found = Architecture(json.dumps({"layout": parts.layout, "tensors": tensors}))
        if layout.before is None:
            known[signature] = found
    notes = json.dumps([carried, parts.notes]) if parts.notes or any(carried) else None
    return Network(found, list(parts.tensors.values()), notes)


def architecture_file(folder: Path, name: str) -> Path:
    """Returns the path of an architecture in a store; its name is its checksum."""
    return folder / FOLDER / f"{name}.json"


@functools.lru_cache(maxsize=1024)
def read_architecture(path: Path) -> Architecture:
    """Reads an architecture from a file whose name is its checksum."""
    try:
        found = Architecture(check_regular(path).read_text("utf-8"), path)
        found.check()
    except FileNotFoundError as error:
        raise damaged_architecture(path, "none") from error
    except Exception as error:  # A damaged document may cause any error.
        raise damaged_architecture(path, f"{type(error).__name__}: {error}") from error
    if found.name != path.stem:
        raise damaged_architecture(path, f"one with the checksum {found.name}")
    return found


def damaged_architecture(path: Path, got: str) -> StoreDamageError:
    """Returns the error for an architecture that is missing or has changed."""
    return damage_error(
        path,
        got,
        "convert again with --overwrite; for a zoo, delete the records in 'shards' that name it, "
        "and build it again",
    )


def _take_values(layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Replaces carried values by None, and returns those of this layout and of previous ones."""
    own = dict(layout["carried"])
    layout["carried"] = dict.fromkeys(own)
    before = layout["before"]
    return [own, *(_take_values(before[1]) if before is not None else [])]


def _carrying(
    layout: Layout, tensors: Mapping[str, Tensor], notes: Sequence[Any], place: str
) -> Layout:
    values = {key: unpack(value) for key, value in (notes[0] if notes else {}).items()}
    values |= {k: tensors[f"{place}/{k}"] for k in layout.carried if f"{place}/{k}" in tensors}
    if values.keys() != layout.carried.keys():
        raise ConversionError(
            f"Expected values of {list(layout.carried)}, which the network carries along (got "
            f"{list(values)}). The table of the store is damaged."
        )
    carried = {key: values[key] for key in layout.carried}
    before = layout.before
    if before is not None:
        before = (before[0], _carrying(before[1], tensors, notes[1:], f"before/{place}"))
    return layout.noting(carried=carried, before=before)
