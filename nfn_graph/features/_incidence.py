"""Which neurons the edges of a batch touch, built from sizes by arithmetic.

Edges are never listed by value and never sorted: layers are complete bipartite, their edges
target-major (the memory order of a `[out, in, ...]` weight tensor), so every index follows
from the sizes of the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.features._cache import IncidenceCache
from nfn_graph.features._rows import (
    EdgeRows,
    NeuronRows,
    SelfRows,
    as_segments,
    group_of_rows,
    is_lasting,
    tensor_bytes,
)
from nfn_graph.spec._sites import Bundle, FoldedSpec
from nfn_graph.spec._types import NetworkSpec, Shape, WeightKey


class Block(NamedTuple):
    """One weight tensor of one network.

    Attributes:
        graph: The network.
        target_size: Neurons at its target.
        source_size: Neurons at its source.
        target_start: The row of its first target neuron.
        source_start: The row of its first source neuron.
    """

    graph: int
    target_size: int
    source_size: int
    target_start: int
    source_start: int


class Incidence:
    """The incidence of a batch of networks. Made by :meth:`of`, which caches by sizes.

    Args:
        spec: The types, in whose order the shapes are given.
        shapes: The sizes of every network.
        device: Where the index tensors live.
    """

    def __init__(self, spec: NetworkSpec, shapes: tuple[Shape, ...], device: torch.device) -> None:
        self.spec = spec
        self.shapes = shapes
        self.device = device
        self.num_graphs = len(shapes)
        self.neurons: dict[str, NeuronRows] = {}
        self.weights: dict[WeightKey, EdgeRows] = {}
        self.self_weights: dict[WeightKey, SelfRows] = {}
        self.masks: dict[FoldedSpec, dict[str, Tensor]] = {}
        self.scales: dict[tuple[FoldedSpec, torch.dtype], tuple[Tensor, ...]] = {}
        self._starts: dict[str, list[list[int]]] = {}
        sizes = [[shape.sizes[i] for shape in shapes] for i in range(len(spec.neurons))]
        for neuron, layers in zip(spec.neurons, sizes, strict=True):
            self._starts[neuron.name] = _starts(layers)
        # Whether every network has every type; the usual case, in which nothing is masked.
        self.is_whole = all(all(shape.sizes) and all(shape.blocks) for shape in shapes)
        self._blocks = {w.key: list(self._list_blocks(i)) for i, w in enumerate(spec.weights)}
        edges = [sum(b.target_size * b.source_size for b in bs) for bs in self._blocks.values()]
        rows = [sum(map(sum, layers)) for layers in sizes]
        # Both ends of every edge are numbered.
        most = max(edges + rows) + 1
        self._dtype = torch.int32 if 2 * most < 2**31 else torch.int64
        # Index tensors made in inference mode could not be used in training later on.
        with torch.inference_mode(False):
            self._steps = torch.arange(most, dtype=self._dtype, device=device)
            self._pairs = 2 * self._steps
            for neuron, layers in zip(spec.neurons, sizes, strict=True):
                self.neurons[neuron.name] = self._neuron_rows(layers)
            for weight in spec.weights:
                blocks = self._blocks[weight.key]
                self.weights[weight.key] = self._edges(weight.target, weight.source, blocks)
                if spec.is_self(weight):
                    self.self_weights[weight.key] = self._split_self(weight.key)

    @staticmethod
    def of(spec: NetworkSpec, shapes: Sequence[Shape], device: torch.device) -> Incidence:
        """The incidence of these sizes; training repeats few of them, so it is cached."""
        sizes = tuple(shapes)
        return _CACHE.get((spec, sizes, device), lambda: Incidence(spec, sizes, device))

    def to(self, device: torch.device) -> Incidence:
        """The same incidence on another device."""
        if device == self.device:
            return self
        return Incidence.of(self.spec, self.shapes, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index tensors."""
        held = (self.neurons, self.weights, self.self_weights, self.masks, self.scales)
        return tensor_bytes(held)

    @property
    def is_lasting(self) -> bool:
        """Whether the tensors are ordinary ones, not those of a mode or transform."""
        return is_lasting(self._pairs)

    def edges(self, bundle: Bundle) -> EdgeRows:
        """The edges of a bundle of weight tensors."""
        if bundle.is_self:
            return self.self_weights[bundle.key].edges
        return self.weights[bundle.key]

    def lookup(self, key: WeightKey, target: Tensor, source: Tensor) -> Tensor:
        """For every edge in order, the row of the edge between the given neurons.

        Args:
            target: `[e]`, a neuron of the same layer as the edge's own target.
            source: `[e]`, a neuron of the same layer as the edge's own source.
        """
        _, target_size, source_size, target_start, source_start = self._columns(self._blocks[key])
        count = target_size * source_size
        start = count.cumsum(0) - count
        base = start - target_start * source_size - source_start
        block = group_of_rows(count, self.weights[key].count)
        return base.index_select(0, block) + target * source_size.index_select(0, block) + source

    def _list_blocks(self, number: int) -> Iterable[Block]:
        weight = self.spec.weights[number]
        order = list(self.spec.neuron)
        target, source = order.index(weight.target), order.index(weight.source)
        for graph, shape in enumerate(self.shapes):
            for t, s in shape.blocks[number]:
                yield Block(
                    graph,
                    shape.sizes[target][t],
                    shape.sizes[source][s],
                    self._starts[weight.target][graph][t],
                    self._starts[weight.source][graph][s],
                )

    def _neuron_rows(self, sizes: list[tuple[int, ...]]) -> NeuronRows:
        total = sum(map(sum, sizes))
        layer_sizes = self._tensor([n for layers in sizes for n in layers])
        layer_graph = self._tensor([g for g, layers in enumerate(sizes) for _ in layers])
        layer = group_of_rows(layer_sizes, total)
        start = layer_sizes.cumsum(0) - layer_sizes
        per_graph = self._tensor([sum(layers) for layers in sizes])
        graph = layer_graph.index_select(0, layer)
        return NeuronRows(
            graph=graph,
            position=torch.arange(total, device=self.device) - start.index_select(0, layer),
            layer_size=layer_sizes.index_select(0, layer),
            graphs=as_segments(
                self._number(graph), None, per_graph, self._steps.narrow(0, 0, total)
            ),
        )

    def _edges(
        self, target_type: str, source_type: str, blocks: list[Block], skip_diagonal: bool = False
    ) -> EdgeRows:
        # Of a self weight, an edge's source counts the other neurons of the layer only.
        less = int(skip_diagonal)
        graph, target_size, source_size, target_start, source_start = self._columns(blocks)
        total = sum(b.target_size * (b.source_size - less) for b in blocks)
        count = target_size * (source_size - less)
        targets, sources = self._number(target_size - less), self._number(source_size - less)
        steps = self._steps.narrow(0, 0, total)
        block = group_of_rows(count, total)
        start = self._number(count.cumsum(0) - count).index_select(0, block)
        local = steps - start
        target, source = _divide(local, sources.index_select(0, block))
        # The same arithmetic with the ends exchanged gives the order by source.
        late_source, late_target = _divide(local, targets.index_select(0, block))
        column = late_source
        if skip_diagonal:
            source = source + (source >= target)
            late_target = late_target + (late_target >= late_source)
            column = late_source - (late_source > late_target).to(self._dtype)
        transposed = start + late_target * sources.index_select(0, block) + column
        num_targets, num_sources = (self._rows(name) for name in (target_type, source_type))
        target = target + self._number(target_start).index_select(0, block)
        source = source + self._number(source_start).index_select(0, block)
        per_target = _degree(target_start, target_size, source_size - less, num_targets)
        per_source = _degree(source_start, source_size, target_size - less, num_sources)
        # Tensors of a type join layers in order, so a neuron's edges are one run in either order.
        at_target = as_segments(target, None, per_target, steps)
        at_source = as_segments(source, transposed, per_source, steps)
        return EdgeRows(
            ends=torch.stack([target, source + num_targets], 1).flatten(),
            pairs=self._pairs.narrow(0, 0, total + 1),
            order=torch.cat([at_target.order, at_source.order]),
            pointers=torch.cat(
                [at_target.pointers, at_source.pointers.narrow(0, 1, num_sources) + total]
            ),
            transposed=transposed,
            targets=at_target,
            sources=at_source,
            per_graph=count.new_zeros(self.num_graphs).index_add(0, graph, count),
        )

    def _split_self(self, key: WeightKey) -> SelfRows:
        blocks = self._blocks[key]
        edges = self._edges(key[2], key[0], blocks, skip_diagonal=True)
        _, size, _, neuron_start, _ = self._columns(blocks)
        store_start = (size * size).cumsum(0) - size * size
        neuron_block = group_of_rows(size, sum(b.target_size for b in blocks))
        first = (size.cumsum(0) - size).index_select(0, neuron_block)
        place = torch.arange(neuron_block.shape[0], device=self.device) - first
        block = group_of_rows(size * (size - 1), edges.count)
        row = edges.target - neuron_start.index_select(0, block)
        column = edges.source - neuron_start.index_select(0, block)
        return SelfRows(
            neuron=neuron_start.index_select(0, neuron_block) + place,
            diagonal=store_start.index_select(0, neuron_block)
            + place * (size.index_select(0, neuron_block) + 1),
            off_diagonal=store_start.index_select(0, block)
            + row * size.index_select(0, block)
            + column,
            edges=edges,
        )

    def _columns(self, blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The entries of all blocks."""
        table = self._tensor([list(b) for b in blocks]).reshape(len(blocks), 5)
        graph, target_size, source_size, target_start, source_start = table.unbind(1)
        return graph, target_size, source_size, target_start, source_start

    def _rows(self, name: str) -> int:
        return self.neurons[name].count

    def _number(self, values: Tensor) -> Tensor:
        return values.to(self._dtype)

    def _tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _starts(sizes: list[tuple[int, ...]]) -> list[list[int]]:
    """The first row of every layer of every network."""
    starts, total = [], 0
    for layers in sizes:
        starts.append([total + sum(layers[:i]) for i in range(len(layers))])
        total += sum(layers)
    return starts


def _divide(number: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder."""
    quotient = number // by
    return quotient, number - quotient * by


def _degree(start: Tensor, size: Tensor, edges: Tensor, total: int) -> Tensor:
    """How many edges each neuron of a type has, from their number for whole layers."""
    change = start.new_zeros(total + 1)
    change = change.index_add(0, start, edges).index_add(0, start + size, -edges)
    return change.cumsum(0).narrow(0, 0, total).clone()


_CACHE: IncidenceCache[Incidence] = IncidenceCache(max_entries=32, max_bytes=2**28)
