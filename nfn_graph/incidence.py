"""Which neurons the edges of a batch touch, built from sizes by arithmetic.

Edges are never listed by value and never sorted: layers are complete bipartite, their edges
target-major (the memory order of a `[out, in, ...]` weight tensor), so every index follows
from the sizes of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from nfn_graph.folded import Bundle, FoldedSpec
from nfn_graph.layout import Shape
from nfn_graph.spec import NetworkSpec, WeightKey


@dataclass(frozen=True, eq=False)
class NeuronRows:
    """The neurons of one type in a batch, ordered by network, then layer, then position.

    Attributes:
        graph: `[n]`, the network of each neuron.
        position: `[n]`, its place in its layer.
        layer_size: `[n]`, the size of its layer.
        per_graph: `[graphs]`, how many neurons of this type each network has.
    """

    graph: Tensor
    position: Tensor
    layer_size: Tensor
    per_graph: Tensor

    @property
    def count(self) -> int:
        """Neurons of this type in the batch."""
        return self.graph.shape[0]


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """The edges of one weight type in a batch, ordered by network, target, source.

    Attributes:
        target: `[e]`, the row of each edge's target neuron.
        source: `[e]`, the row of each edge's source neuron.
        by_source: `[e]`, the permutation that orders the edges by source, then target.
        per_target: `[targets]`, how many of these edges end at each neuron.
        per_source: `[sources]`, how many of them start there.
        per_graph: `[graphs]`, how many each network has.
    """

    target: Tensor
    source: Tensor
    by_source: Tensor
    per_target: Tensor
    per_source: Tensor
    per_graph: Tensor

    @property
    def count(self) -> int:
        """Edges of this type in the batch."""
        return self.target.shape[0]


@dataclass(frozen=True, eq=False)
class SelfRows:
    """How a weight tensor of a layer with itself splits.

    Attributes:
        neuron: `[n]`, the neurons of the layer.
        diagonal: `[n]`, the row of each neuron's diagonal entry in the whole tensor.
        off_diagonal: The rows of all other entries in the whole tensor.
        edges: Those other entries as edges of their own; `by_source` is at the same time
            the place of each edge's transposed edge.
    """

    neuron: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    edges: EdgeRows


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
        self.masks: dict[FoldedSpec, dict[str, Tensor]] = {}
        self._starts: dict[str, list[list[int]]] = {}
        self._blocks: dict[WeightKey, list[tuple[int, int, int, int, int]]] = {}
        for i, neuron in enumerate(spec.neurons):
            self._add_neurons(neuron.name, [shape.sizes[i] for shape in shapes])
        order = {name: i for i, name in enumerate(spec.neuron)}
        for i, weight in enumerate(spec.weights):
            key, (target, source) = weight.key, (order[weight.target], order[weight.source])
            blocks = [
                (
                    graph,
                    shape.sizes[target][t],
                    shape.sizes[source][s],
                    self._starts[weight.target][graph][t],
                    self._starts[weight.source][graph][s],
                )
                for graph, shape in enumerate(shapes)
                for t, s in shape.blocks[i]
            ]
            self._blocks[key] = blocks
            self.weights[key] = self._edges(weight.target, weight.source, blocks)

    @staticmethod
    def of(spec: NetworkSpec, shapes: Sequence[Shape], device: torch.device) -> Incidence:
        """The incidence of these sizes; training repeats few of them, so it is cached."""
        return _cached(spec, tuple(shapes), device)

    def to(self, device: torch.device) -> Incidence:
        """The same incidence on another device."""
        return Incidence.of(self.spec, self.shapes, device)

    @cached_property
    def self_weights(self) -> dict[WeightKey, SelfRows]:
        """The split of every self weight."""
        keys = [w.key for w in self.spec.weights if self.spec.is_self(w)]
        return {key: self._split_self(key) for key in keys}

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
        _, target_size, source_size, target_start, source_start = self._columns(key)
        count = target_size * source_size
        start = count.cumsum(0) - count
        base = start - target_start * source_size - source_start
        block = self._repeat(count, self.weights[key].count)
        return base[block] + target * source_size[block] + source

    def _add_neurons(self, name: str, sizes: list[tuple[int, ...]]) -> None:
        starts, total = [], 0
        for layers in sizes:
            starts.append([total + sum(layers[:i]) for i in range(len(layers))])
            total += sum(layers)
        self._starts[name] = starts
        layer_sizes = self._tensor([n for layers in sizes for n in layers])
        layer_graph = self._tensor([g for g, layers in enumerate(sizes) for _ in layers])
        layer = self._repeat(layer_sizes, total)
        start = layer_sizes.cumsum(0) - layer_sizes
        self.neurons[name] = NeuronRows(
            graph=layer_graph[layer],
            position=torch.arange(total, device=self.device) - start[layer],
            layer_size=layer_sizes[layer],
            per_graph=self._tensor([sum(layers) for layers in sizes]),
        )

    def _edges(
        self,
        target_type: str,
        source_type: str,
        blocks: list[tuple[int, int, int, int, int]],
        skip_diagonal: bool = False,
    ) -> EdgeRows:
        graph, target_size, source_size, target_start, source_start = self._unpack(blocks)
        # Of a self weight, an edge's source counts the other neurons of the layer only.
        sources = source_size - int(skip_diagonal)
        targets = target_size - int(skip_diagonal)
        total = sum(b[1] * (b[2] - int(skip_diagonal)) for b in blocks)
        count = target_size * sources
        block = self._repeat(count, total)
        start = (count.cumsum(0) - count)[block]
        local = torch.arange(total, device=self.device) - start
        target = local // sources[block]
        source = local % sources[block]
        # The same arithmetic with the ends exchanged gives the order by source.
        late_source = local // targets[block]
        late_target = local % targets[block]
        if skip_diagonal:
            source = source + (source >= target)
            late_target = late_target + (late_target >= late_source)
            column = late_source - (late_source > late_target).long()
        else:
            column = late_source
        edges_per_target = self._tensor([b[2] - int(skip_diagonal) for b in blocks])
        edges_per_source = self._tensor([b[1] - int(skip_diagonal) for b in blocks])
        return EdgeRows(
            target=target + target_start[block],
            source=source + source_start[block],
            by_source=start + late_target * sources[block] + column,
            per_target=self._degree(target_type, target_size, target_start, edges_per_target),
            per_source=self._degree(source_type, source_size, source_start, edges_per_source),
            per_graph=self._tensor([0] * self.num_graphs).index_add(0, graph, count),
        )

    def _degree(self, name: str, size: Tensor, start: Tensor, edges: Tensor) -> Tensor:
        """How many edges each neuron of a type has, from their number for whole layers."""
        total = self.neurons[name].count
        change = torch.zeros(total + 1, dtype=torch.long, device=self.device)
        change = change.index_add(0, start, edges).index_add(0, start + size, -edges)
        return change.cumsum(0)[:total]

    def _split_self(self, key: WeightKey) -> SelfRows:
        blocks = self._blocks[key]
        edges = self._edges(key[2], key[0], blocks, skip_diagonal=True)
        _, size, _, neuron_start, _ = self._unpack(blocks)
        store_start = (size * size).cumsum(0) - size * size
        neuron_block = self._repeat(size, sum(b[1] for b in blocks))
        first = (size.cumsum(0) - size)[neuron_block]
        place = torch.arange(neuron_block.shape[0], device=self.device) - first
        block = self._repeat(size * (size - 1), edges.count)
        row = edges.target - neuron_start[block]
        column = edges.source - neuron_start[block]
        return SelfRows(
            neuron=neuron_start[neuron_block] + place,
            diagonal=store_start[neuron_block] + place * (size[neuron_block] + 1),
            off_diagonal=store_start[block] + row * size[block] + column,
            edges=edges,
        )

    def _columns(self, key: WeightKey) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self._unpack(self._blocks[key])

    def _unpack(
        self, blocks: list[tuple[int, int, int, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Per block: graph, target size, source size, first target row, first source row."""
        table = self._tensor([list(b) for b in blocks]).reshape(len(blocks), 5)
        graph, target_size, source_size, target_start, source_start = table.unbind(1)
        return graph, target_size, source_size, target_start, source_start

    def _repeat(self, counts: Tensor, total: int) -> Tensor:
        """The number of each count, repeated that often; `total` spares a synchronisation."""
        index = torch.arange(counts.shape[0], device=self.device)
        return torch.repeat_interleave(index, counts, output_size=total)

    def _tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


@lru_cache(maxsize=32)
def _cached(spec: NetworkSpec, shapes: tuple[Shape, ...], device: torch.device) -> Incidence:
    return Incidence(spec, shapes, device)
