"""Ranges of options: how the help shows them, and errors that name the option in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, get_args

from tyro.conf import arg

from nfn_graph.messages import UserError

_MOST_NETWORKS = 10_000_000
_BETWEEN = arg(
    metavar="LOW HIGH",
    help_behavior_hint=lambda default: f"(default: {default.replace(' ', ' to ')})",
)

# Types of options whose help shows their range.
Share = Annotated[float, arg(metavar="0..1")]
Shares = Annotated[tuple[float, ...], arg(metavar="0..1 ...")]
Several = Annotated[tuple[int, ...], arg(metavar="INT ...")]
Interval = Annotated[tuple[float, float], _BETWEEN]
Integers = Annotated[tuple[int, int], _BETWEEN]


def choices(kind: object, of: str = "{} ...") -> str:
    """The values of a Literal, as the help shows them."""
    return of.format(f"{{{','.join(map(str, get_args(kind)))}}}")


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def check_at_least(name: str, value: float, least: float) -> None:
    """Raises for a value below `least`."""
    if not value >= least:
        raise UserError(f"Expected {flag(name)} of at least {least} (got {value})")


def check_above(name: str, value: float, limit: float) -> None:
    """Raises for a value that is not above `limit`."""
    if not value > limit:
        raise UserError(f"Expected {flag(name)} above {limit} (got {value})")


def check_share(name: str, value: float) -> None:
    """Raises for a value that is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise UserError(f"Expected {flag(name)} between 0 and 1 (got {value})")


def check_part(name: str, value: float) -> None:
    """Raises for a value that is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise UserError(f"Expected {flag(name)} of at least 0 and below 1 (got {value})")


def check_several(name: str, values: Sequence[float], least: float) -> None:
    """Raises if there is no value, or one below `least`."""
    if not values or not min(values) >= least:
        got = " ".join(map(str, values)) or "none"
        raise UserError(f"Expected values of {flag(name)} of at least {least} each (got {got})")


def check_interval(name: str, interval: tuple[float, float], *, above: float = -math.inf) -> None:
    """Raises unless two numbers come in their order, both above a limit."""
    low, high = interval
    if not above < low <= high:
        limit = f" above {above:g}" if above > -math.inf else ""
        raise UserError(
            f"Expected {flag(name)} as two numbers{limit}, the smaller first (got {low} {high})"
        )


def check_split(validation_share: float, test_share: float) -> None:
    """Raises unless both shares, and both together, are parts of a whole."""
    check_share("validation_share", validation_share)
    check_share("test_share", test_share)
    if validation_share + test_share > 1:
        raise UserError(
            f"Expected --validation-share and --test-share of at most 1 together (got "
            f"{validation_share} and {test_share})"
        )


def check_networks(name: str, value: int) -> None:
    """Raises for too many networks, because all of them are listed before training begins."""
    check_at_least(name, value, 1)
    if value > _MOST_NETWORKS:
        raise UserError(f"Expected {flag(name)} of at most {_MOST_NETWORKS:,} (got {value})")
