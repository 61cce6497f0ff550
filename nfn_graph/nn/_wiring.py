"""How the parts of the NF-Layer's three levels are laid side by side.

A neuron's summary is its own taps, then one aggregate for every incident (weight type, end);
the network's summary has one aggregate for every tap of every type. The messages that the
two levels send have the same layout as the summaries that they read.
"""

from __future__ import annotations

from dataclasses import dataclass

from nfn_graph.spec._sites import Bundle, End, FoldedSpec


@dataclass(frozen=True)
class Place:
    """A part of a summary: the neuron type whose it is, and its number there."""

    neuron: int
    part: int


@dataclass(frozen=True)
class BundleWires:
    """Where a bundle of weights stands in the summaries of its two neuron types."""

    taps: int
    target: Place
    source: Place
    is_self: bool


@dataclass(frozen=True)
class NeuronWires:
    """A neuron type's summary: its own taps and, behind them, those of its bundles.

    Attributes:
        taps: Taps of every part.
        incident: The bundle and its end of every part but the first.
    """

    taps: tuple[int, ...]
    incident: tuple[tuple[int, End], ...]


@dataclass(frozen=True)
class Wiring:
    """The layout of all summaries of a spec, in its order of types.

    Attributes:
        bundles: Level of the weights.
        neurons: Level of the neurons.
        summary: Taps of every part of the network's summary: bundles, neurons, its own.
    """

    bundles: tuple[BundleWires, ...]
    neurons: tuple[NeuronWires, ...]
    summary: tuple[int, ...]

    @classmethod
    def of(cls, spec: FoldedSpec) -> Wiring:
        """The wiring of a folded spec."""
        places: dict[tuple[Bundle, End], Place] = {}
        order = {bundle.key: i for i, bundle in enumerate(spec.bundles)}
        neurons = []
        for i, neuron in enumerate(spec.neurons):
            incident = spec.incident[neuron.name]
            for part, (bundle, end) in enumerate(incident, 1):
                places[bundle, end] = Place(i, part)
            taps = (neuron.taps, *(bundle.taps for bundle, _ in incident))
            neurons.append(NeuronWires(taps, tuple((order[b.key], end) for b, end in incident)))
        bundles = tuple(
            BundleWires(b.taps, places[b, "target"], places[b, "source"], b.is_self)
            for b in spec.bundles
        )
        return cls(bundles, tuple(neurons), tuple(spec.taps.values()))
