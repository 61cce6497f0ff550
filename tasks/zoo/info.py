"""What a folder holds: a zoo of ours, or one that others published."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset, open_zoo
from nfn_graph.converters.store.description import is_store
from nfn_graph.messages import UserError
from nfn_graph.tasks.zoo.folder import open_networks

Facts = dict[str, Any]


def zoo_facts(path: Path, split_file: Path | None = None) -> Facts:
    """What is known of the networks in a folder, the first one looked at more closely.

    Args:
        path: The folder.
        split_file: The published splits of a zoo that keeps them elsewhere.
    """
    if is_store(path):
        if split_file is not None:
            raise UserError(
                f"Expected no --split-file for '{path}', whose table has its splits (got "
                f"'{split_file}')"
            )
        return _own_facts(path)
    zoo = open_zoo(path, split_file=split_file)
    about = asdict(zoo.description)
    rule = about.pop("splits")
    return {
        **about,
        "networks": len(zoo),
        "splits": {name: len(indices) for name, indices in zoo.splits.items()},
        "split rule": rule,
        **_first(zoo[0], zoo.row(0)),
    }


def accuracy_line(zoo: WeightDataset) -> str:
    """How many classifiers a zoo holds, and how good they are."""
    found = sorted(row["test_accuracy"] for row in zoo.rows)
    return (
        f"{zoo.folder}: {len(zoo)} checkpoints, test accuracy {found[0]:.3f} to {found[-1]:.3f}, "
        f"median {found[len(found) // 2]:.3f}"
    )


def _own_facts(path: Path) -> Facts:
    zoo = open_networks(path)
    about = dict(zoo.description)
    options = about.pop("options", {})
    return {
        "layout": "nfn-graph",
        **about,
        "options": {name: value for name, value in options.items() if value is not None},
        "networks": len(zoo),
        "splits": dict(Counter(row["split"] for row in zoo.rows if "split" in row)),
        **_first(zoo[0], zoo[:1].rows[0]),
    }


def _first(graph: WeightGraph, row: Facts) -> Facts:
    tensors = {key: p.shape for p in graph.layout.placements for key in p.keys}
    return {
        "columns": list(row),
        "first network": row,
        "tensors": {key: list(shape) for key, shape in tensors.items()},
        "types": str(graph.spec),
    }


def as_text(path: Path, facts: Facts) -> str:
    """One line for each fact that is known."""
    width = max(map(len, facts)) + 2
    lines = [f"{name:{width}}{_text(value)}" for name, value in facts.items() if _is_known(value)]
    return "\n".join([str(path), *lines])


def _is_known(value: Any) -> bool:
    return value is not None and value not in ((), [], {})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(member)}" for name, member in value.items())
    if isinstance(value, list | tuple) and all(isinstance(member, int) for member in value):
        return " x ".join(map(str, value))
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)


def as_json(path: Path, facts: Facts) -> str:
    """The same as one JSON object."""
    return json.dumps({"path": str(path), **facts}, default=str)
