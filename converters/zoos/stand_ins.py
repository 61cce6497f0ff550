"""Checkpoints with objects of foreign classes, read without these classes.

`torch.load(weights_only=True)` refuses a file that names a class it does not know, because the
class would run code. Here every such name is given a class of ours that keeps what the file says
of the object and does nothing else. So nothing of the file is run, and neither the foreign
package nor trust in the file is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.files import read_checkpoint

# Objects of OmegaConf keep their members or their value under these names.
_MEMBERS, _VALUE = "_content", "_val"
_DEEPEST = 8


class StandIn:
    """An object of a class that is not loaded: what it was made with, and its state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = {**(self.state or {}), key: value}


class CheckpointReader:
    """Reads files of torch.save, and remembers the names that they needed stand-ins for."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, path: Path) -> Mapping[str, Any]:
        """What was saved, with stand-ins for objects of unknown classes."""
        try:
            return self._read(path)
        except ConversionError:
            if not self._add_names(path):
                raise
        return self._read(path)

    def _read(self, path: Path) -> Mapping[str, Any]:
        # Classes for this block only, one for each name.
        named: list[Any] = [(type(name, (StandIn,), {}), name) for name in sorted(self._names)]
        with torch.serialization.safe_globals(named):
            return read_checkpoint(path)

    def _add_names(self, path: Path) -> bool:
        """Whether a file names classes that were not known before."""
        before = len(self._names)
        # A damaged file raises whatever it likes here, and has raised what it is in `_read`.
        with suppress(Exception):
            self._names.update(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        return len(self._names) > before


def plain(value: Any, depth: int = 0) -> Any:
    """A configuration as dicts, lists and values, if it is one of OmegaConf or plain already."""
    if isinstance(value, StandIn) and isinstance(value.state, Mapping):
        for name in (_MEMBERS, _VALUE):
            if name in value.state and depth < _DEEPEST:
                return plain(value.state[name], depth + 1)
    if isinstance(value, Mapping):
        return {key: plain(member, depth + 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member, depth + 1) for member in value]
    return value
