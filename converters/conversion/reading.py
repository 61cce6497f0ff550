"""Checkpoint files: found in folders, and read with the options of a command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.conversion.named_arch import make_arch, parse_arch, running_arch
from nfn_graph.converters.errors import ConversionError, in_command_line
from nfn_graph.converters.formats import SUFFIXES
from nfn_graph.converters.io import load
from nfn_graph.converters.layout_changes import Orientation
from nfn_graph.converters.store.description import FILE, is_store
from nfn_graph.messages import UserError


@dataclass(frozen=True)
class Options:
    """How files are read: see :func:`nfn_graph.converters.load`; `arch` by name."""

    arch: str | None = None
    flatten: FlattenOrder | None = None
    input_shape: tuple[int, ...] | None = None
    orientation: Orientation | None = None
    key: str | None = None
    safe_globals: tuple[str, ...] | None = None
    activation: str | None = None
    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.arch is not None:
            parse_arch(self.arch)
        for option in ("only", "exclude"):
            if getattr(self, option) == ():
                raise UserError(f"Expected patterns of keys as --{option} (got none)")
        if self.key == "":
            raise UserError("Expected the name of a network as --key (got an empty one)")
        names = () if self.safe_globals is None else self.safe_globals or ("",)
        wrong = [n for n in names if not all(part.isidentifier() for part in n.split("."))]
        if wrong:
            raise UserError(
                f"Expected names such as package.Class as --safe-globals (got {wrong[0][:60]!r})"
            )
        shape = (1,) if self.input_shape is None else self.input_shape
        if min(shape, default=0) < 1 or math.prod(shape) >= 2**60:
            raise UserError(f"Expected an input shape of positive sizes (got {list(shape)})")


class FoundFiles(NamedTuple):
    """What paths lead to.

    Attributes:
        files: Files, each once.
        stores: Stores in folders, which are passed over.
    """

    files: list[Path]
    stores: list[Path]


def find_files(paths: Sequence[Path]) -> FoundFiles:
    """The files among paths, and those with a known suffix in folders but for stores there."""
    found: dict[Path, None] = {}
    stores: dict[Path, None] = {}
    for path in paths:
        if is_store(path):
            raise UserError(
                f"Expected checkpoint files (got '{path}', a store). See it with: nfn-graph store "
                f"{path}; write its networks as files with: nfn-graph export {path} --out FOLDER"
            )
        if path.is_dir():
            inside = {p.parent for p in path.rglob(FILE)}
            stores.update(dict.fromkeys(sorted(inside)))
            files = (p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES)
            found.update(
                dict.fromkeys(p for p in files if p.is_file() and inside.isdisjoint(p.parents))
            )
        else:
            found[path] = None
    if not found:
        names = ", ".join(map(str, paths)) or "no paths"
        raise FileNotFoundError(f"Expected checkpoint files (got {names}, with none inside)")
    return FoundFiles(list(found), list(stores))


def load_file(path: Path, options: Options) -> WeightGraph:
    """The graph of one file."""
    shape = options.input_shape
    arch = None if options.arch is None else make_arch(options.arch)
    try:
        with running_arch(options.arch, OSError, ImportError, MemoryError):
            return load(
                path,
                arch=arch,
                flatten=options.flatten,
                orientation=options.orientation,
                key=options.key,
                activation=options.activation,
                example_input=None if shape is None else torch.empty(shape, device="meta"),
                safe_globals=options.safe_globals or (),
                only=options.only or (),
                exclude=options.exclude or (),
                heads=options.heads,
            )
    except ConversionError as error:
        raise ConversionError(in_command_line(str(error))) from error
