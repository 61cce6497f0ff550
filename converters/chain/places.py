"""Which layer of a chain the vectors of a norm, or of a PReLU, belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfn_graph.converters.chain.norms import VectorGroup
from nfn_graph.converters.chain.order import ChainLayer
from nfn_graph.converters.chain.topology import ASK_FOR_ARCH
from nfn_graph.converters.errors import ConversionError


@dataclass(frozen=True)
class Places:
    """Where the vectors of a chain can stand: 0 is its input, i the outputs of its weight i.

    Args:
        chain: The weights in their order.
        channels: How many channels or features the first one reads.
        keys: All keys in the order of the file.
        is_sorted: Whether that is their order as text, which says nothing about places.
    """

    chain: Sequence[ChainLayer]
    channels: int
    keys: Sequence[str]
    is_sorted: bool

    def find(self, group: VectorGroup, siblings: Sequence[VectorGroup]) -> int | None:
        """The place of a group; None for one number that all neurons of any layer share.

        If its size fits several places, its name and the order of the file must agree.

        Args:
            group: The vectors of a module.
            siblings: All groups whose modules have the same name but for numbers.
        """
        fitting = [at for at in range(len(self.chain) + 1) if self._fits(group.size, at)]
        named, is_sure = self._by_name(group, siblings)
        if group.may_be_shared:
            # It belongs to a neuron where there is just one, and to the network elsewhere.
            if not fitting:
                return None
            fitting = list(range(len(self.chain) + 1))
        if is_sure and named[0] not in fitting:
            raise ConversionError(
                f"Expected '{group.keys[0]}' to have {self._neurons(named[0])} entries, one for "
                f"each neuron it stands behind (got {group.size})"
            )
        stored = self._as_stored(group)
        if len(fitting) == 1 and fitting == (named or fitting):
            if self._is_witnessed(group, siblings, fitting[0]):
                return fitting[0]
        elif (self.is_sorted and is_sure) or named == [stored]:
            return named[0]
        places = [f"{self._shown(named or fitting)} by {'name' if named else 'size'}"]
        places += [] if stored is None else [f"{self._shown([stored])} as stored"]
        raise ConversionError(
            f"Expected one place that '{group.keys[0]}' of {group.size} entries can have (got "
            f"{'; '.join(places)}). {ASK_FOR_ARCH}"
        )

    def _is_witnessed(self, group: VectorGroup, siblings: Sequence[VectorGroup], at: int) -> bool:
        """Whether nothing speaks against the only place that the size of a group fits.

        If a weight is transposed or missing, it may fit elsewhere only. The order of the file shows
        that it belongs here, or the name of the weight before it if all such groups lie together.
        """
        stored = self._as_stored(group)
        is_behind = at > 0 and self.chain[at - 1].name.numbers == group.name.numbers
        if stored is None:
            others = (place for place in range(len(self.chain) + 1) if place != at)
            is_fixed = not any(self._fits_turned(group.size, place) for place in others)
            return is_fixed or is_behind or self._between(group) is not None
        are_together = len(siblings) > 1 and len({self._as_stored(g) for g in siblings}) == 1
        is_named = is_behind and are_together and not self._fits_turned(group.size, stored)
        return stored == at or is_named

    def _shown(self, places: Sequence[int]) -> str:
        shown = [f"behind '{self.chain[at - 1].key}'" if at else "the input" for at in places]
        return " or ".join(shown) or "none"

    def _neurons(self, at: int) -> int:
        return self.chain[at - 1].shape[0] if at else self.channels

    def _fits(self, size: int, at: int) -> bool:
        """Whether a vector has an entry for every neuron of a place, or for every flat entry."""
        channels = self._neurons(at)
        read = self.chain[at].shape[1] if 0 < at < len(self.chain) else channels
        return size == channels or (size == read and size % channels == 0)

    def _fits_turned(self, size: int, at: int) -> bool:
        """Whether a vector would fit a place if the weight there were transposed."""
        weight = self.chain[max(at - 1, 0)]
        return weight.bias is None and size == weight.shape[1 if at else 0]

    def _as_stored(self, group: VectorGroup) -> int | None:
        """The place of a group between the weights of a file that are in order."""
        order = {key: i for i, key in enumerate(self.keys)}
        weights = [order[layer.key] for layer in self.chain]
        if self.is_sorted or weights != sorted(weights):
            return None
        return sum(at < min(order[key] for key in group.keys) for at in weights)

    def _by_name(
        self, group: VectorGroup, siblings: Sequence[VectorGroup]
    ) -> tuple[list[int], bool]:
        """The places that the name of a group allows, and whether it needs no second witness.

        A place between the indices of a container (`net.0`, here `net.1`, `net.3`) decides;
        else the same numbers as a weight's (`conv2`, `bn2`), if all groups of that name fit in
        one way, after their weights or before them.
        """
        between = self._between(group)
        if between is not None:
            return [between], True
        at = siblings.index(group)
        readings: dict[int, bool] = {}
        for template in dict.fromkeys(layer.name.template for layer in self.chain):
            for offset in (1, 0):
                places = self._paired(siblings, template, offset)
                if places is not None:
                    is_whole = len(places) == len(self.chain)
                    readings[places[at]] = readings.get(places[at], False) or is_whole
        return sorted(readings), len(readings) == 1 and all(readings.values())

    def _between(self, group: VectorGroup) -> int | None:
        """The place that an index in a container gives, None if there is none."""
        if not group.template.endswith("#"):
            return None
        container, number = group.name.numbers[:-1], group.name.numbers[-1]
        depth = len(group.name.numbers)
        mates = [
            (layer.name.numbers[depth - 1], i)
            for i, layer in enumerate(self.chain)
            if layer.name.template.startswith(group.template)
            and layer.name.numbers[: depth - 1] == container
        ]
        if not mates or any(n == number for n, _ in mates):
            return None
        before = [i for n, i in mates if n < number]
        return max(before) + 1 if before else min(i for _, i in mates)

    def _paired(
        self, siblings: Sequence[VectorGroup], template: str, offset: int
    ) -> list[int] | None:
        """The places of all groups of one name, each at the weight with its numbers."""
        places = []
        for group in siblings:
            same = [
                i + offset
                for i, layer in enumerate(self.chain)
                if layer.name.template == template and layer.name.numbers == group.name.numbers
            ]
            if len(same) != 1 or not self._fits(group.size, same[0]):
                return None
            places.append(same[0])
        return places
