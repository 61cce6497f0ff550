"""The steps of the NF-Layer on all rows of a batch at once, outside of autograd.

Collecting and spreading are adjoint to each other, which is why the gradient of the layer is
made of the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.nn._batch_rows import BatchRows
from nfn_graph.ops._kernels import bag_edges, bag_ends, bag_sum
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.ops._segments import with_transposed


class Values(NamedTuple):
    """One tensor `[rows, taps * channels]` for every type of each level."""

    weights: Sequence[Tensor]
    neurons: Sequence[Tensor]
    network: Tensor

    def to(self, dtype: torch.dtype) -> Values:
        """The same values in another dtype."""
        return Values(
            [x.to(dtype) for x in self.weights],
            [x.to(dtype) for x in self.neurons],
            self.network.to(dtype),
        )


class Maps(NamedTuple):
    """The matrices `[out, in]` of the three levels; none for a neuron without taps."""

    weights: Sequence[Tensor]
    neurons: Sequence[Tensor | None]
    network: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Maps:
        """The same parameters in another dtype."""
        return Maps(
            [x.to(dtype) for x in self.weights],
            [None if x is None else x.to(dtype) for x in self.neurons],
            self.network.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
        )


def edge_sums(batch: BatchRows, weights: Sequence[Tensor]) -> list[Tensor]:
    """For every bundle, the sums of its edges at all target, then at all source neurons."""
    return [bag_edges(x, edges) for x, edges in zip(weights, batch.edges, strict=True)]


def collect(
    batch: BatchRows, sums: Sequence[Tensor], own: Sequence[Tensor], network: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Every neuron's own values beside the sums over its edges; their sums per network, in the
    dtype of sums."""
    wiring, wide = batch.wiring, sum_dtype(network.dtype)
    ends = [
        dict(zip(("target", "source"), x.split_with_sizes(edges.num_ends), strict=True))
        for x, edges in zip(sums, batch.edges, strict=True)
    ]
    neurons, totals = [], []
    for wires, x, rows in zip(wiring.neurons, own, batch.neurons, strict=True):
        neuron = torch.cat([x, *(ends[bundle][end] for bundle, end in wires.incident)], 1)
        neurons.append(neuron)
        totals.append(split_taps(bag_sum(neuron.to(wide), rows.graphs), wires.taps))
    # A sum over all edges is one over the sums at their targets.
    whole = [totals[b.target.neuron][b.target.part] for b in wiring.bundles]
    return neurons, torch.cat([*whole, *(parts[0] for parts in totals), network.to(wide)], 1)


def map_summaries(
    batch: BatchRows, neurons: Sequence[Tensor], summary: Tensor, maps: Maps
) -> tuple[list[Tensor], Tensor]:
    """What all neurons and the network say, from their summaries, which are scaled in place."""
    if batch.scales:
        for x, scale in zip((*neurons, summary), batch.scales, strict=True):
            tapped(x, scale).mul_(scale)
    dtype, network = maps.network.dtype, maps.network.to(summary.dtype)
    if maps.bias is None:
        message = summary @ network.t()
    else:
        message = torch.addmm(maps.bias.to(summary.dtype), summary, network.t())
    message = message.to(dtype)
    mapped = spread_network(batch, message)
    for x, read, matrix in zip(mapped, neurons, maps.neurons, strict=True):
        if matrix is not None:
            x.addmm_(read, matrix.t())
    return mapped, message


def spread_network(batch: BatchRows, message: Tensor) -> list[Tensor]:
    """What the network says to each neuron: to its own taps and, as every edge has one
    target, to its edges as a target."""
    wiring = batch.wiring
    said = split_taps(message, wiring.summary)
    silence = torch.zeros_like(message)
    own = said[len(wiring.bundles) :]
    said_to = []
    for i, (wires, rows) in enumerate(zip(wiring.neurons, batch.neurons, strict=True)):
        row = [own[i]]
        for bundle, end in wires.incident:
            to_edges = said[bundle]
            if end == "source":
                to_edges = silence.narrow(1, 0, to_edges.shape[1])
            row.append(to_edges)
        said_to.append(torch.cat(row, 1).index_select(0, rows.graphs.index))
    return said_to


def spread(
    batch: BatchRows,
    values: Values,
    maps: Sequence[Tensor],
    mapped: Sequence[Tensor],
    message: Tensor,
) -> tuple[Tensor, ...]:
    """Every level's part of what was mapped; to the edges also their own map."""
    wiring = batch.wiring
    parts = [split_taps(x, wires.taps) for x, wires in zip(mapped, wiring.neurons, strict=True)]
    weights = []
    for i, (x, matrix, wires) in enumerate(zip(values.weights, maps, wiring.bundles, strict=True)):
        ends = [parts[place.neuron][place.part] for place in (wires.target, wires.source)]
        new = bag_ends(torch.cat(ends), batch.edges[i])
        weights.append(new.addmm_(read_edges(x, batch, i), matrix.t()))
    # Not views: users may change what they get in place.
    neurons = [neuron[0].clone() for neuron in parts]
    return (*weights, *neurons, split_taps(message, wiring.summary)[-1].clone())


def read_edges(x: Tensor, batch: BatchRows, bundle: int) -> Tensor:
    """What an edge reads: itself, and in a self weight its transposed edge."""
    return with_transposed(x, batch.edges[bundle]) if batch.wiring.bundles[bundle].is_self else x


def split_taps(x: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
    """The parts of a summary, side by side."""
    channels = x.shape[1] // max(sum(taps), 1)
    return x.split_with_sizes([count * channels for count in taps], 1)


def tapped(x: Tensor, like: Tensor) -> Tensor:
    """Rows `[rows, taps * channels]` as `[rows, taps, channels]`, with the taps of `like`."""
    return x.view(x.shape[0], like.shape[1], x.shape[1] // max(like.shape[1], 1))
