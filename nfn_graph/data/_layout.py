"""The sizes of a network's layers and the placements of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from nfn_graph.data._computation import Computation, own_fields
from nfn_graph.data._layout_checks import check_placements, check_shape, shared_neurons
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, Shape, WeightKey

PlacementAxis = Literal["target", "source", "neuron", "tap"]

NOT_RECORDED = Computation.unknown(
    "it was made of tensors alone, which do not say how they are used"
)


@dataclass(frozen=True)
class Placement:
    """The place of a stored tensor, or of a slice of it, from which it can be restored exactly.

    The tensor is viewed in the shape `view`, whose axes have the roles `axes`, and the part
    `start:stop` of every axis is taken. The result belongs to one layer (or pair of layers) of the
    type `store`, where it fills the taps from `tap` on.

    Args:
        keys: The names under which the tensor is stored; a shared tensor has several.
        shape: The tensor's own shape.
        dtype: The tensor's own dtype.
        store: The neuron type or weight type that holds it.
        view: The shape to view the tensor in, for example with a flattened axis split.
        axes: The role of each axis of `view`. If there are several `tap` axes, the last one varies
            fastest.
        start: The first index that is taken of each axis.
        stop: The index after the last one that is taken of each axis.
        tap: The first tap in the store.
        block: The number of the layer (or pair of layers) among those of its type; only role types
            have several.
        cut: The first and the last index of each axis of the tensor's own shape, if only a part of
            the tensor is viewed because one axis holds layers with different numbers of positions.

    Example:
        >>> axes = ("target", "source", "tap", "tap")
        >>> kernel = torch.ones(8, 4, 3, 3)
        >>> placement = Placement.whole("conv.weight", kernel, ("a", "weight", "b"), axes)
        >>> placement.take(kernel).shape  # edges, taps
        torch.Size([32, 9])
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    store: Key
    view: tuple[int, ...]
    axes: tuple[PlacementAxis, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    tap: int = 0
    block: int = 0
    cut: tuple[tuple[int, int], ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return own_fields(self)

    @classmethod
    def whole(
        cls, key: str, tensor: Tensor, store: Key, axes: Sequence[PlacementAxis], tap: int = 0
    ) -> Placement:
        """The placement of a tensor that fills one store without changes."""
        shape = tuple(tensor.shape)
        return cls(
            (key,), shape, tensor.dtype, store, shape, tuple(axes), (0,) * len(shape), shape, tap
        )

    @cached_property
    def taps(self) -> int:
        """The number of taps of the store that it fills."""
        return math.prod(n for axis, n in zip(self.axes, self.taken, strict=True) if axis == "tap")

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel of a convolution: the tap axes that are axes of the tensor itself."""
        if isinstance(self.store, str) or self.view != self.shape:
            return ()
        return tuple(n for n, axis in zip(self.view, self.axes, strict=True) if axis == "tap")

    @cached_property
    def count(self) -> int:
        """The number of rows of the store that it fills."""
        return math.prod(self.taken) // max(self.taps, 1)

    def take(self, tensor: Tensor) -> Tensor:
        """Arranges the tensor as rows `[count, taps]` of the store; a view if possible."""
        if tuple(tensor.shape) != self.shape:
            raise UserError(
                f"Expected tensor '{self.keys[0]}' of shape {self.shape} "
                f"(got {tuple(tensor.shape)})"
            )
        if self.is_straight:
            return tensor.reshape(self.count, self.taps)
        part = self.viewed(tensor.contiguous().unsqueeze(0))[0][self.slices]
        return part.permute(self._order).reshape(self.count, self.taps)

    def put(self, rows: Tensor, tensor: Tensor) -> None:
        """Writes rows `[count, taps, channels]` back into a tensor `[*shape, channels]`."""
        entries = self.ordered(rows.movedim(-1, 0)).to(tensor.dtype)
        self.viewed(tensor.movedim(-1, 0))[(slice(None), *self.slices)] = entries

    def ordered(self, rows: Tensor) -> Tensor:
        """Arranges rows `[..., count, taps]` as the entries `[..., *taken]` of the view."""
        order, num_axes = self._order, len(self.axes)
        entries = rows.reshape(*rows.shape[:-2], *(self.taken[axis] for axis in order))
        return entries.movedim(tuple(range(-num_axes, 0)), tuple(i - num_axes for i in order))

    def viewed(self, tensor: Tensor) -> Tensor:
        """Views tensors `[networks, *shape]` in the shape `view`, sharing their memory."""
        if self.cut is not None:
            tensor = tensor[(slice(None), *(slice(a, b) for a, b in self.cut))]
        return tensor.view(tensor.shape[0], *self.view)

    @cached_property
    def is_straight(self) -> bool:
        """Whether the store contains the whole tensor in its own order."""
        return self.is_whole and self._order == list(range(len(self.axes)))

    @cached_property
    def is_whole(self) -> bool:
        """Whether the whole tensor is taken."""
        return self.cut is None and self.taken == self.view

    @cached_property
    def taken(self) -> tuple[int, ...]:
        """The number of indices that are taken of each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The part of the view that is taken."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @cached_property
    def view_axes(self) -> tuple[range, ...]:
        """The axes of the view that belong to each axis of the tensor."""
        found, end = [], 0
        for size in self.shape:
            begin, product = end, 1
            while end < len(self.view) and (
                product < size or (end == begin and size == self.view[end])
            ):
                product *= self.view[end]
                end += 1
            found.append(range(begin, end))
        return tuple(found)

    @cached_property
    def _order(self) -> list[int]:
        rank = {"target": 0, "neuron": 0, "source": 1, "tap": 2}
        return sorted(range(len(self.axes)), key=lambda i: rank[self.axes[i]])


@dataclass(frozen=True)
class Layout:
    """Everything in a graph except tensors: its spec, its sizes and the origin of its tensors.

    Args:
        spec: The network's own spec.
        shape: The sizes of the network, in the order of `spec`.
        placements: The places of the tensors that the graph was made from.
        within: The spec of the batch that the network was collated into, if any.
        carried: Tensors of the checkpoint that are not features (counters and other integers), by
            key; they are kept unchanged.
        aside: By key, the carried tensors that were left out of the graph on purpose, with the
            placements that they would have, so that they can be permuted with the neurons.
        keys: All keys of the checkpoint, in its order.
        channels: Further channels of the features after the weights themselves: by name, the keys
            that they contain values for, and their dtypes.
        before: The layout before a transform and the name of the transform, so that its inverse is
            exact.
        computation: The computation of the network with its tensors, or the reason why it is not
            known.

    Example:
        >>> from nfn_graph import WeightGraph
        >>> layout = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(1, 4)]).layout
        >>> layout.num_rows("hidden1"), layout.num_entries
        (4, 12)
    """

    spec: NetworkSpec
    shape: Shape
    placements: tuple[Placement, ...] = ()
    within: NetworkSpec | None = None
    carried: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    aside: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict, compare=False)
    keys: tuple[str, ...] = field(default=(), compare=False)
    channels: Mapping[str, Mapping[str, torch.dtype]] = field(default_factory=dict, compare=False)
    before: tuple[str, Layout] | None = field(default=None, compare=False)
    computation: Computation = field(default=NOT_RECORDED, compare=False)

    def __post_init__(self) -> None:
        check_shape(self)
        if self.placements:
            check_placements(self)

    def __getstate__(self) -> dict[str, Any]:
        return own_fields(self)

    def shape_in(self, spec: NetworkSpec) -> Shape:
        """The sizes in the order of a spec that contains all types of this network."""
        if spec is self.spec or list(spec.taps) == list(self.spec.taps):
            return self.shape
        return Shape(
            tuple(self.sizes.get(name, ()) for name in spec.neuron),
            tuple(self.blocks.get(key, ()) for key in spec.weight),
        )

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the layers of every neuron type; only role types have several."""
        return dict(zip(self.spec.neuron, self.shape.sizes, strict=True))

    @cached_property
    def blocks(self) -> dict[WeightKey, tuple[tuple[int, int], ...]]:
        """The `(target, source)` layers that the tensors of every weight type connect."""
        return dict(zip(self.spec.weight, self.shape.blocks, strict=True))

    @cached_property
    def sources(self) -> tuple[tuple[Placement, ...], ...]:
        """The placements of every tensor, in the order in which a computation counts tensors."""
        found: dict[str, list[Placement]] = {}
        for placement in self.placements:
            found.setdefault(placement.keys[0], []).append(placement)
        return tuple(map(tuple, found.values()))

    @cached_property
    def placed(self) -> frozenset[str]:
        """The keys of all tensors that are features."""
        return frozenset(key for placement in self.placements for key in placement.keys)

    def inside(self, spec: NetworkSpec | None) -> Layout:
        """The layout of the same network in a batch of that spec; itself if the spec is its own."""
        within = None if spec == self.spec else spec
        return self if self.within is within else self.noting(within=within)

    def noting(self, **fields: Any) -> Layout:
        """Returns a copy that changes neither spec, shape nor placements, so it needs no checks."""
        # Copies share derived values, since there may be thousands of networks of one kind.
        _ = (self._num_rows, self.fillings, self.placed)
        copy = object.__new__(Layout)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(fields)
        return copy

    @cached_property
    def fillings(self) -> dict[Key, list[list[Placement]]]:
        """For every store and each of its blocks, the placements in the order of their taps."""
        found: dict[Key, dict[int, list[Placement]]] = {}
        for placement in sorted(self.placements, key=lambda p: (p.block, p.tap)):
            blocks = found.setdefault(placement.store, {})
            blocks.setdefault(placement.block, []).append(placement)
        return {store: list(blocks.values()) for store, blocks in found.items()}

    @cached_property
    def first_rows(self) -> dict[tuple[Key, int], int]:
        """The first row of every block of a store."""
        found = {}
        for store, blocks in self.fillings.items():
            begin = 0
            for first, *_ in blocks:
                found[store, first.block] = begin
                begin += first.count
        return found

    def num_rows(self, store: Key) -> int:
        """The number of rows that this network has in a store; 0 if it lacks the type."""
        return self._num_rows.get(store, 0)

    @cached_property
    def num_entries(self) -> int:
        """The number of entries of all weights, without biases: edges times taps."""
        return sum(self.num_rows(weight.key) * weight.taps for weight in self.spec.weights)

    @cached_property
    def _num_rows(self) -> dict[Key, int]:
        sizes = self.sizes
        rows: dict[Key, int] = {name: sum(layers) for name, layers in sizes.items()}
        for key, blocks in self.blocks.items():
            source, _, target = key
            pairs = (sizes[target][t] * sizes[source][s] for t, s in blocks)
            shared = shared_neurons(self.spec, sizes, source, target)
            rows[key] = sum(pair // shared for pair in pairs)
        return rows


def gather_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Gathers named tensors into stores `[count, taps, 1]` by their placements.

    Example:
        >>> from nfn_graph import WeightGraph
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(1, 4)])
        >>> stores = gather_tensors(graph.layout, graph.to_tensors())
        >>> stores["input", "weight", "hidden1"].shape
        torch.Size([8, 1, 1])
    """
    stores = {}
    for store, blocks in layout.fillings.items():
        rows = [_joined([p.take(tensors[p.keys[0]]) for p in block], 1) for block in blocks]
        stores[store] = _joined(rows, 0).unsqueeze(-1)
    return stores


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenates tensors; a single one keeps its memory."""
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def scatter_tensors(layout: Layout, stores: Mapping[Key, Tensor]) -> dict[str, Tensor]:
    """Restores the named tensors from stores by their placements, each `[*shape, channels]`.

    Example:
        >>> from nfn_graph import WeightGraph
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(1, 4)])
        >>> scatter_tensors(graph.layout, gather_tensors(graph.layout, graph.to_tensors())).keys()
        dict_keys(['0.weight', '1.weight'])
    """
    tensors: dict[str, Tensor] = {}
    for placement in layout.placements:
        rows = stores[placement.store]
        if placement.keys[0] not in tensors:
            shape = (*placement.shape, rows.shape[-1])
            tensor = torch.empty(shape, dtype=placement.dtype, device=rows.device)
            tensors.update(dict.fromkeys(placement.keys, tensor))
        begin = layout.first_rows[placement.store, placement.block]
        part = rows.narrow(0, begin, placement.count).narrow(1, placement.tap, placement.taps)
        placement.put(part, tensors[placement.keys[0]])
    return tensors
