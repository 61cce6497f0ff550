"""The vectors of a norm or a PReLU, and which norm they belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nfn_graph.converters.chain.names import ASK_FOR_ARCH, Name, spelled
from nfn_graph.converters.errors import ConversionError

# Names of norms that leave their channels free, and of the one that may not.
_FREE_NORM = re.compile(
    r"(?<![a-z])(ln|bn|(layer|batch|inst|instance)_?norm(alization)?)s?(?![a-z])|^in_?\d*$"
)
_GROUP_NORM = re.compile(r"(?<![a-z])(gns?(?![a-z])|group)")

# The names of the vectors of a norm, or the slopes of a PReLU, in the order of their taps.
_ROLES = {
    "scale": ("weight", "gamma", "scale", "g"),
    "shift": ("bias", "beta", "shift", "offset", "b"),
    "mean": ("running_mean", "moving_mean", "mean"),
    "variance": ("running_var", "moving_variance", "moving_var", "variance", "var"),
    "slope": ("alpha", "slope", "a"),
}


@dataclass(frozen=True)
class VectorGroup:
    """Vectors of one module that has no weight with two axes.

    Args:
        name: The module's name.
        keys: The vectors, in the order in which a norm applies them.
        size: Their common size.
        is_input: Whether they act on the network's input.
    """

    name: Name
    keys: tuple[str, ...]
    size: int
    is_input: bool = False

    @classmethod
    def of(cls, module: str, keys: Sequence[str], size: int) -> VectorGroup:
        """Creates the group of a module."""

        order = list(_ROLES)
        ranked = sorted(keys, key=lambda key: order.index(_role(key) or order[-1]))
        return cls(Name.of(module), tuple(ranked), size)

    @property
    def template(self) -> str:
        """The module's name without its numbers."""
        return self.name.template

    @property
    def may_be_shared(self) -> bool:
        """Whether it is a single number, which all neurons of a layer may share."""
        return self.size == len(self.keys) == 1

    def at_input(self) -> VectorGroup:
        """Returns the same group, acting on the network's input."""
        return replace(self, is_input=True)


def are_norm(keys: Sequence[str]) -> bool:
    """Whether the vectors of a module are those of a norm, or the slopes of a PReLU."""
    roles = {_role(key) for key in keys}
    if None in roles or len(roles) < len(keys):
        return False
    if {"mean", "variance"} <= roles:
        return "slope" not in roles
    return roles in ({"scale"}, {"slope"}, {"scale", "shift"})


def _role(key: str) -> str | None:
    leaf = key.rpartition(".")[2]
    return next((role for role, leaves in _ROLES.items() if leaf in leaves), None)


def check_groups(group: VectorGroup, spatial: int) -> None:
    """Refuses vectors that may belong to a norm over groups of channels.

    Two vectors of a module without running statistics are the scale and the shift of some norm.
    After a convolution, GroupNorm is as common as other norms, so the name must indicate another
    norm. After a linear layer it is rare, so it is only refused if the name indicates it. If the
    number of channels is prime, all possible groups leave the channels free.
    """
    leaves = [key.rpartition(".")[2] for key in group.keys]
    has_statistics = any(re.search("mean|var", leaf) for leaf in leaves)
    counts = [n for n in range(2, group.size) if group.size % n == 0]
    if len(leaves) < 2 or has_statistics or not counts:
        return
    module = spelled(group.keys[0].rpartition(".")[0])
    name = next((part for part in reversed(module.split(".")) if not part.isdigit()), "")
    is_named, is_group = _FREE_NORM.search(name) is not None, _GROUP_NORM.search(module) is not None
    if not is_group and (is_named or not spatial):
        return
    *most, last = map(str, counts)
    numbers = f"{', '.join(most)} or {last}" if most else last
    raise ConversionError(
        f"Expected a name that determines the norm of '{group.keys[0]}' with {group.size} entries "
        f"(got two vectors without running statistics: GroupNorm with {numbers} groups, whose "
        f"channels cannot be permuted freely; or GroupNorm with 1 or {group.size} groups, "
        f"LayerNorm, InstanceNorm or a BatchNorm without statistics, whose channels can). "
        f"{ASK_FOR_ARCH}"
    )
