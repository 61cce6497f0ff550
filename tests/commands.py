"""Every command of `nfn-graph` with its options, as the parser sees them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nfn_graph.cli import COMMANDS


class Option(NamedTuple):
    """An option or a positional argument.

    Attributes:
        name: Name on the command line, `--batch-size`; without dashes if it is positional.
        kinds: The plain types of its values: int, float, str, Path, bool.
        count: The smallest number of values that it takes; 0 for a flag.
        is_required: Whether the command needs it.
    """

    name: str
    kinds: frozenset[type]
    count: int
    is_required: bool


class Leaf(NamedTuple):
    """A command without further subcommands."""

    words: tuple[str, ...]
    options: tuple[Option, ...]


def leaves() -> dict[str, Leaf]:
    """All commands by name, such as `zoo cnn`."""
    found = {}
    for name, command in COMMANDS.items():
        module, _, function = command.function.partition(":")
        for words, options in _leaves(getattr(importlib.import_module(module), function)):
            found[" ".join((name, *words))] = Leaf((name, *words), tuple(options))
    return found


def _leaves(function: Callable[..., int]) -> Iterator[tuple[tuple[str, ...], list[Option]]]:
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    for name in parameters:
        kind = _without_notes(hints[name])
        if _is_union(kind) and all(map(_is_options, map(_without_notes, typing.get_args(kind)))):
            for part in typing.get_args(kind):
                yield (_subcommand(part),), _fields(_without_notes(part))
            return
    empty = inspect.Parameter.empty
    yield (), [o for n, p in parameters.items() for o in _options(n, hints[n], p.default is empty)]


def _fields(kind: Any) -> list[Option]:
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return [
        option
        for field in dataclasses.fields(kind)
        for option in _options(
            field.name,
            hints[field.name],
            field.default is missing and field.default_factory is missing,
        )
    ]


def _options(name: str, hint: Any, is_required: bool) -> list[Option]:
    """Returns an option, or those of a group that several commands share."""
    kind = _without_notes(hint)
    return _fields(kind) if _is_options(kind) else [_option(name, hint, is_required)]


def _option(name: str, hint: Any, is_required: bool) -> Option:
    is_positional = "Positional" in repr(hint) or "_PositionalMarker" in repr(hint)
    kinds = frozenset(_plain_kinds(hint))
    shown = name if is_positional else f"--{name.replace('_', '-')}"
    return Option(shown, kinds, _count(hint), is_required)


def _plain_kinds(hint: Any) -> Iterator[type]:
    hint = _without_notes(hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        yield from {type(value) for value in arguments} - {int}
    elif arguments:
        for argument in arguments:
            if argument is not Ellipsis:
                yield from _plain_kinds(argument)
    elif hint in (int, float, str, bool, Path):
        yield hint


def _count(hint: Any) -> int:
    hint = _without_notes(hint)
    if _is_union(hint):
        return max(_count(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        arguments = typing.get_args(hint)
        return 1 if Ellipsis in arguments else len(arguments)
    return 0 if hint in (bool, type(None)) else 1


def _without_notes(hint: Any) -> Any:
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_options(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _subcommand(hint: Any) -> str:
    (name,) = (note.name for note in hint.__metadata__ if hasattr(note, "name"))
    return str(name)
