"""Which layer of a chain the vectors of a norm, or of a PReLU, belong to, and which norm it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nfn_graph.converters.chain.names import Name, spelled, stem
from nfn_graph.converters.errors import ConversionError

_LEAVES = ("weight", "bias", "running_mean", "running_var")

# Names of norms whose channels are free, and of the one whose channels may not be.
_FREE_NORM = re.compile(
    r"(?<![a-z])(ln|bn|(layer|batch|inst|instance)_?norm(alization)?)s?(?![a-z])|^in_?\d*$"
)
_GROUP_NORM = re.compile(r"(?<![a-z])(gns?(?![a-z])|group)")

Layers = Sequence[tuple[Name, tuple[int, ...]]]


@dataclass(frozen=True)
class VectorGroup:
    """Vectors of one module without a weight of two axes.

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
        """The group of a module."""

        def rank(key: str) -> tuple[int, str]:
            leaf = key.rpartition(".")[2]
            return (_LEAVES.index(leaf) if leaf in _LEAVES else len(_LEAVES), key)

        return cls(Name.of(stem(module)), tuple(sorted(keys, key=rank)), size)

    @property
    def template(self) -> str:
        """The module's name without its numbers."""
        return self.name.template

    def at_input(self) -> VectorGroup:
        """The same, acting on the network's input."""
        return replace(self, is_input=True)


def check_groups(group: VectorGroup, spatial: int) -> None:
    """Refuses vectors that may be those of a norm over groups of channels.

    Two vectors of a module without running statistics are the scale and the shift of some norm.
    Behind a convolution, GroupNorm is as usual as others, so a name must say that it is none;
    behind a linear layer it is rare, so a name must say that it is one. All groups are alike if
    the number of channels is prime.

    Args:
        group: Vectors with an entry for every channel.
        spatial: The axes of the kernel that they stand behind; 0 for a linear layer.
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
        f"Expected to know which norm '{group.keys[0]}' of {group.size} entries belongs to (got "
        f"two vectors without running statistics: GroupNorm with {numbers} groups, whose channels "
        f"cannot be permuted freely; or GroupNorm with 1 or {group.size} groups, LayerNorm, "
        f"InstanceNorm or a BatchNorm without statistics, whose channels can). Give the network "
        f"as arch, on the meta device if it is large"
    )


def find_layer(group: VectorGroup, layers: Layers, siblings: Sequence[VectorGroup]) -> int:
    """The neuron layer that a group belongs to, 0 for the input.

    A place between the numbers of a container (`net.0`, here `net.1`, `net.3`) decides; else
    the same numbers as a weight's (`conv2`, `bn2`), if all groups of that name fit in one
    way, after their weights or before them; else the size, if one layer has it.
    """
    between = _between(group, layers)
    if between is not None:
        _check_size(group, layers, between)
        return between
    readings = {
        tuple(places)
        for template in dict.fromkeys(name.template for name, _ in layers)
        for offset in (1, 0)
        if (places := _paired(siblings, layers, template, offset)) is not None
    }
    at = siblings.index(group)
    found = sorted({places[at] for places in readings})
    if not found:
        found = [i for i in range(len(layers) + 1) if _fits(group.size, layers, i, exactly=True)]
    if len(found) == 1:
        return found[0]
    shown = ["the input" if i == 0 else f"the outputs of layer {i}" for i in found]
    raise ConversionError(
        f"Expected one layer that '{group.keys[0]}' of {group.size} entries can belong to (got "
        f"{' or '.join(shown) or 'none'}). Give the network as arch"
    )


def _between(group: VectorGroup, layers: Layers) -> int | None:
    """The layer that a place in a numbered container gives, None if there is none."""
    if not group.template.endswith("#"):
        return None
    container, number = group.name.numbers[:-1], group.name.numbers[-1]
    depth = len(group.name.numbers)
    mates = [
        (name.numbers[depth - 1], i)
        for i, (name, _) in enumerate(layers)
        if name.template.startswith(group.template) and name.numbers[: depth - 1] == container
    ]
    if not mates or any(n == number for n, _ in mates):
        return None
    before = [i for n, i in mates if n < number]
    return max(before) + 1 if before else min(i for _, i in mates)


def _paired(
    siblings: Sequence[VectorGroup], layers: Layers, template: str, offset: int
) -> list[int] | None:
    """The layers of all groups of one name, each at the weight with its numbers."""
    places = []
    for group in siblings:
        same = [
            i
            for i, (name, _) in enumerate(layers)
            if name.template == template and name.numbers == group.name.numbers
        ]
        if len(same) != 1 or not _fits(group.size, layers, same[0] + offset, exactly=False):
            return None
        places.append(same[0] + offset)
    return places


def _fits(size: int, layers: Layers, at: int, *, exactly: bool) -> bool:
    """Whether a vector has an entry for every neuron of a layer, or for every flat entry."""
    channels = layers[0][1][1] if at == 0 else layers[at - 1][1][0]
    if size == channels:
        return True
    read = layers[at][1][1] if at < len(layers) else channels
    return not exactly and at > 0 and size == read and size % channels == 0


def _check_size(group: VectorGroup, layers: Layers, at: int) -> None:
    if not _fits(group.size, layers, at, exactly=False):
        channels = layers[0][1][1] if at == 0 else layers[at - 1][1][0]
        raise ConversionError(
            f"Expected '{group.keys[0]}' to have {channels} entries, one for each neuron it "
            f"stands behind (got {group.size})"
        )
