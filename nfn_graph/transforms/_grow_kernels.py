"""Convolution kernels of one size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Layout, Placement, Range, View, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, WeightKey
from nfn_graph.transforms._reversible import ReversibleTransform, Stores

Kernel = tuple[int, ...]


class GrowKernels(ReversibleTransform):
    """Grows convolution kernels to a common size by placing zeros evenly around them.

    A network whose padding grows with its kernels computes the same function;
    :meth:`WeightGraph.run` ignores the zeros. If an axis grows by an odd number, the additional
    zero comes last. Linear layers, also after a flatten, have no kernels and do not change.

    Args:
        sizes: The kernel size of all convolutions, such as `(5, 5)`, or one size per weight type.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import GrowKernels
        >>> graph = WeightGraph.from_tensors([torch.randn(4, 1, 3, 3), torch.randn(2, 4, 3, 3)])
        >>> grow = GrowKernels((5, 5))
        >>> grow(graph)["input", "weight", "hidden1"].edge_attr.shape
        torch.Size([4, 25, 1])
    """

    def __init__(self, sizes: Sequence[int] | Mapping[WeightKey, Sequence[int]]) -> None:
        if not isinstance(sizes, Sequence | Mapping):
            raise TypeError(f"Expected a kernel size such as (5, 5) (got {sizes!r})")
        self.sizes: Sequence[int] | Mapping[Any, Sequence[int]] = sizes

    def __repr__(self) -> str:
        return f"GrowKernels({self.sizes})"

    @classmethod
    def to_largest(cls, graphs: Iterable[WeightGraph]) -> GrowKernels:
        """Grows the kernels of every weight type to the largest size in these networks.

        Types that share a tensor grow to the same size.
        """
        sizes: dict[Any, Kernel] = {}
        shared: set[frozenset[Key]] = set()
        layouts = list({id(graph.layout): graph.layout for graph in graphs}.values())
        for layout in layouts:
            for p in layout.placements:
                if kernel := p.kernel:
                    known = sizes.setdefault(p.store, kernel)
                    if len(known) != len(kernel):
                        raise UserError(
                            f"Expected a kernel of {len(known)} axes at '{p.keys[0]}', as in "
                            f"other networks (got {kernel})"
                        )
                    sizes[p.store] = tuple(map(max, known, kernel))
            shared.update(map(frozenset, _stores(layout).values()))
        before = None
        while before != sizes:
            before = dict(sizes)
            for stores in shared:
                largest = tuple(map(max, zip(*(sizes[store] for store in stores), strict=True)))
                sizes.update(dict.fromkeys(stores, largest))
        _check_meet(layouts, sizes)
        return cls(sizes)

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        self._check_shared(layout)
        grown: dict[Placement, Placement] = {}
        # Role types, which have several blocks, come last.
        for store, [block] in layout.fillings.items():
            parts: list[Tensor] = []
            tap = 0
            for p in block:
                size = self._size(p)
                rows = stores[store][:, p.tap : p.tap + p.taps]
                parts.append(_resize(rows, p.kernel, size))
                grown[p] = replace(_with_kernel(p, size), tap=tap)
                tap += parts[-1].shape[1]
            stores[store] = torch.cat(parts, 1)
        weights = [replace(w, taps=stores[w.key].shape[1]) for w in layout.spec.weights]
        spec = NetworkSpec(layout.spec.neurons, tuple(weights))
        placements = tuple(grown[p] for p in layout.placements)
        views: dict[int, list[View]] = {
            number: [("getitem", (_crop(p, grown[p]),))]
            for number, (p, *_) in enumerate(layout.sources)
            if p.shape != grown[p].shape
        }
        computation = layout.computation.reading(views)
        return replace(layout, spec=spec, placements=placements, computation=computation), stores

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        for store, [block] in before.fillings.items():
            [grown] = layout.fillings[store]
            parts = [
                _resize(stores[store][:, q.tap : q.tap + q.taps], q.kernel, p.kernel)
                for p, q in zip(block, grown, strict=True)
            ]
            stores[store] = torch.cat(parts, 1)
        return stores

    def _check_shared(self, layout: Layout) -> None:
        if not isinstance(self.sizes, Mapping):
            return
        for key, stores in _stores(layout).items():
            found = {store: self.sizes.get(store) for store in stores}
            if len({None if size is None else tuple(size) for size in found.values()}) > 1:
                raise UserError(
                    f"Expected one kernel size for all types that hold a part of '{key}' "
                    f"(got {found})"
                )

    def _size(self, placement: Placement) -> Kernel:
        """The new kernel of a placement, which is its own if it does not grow."""
        kernel, sizes = placement.kernel, self.sizes
        size = tuple(sizes.get(placement.store, ()) if isinstance(sizes, Mapping) else sizes)
        if not kernel or not size:
            return kernel
        if len(size) != len(kernel) or any(k > s for k, s in zip(kernel, size, strict=True)):
            raise UserError(
                f"Expected a kernel of {len(size)} axes, at most {size}, at "
                f"'{placement.keys[0]}' (got {kernel})"
            )
        return size


def _check_meet(layouts: Sequence[Layout], sizes: Mapping[Any, Kernel]) -> None:
    """Raises an error if numbers of taps still differ with kernels of these sizes."""
    known: dict[Key, tuple[int, str]] = {}
    for layout in layouts:
        for store, blocks in layout.fillings.items():
            if isinstance(store, str):
                continue
            for block in blocks:
                taps = sum(math.prod(sizes[store]) if p.kernel else p.taps for p in block)
                before = known.setdefault(store, (taps, block[0].keys[0]))
                if before[0] != taps:
                    raise UserError(
                        f"Expected '{block[0].keys[0]}' and '{before[1]}' of two networks to have "
                        f"one number of taps in {store} (got {taps} and {before[0]}). Only the "
                        f"kernels of convolutions can grow; the taps of a linear layer are the "
                        f"positions that it reads after a flatten."
                    )


def _stores(layout: Layout) -> dict[str, list[Key]]:
    """For every kernel, the types that contain a part of it."""
    kernels = {own[0].keys[0]: [p.store for p in own if p.kernel] for own in layout.sources}
    return {key: stores for key, stores in kernels.items() if stores}


def _with_kernel(placement: Placement, size: Kernel) -> Placement:
    if placement.kernel == size:
        return placement
    new = dict(zip((i for i, a in enumerate(placement.axes) if a == "tap"), size, strict=True))
    shape = tuple(new.get(i, n) for i, n in enumerate(placement.shape))
    stop = tuple(new.get(i, n) for i, n in enumerate(placement.stop))
    return replace(placement, shape=shape, view=shape, stop=stop)


def _crop(small: Placement, large: Placement) -> tuple[Range, ...]:
    """Removes the zeros around the kernel of a grown tensor."""
    return tuple(
        Range() if m == n else Range((n - m) // 2, (n - m) // 2 + m)
        for m, n in zip(small.shape, large.shape, strict=True)
    )


def _resize(rows: Tensor, kernel: Kernel, size: Kernel) -> Tensor:
    """Pads or crops taps `[count, prod(kernel), channels]` around their centre."""
    if kernel == size:
        return rows
    count, _, channels = rows.shape
    pads = [0, 0]
    for old, new in zip(reversed(kernel), reversed(size), strict=True):
        # Growing by d puts d // 2 zeros first; cropping removes the same ones.
        before = int((new - old) / 2)
        pads += [before, new - old - before]
    x = rows.reshape(count, *kernel, channels)
    return torch.nn.functional.pad(x, pads).reshape(count, -1, channels)
