"""The folder of a run.

config.json        the task, its options, versions, the zoo and the types of its networks
checkpoints/       last.ckpt, to resume from, and best.ckpt, the best epoch by validation
logs/metrics.csv   the learning curve; logs for TensorBoard beside it
predictions.csv    the split, the number and the predictions of every network
metrics.json       written last: a run that has it is finished
figures/*.png      and report.html
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nfn_graph.converters.files.atomic import replacing
from nfn_graph.messages import UserError
from nfn_graph.tasks.training.options import NEUTRAL


class RunFolder:
    """Reads and writes the files of a run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint of the best epoch."""
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def figures(self) -> Path:
        """The folder of the figures, made if need be."""
        path = self.path / "figures"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def is_finished(self) -> bool:
        """Whether the run has its metrics."""
        return (self.path / "metrics.json").is_file()

    def read(self, name: str) -> dict[str, Any]:
        """`config.json` or `metrics.json`."""
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected the folder of a run, with a file '{name}' (got '{self.path}')"
            )
        return read_json(path)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a JSON file in one step."""
        write_json(self.path / name, values)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration, or checks that a run that was begun has the same."""
        if not (self.path / "config.json").exists():
            # Another process of the same run may be writing the file at this moment.
            others = self.path.iterdir() if self.path.exists() else ()
            # A published zoo is imported before a run begins.
            if any(not path.name.startswith((".config.", "zoo")) for path in others):
                raise UserError(
                    f"Expected an empty folder or that of a run (got '{self.path}', which holds "
                    f"other files). Choose another --out."
                )
            self.write("config.json", config)
            return
        found, now = self.read("config.json"), json.loads(json.dumps(config))
        differing = [name for name in ("task", "zoo") if found[name] != now[name]]
        before, after = found["options"], now["options"]
        # By edges, the networks of a step depend on the number of devices.
        counted = ("devices", "nodes") if after["max_edges"] else ()
        differing += [
            name
            for name in {**before, **after}
            if (name not in NEUTRAL or name in counted) and before.get(name) != after.get(name)
        ]
        if differing:
            name = differing[0]
            was, got = (_shown(name, config) for config in (found, now))
            raise UserError(
                f"Expected the values that the run in '{self.path}' was begun with: {name} = {was} "
                f"(got {got}). Choose another --out, or delete that folder."
            )

    def write_predictions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes `predictions.csv`."""
        write_csv(self.path / "predictions.csv", rows)


def _shown(name: str, config: Mapping[str, Any]) -> Any:
    """A part of the configuration, as text for an error message."""
    if name == "task":
        return config["task"]
    if name != "zoo":
        return config["options"].get(name)
    # The same folder may hold another zoo by now.
    counts = ", ".join(f"{n} {split}" for split, n in config["zoo"]["networks"].items())
    fingerprint = config["zoo"]["fingerprint"][:8]
    return f"'{config['options']['zoo']}' with the checksum {fingerprint} and {counts} networks"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"Expected JSON in '{path}' (got: {error})") from error
    if not isinstance(found, dict):
        raise UserError(f"Expected a JSON object in '{path}' (got {type(found).__name__})")
    return found


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table in one step, with a column for every name in any of the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes an object; NaN and infinity become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_strict(values), indent=2, allow_nan=False) + "\n", "utf-8")


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _strict(x) for name, x in value.items()}
    return [_strict(x) for x in value] if isinstance(value, list | tuple) else value
