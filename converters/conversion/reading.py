"""Finds checkpoint files in folders, and reads them with the options of a command.

The networks that `--arch` names are code, which may do anything.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.errors import ConversionError, in_command_line
from nfn_graph.converters.formats import SUFFIXES
from nfn_graph.converters.io import load
from nfn_graph.converters.layout_changes import Orientation
from nfn_graph.converters.store.description import FILE, is_store
from nfn_graph.messages import UserError


def parse_arch(name: str) -> tuple[str, str]:
    """Splits `package.module:name` into the module and the attribute."""
    module, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"Expected arch as package.module:name (got '{name}')")
    return module, attribute


@lru_cache(maxsize=8)
def make_arch(name: str) -> nn.Module:
    """Returns the module that `package.module:name` is or creates, on the meta device."""
    module_name, attribute = parse_arch(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with running_arch(name, ModuleNotFoundError):
        module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise UserError(f"Expected '{attribute}' in '{module_name}' (got no such name)")
    made = getattr(module, attribute)
    if callable(made) and not isinstance(made, nn.Module):
        with running_arch(name), torch.device("meta"):
            made = made()
    if not isinstance(made, nn.Module):
        raise UserError(
            f"Expected '{name}' to be a torch.nn.Module or to return one "
            f"(got {type(made).__name__})"
        )
    return made


@contextmanager
def running_arch(name: str | None, *expected: type[Exception]) -> Iterator[None]:
    """Turns errors in the code of a network into errors that name the line.

    Args:
        name: The network's name; None if its code is not run.
        expected: Errors that may have other causes, which are raised unchanged.
    """
    passed: tuple[type[Exception], ...] = (ConversionError, *expected)
    try:
        yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        if name is None:
            raise
        raise ConversionError(
            f"Expected '{name}' to be a network that can be followed (got "
            f"{type(error).__name__} at {_place(error)}: {error})"
        ) from error


def _place(error: BaseException) -> str:
    """Returns the last line outside of torch that led to an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    foreign = ("<frozen", os.path.dirname(torch.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(foreign)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


@dataclass(frozen=True)
class Options:
    """The options for reading checkpoint files; see :func:`nfn_graph.converters.load`.

    Attributes:
        arch: A PyTorch module or a function that returns one. It is executed, so trust it.
        flatten: The order of entries between convolution and dense layer, if not in the file.
        input_shape: The shape of an input with its batch axis, if it matters: 1 3 224 224. It
            describes a floating-point input. (train takes the shape without the batch axis.)
        orientation: The order of the axes of weights, if shapes allow both.
        key: The name of the network in a file that holds several.
        safe_globals: Classes and functions that a PyTorch file may use. They are called, so trust
            them.
        activation: The function between linear layers, such as relu or sin:30, if not in the file.
        only: Patterns of the keys to include; other tensors are carried along, not in the graph.
        exclude: Patterns of the keys to leave out of the graph, such as "*embeddings*".
        heads: The number of attention heads of a transformer without a config.json.
    """

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
    """The files and stores that paths lead to.

    Attributes:
        files: The files, without repetitions.
        stores: Stores inside folders, which are skipped.
    """

    files: list[Path]
    stores: list[Path]


def find_files(paths: Sequence[Path]) -> FoundFiles:
    """Returns the files among paths, and those with a known suffix in folders, but not stores."""
    found: dict[Path, None] = {}
    stores: dict[Path, None] = {}
    for path in paths:
        if is_store(path):
            raise UserError(
                f"Expected checkpoint files (got '{path}', a store). Show it with: nfn-graph store "
                f"{path}; write its networks to files with: nfn-graph export {path} --out FOLDER"
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
    """Reads the graph of one file."""
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
