"""What the NF-Layer needs to know of a batch, in the order of its spec's types."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import EdgeRows, NeuronRows, is_lasting
from nfn_graph.nn._wiring import Wiring
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.spec._sites import FoldedSpec


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Which rows of a batch belong together, and how many they are.

    Attributes:
        wiring: The layout of the summaries.
        edges: The edges of every bundle.
        neurons: The neurons of every type.
        mean: Whether the summaries are means, not sums.
        scales: For every neuron type and then for the network, `[rows, taps, 1]`, what turns
            the sums of a summary into means; none for sums, nor where sums are divided.
    """

    wiring: Wiring
    edges: tuple[EdgeRows, ...]
    neurons: tuple[NeuronRows, ...]
    mean: bool
    scales: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, incidence: Incidence, spec: FoldedSpec, wiring: Wiring, mean: bool) -> BatchRows:
        """The rows of a batch in the order of a spec's types, without scales."""
        edges = tuple(incidence.edges(bundle) for bundle in spec.bundles)
        neurons = tuple(incidence.neurons[neuron.name] for neuron in spec.neurons)
        return cls(wiring, edges, neurons, mean)

    def with_scales(self, incidence: Incidence, spec: FoldedSpec, dtype: torch.dtype) -> BatchRows:
        """With scales of that dtype, if there are means; the batch's incidence keeps them."""
        if not self.mean:
            return self
        scales = incidence.scales.get((spec, dtype))
        if scales is None:
            # Scales made in inference mode could not be used in training later on.
            with torch.inference_mode(False), torch.no_grad():
                scales = self._scales(incidence, dtype)
            if is_lasting(scales[-1]):
                incidence.scales[spec, dtype] = scales
        return replace(self, scales=scales)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of bundles and of neuron types."""
        return len(self.edges), len(self.neurons)

    def _scales(self, incidence: Incidence, dtype: torch.dtype) -> tuple[Tensor, ...]:
        wide = sum_dtype(dtype)

        def column(counts: Tensor, taps: int) -> Tensor:
            return (1 / counts.clamp(min=1).to(wide)).unsqueeze(1).expand(-1, taps)

        scales = []
        for wires, rows in zip(self.wiring.neurons, self.neurons, strict=True):
            ends = [
                self.edges[bundle].per_target if end == "target" else self.edges[bundle].per_source
                for bundle, end in wires.incident
            ]
            counts = [rows.graph.new_ones(rows.count), *ends]
            parts = [column(n, taps) for n, taps in zip(counts, wires.taps, strict=True)]
            scales.append(torch.cat(parts, 1).unsqueeze(-1).to(dtype))
        counts = [e.per_graph for e in self.edges] + [n.per_graph for n in self.neurons]
        counts.append(torch.ones(incidence.num_graphs, dtype=torch.long, device=incidence.device))
        parts = [column(n, taps) for n, taps in zip(counts, self.wiring.summary, strict=True)]
        scales.append(torch.cat(parts, 1).unsqueeze(-1))
        return tuple(scales)
