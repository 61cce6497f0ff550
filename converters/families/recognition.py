"""Which family a state dict belongs to, and what is missing if it is incomplete."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families.tables import FAMILIES, Family

# A configuration is small.
_MOST_BYTES = 2**20
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads")
_SHOWN = 6


class Heads(NamedTuple):
    """How many heads an attention has.

    Attributes:
        queries: Of queries.
        keys: Of keys and values; None if there are as many.
    """

    queries: int
    keys: int | None = None


@dataclass(frozen=True)
class Found:
    """A state dict of a family.

    Args:
        family: The family.
        prefix: What the names begin with.
        blocks: The names of the blocks.
        names: For every name of the family that the file has, its tensors: `weight` and `bias`.
    """

    family: Family
    prefix: str
    blocks: tuple[str, ...]
    names: Mapping[str, Mapping[str, str]]


def heads_beside(path: Path) -> Heads | None:
    """The number of heads that a `config.json` beside a file says; None if there is none."""
    file = path.parent / "config.json"
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    found = [_number(config, names) for names in (_HEADS, _KEY_HEADS)]
    return None if found[0] is None else Heads(found[0], found[1])


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    values = [config[name] for name in names if type(config.get(name)) is int]
    return values[0] if values and values[0] > 0 else None


@functools.lru_cache(maxsize=64)
def is_named(keys: tuple[str, ...]) -> bool:
    """Whether keys have the names of a family, complete or not."""
    return any(_numbers(family, p, keys) for family in FAMILIES for p in family.prefixes)


def find_family(tensors: Mapping[str, Tensor], heads: Heads | None) -> Found | None:
    """The family of a state dict; None if its names are those of no family.

    Raises:
        ConversionError: The names are those of a family, but some tensors are missing or not
            known, or nothing says how many heads there are.
    """
    candidates = [found for family in FAMILIES for found in _candidates(family, tensors)]
    complete = [found for found in candidates if not _problems(found, tensors)]
    if not candidates:
        return None
    if not complete:
        first = candidates[0]
        raise ConversionError(
            f"Expected the tensors of {first.family.name}, whose names these are (got a state dict "
            f"with {'; '.join(_problems(first, tensors))}). Give the network as arch, on the meta "
            f"device if it is large"
        )
    if heads is None:
        raise ConversionError(
            f"Expected heads=..., the number of attention heads (got none). The names are those of "
            f"{complete[0].family.name}; neither they nor a config.json beside the file say it"
        )
    return complete[0]


def _candidates(family: Family, tensors: Mapping[str, Tensor]) -> Iterator[Found]:
    """The readings of a state dict whose blocks have the names of a family."""
    for prefix in family.prefixes:
        numbers = _numbers(family, prefix, tensors)
        if not numbers:
            continue
        blocks = tuple(prefix + family.block.format(i) for i in range(max(numbers) + 1))
        wanted = [prefix + name for name in _outside(family) if not name.startswith("^")]
        wanted += [name[1:] for name in _outside(family) if name.startswith("^")]
        wanted += [f"{block}.{name}" for block in blocks for name in _inside(family)]
        names = {name: own for name in wanted if (own := _tensors_of(name, tensors))}
        yield Found(family, prefix, blocks, names)


def _numbers(family: Family, prefix: str, keys: Iterable[str]) -> list[int]:
    """The numbers of the blocks, by the weights of their queries."""
    start = re.escape(prefix + family.block).replace(r"\{\}", r"(\d+)")
    pattern = re.compile(rf"{start}\.{re.escape(family.query)}[._]weight")
    return [int(m[1]) for key in keys if (m := pattern.fullmatch(key))]


def _inside(family: Family) -> list[str]:
    parts = (family.query, family.key, family.value, family.out, family.up, family.gate)
    return [name for name in (*family.norms, *parts, family.down) if name]


def _outside(family: Family) -> list[str]:
    outputs = [name for chain in family.outputs for name in chain]
    tables = (*family.tables, *family.added, family.token, family.patches, *family.final)
    outputs.append(family.pooler)
    return [name for name in (*tables, *outputs) if name]


def _tensors_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The tensors of a layer, by what they are; a tensor without an ending is a weight."""
    found = {"weight": name} if name in tensors else {}
    for role in ("weight", "bias"):
        for key in (f"{name}.{role}", f"{name}_{role}"):
            if key in tensors:
                found[role] = key
    return found


def _problems(found: Found, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is missing, and what is left over."""
    family = found.family
    needed = [f"{block}.{name}" for block in found.blocks for name in _inside(family)]
    outside = (*family.tables[:1], *family.added, family.token, family.patches)
    needed += [found.prefix + name for name in outside if name]
    missing = [name for name in needed if "weight" not in found.names.get(name, {})]
    used = {key for own in found.names.values() for key in own.values()}
    left = [
        key
        for key, tensor in tensors.items()
        if key not in used
        and tensor.is_floating_point()
        and not any(key.endswith(word) for word in family.masks)
    ]
    problems = []
    if missing:
        problems.append(f"no {_listed(missing)}")
    if left:
        problems.append(f"{_listed(left)}, which it does not have")
    return problems


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + (f" and {more} more" * (more > 0))
