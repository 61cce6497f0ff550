"""The equations of the NF-Layer, in operations that every transform of torch knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from nfn_graph.nn._batch_rows import BatchRows
from nfn_graph.nn._steps import Maps, Values
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.ops._segments import divide_by_count, expand, segment_sum, with_transposed


def apply_maps(
    tensors: Sequence[Tensor],
    matrices: Sequence[Tensor | None],
    constants: Sequence[Tensor | None],
) -> list[Tensor]:
    """Every tensor's own map and constant, as in a pointwise layer."""
    return [
        x if matrix is None else linear(x, matrix, constant)
        for x, matrix, constant in zip(tensors, matrices, constants, strict=True)
    ]


def message_passing(batch: BatchRows, values: Values, maps: Maps) -> Values:
    """The equations of :class:`~nfn_graph.NFLinear`, one after the other."""
    wiring, edges, neurons = batch.wiring, batch.edges, batch.neurons
    # W_{j,*} and W_{*,k}: the aggregates over the edges of a target and of a source neuron.
    rows = [segment_sum(x, e.targets) for x, e in zip(values.weights, edges, strict=True)]
    columns = [segment_sum(x, e.sources) for x, e in zip(values.weights, edges, strict=True)]
    # W_{*,*} and v_*: the aggregates over all edges and all neurons of a type.
    dtype, wide = values.network.dtype, sum_dtype(values.network.dtype)
    sums = [
        segment_sum(x.to(wide), neurons[wires.target.neuron].graphs)
        for x, wires in zip(rows, wiring.bundles, strict=True)
    ]
    sums += [
        segment_sum(x.to(wide), n.graphs) for x, n in zip(values.neurons, neurons, strict=True)
    ]
    if batch.mean:
        rows = [divide_by_count(x, e.per_target) for x, e in zip(rows, edges, strict=True)]
        columns = [divide_by_count(x, e.per_source) for x, e in zip(columns, edges, strict=True)]
        counts = [e.per_graph for e in edges] + [n.per_graph for n in neurons]
        sums = [divide_by_count(x, n) for x, n in zip(sums, counts, strict=True)]
    # The network: one map of everything, split into what it says to each type.
    summary = torch.cat([*sums, values.network.to(wide)], 1)
    bias = None if maps.bias is None else maps.bias.to(wide)
    message = linear(summary, maps.network.to(wide), bias).to(dtype)
    channels = message.shape[1] // max(sum(wiring.summary), 1)
    *said, network = message.split([taps * channels for taps in wiring.summary], 1)
    # The neurons: one map of each, split into its own part and one message per end.
    ends = {"target": rows, "source": columns}
    new_neurons: list[Tensor] = []
    messages: dict[tuple[int, str], Tensor] = {}
    for i, (own, wires) in enumerate(zip(values.neurons, wiring.neurons, strict=True)):
        matrix = maps.neurons[i]
        read = torch.cat([own, *(ends[end][bundle] for bundle, end in wires.incident)], 1)
        mapped = read.new_zeros(read.shape[0], 0) if matrix is None else linear(read, matrix)
        new, *sent = mapped.split([taps * channels for taps in wires.taps], 1)
        graphs = neurons[i].graphs
        new_neurons.append(new + expand(said[len(edges) + i], graphs))
        for (bundle, end), part in zip(wires.incident, sent, strict=True):
            # Every edge has one target: what the network says goes along.
            along = expand(said[bundle], graphs) if end == "target" else 0
            messages[bundle, end] = part + along
    # The weights: each one's own map, and the messages of its two neurons.
    new_weights = []
    for i, (x, rows_) in enumerate(zip(values.weights, edges, strict=True)):
        read = with_transposed(x, rows_) if wiring.bundles[i].is_self else x
        new_weights.append(
            linear(read, maps.weights[i])
            + expand(messages[i, "target"], rows_.targets)
            + expand(messages[i, "source"], rows_.sources)
        )
    # Not a view: users may change what they get in place.
    return Values(new_weights, new_neurons, network.clone())
