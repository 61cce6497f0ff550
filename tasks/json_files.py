"""JSON files that are written in one step, and that every reader of JSON can read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nfn_graph.converters.files.atomic import replacing
from nfn_graph.messages import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"Expected JSON in '{path}' (got: {error})") from error
    if not isinstance(found, dict):
        raise UserError(f"Expected a JSON object in '{path}' (got {type(found).__name__})")
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes an object; a number that is none (NaN or infinity) becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_strict(values), indent=2, allow_nan=False) + "\n", "utf-8")


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _strict(x) for name, x in value.items()}
    return [_strict(x) for x in value] if isinstance(value, list | tuple) else value
