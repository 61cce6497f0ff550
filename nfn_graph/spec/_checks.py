"""That names and counts are such as specs and layers can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from torch import nn

# Names that modules, graphs and the network level need for themselves.
_RESERVED = (
    frozenset(dir(nn.ParameterDict()))
    | frozenset(dir(nn.ModuleDict()))
    | {"network", "layout", "y"}
)


def check_name(name: str, what: str) -> None:
    """Raises unless a type can have that name."""
    if not isinstance(name, str) or not name.isidentifier() or "__" in name or name in _RESERVED:
        raise ValueError(
            f"Expected the name of a {what} to be a Python identifier without '__', not 'y', "
            f"'layout', 'network' or an attribute of torch.nn.ModuleDict (got {name!r})"
        )


def check_count(value: int, least: int, what: str) -> int:
    """Raises unless the value is an integer that is large enough."""
    if not isinstance(value, SupportsIndex) or value.__index__() < least:
        raise ValueError(f"Expected {what} to be an integer of at least {least} (got {value!r})")
    return value


def check_unique(names: Sequence[object], what: str) -> None:
    """Raises if a name comes twice."""
    repeated = sorted({repr(name) for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"Expected the names of {what} to differ (got {', '.join(repeated)} twice)"
        )
