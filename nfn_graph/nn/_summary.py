"""The network summary: one aggregate for every tap of every type.

On an NP fold this is the paper's invariant layer P, on an HNP fold P-tilde without those
entries that are means of others. The network level of the NF-Layer reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nfn_graph.features._features import WeightFeatures
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.ops._segments import Reduce, divide_by_count, segment_max, segment_sum
from nfn_graph.spec._sites import NETWORK, Bundle, FoldedSpec


def network_summary(
    features: WeightFeatures,
    spec: FoldedSpec,
    reduce: Reduce,
    totals: Sequence[Tensor] | None = None,
    relu: bool = False,
) -> Tensor:
    """Weights, then neurons, then the network's own taps: `[graphs, G * channels]`.

    Args:
        features: Features of that spec.
        spec: The folded spec, whose order the entries have.
        reduce: The aggregate.
        totals: For every bundle, the sums over its edges (or the largest), where they are
            known already.
        relu: Whether to take the ReLU of the weights first, for a mean or a sum.
    """
    incidence, graphs = features.incidence, features.num_graphs
    parts = []
    for i, bundle in enumerate(spec.bundles):
        edges = incidence.edges(bundle)
        total = _total(features, bundle, reduce, relu) if totals is None else totals[i]
        parts.append(divide_by_count(total, edges.per_graph) if reduce == "mean" else total)
    for neuron in spec.neurons:
        x = features.neurons[neuron.name].flatten(1)
        rows = incidence.neurons[neuron.name]
        if reduce == "max":
            parts.append(segment_max(x, rows.graph, graphs))
            continue
        total = segment_sum(x.to(sum_dtype(x.dtype)), rows.graphs)
        parts.append(divide_by_count(total, rows.per_graph) if reduce == "mean" else total)
    parts.append(features.network[NETWORK].flatten(1))
    return torch.cat(parts, 1).to(features.dtype)


def _total(features: WeightFeatures, bundle: Bundle, reduce: Reduce, relu: bool) -> Tensor:
    x, edges = features.weights[bundle.key].flatten(1), features.incidence.edges(bundle)
    neurons = features.incidence.neurons[bundle.target]
    if reduce == "max":
        graph = neurons.graph.index_select(0, edges.target)
        return segment_max(x, graph, features.num_graphs)
    # Through the target neurons: many short sums, which run in parallel.
    rows = segment_sum(x, edges.targets, relu)
    return segment_sum(rows.to(sum_dtype(rows.dtype)), neurons.graphs)
