"""Zoos are stores: what a builder writes down, and shards by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters.state_dict import from_state_dict
from nfn_graph.converters.store.description import is_store, none_publishing, read_description
from nfn_graph.converters.store.writer import StoreWriter
from nfn_graph.messages import UserError
from nfn_graph.tasks.zoo.computation import computation_of

Row = dict[str, Any]
# What the keys of masks end in, among the tensors of a winning ticket.
MASK = "_mask"
# Options that say how and where to build a zoo, not what is in it.
_NEUTRAL = ("out", "shard", "engine", "device", "together")


class ZooWriter:
    """Writes the shards of a zoo, or the missing ones of a zoo that was begun.

    Args:
        folder: The zoo's folder, made if need be.
        kind: `cnn`, `inr`, `tickets` or `transformer`.
        options: What was asked for, as plain values.
        facts: What else a reader must know: data, checksums, conventions.
        graph_of: The graph of the tensors of a group, for networks that are no chains of layers.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        options: Mapping[str, Any],
        facts: Mapping[str, Any],
        graph_of: Callable[[str, Mapping[str, Tensor]], WeightGraph] | None = None,
    ) -> None:
        self._graph_of = graph_of
        chosen = {k: _plain(v) for k, v in options.items() if k not in _NEUTRAL}
        self.description = {"kind": kind, "options": chosen, **_plain(dict(facts))}
        if is_store(folder):
            _check_same(folder, self.description)
        self._writer = StoreWriter(folder, self.description)

    def is_done(self, shard: int) -> bool:
        """Whether a shard was published."""
        return self._writer.is_done(_name(shard))

    def publish(
        self, shard: int, networks: Sequence[tuple[Row, str, Mapping[str, Tensor]]]
    ) -> None:
        """Writes a shard: for every network its row, its group and its parameters.

        A shard that another process has published in the meantime stays as it is.
        """
        found = [
            ({**row, "group": group}, self._running(self._graph(parameters, group), row))
            for row, group, parameters in networks
        ]
        with none_publishing(self._writer.folder):
            if not self.is_done(shard):
                self._writer.publish(_name(shard), found)

    def _running(self, graph: WeightGraph, row: Row) -> WeightGraph:
        """The same graph, with what its network computes."""
        computation = computation_of(graph.layout, self.description["kind"], row)
        graph.layout = graph.layout.noting(computation=computation)
        return graph

    def _graph(self, parameters: Mapping[str, Tensor], group: str) -> WeightGraph:
        """The graph of a network; the masks of a winning ticket are a second channel."""
        if self._graph_of is not None:
            return self._graph_of(group, parameters)
        own = {key: x for key, x in parameters.items() if not key.endswith(MASK)}
        channels = None
        if len(own) < len(parameters):
            # Biases have no mask of their own: all of them are kept.
            masks = {k: parameters.get(f"{k}{MASK}", torch.ones_like(x)) for k, x in own.items()}
            channels = {"mask": {k: masks[k].to(x.dtype) for k, x in own.items()}}
        example = None
        if self.description["options"].get("arch") == "cnn":
            # Only its shape counts.
            example = torch.empty(1, *self.description["image_shape"], device="meta")
        return from_state_dict(
            own,
            flatten=self.description.get("flatten"),
            example_input=example,
            channels=channels,
        )


def _name(shard: int) -> str:
    return f"{shard:05d}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _check_same(folder: Path, description: Mapping[str, Any]) -> None:
    """Raises if a zoo was begun differently; where its data lie does not matter."""
    found = read_description(folder)
    if "options" not in found:
        raise UserError(
            f"Expected a zoo in '{folder}' (got a store of converted files). Choose another folder."
        )
    found = {k: v for k, v in found.items() if k not in ("format", "version")}
    for before, after in ((found, description), (found["options"], description["options"])):
        for name in {**before, **after}:
            if name not in ("options", "data") and before.get(name) != after.get(name):
                raise UserError(
                    f"Expected what the zoo in '{folder}' was begun with: "
                    f"{name.replace('_', '-')} = {before.get(name)} (got {after.get(name)}). "
                    f"Choose another folder, or delete that one."
                )
