"""Opening the zoos that were built, checking them, and describing their contents."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset, open_zoo
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.store.description import FILE, is_store
from nfn_graph.converters.store.table import arrow
from nfn_graph.messages import UserError

_NUMBER = (int, float)
# What tasks read of zoos, by kind: options and facts in store.json, columns of the table.
_OPTIONS: dict[str, dict[str, Any]] = {
    "cnn": {},
    "inr": {"w0": _NUMBER},
    "tickets": {"sparsity": _NUMBER, "scope": str},
    "transformer": {},
}
_FACTS: dict[str, dict[str, Any]] = {
    "cnn": {"fingerprint": str},
    "inr": {"fingerprint": str, "classes": list, "signal": str, "output_offset": _NUMBER},
    "tickets": {"fingerprint": str},
    "transformer": {"fingerprint": str},
}
_COLUMNS = {
    "cnn": {"width": "integer", "is_finite": "boolean", "test_accuracy": "floating"},
    "inr": {"label": "integer", "w0": "floating", "output_offset": "floating", "mse": "floating"},
    "tickets": {"seed": "integer", "is_finite": "boolean", "scope": "string"},
    "transformer": {"width": "integer", "is_finite": "boolean", "test_accuracy": "floating"},
}
# Networks are drawn at this size, which memory must allow; no image is larger.
_MAX_PIXELS = 2**28
_EVERY_COLUMN = {"network": "integer", "split": "string", "group": "string"}
Facts = dict[str, Any]


def open_zoo_folder(path: str | Path) -> WeightDataset:
    """Opens a zoo that `nfn-graph zoo` built; shards that are not built yet are left out.

    The attribute `rows` has the metadata of its networks. A zoo of winning tickets has the mask
    as a second channel of every graph.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     small = {"widths": (2,), "depths": (1,), "epochs": (1, 1)}
        ...     options = CnnZooOptions(Path(folder), networks=2, train_fractions=(0.1,), **small)
        ...     zoo = open_zoo_folder(build_zoo(options))
        ...     print(len(zoo), zoo.rows[0]["width"])
        2 2
    """
    zoo = open_networks(path)
    if "kind" not in zoo.description:
        raise UserError(
            f"Expected a zoo (got '{path}', a store of converted files). See it with: nfn-graph "
            f"store {path}; build a zoo with: nfn-graph zoo"
        )
    return zoo


def open_networks(path: str | Path) -> WeightDataset:
    """The networks of any store; one that says that it is a zoo must be a whole one."""
    found = WeightDataset(path)
    if "kind" in found.description:
        _check_description(found)
        _check_columns(found)
    return found


def _check_description(zoo: WeightDataset) -> None:
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


def _check_columns(zoo: WeightDataset) -> None:
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


def zoo_facts(path: Path, split_file: Path | None = None) -> Facts:
    """Returns facts about the networks in a folder, with details of the first one.

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
    found = sorted(zoo.column("test_accuracy").to_pylist())
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
