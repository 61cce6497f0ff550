"""Published splits: JSON files with lists of paths that name the files of a zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.files import read_json
from nfn_graph.messages import UserError

#: The names of splits in published files and folders, and our names.
SPLIT_NAMES = {"train": "train", "val": "validation", "test": "test"}


class Splits(NamedTuple):
    """The content of a split file.

    Attributes:
        indices: The networks of each split.
        columns: Further lists in the file, such as labels: by name, a value for each network that
            is in a split.
    """

    indices: dict[str, list[int]]
    columns: dict[str, dict[int, Any]]


def refuse_split_file(path: Path, given: Path | None) -> None:
    """Raises if a split file was given for a layout that has none."""
    if given is not None:
        raise UserError(f"Expected no split file for '{path}' (got '{given}')")


def find_split_file(path: Path, names: Sequence[str], given: Path | None) -> Path | None:
    """Returns the given split file, or one of these names in the zoo's folder or above it."""
    if given is not None:
        if not given.is_file():
            raise FileNotFoundError(f"Expected a split file (got '{given}', which is not a file)")
        return given
    candidates = [folder / name for folder in (path, path.parent) for name in names]
    return next((file for file in candidates if file.is_file()), None)


def read_splits(file: Path, paths: Sequence[str]) -> Splits:
    """Reads the splits of a file, whose paths may begin with folders of another machine.

    Args:
        file: `{"train": {"path": [...], "label": [...]}, ...}` or `{"train": [...], ...}`.
        paths: The networks' paths within the zoo, with `/`, all of the same depth.
    """
    content = read_json(file)
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLIT_NAMES):
        got = list(content)[:5] if isinstance(content, dict) else type(content).__name__
        raise ConversionError(
            f"Expected the splits {', '.join(SPLIT_NAMES)} in '{file}' (got {got})"
        )
    depth = paths[0].count("/") + 1
    index = {path: i for i, path in enumerate(paths)}
    splits = Splits({}, {})
    seen: dict[int, str] = {}
    for split in (name for name in SPLIT_NAMES if name in content):
        lists = _lists(file, split, content[split])
        found = splits.indices.setdefault(SPLIT_NAMES[split], [])
        for number, path in enumerate(lists.pop("path")):
            record = f"entry {number} of '{split}'"
            # Paths from another machine may contain backslashes.
            parts = path.replace("\\", "/").split("/") if isinstance(path, str) else []
            at = index.get("/".join(parts[-depth:]))
            if at is None:
                raise ConversionError(
                    f"Expected a network of the zoo as {record} in '{file}' (got {path!r}). The "
                    f"zoo is incomplete, or the file belongs to another one"
                )
            if at in seen:
                raise ConversionError(
                    f"Expected every network once in '{file}' (got {path!r} as {seen[at]} and as "
                    f"{record})"
                )
            seen[at] = record
            found.append(at)
        for name, values in lists.items():
            splits.columns.setdefault(name, {}).update(zip(found, values, strict=True))
    return splits


def _lists(file: Path, split: str, content: Any) -> dict[str, list[Any]]:
    lists = dict(content) if isinstance(content, Mapping) else {"path": content}
    if "path" not in lists or not all(isinstance(values, list) for values in lists.values()):
        raise ConversionError(
            f"Expected a list of paths under '{split}' in '{file}' (got {list(lists)})"
        )
    for name, values in lists.items():
        if len(values) != len(lists["path"]):
            raise ConversionError(
                f"Expected {len(lists['path'])} entries '{name}' of '{split}' in '{file}', one "
                f"for each path (got {len(values)})"
            )
    return lists
