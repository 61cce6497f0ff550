r"""The fold: how NP and HNP become one and the same layer.

HNP says that the neurons of fixed types (inputs, outputs) keep their order. A fixed axis is
*folded* into taps, the entries that no permutation mixes:

==================================  =================================================
tensor                              becomes
==================================  =================================================
bias of a fixed type                taps of the network
weight between two fixed types      taps of the network
weight with one fixed end           taps of the neurons at its other end
weight between two free types       taps of the edges, bundled with all other tensors
                                    over that pair of types (reversed ones transposed)
weight of a free type with itself   diagonal: taps of the neurons; the rest: edges that
                                    read their own and their transposed entry
==================================  =================================================

Under NP no type is fixed. What is left has three levels, weights, neurons and network, and
every layer works on it without knowing which group it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nfn_graph.spec._types import Key, NetworkSpec, NeuronType, Symmetry, WeightKey, WeightType

NETWORK = "network"
End = Literal["target", "source"]
Axis = Literal["own", "target", "source", "diagonal", "all"]


@dataclass(frozen=True)
class Piece:
    """One stored tensor's share in the taps of a neuron type or of the network.

    Args:
        store: The neuron type or weight type that it comes from.
        axis: What its rows are: a neuron type's `own` neurons, the `target` or `source`
            neurons of a weight, the `diagonal` of a self weight; `all` for the network.
        taps: How many taps it gives.
    """

    store: Key
    axis: Axis
    taps: int


@dataclass(frozen=True)
class Bundle:
    """The weight tensors over one pair of free neuron types, as taps of the same edges.

    Args:
        members: The tensors, and whether each runs against the bundle's direction.
        taps: Taps of all members together.
        is_self: Whether both ends are one layer.
    """

    source: str
    target: str
    members: tuple[tuple[WeightType, bool], ...]
    taps: int
    is_self: bool

    @property
    def key(self) -> WeightKey:
        """The key of the first tensor, whose direction and order the edges have."""
        return self.members[0][0].key

    @property
    def read_taps(self) -> int:
        """The taps that an edge reads: a self weight's edge also sees its transposed."""
        return self.taps * (2 if self.is_self else 1)


@dataclass(frozen=True)
class FoldedNeuron:
    """A free neuron type and the pieces that its taps are made of."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def taps(self) -> int:
        """Taps of all pieces together."""
        return sum(piece.taps for piece in self.pieces)


@dataclass(frozen=True)
class FoldedSpec:
    """A spec in the folded view of one symmetry group. Made by :meth:`NetworkSpec.fold`."""

    network: NetworkSpec
    symmetry: Symmetry

    @classmethod
    def of(cls, network: NetworkSpec, symmetry: Symmetry) -> FoldedSpec:
        """Folds a spec; see :meth:`NetworkSpec.fold`."""
        if symmetry == "np":
            return cls(network.free, symmetry)
        if symmetry != "hnp":
            raise ValueError(f"Expected the symmetry 'np' or 'hnp' (got {symmetry!r})")
        for neuron in network.neurons:
            if neuron.fixed and neuron.size is None:
                raise ValueError(
                    f"Expected one size of the fixed neuron type '{neuron.name}' for 'hnp' "
                    f"(got networks of different sizes, or none given). Use 'np', or "
                    f"networks that agree there."
                )
            if neuron.role:
                raise ValueError(
                    f"Expected depth types for 'hnp' (got the role type '{neuron.name}'). "
                    f"The fold would give every neuron of the role taps of a weight that "
                    f"most of its layers do not have. Use 'np' with IOEncoding."
                )
        return cls(network, symmetry)

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """Level of the weights: the edges."""
        free = [w for w in self.network.weights if not self._fixed(w.source, w.target)]
        groups: dict[object, list[WeightType]] = {}
        for weight in free:
            ends = (self.network.neuron[weight.source], self.network.neuron[weight.target])
            # Layers of one role are told apart by the graph, not by the spec.
            pair = weight.key if any(n.role for n in ends) else frozenset(n.name for n in ends)
            groups.setdefault(pair, []).append(weight)
        return tuple(
            Bundle(
                source=group[0].source,
                target=group[0].target,
                members=tuple((w, w.source != group[0].source) for w in group),
                taps=sum(w.taps for w in group),
                is_self=self.network.is_self(group[0]),
            )
            for group in groups.values()
        )

    @cached_property
    def neurons(self) -> tuple[FoldedNeuron, ...]:
        """Level of the neurons: the free neuron types."""
        return tuple(
            FoldedNeuron(n.name, tuple(self._neuron_pieces(n)))
            for n in self.network.neurons
            if not self._fixed(n.name)
        )

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Level of the network: the tensors without any free axis."""
        size = {n.name: n.size or 0 for n in self.network.neurons}
        weights = [
            Piece(w.key, "all", size[w.target] * size[w.source] * w.taps)
            for w in self.network.weights
            if self._fixed(w.source) and self._fixed(w.target)
        ]
        neurons = [
            Piece(n.name, "all", size[n.name] * n.taps)
            for n in self.network.neurons
            if self._fixed(n.name) and n.taps
        ]
        return tuple(weights + neurons)

    @cached_property
    def network_taps(self) -> int:
        """The number of taps at the network level, `m_g`."""
        return sum(piece.taps for piece in self.pieces)

    @cached_property
    def taps(self) -> dict[Key, int]:
        """The taps of every type, in the order of the network summary."""
        return {
            **{bundle.key: bundle.taps for bundle in self.bundles},
            **{neuron.name: neuron.taps for neuron in self.neurons},
            NETWORK: self.network_taps,
        }

    @cached_property
    def summary_taps(self) -> int:
        """`G`: the entries of the network summary, one mean for every tap of every type."""
        return sum(self.taps.values())

    @cached_property
    def incident(self) -> dict[str, tuple[tuple[Bundle, End], ...]]:
        """For every neuron type, the bundles that end there, by end."""
        ends: list[End] = ["target", "source"]
        return {
            neuron.name: tuple(
                (bundle, end)
                for bundle in self.bundles
                for end in ends
                if getattr(bundle, end) == neuron.name
            )
            for neuron in self.neurons
        }

    @cached_property
    def neuron_summary_taps(self) -> dict[str, int]:
        """`s_l`: own taps plus one mean per incident (weight type, end)."""
        return {
            neuron.name: neuron.taps + sum(b.taps for b, _ in self.incident[neuron.name])
            for neuron in self.neurons
        }

    @cached_property
    def num_orbits(self) -> int:
        """Parameters per `c_out * c_in` of the complete equivariant linear layer."""
        weights = sum(bundle.taps * bundle.read_taps for bundle in self.bundles)
        neurons = sum(taps**2 for taps in self.neuron_summary_taps.values())
        return weights + neurons + self.summary_taps**2

    @cached_property
    def is_complete(self) -> bool:
        """Whether the types tell all layers apart, so that the layer is the general one."""
        return not any(n.role for n in self.network.neurons)

    @cached_property
    def _hash(self) -> int:
        return hash((self.network, self.symmetry))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {"network": self.network, "symmetry": self.symmetry}

    def __str__(self) -> str:
        weights = ", ".join(f"{b.source}->{b.target}:{b.taps}" for b in self.bundles)
        neurons = ", ".join(f"{n.name}:{n.taps}" for n in self.neurons)
        return (
            f"FoldedSpec({self.symmetry}; weights {weights or '-'}; neurons {neurons or '-'}; "
            f"network {self.network_taps})"
        )

    def _fixed(self, *names: str) -> bool:
        return any(self.network.neuron[name].fixed for name in names)

    def _neuron_pieces(self, neuron: NeuronType) -> list[Piece]:
        pieces = [Piece(neuron.name, "own", neuron.taps)] if neuron.taps else []
        for weight in self.network.weights:
            source, target = (self.network.neuron[n] for n in (weight.source, weight.target))
            if target is neuron and source.fixed:
                pieces.append(Piece(weight.key, "target", (source.size or 0) * weight.taps))
            elif source is neuron and target.fixed:
                pieces.append(Piece(weight.key, "source", (target.size or 0) * weight.taps))
            elif source is neuron and self.network.is_self(weight):
                pieces.append(Piece(weight.key, "diagonal", weight.taps))
        return pieces
