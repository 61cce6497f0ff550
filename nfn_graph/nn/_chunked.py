"""Inference in chunks of edges, for networks whose features do not fit into memory.

Between two layers only the neurons' messages are kept. An edge's features follow from its own
entries and from the messages of its two neurons, so they are computed again, chunk by chunk,
whenever a layer needs their sums: exact, in the memory of one chunk, at the price of computing
a layer again for every layer behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nfn_graph.features._features import WeightFeatures
from nfn_graph.features._fold import Levels
from nfn_graph.nn._message_passing import apply_maps
from nfn_graph.nn._steps import Maps, collect, map_summaries, split_taps
from nfn_graph.nn._summary import network_summary
from nfn_graph.nn.elementwise import Dropout, Residual
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.pool import Pool
from nfn_graph.ops._kernels import bag_rows
from nfn_graph.ops._precision import autocast_dtype, sum_dtype
from nfn_graph.spec._sites import NETWORK, Bundle, FoldedSpec


class LayerBlock(NamedTuple):
    """An NF-Layer with what acts on every entry before and behind it.

    Attributes:
        maps: The layer's parameters.
        said: For every bundle, what its edges hear: the messages of all target and then all
            source neurons; in a pointwise layer the constant.
    """

    before: Sequence[nn.Module]
    layer: NFLinear
    maps: Maps
    behind: Sequence[nn.Module]
    residual: bool
    said: list[Tensor | None]

    @classmethod
    def of(cls, module: nn.Module) -> LayerBlock:
        """Takes one block of a model apart."""
        residual = isinstance(module, Residual)
        inner = module.layer if isinstance(module, Residual) else module
        parts: list[nn.Module] = list(inner) if isinstance(inner, nn.Sequential) else [inner]
        if any(isinstance(part, Dropout) and part.training and part.p for part in parts):
            raise ValueError("Expected a model in eval() for max_edges (got one in train())")
        layers = [(i, part) for i, part in enumerate(parts) if isinstance(part, NFLinear)]
        if len(layers) != 1:
            raise ValueError(f"Expected one NFLinear in a block (got {len(layers)})")
        place, layer = layers[0]
        return cls(parts[:place], layer, layer.maps(), parts[place + 1 :], residual, [])


class ChunkedFeatures:
    """Features of which the edges exist only in chunks.

    Args:
        features: The input, folded.
        max_edges: How many edges of one type to hold at a time.
    """

    def __init__(self, features: WeightFeatures, max_edges: int) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "Expected torch.no_grad() or torch.inference_mode() for max_edges (got "
                "gradients enabled). For training use recompute=True."
            )
        if max_edges < 1:
            raise ValueError(f"Expected max_edges of at least 1 (got {max_edges})")
        if not isinstance(features.spec, FoldedSpec):
            raise TypeError("Expected features after the fold (got features before it)")
        self.input = features
        self.spec = features.spec
        self.max_edges = max_edges
        self.blocks: list[LayerBlock] = []
        # Neurons and network are held as they are.
        self.small = features.replace(Levels({}, features.neurons, features.network))

    def apply(self, modules: Iterable[nn.Module]) -> ChunkedFeatures:
        """Applies blocks of a model, one after the other."""
        for module in modules:
            block = LayerBlock.of(module)
            read = _run(block.before, self.small).owned()
            step = self._pointwise if block.layer.pointwise else self._full
            new = _run(block.behind, step(block, read))
            self.small = self.small + new if block.residual else new
            self.blocks.append(block)
        return self

    def features(self) -> WeightFeatures:
        """All features, the edges in one tensor again."""
        weights = {}
        for bundle in self.spec.bundles:
            count, channels = self.input.weights[bundle.key].shape[0], self.small.channels
            out = self.small.network[NETWORK].new_empty(count, bundle.taps, channels)
            for start, x in self._chunks(bundle):
                out.narrow(0, start, len(x)).copy_(x)
            weights[bundle.key] = out
        return self.small.replace(Levels(weights, self.small.neurons, self.small.network))

    def summary(self, pool: Pool) -> Tensor:
        """What a pool makes of the features: `[graphs, entries * channels]`."""
        incidence, like, totals = self.input.incidence, self.small.network[NETWORK], []
        act: list[nn.Module] = [] if pool.act is None else [pool.act]
        reduce = pool.reduce
        for bundle in self.spec.bundles:
            edges, graph = incidence.edges(bundle), incidence.neurons[bundle.target].graph
            shape = (incidence.num_graphs, bundle.taps * self.small.channels)
            lowest = -torch.inf if reduce == "max" else 0.0
            total = like.new_full(shape, lowest, dtype=sum_dtype(like.dtype))
            for start, x in self._chunks(bundle, act):
                x = x.flatten(1).to(total.dtype)
                rows = graph.index_select(0, edges.targets.index.narrow(0, start, len(x)))
                if reduce == "max":
                    where = rows.unsqueeze(1).expand(len(x), shape[1])
                    total = total.scatter_reduce(0, where, x, "amax")
                else:
                    total = total.index_add(0, rows, x)
            totals.append(total.where(edges.per_graph.unsqueeze(1) > 0, 0.0))
        return network_summary(_run(act, self.small).owned(), self.spec, reduce, totals)

    def _full(self, block: LayerBlock, read: WeightFeatures) -> WeightFeatures:
        layer, values = block.layer, block.layer.values(read)
        dtype = values.network.dtype
        sums: list[Tensor] = []
        batch = layer.scaled_rows(self.input.incidence, dtype)
        for bundle, edges in zip(self.spec.bundles, batch.edges, strict=True):
            shape = (sum(edges.num_ends), bundle.taps * layer.in_channels)
            table = values.network.new_zeros(shape, dtype=sum_dtype(dtype))
            neurons_of = edges.ends.view(-1, 2)
            for start, x in self._chunks(bundle, block.before):
                for rows in neurons_of.narrow(0, start, len(x)).unbind(1):
                    table.index_add_(0, rows, x.flatten(1).to(table.dtype))
            sums.append(table.to(dtype))
        neurons, summary = collect(batch, sums, values.neurons, values.network)
        mapped, message = map_summaries(batch, neurons, summary, block.maps)
        wires = batch.wiring
        split = [split_taps(x, n.taps) for x, n in zip(mapped, wires.neurons, strict=True)]
        for bundle_wires in wires.bundles:
            ends = (bundle_wires.target, bundle_wires.source)
            block.said.append(torch.cat([split[end.neuron][end.part] for end in ends]))
        new = [*(parts[0] for parts in split), split_taps(message, wires.summary)[-1]]
        return self._levels(new, layer.out_channels)

    def _pointwise(self, block: LayerBlock, read: WeightFeatures) -> WeightFeatures:
        layer, maps, count = block.layer, block.maps, len(self.spec.bundles)
        values, constants = layer.values(read), layer.constants(maps)
        block.said.extend(constants[:count])
        new = apply_maps(
            [*values.neurons, values.network], [*maps.neurons, maps.network], constants[count:]
        )
        return self._levels(new, layer.out_channels)

    def _levels(self, tensors: Sequence[Tensor], channels: int) -> WeightFeatures:
        names = [*(neuron.name for neuron in self.spec.neurons), NETWORK]
        tapped = {
            name: x.reshape(x.shape[0], self.spec.taps[name], channels)
            for name, x in zip(names, tensors, strict=True)
        }
        network = {NETWORK: tapped.pop(NETWORK)}
        return self.small.replace(Levels({}, tapped, network))

    def _chunks(
        self, bundle: Bundle, before: Sequence[nn.Module] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        """The first row of every chunk of edges, and the edges `[size, taps, channels]`, as
        they are after all blocks and some modules more."""
        count = self.input.weights[bundle.key].shape[0]
        for start in range(0, count, self.max_edges):
            x = self._chunk(bundle, start, min(self.max_edges, count - start), before)
            yield start, x

    def _chunk(self, bundle: Bundle, start: int, size: int, before: Sequence[nn.Module]) -> Tensor:
        edges = self.input.incidence.edges(bundle)
        rows = torch.arange(start, start + size, device=self.input.device)
        if bundle.is_self:
            # An edge reads its transposed one, and that one reads it: both go along.
            rows = torch.cat([rows, edges.transposed.narrow(0, start, size)])
        ends = edges.ends.view(-1, 2).index_select(0, rows).flatten()
        pairs = torch.arange(0, 2 * len(rows) + 1, 2, device=ends.device, dtype=ends.dtype)
        x = self.input.weights[bundle.key].index_select(0, rows)
        number = self.spec.bundles.index(bundle)
        for block in self.blocks:
            x = self._edge_step(block, bundle, number, x, ends, pairs)
        return self._entries(before, bundle, x).narrow(0, 0, size)

    def _edge_step(
        self, block: LayerBlock, bundle: Bundle, number: int, x: Tensor, ends: Tensor, pairs: Tensor
    ) -> Tensor:
        layer, said, matrix = block.layer, block.said[number], block.maps.weights[number]
        read = self._entries(block.before, bundle, x).flatten(1)
        read = read.to(autocast_dtype(read.device) or read.dtype)
        if layer.pointwise or said is None:
            new = linear(read, matrix, said)
        else:
            if bundle.is_self:
                read = torch.cat([read, read.roll(len(read) // 2, 0)], 1)
            new = bag_rows(said, ends, pairs).addmm_(read, matrix.t())
        new = new.view(len(x), bundle.taps, layer.out_channels)
        new = self._entries(block.behind, bundle, new)
        return x + new if block.residual else new

    def _entries(self, modules: Sequence[nn.Module], bundle: Bundle, x: Tensor) -> Tensor:
        """Applies modules that act on every entry by itself."""
        if not modules:
            return x
        entries = self.input.replace(Levels({bundle.key: x}, {}, {}))
        return _run(modules, entries).weights[bundle.key]


def _run(modules: Sequence[nn.Module], features: WeightFeatures) -> WeightFeatures:
    for module in modules:
        features = module(features)
    return features
