"""Checks that sizes and placements fit a spec: a layout that exists is valid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, Shape

# A layout calls these checks when it is constructed.
if TYPE_CHECKING:
    from nfn_graph.data._layout import Placement


def check_shape(spec: NetworkSpec, shape: Shape) -> None:
    """Raises an error unless the sizes are those of a network of that spec."""
    if len(shape.sizes) != len(spec.neurons) or len(shape.blocks) != len(spec.weights):
        raise UserError(
            f"Expected sizes of {len(spec.neurons)} neuron types and blocks of "
            f"{len(spec.weights)} weight types (got {len(shape.sizes)} and {len(shape.blocks)})"
        )
    layers = dict(zip(spec.neuron, shape.sizes, strict=True))
    for neuron in spec.neurons:
        sizes = layers[neuron.name]
        if len(sizes) != 1 and not neuron.role:
            raise UserError(
                f"Expected one layer of neuron type '{neuron.name}' (got sizes {sizes})"
            )
        inside = math.prod(sum(layers[parent]) for parent in neuron.parents)
        if len(neuron.parents) == 2:
            inside //= shared_neurons(spec, layers, *neuron.parents)
        exact = inside if len(neuron.parents) == 2 else neuron.size and neuron.size * inside
        if exact is not None and sum(sizes) != exact:
            raise UserError(
                f"Expected {exact} neurons of the {'fixed ' if neuron.fixed else ''}type "
                f"'{neuron.name}' (got {sum(sizes)})"
            )
        if neuron.parents and (sum(sizes) == 0 or sum(sizes) % inside):
            raise UserError(
                f"Expected one number of neurons of type '{neuron.name}' in each of the {inside} "
                f"neurons of '{neuron.parents[0]}' (got {sum(sizes)} neurons)"
            )
    for weight, blocks in zip(spec.weights, shape.blocks, strict=True):
        targets, sources = len(layers[weight.target]), len(layers[weight.source])
        if not all(0 <= t < targets and 0 <= s < sources for t, s in blocks):
            raise UserError(
                f"Expected tensors of weight type {weight.key} between layers below "
                f"({targets}, {sources}) (got (target, source) layers {blocks})"
            )
        # In this order, the edges of a neuron are contiguous both by target and by source.
        if any(a >= c or b >= d for (a, b), (c, d) in pairwise(blocks)):
            raise UserError(
                f"Expected the tensors of weight type {weight.key} to connect different pairs of "
                f"layers, in order (got (target, source) layers {blocks}). Give parallel tensors "
                f"types with different names."
            )


def check_placements(spec: NetworkSpec, shape: Shape, placements: tuple[Placement, ...]) -> None:
    """Raises an error unless the placements fill every entry once and use all of every tensor."""
    layers = dict(zip(spec.neuron, shape.sizes, strict=True))
    joined = dict(zip(spec.weight, shape.blocks, strict=True))
    taps: dict[tuple[Key, int], list[tuple[int, int]]] = {}
    used: dict[str, int] = {}
    for p in placements:
        if p.store not in spec.types:
            raise UserError(f"Expected '{p.keys[0]}' in a type of the spec (got {p.store!r})")
        blocks = len(layers[p.store] if isinstance(p.store, str) else joined[p.store])
        if not 0 <= p.block < blocks:
            raise UserError(
                f"Expected '{p.keys[0]}' in a block of {p.store!r} below {blocks} (got {p.block})"
            )
        if isinstance(p.store, str):
            expected = {"neuron": layers[p.store][p.block]}
        else:
            target, source = joined[p.store][p.block]
            shared = shared_neurons(spec, layers, p.store[0], p.store[2])
            expected = {
                "target": layers[p.store[2]][target],
                "source": layers[p.store[0]][source] // shared,
            }
        found: dict[str, int] = {}
        for axis, count in zip(p.axes, p.taken, strict=True):
            if axis != "tap":
                found[axis] = found.get(axis, 1) * count
        if found != expected:
            raise UserError(
                f"Expected '{p.keys[0]}' to have {expected} neurons along its axes, the sizes "
                f"of {p.store!r} (got {found})"
            )
        taps.setdefault((p.store, p.block), []).append((p.tap, p.tap + p.taps))
        used[p.keys[0]] = used.get(p.keys[0], 0) + math.prod(p.taken)
    for key, count in spec.taps.items():
        blocks = len(layers[key]) if isinstance(key, str) else len(joined[key])
        for block in range(blocks):
            runs = sorted(taps.get((key, block), []))
            ends = [0, *(end for _, end in runs)]
            if [begin for begin, _ in runs] != ends[:-1] or ends[-1] != count:
                raise UserError(
                    f"Expected tensors for all {count} taps of {key!r}, each once (got taps {runs})"
                )
    sizes = {p.keys[0]: math.prod(p.shape) for p in placements}
    for name, count in used.items():
        if count != sizes[name]:
            raise UserError(
                f"Expected all {sizes[name]} entries of '{name}' to be placed once (got {count})"
            )


def shared_neurons(
    spec: NetworkSpec, sizes: Mapping[str, tuple[int, ...]], first: str, second: str
) -> int:
    """The number of parent neurons that two types share; within each, all pairs are connected."""
    if first == second:
        return 1
    shared = [i for i in spec.indices(first) if i in spec.indices(second)]
    inside = [sum(sizes[p]) for i in shared for p in spec.neuron[i].parents]
    return math.prod(sum(sizes[i]) for i in shared) // math.prod(inside)
