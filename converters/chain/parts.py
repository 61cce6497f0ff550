"""Finds the weights of a state dict with their biases, and the vectors of norms and PReLUs.

Every floating-point tensor must be one of these, and other tensors are refused. Shapes and names
determine to which layer of a chain the vectors belong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nfn_graph.converters.chain.names import ASK_FOR_ARCH, Name, is_bias, stem
from nfn_graph.converters.chain.norms import VectorGroup, are_norm
from nfn_graph.converters.chain.order import ChainLayer, NotChained
from nfn_graph.converters.errors import ConversionError

_MOST_SHOWN = 5


def find_parts(tensors: Mapping[str, Tensor]) -> tuple[list[ChainLayer], list[VectorGroup]]:
    """Returns the weights with their biases, and the vectors of norms and PReLUs by module."""
    layers: list[ChainLayer] = []
    for key, tensor in tensors.items():
        _check_tensor(key, tensor)
        if tensor.dim() > 1:
            layers.append(ChainLayer(key, tuple(tensor.shape), Name.of(key)))
    _check_weights(layers)
    by_module, by_stem = _grouped(layers, _module), _grouped(layers, stem)
    modules: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for key, tensor in tensors.items():
        if tensor.dim() > 1 or not tensor.is_floating_point():
            continue
        if (own := _own_layer(key, by_module, by_stem)) is not None:
            _check_bias(key, tensor.numel(), own)
            own.bias = key
        elif "." in key:
            modules.setdefault(_module(key), []).append(key)
        else:
            unnamed.append(key)
    groups, left = [], []
    for module, keys in modules.items():
        sizes = {tensors[key].numel() for key in keys}
        if len(sizes) == 1 and are_norm(keys):
            groups.append(VectorGroup.of(module, keys, sizes.pop()))
        else:
            left += keys
    # If names pair no vector with a weight, sizes do, provided that they pair all of them.
    is_nameless = not modules and not any("." in n.key or n.bias for n in layers)
    if is_nameless and len(unnamed) == len(layers):
        for key in unnamed:
            _pair_by_size(key, tensors[key].numel(), layers)
    else:
        left += unnamed
    if left:
        raise ConversionError(
            f"Expected a chain of layers that explains every tensor (got {listed(tensors, left)} "
            f"left over). {ASK_FOR_ARCH}"
        )
    return layers, groups


def listed(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    """Returns the number of tensors, and the first of them with their shapes."""
    if not keys:
        return "no tensors"
    shown = [f"'{key}' {list(tensors[key].shape)}" for key in keys[:_MOST_SHOWN]]
    more = ", ..." if len(keys) > _MOST_SHOWN else ""
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)}: {', '.join(shown)}{more}"


def _check_tensor(key: str, tensor: Tensor) -> None:
    if tensor.is_complex() or (tensor.dim() > 1 and not tensor.is_floating_point()):
        raise ConversionError(f"Expected floating-point weights (got '{key}' of {tensor.dtype})")
    if 0 in tensor.shape:
        raise ConversionError(
            f"Expected tensors with entries (got '{key}' of shape {list(tensor.shape)})"
        )


def _check_weights(layers: Sequence[ChainLayer]) -> None:
    """Refuses tensors with several axes that are named as the biases of others."""
    by_stem = _grouped(layers, stem)
    for layer in layers:
        others = [n for n in by_stem[stem(layer.key)] if n is not layer]
        if is_bias(layer.key) and others:
            raise ConversionError(
                f"Expected '{layer.key}' to be a vector, the bias of '{others[0].key}' (got shape "
                f"{list(layer.shape)}). {ASK_FOR_ARCH}"
            )


def _own_layer(
    key: str, by_module: Mapping[str, list[ChainLayer]], by_stem: Mapping[str, list[ChainLayer]]
) -> ChainLayer | None:
    """Returns the weight in the module of a bias, or the one with the same name except the role."""
    if not is_bias(key):
        return None
    own = by_module.get(_module(key), []) if "." in key else []
    if len(own) != 1:
        own = by_stem.get(stem(key), [])
    return own[0] if len(own) == 1 and own[0].bias is None else None


def _grouped(
    layers: Sequence[ChainLayer], name: Callable[[str], str]
) -> dict[str, list[ChainLayer]]:
    found: dict[str, list[ChainLayer]] = {}
    for layer in layers:
        found.setdefault(name(layer.key), []).append(layer)
    return found


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _check_bias(key: str, size: int, layer: ChainLayer) -> None:
    outputs, inputs, *kernel = layer.shape
    if size == outputs:
        return
    if size != inputs:
        raise NotChained(
            f"Expected '{key}' to have {outputs} entries, the outputs of '{layer.key}' (got {size})"
        )
    raise NotChained(
        f"Expected '{layer.key}' as [out, in{', ...' if kernel else ''}] (got shape "
        f"{list(layer.shape)} and {size} entries in '{key}': "
        + (
            f"a transposed convolution, which stores [in, out, ...]). {ASK_FOR_ARCH}"
            if kernel
            else f"it is transposed). {ASK_FOR_ARCH}"
        )
    )


def _pair_by_size(key: str, size: int, layers: Sequence[ChainLayer]) -> None:
    fitting = [n for n in layers if n.bias is None and n.shape[0] == size]
    if len(fitting) != 1:
        got = [n.key for n in fitting] or "none"
        raise (ConversionError if fitting else NotChained)(
            f"Expected one weight that the vector '{key}' of {size} entries can belong to "
            f"(got {got}). {ASK_FOR_ARCH}"
        )
    fitting[0].bias = key


@dataclass(frozen=True)
class Places:
    """The places that vectors of a chain can have: 0 is its input, i the outputs of its weight i.

    Args:
        chain: The weights in their order.
        channels: The number of channels or features that the first one reads.
        keys: All keys in the order of the file.
        is_sorted: Whether the file is sorted by name, so that its order is not informative.
    """

    chain: Sequence[ChainLayer]
    channels: int
    keys: Sequence[str]
    is_sorted: bool

    def find(self, group: VectorGroup, siblings: Sequence[VectorGroup]) -> int | None:
        """Returns the place of a group; None for a single number that all neurons of a layer share.

        If its size fits several places, its name and the order of the file must agree.
        """
        fitting = [at for at in range(len(self.chain) + 1) if self._fits(group.size, at)]
        named, is_sure = self._by_name(group, siblings)
        if group.may_be_shared:
            # It belongs to a neuron if a layer has only one, and to the network otherwise.
            if not fitting:
                return None
            fitting = list(range(len(self.chain) + 1))
        if is_sure and named[0] not in fitting:
            raise ConversionError(
                f"Expected '{group.keys[0]}' to have {self._neurons(named[0])} entries, one for "
                f"each neuron that it acts on (got {group.size})"
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
        """Whether nothing contradicts the only place that the size of a group fits.

        If a weight is transposed or missing, the group might belong elsewhere. Its place is
        confirmed by the order of the file, or, if all such groups are stored together, by the name
        of the weight before it.
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
        shown = [f"after '{self.chain[at - 1].key}'" if at else "the input" for at in places]
        return " or ".join(shown) or "none"

    def _neurons(self, at: int) -> int:
        return self.chain[at - 1].shape[0] if at else self.channels

    def _fits(self, size: int, at: int) -> bool:
        """Whether a vector has one entry per neuron of a place, or per flattened entry."""
        channels = self._neurons(at)
        read = self.chain[at].shape[1] if 0 < at < len(self.chain) else channels
        return size == channels or (size == read and size % channels == 0)

    def _fits_turned(self, size: int, at: int) -> bool:
        """Whether a vector would fit a place if the weight there were transposed."""
        weight = self.chain[max(at - 1, 0)]
        return weight.bias is None and size == weight.shape[1 if at else 0]

    def _as_stored(self, group: VectorGroup) -> int | None:
        """Returns the place of a group between the weights of a file that are stored in order."""
        order = {key: i for i, key in enumerate(self.keys)}
        weights = [order[layer.key] for layer in self.chain]
        if self.is_sorted or weights != sorted(weights):
            return None
        return sum(at < min(order[key] for key in group.keys) for at in weights)

    def _by_name(
        self, group: VectorGroup, siblings: Sequence[VectorGroup]
    ) -> tuple[list[int], bool]:
        """Returns the places that the name of a group allows, and whether the name alone decides.

        A place between the indices of a container decides (`net.1` between `net.0` and `net.3`).
        Otherwise a group has the numbers of its weight (`conv2`, `bn2`), if all groups of that name
        fit in the same way, after their weights or before them.
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
        """Returns the place that an index in a container determines; None without one."""
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
        """Returns the places of all groups of one name, each at the weight with its numbers."""
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
