"""What turns the sums of a batch into means."""

from __future__ import annotations

import torch
from torch import Tensor

from nfn_graph.folded import FoldedSpec
from nfn_graph.incidence import Incidence
from nfn_graph.ops import Reduce
from nfn_graph.precision import sum_dtype
from nfn_graph.rows import is_lasting
from nfn_graph.steps import Batched
from nfn_graph.wiring import Wiring


def batched(
    incidence: Incidence,
    spec: FoldedSpec,
    wiring: Wiring,
    reduce: Reduce,
    dtype: torch.dtype,
    fused: bool,
) -> Batched:
    """The rows of a batch in the order of a spec's types.

    Args:
        incidence: The batch.
        spec: The folded spec.
        wiring: Its wiring.
        reduce: The aggregate of the layer, `"mean"` or `"sum"`.
        dtype: Of the features.
        fused: Whether the fused layer asks, which multiplies by reciprocals.
    """
    edges = tuple(incidence.edges(bundle) for bundle in spec.bundles)
    neurons = tuple(incidence.neurons[neuron.name] for neuron in spec.neurons)
    batch = Batched(wiring, edges, neurons, reduce == "mean")
    if not (fused and batch.mean):
        return batch
    scales = incidence.scales.get((spec, dtype))
    if scales is None:
        with torch.inference_mode(False), torch.no_grad():
            scales = _scales(batch, incidence.num_graphs, dtype, incidence.device)
        if is_lasting(scales[-1]):
            incidence.scales[spec, dtype] = scales
    return Batched(wiring, edges, neurons, True, scales)


def _scales(
    batch: Batched, num_graphs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    wide = sum_dtype(dtype)

    def column(counts: Tensor, taps: int) -> Tensor:
        return (1 / counts.clamp(min=1).to(wide)).unsqueeze(1).expand(-1, taps)

    scales = []
    for wires, rows in zip(batch.wiring.neurons, batch.neurons, strict=True):
        ends = [
            batch.edges[bundle].per_target if end == "target" else batch.edges[bundle].per_source
            for bundle, end in wires.incident
        ]
        counts = [rows.graph.new_ones(rows.count), *ends]
        parts = [column(n, taps) for n, taps in zip(counts, wires.taps, strict=True)]
        scales.append(torch.cat(parts, 1).unsqueeze(-1).to(dtype))
    counts = [e.per_graph for e in batch.edges] + [n.per_graph for n in batch.neurons]
    counts.append(torch.ones(num_graphs, dtype=torch.long, device=device))
    parts = [column(n, taps) for n, taps in zip(counts, batch.wiring.summary, strict=True)]
    scales.append(torch.cat(parts, 1).unsqueeze(-1))
    return tuple(scales)
