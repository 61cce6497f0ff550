"""Finds the family of a state dict, and what is missing if the state dict is incomplete."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nfn_graph.converters.chain import ASK_FOR_ARCH
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families.tables import FAMILIES, Family

# The largest size of a configuration file that is read.
_MOST_BYTES = 2**20
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads")
_SHOWN = 6


class Heads(NamedTuple):
    """The number of attention heads.

    Attributes:
        queries: The number of query heads.
        keys: The number of heads of keys and values; None if it is the same.
        model: The type of network in a configuration, if there is one.
    """

    queries: int
    keys: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class Found:
    """A state dict of a known family.

    Args:
        family: The family.
        prefix: The prefix of the names.
        blocks: The names of the blocks.
        names: The tensors, `weight` and `bias`, for every name of the family that the file
            contains.
    """

    family: Family
    prefix: str
    blocks: tuple[str, ...]
    names: Mapping[str, Mapping[str, str]]


def heads_beside(path: Path, heads: int | None = None) -> Heads | None:
    """Returns the number of heads, given or read from a `config.json` beside a file, or None.

    Args:
        path: The file.
        heads: The number of query heads, if known.
    """
    config = _read_config(path.parent / "config.json")
    queries = _number(config, _HEADS) if heads is None else heads
    if queries is None:
        return None
    model = config.get("model_type")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        model = f"{model} with positions '{positions}'"
    keys = _number(config, _KEY_HEADS) if heads is None else None
    return Heads(queries, keys, None if model is None else str(model))


def _read_config(file: Path) -> Mapping[str, Any]:
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    values = [config[name] for name in names if type(config.get(name)) is int]
    return values[0] if values and values[0] > 0 else None


@functools.lru_cache(maxsize=64)
def is_named(keys: tuple[str, ...]) -> bool:
    """Whether keys have the names of a family, complete or not."""
    return any(_numbers(family, p, keys) for family in FAMILIES for p in family.prefixes)


def find_family(tensors: Mapping[str, Tensor], heads: Heads | None) -> Found | None:
    """Returns the family of a state dict; None if its names belong to no family.

    Raises:
        ConversionError: If the names belong to a family, but tensors are missing or unknown, or the
            number of heads is not known.
    """
    candidates = [found for family in FAMILIES for found in _candidates(family, tensors)]
    complete = [found for found in candidates if not _problems(found, tensors)]
    if not candidates:
        return None
    if not complete:
        first = candidates[0]
        raise ConversionError(
            f"Expected the tensors of {first.family.name}, whose names these are (got a state dict "
            f"with {'; '.join(_problems(first, tensors))}). {ASK_FOR_ARCH}"
        )
    if heads is None:
        raise ConversionError(
            f"Expected heads=..., the number of attention heads (got none). The names are those of "
            f"{complete[0].family.name}; neither they nor a config.json beside the file contain it"
        )
    models = complete[0].family.models.split()
    if models and heads.model is not None and heads.model not in models:
        raise ConversionError(
            f"Expected a network of one of the types {_listed(models, len(models))}, which have "
            f"the names of {complete[0].family.name} (got {heads.model} in config.json). Others "
            f"may compute more than their names show. {ASK_FOR_ARCH}"
        )
    return complete[0]


def may_share(first: str, second: str) -> bool:
    """Whether two names are those of an embedding table and of its tied output layer."""

    def is_one_of(key: str, names: set[str]) -> bool:
        return any(key == f"{name}.weight" or key.endswith(f".{name}.weight") for name in names)

    tables = {name for family in FAMILIES for name in family.tables.split()[:1]}
    outputs = {chain.lstrip("^") for family in FAMILIES for chain in family.outputs}
    return any(
        is_one_of(one, tables) and is_one_of(other, outputs)
        for one, other in ((first, second), (second, first))
    )


def _candidates(family: Family, tensors: Mapping[str, Tensor]) -> Iterator[Found]:
    """Yields the readings of a state dict whose blocks have the names of a family."""
    for prefix in family.prefixes:
        numbers = _numbers(family, prefix, tensors)
        if not numbers:
            continue
        # A single number far above all others does not imply that many blocks.
        count = min(max(numbers), len(numbers)) + 1
        blocks = tuple(prefix + family.block.format(i) for i in range(count))
        wanted = [prefix + name for name in _outside(family) if not name.startswith("^")]
        wanted += [name[1:] for name in _outside(family) if name.startswith("^")]
        wanted += [f"{block}.{name}" for block in blocks for name in _inside(family)]
        names = {name: own for name in wanted if (own := _tensors_of(name, tensors))}
        yield Found(family, prefix, blocks, names)


def _numbers(family: Family, prefix: str, keys: Iterable[str]) -> list[int]:
    """Returns the numbers of the blocks, found by the weights of their queries."""
    start = re.escape(prefix + family.block).replace(r"\{\}", r"(\d{1,6})")
    pattern = re.compile(rf"{start}\.{re.escape(family.query)}[._]weight")
    return [int(m[1]) for key in keys if (m := pattern.fullmatch(key))]


def _inside(family: Family) -> list[str]:
    return f"{family.norms} {family.attention} {family.dense}".split()


def _outside(family: Family) -> list[str]:
    tables = (family.tables, family.added, family.token, family.patches, family.final)
    return " ".join([*tables, *family.outputs, family.pooler]).split()


def _tensors_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the tensors of a layer by role; a tensor without a suffix is a weight."""
    found = {"weight": name} if name in tensors else {}
    for role in ("weight", "bias"):
        for key in (f"{name}.{role}", f"{name}_{role}"):
            if key in tensors:
                found[role] = key
    return found


def _problems(found: Found, tensors: Mapping[str, Tensor]) -> list[str]:
    """Describes missing and unknown tensors, and tensors that contradict their names."""
    family = found.family
    needed = [f"{block}.{name}" for block in found.blocks for name in _inside(family)]
    outside = " ".join([family.tables, family.added, family.token, family.patches]).split()
    needed += [found.prefix + name for name in outside if name not in family.optional.split()]
    missing = [name for name in needed if "weight" not in found.names.get(name, {})]
    used = {key for own in found.names.values() for key in own.values()}
    left = [
        key
        for key, tensor in tensors.items()
        if key not in used
        and tensor.is_floating_point()
        and not any(key == word or key.endswith(f".{word}") for word in family.masks)
    ]
    problems = []
    if missing:
        problems.append(f"no {_listed(missing)}")
    if left:
        problems.append(f"{_listed(left)}, which it does not have")
    return problems or _misshapen(found, tensors)


def _misshapen(found: Found, tensors: Mapping[str, Tensor]) -> list[str]:
    """Describes a tensor with a type or shape that contradicts its name."""
    family = found.family
    for own in found.names.values():
        for key in own.values():
            if not tensors[key].is_floating_point():
                return [f"'{key}' of {tensors[key].dtype}, where it has floating-point numbers"]
    width = None
    for block in found.blocks:
        for name in family.norms.split():
            shape = tensors[found.names[f"{block}.{name}"]["weight"]].shape
            width = shape[0] if width is None and len(shape) == 1 else width
            if tuple(shape) != (width,):
                return [f"'{block}.{name}' of shape {list(shape)}, where it has a norm of {width}"]
        for name in f"{family.attention} {family.dense}".split():
            shape = tensors[found.names[f"{block}.{name}"]["weight"]].shape
            last = name in (family.attention.split()[-1], family.dense.split()[-1])
            stream = int(last) if family.in_out else int(not last)
            if len(shape) != 2 or shape[stream] != width:
                order = "in, out" if family.in_out else "out, in"
                return [
                    f"'{block}.{name}' of shape {list(shape)}, where it has a weight [{order}] "
                    f"{'to' if last else 'from'} {width} neurons"
                ]
    return []


def _listed(names: Sequence[str], most: int = _SHOWN) -> str:
    more = len(names) - most
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {more} more" * (more > 0))
