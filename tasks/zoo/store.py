"""A zoo on the disk.

    zoo.json                    what it is: kind, options, data, conventions
    weights/00000.safetensors   the networks of a shard, stacked by architecture
    metadata/00000.parquet      a row for each of them

In a weights file, `{group}/{key}` is a tensor `[rows, ...]`: the parameter `key` of all
networks of that architecture. The columns `shard`, `group` and `row` of the table lead there.
A shard counts as soon as its table is there, which is published last, in one step; a process
that is killed leaves whole shards only, and the next one goes on with the missing ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.tasks.zoo.arrow import arrow, parquet

VERSION = 1
# Options that say how to build a zoo, not what is in it.
_NEUTRAL = ("out", "shard", "device", "together")
Row = dict[str, Any]


class ZooWriter:
    """Writes the shards of a zoo, or the missing ones of a zoo that was begun.

    Args:
        folder: The zoo's folder, made if need be.
        kind: `cnn` or `inr`.
        options: What was asked for, as plain values.
        facts: What else a reader must know: data, checksums, conventions.
    """

    def __init__(
        self, folder: Path, kind: str, options: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        chosen = {k: _plain(v) for k, v in options.items() if k not in _NEUTRAL}
        description = {"version": VERSION, "kind": kind, "options": chosen, **facts}
        path = folder / "zoo.json"
        if path.exists():
            _check_same(path, description)
            return
        for part in (folder / "weights", folder / "metadata"):
            part.mkdir(parents=True, exist_ok=True)
        if any((folder / "metadata").iterdir()):
            raise ValueError(
                f"Expected '{path}' next to the shards of a zoo (got none). Choose another "
                f"folder, or delete this one."
            )
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(description, indent=2) + "\n", "utf-8")

    def is_done(self, shard: int) -> bool:
        """Whether a shard was published."""
        return self._path("metadata", shard).exists()

    def publish(
        self, shard: int, networks: Sequence[tuple[Row, str, Mapping[str, Tensor]]]
    ) -> None:
        """Writes a shard: for every network its row, its group and its parameters."""
        self._clean(shard)
        stacks: dict[str, list[Tensor]] = {}
        rows: list[Row] = []
        counts: dict[str, int] = {}
        for row, group, parameters in networks:
            at = counts.setdefault(group, 0)
            counts[group] += 1
            rows.append({**row, "shard": shard, "group": group, "row": at})
            for key, tensor in parameters.items():
                stacks.setdefault(f"{group}/{key}", []).append(tensor)
        tensors = {key: torch.stack(parts) for key, parts in stacks.items()}
        safetensors.write(self._path("weights", shard), tensors)
        pa, pq = arrow(), parquet()
        with replacing(self._path("metadata", shard)) as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)

    def _path(self, part: str, shard: int) -> Path:
        suffix = "safetensors" if part == "weights" else "parquet"
        return self.folder / part / f"{shard:05d}.{suffix}"

    def _clean(self, shard: int) -> None:
        """Deletes what a killed process left of this shard."""
        for part in ("weights", "metadata"):
            for path in (self.folder / part).glob(f".{shard:05d}.*"):
                path.unlink(missing_ok=True)


def read_description(folder: Path) -> dict[str, Any]:
    """What `zoo.json` says."""
    path = folder / "zoo.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected the folder of a zoo, with a file 'zoo.json' (got '{folder}'). Build one "
            f"with: nfn-graph zoo cnn --out {folder}"
        )
    try:
        found = json.loads(path.read_text("utf-8"))
        version = found["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Expected the description of a zoo in '{path}' (got: {error})") from error
    if version != VERSION:
        raise ValueError(f"Expected version {VERSION} of the format in '{path}' (got {version})")
    return dict(found)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _check_same(path: Path, description: Mapping[str, Any]) -> None:
    """Raises if a zoo was begun differently; where its data lie does not matter."""
    found, now = read_description(path.parent), _plain(description)
    for before, after in ((found, now), (found["options"], now["options"])):
        for name in {**before, **after}:
            if name not in ("options", "data") and before.get(name) != after.get(name):
                raise ValueError(
                    f"Expected what the zoo in '{path.parent}' was begun with: "
                    f"{name.replace('_', '-')} = {before.get(name)} (got {after.get(name)}). "
                    f"Choose another folder, or delete that one."
                )
