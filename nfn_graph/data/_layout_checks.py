"""Checks that sizes and placements fit a spec: a layout that exists is valid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec

# A layout calls these checks when it is constructed.
if TYPE_CHECKING:
    from nfn_graph.data._layout import Layout


def check_shape(layout: Layout) -> None:
    """Raises an error unless the sizes are those of a network of the spec."""
    spec, shape = layout.spec, layout.shape
    if len(shape.sizes) != len(spec.neurons) or len(shape.blocks) != len(spec.weights):
        raise UserError(
            f"Expected sizes of {len(spec.neurons)} neuron types and blocks of "
            f"{len(spec.weights)} weight types (got {len(shape.sizes)} and {len(shape.blocks)})"
        )
    layers = layout.sizes
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
    for key, blocks in layout.blocks.items():
        targets, sources = len(layers[key[2]]), len(layers[key[0]])
        if not all(0 <= t < targets and 0 <= s < sources for t, s in blocks):
            raise UserError(
                f"Expected tensors of weight type {key} between layers below "
                f"({targets}, {sources}) (got (target, source) layers {blocks})"
            )
        # In this order, the edges of a neuron are contiguous both by target and by source.
        if any(a >= c or b >= d for (a, b), (c, d) in pairwise(blocks)):
            raise UserError(
                f"Expected the tensors of weight type {key} to connect different pairs of "
                f"layers, in order (got (target, source) layers {blocks}). Give parallel tensors "
                f"types with different names."
            )


def check_placements(layout: Layout) -> None:
    """Raises an error unless the placements fill every entry once and use all of every tensor."""
    sizes, blocks, types = layout.sizes, layout.blocks, layout.spec.types
    num_blocks: dict[Key, int] = {name: len(layers) for name, layers in sizes.items()}
    num_blocks |= {key: len(pairs) for key, pairs in blocks.items()}
    taps: dict[tuple[Key, int], list[tuple[int, int]]]
    taps = {(key, i): [] for key, count in num_blocks.items() for i in range(count)}
    used = Counter[str]()
    for p in layout.placements:
        name = p.keys[0]
        if p.store not in types:
            raise UserError(f"Expected '{name}' in a type of the spec (got {p.store!r})")
        if (p.store, p.block) not in taps:
            raise UserError(
                f"Expected '{name}' in a block of {p.store!r} below {num_blocks[p.store]} "
                f"(got {p.block})"
            )
        if isinstance(p.store, str):
            expected = {"neuron": sizes[p.store][p.block]}
        else:
            source, _, target = p.store
            row, column = blocks[p.store][p.block]
            shared = shared_neurons(layout.spec, sizes, source, target)
            expected = {"target": sizes[target][row], "source": sizes[source][column] // shared}
        found: dict[str, int] = {}
        for axis, count in zip(p.axes, p.taken, strict=True):
            if axis != "tap":
                found[axis] = found.get(axis, 1) * count
        if found != expected:
            raise UserError(
                f"Expected '{name}' to have {expected} neurons along its axes, the sizes "
                f"of {p.store!r} (got {found})"
            )
        taps[p.store, p.block].append((p.tap, p.tap + p.taps))
        used[name] += math.prod(p.taken)
    for (key, _), runs in taps.items():
        begins, ends = zip(*sorted(runs), strict=True) if runs else ((), ())
        if (*begins, types[key].taps) != (0, *ends):
            raise UserError(
                f"Expected tensors for all {types[key].taps} taps of {key!r}, each once "
                f"(got taps {sorted(runs)})"
            )
    for p in layout.placements:
        if used[p.keys[0]] != math.prod(p.shape):
            raise UserError(
                f"Expected all {math.prod(p.shape)} entries of '{p.keys[0]}' to be placed once "
                f"(got {used[p.keys[0]]})"
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
