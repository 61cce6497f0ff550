"""The order of layers that are only counted, class by class, as in Keras 3's files of weights.

`dense_1` comes after `dense`, but whether `batch_normalization` comes before it, sizes must tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import KerasLayer
from nfn_graph.converters.keras.keys import natural
from nfn_graph.converters.keras.links import Ends, are_flattened, ends_of, refuse_chain

_MOST_STEPS = 10_000

Chain = list[tuple[KerasLayer, Ends]]


def in_order(layers: Sequence[KerasLayer], tensors: Mapping[str, Tensor]) -> list[KerasLayer]:
    """The one order that the layers with weights can have."""
    counted = sorted((n for n in layers if n.keys), key=lambda layer: natural(layer.name))
    links: dict[str, Chain] = {}
    vectors: dict[str, list[KerasLayer]] = {}
    for layer in counted:
        if not any(tensors[key].is_floating_point() for key in layer.keys):
            continue
        ends = ends_of(layer, tensors)
        if ends is None:
            vectors.setdefault(layer.class_name, []).append(layer)
        else:
            links.setdefault(layer.class_name, []).append((layer, ends))
    chain = _only_chain(list(links.values()))
    if any(layer.class_name == "InputLayer" for layer in layers):
        _check_untied(chain)
    behind: list[list[KerasLayer]] = [[] for _ in range(len(chain) + 1)]
    for same in vectors.values():
        for layer, at in zip(same, _only_places(same, chain, tensors), strict=True):
            behind[at].append(layer)
    ordered = list(behind[0])
    for (layer, _), after in zip(chain, behind[1:], strict=True):
        ordered += [layer, *after]
    return ordered


def _only_chain(classes: Sequence[Chain]) -> Chain:
    found: list[Chain] = []
    for chain in _chains(classes):
        found.append(chain)
        if len(found) > 1:
            readings = "; or ".join(" -> ".join(n.name for n, _ in chain) for chain in found)
            raise refuse_chain(f"several readings: {readings}")
    if not found:
        shown = ", ".join(
            f"'{layer.name}' from {ends.inputs} to {ends.outputs}"
            for same in classes
            for layer, ends in same
        )
        raise refuse_chain(f"layers that do not form one: {shown}")
    return found[0]


def _chains(classes: Sequence[Chain]) -> Iterator[Chain]:
    """All chains in which the layers of every class keep their order."""
    total = sum(map(len, classes))
    stack: list[tuple[Chain, tuple[int, ...]]] = [([], (0,) * len(classes))]
    for _ in range(_MOST_STEPS):
        if not stack:
            return
        chain, used = stack.pop()
        if len(chain) == total:
            yield chain
            continue
        for i, same in enumerate(classes):
            if used[i] < len(same) and (not chain or _follows(chain[-1], same[used[i]])):
                after = (*used[:i], used[i] + 1, *used[i + 1 :])
                stack.append(([*chain, same[used[i]]], after))
    raise refuse_chain(f"more than {_MOST_STEPS} partial readings")


def _follows(before: tuple[KerasLayer, Ends], after: tuple[KerasLayer, Ends]) -> bool:
    try:
        are_flattened(before, after)
    except ConversionError:
        return False
    return True


def _check_untied(chain: Chain) -> None:
    """Refuses a functional model whose layers may be added: its file does not list additions."""
    sizes: dict[int, str] = {chain[0][1].inputs: "the input"}
    for layer, ends in chain:
        if ends.outputs in sizes:
            raise refuse_chain(
                f"a functional model with {ends.outputs} neurons at {sizes[ends.outputs]} and at "
                f"'{layer.name}', which may be added to each other"
            )
        sizes[ends.outputs] = f"'{layer.name}'"


def _only_places(
    layers: Sequence[KerasLayer], chain: Chain, tensors: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """The places of the layers of one class, which keep their order; 0 is the input."""
    found: list[tuple[int, ...]] = [()]
    for layer in layers:
        size = next(tensors[key].shape[-1] for key in layer.keys if tensors[key].dim())
        fitting = [i for i in range(len(chain) + 1) if _fits(size, chain, i)]
        found = [(*places, i) for places in found for i in fitting if i >= max(places, default=0)]
        if len(found) > _MOST_STEPS:
            break
    if len(found) != 1:
        names = ", ".join(f"'{layer.name}'" for layer in layers[:3])
        raise refuse_chain(f"{len(found) or 'no'} places for {names}")
    return found[0]


def _fits(size: int, chain: Chain, at: int) -> bool:
    outputs = chain[0][1].inputs if at == 0 else chain[at - 1][1].outputs
    return size == outputs or (0 < at < len(chain) and size == chain[at][1].inputs)
