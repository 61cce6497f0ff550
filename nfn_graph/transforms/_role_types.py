"""One type for all hidden layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch

from nfn_graph.data import Layout
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, NeuronType, Shape, WeightKey, WeightType
from nfn_graph.transforms._reversible import ReversibleTransform, Stores


class RoleTypes(ReversibleTransform):
    """Gives all free layers one type, so that networks of any depth share a spec.

    `hidden1`, `hidden2`, ... become the layers of `hidden`. Use NP layers with
    :class:`~nfn_graph.IOEncoding`, since HNP refuses role types. Layers on role types are
    equivariant but not complete, since all hidden layers share their parameters. Networks with
    nested neurons, such as the dimensions of attention heads, are refused: in one type for all
    layers, dimensions would be permuted across heads. Transformers of different depths share a
    batch without it, after :class:`FillBiases`, because each block has types of its own.

    Args:
        name: The name of the shared type.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import RoleTypes
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(4, 4), torch.ones(1, 4)])
        >>> RoleTypes()(graph).node_types
        ['input', 'hidden', 'output']
    """

    def __init__(self, name: str = "hidden") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"RoleTypes({self.name!r})"

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        spec, plan = layout.spec, _Plan(layout.spec, self.name)
        neurons: list[NeuronType] = []
        weights: list[WeightType] = []
        for key, members in plan.members.items():
            found = {member: spec.taps[member] for member in members}
            if len(set(found.values())) > 1:
                raise UserError(
                    f"Expected one number of taps for all layers of the role {key!r} "
                    f"(got {found}). {_advice(layout, members)}"
                )
            taps = found[members[0]]
            if isinstance(key, tuple):
                weights.append(WeightType(key[0], key[2], taps, key[1]))
            elif key == self.name:
                neurons.append(NeuronType(key, taps, role=True))
            else:
                neurons.append(spec.neuron[key])
        size: dict[Key, tuple[int, ...]] = dict(zip(spec.neuron, layout.shape.sizes, strict=True))
        shape = Shape(
            tuple(tuple(s for m in plan.members[n.name] for s in size[m]) for n in neurons),
            tuple(tuple(plan.blocks[w.key]) for w in weights),
        )
        placements = tuple(
            replace(p, store=plan.role[p.store], block=plan.number(p.store))
            for p in layout.placements
        )
        joined = {key: torch.cat([stores[m] for m in ms]) for key, ms in plan.members.items()}
        spec = NetworkSpec(tuple(neurons), tuple(weights))
        # Several layers now have one type, and their activations may have different positions.
        computation = replace(layout.computation, activations=())
        return replace(
            layout, spec=spec, shape=shape, placements=placements, computation=computation
        ), joined

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        plan = _Plan(before.spec, self.name)
        out: Stores = {}
        for key, members in plan.members.items():
            parts = stores[key].split([before.num_rows(m) for m in members])
            out.update(zip(members, parts, strict=True))
        return out


def _advice(layout: Layout, members: list[Key]) -> str:
    """Advice on giving layers with different numbers of taps the same number."""
    most = max(layout.spec.taps[member] for member in members)
    if isinstance(members[0], str):
        fewer = {m: most for m in members if layout.spec.taps[m] < most}
        return f"Use nfn_graph.transforms.FillBiases({fewer}) first."
    kernels = [
        block[0].kernel if len(block) == 1 else ()
        for member in members
        for block in layout.fillings.get(member, [[]])
    ]
    if all(kernels) and len({len(kernel) for kernel in kernels}) == 1:
        largest = tuple(map(max, zip(*kernels, strict=True)))
        grown = dict.fromkeys(members, largest)
        return f"Use nfn_graph.transforms.GrowKernels({grown}) first."
    return "Only kernels of convolutions can grow, and not all of these are such kernels."


@dataclass
class _Plan:
    """The assignment of the types of a spec to role types, and their order."""

    spec: NetworkSpec
    name: str
    role: dict[Key, Key] = field(default_factory=dict)
    members: dict[Key, list[Key]] = field(default_factory=dict)
    blocks: dict[WeightKey, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for neuron in self.spec.neurons:
            if neuron.fixed and neuron.name == self.name:
                raise UserError(
                    f"Expected a name for the hidden layers that no fixed layer has "
                    f"(got {self.name!r})"
                )
            if neuron.parents:
                raise UserError(
                    f"Expected layers that are not nested (got '{neuron.name}', whose "
                    f"neurons are nested in '{neuron.parents[0]}'). One type for all layers would "
                    f"permute them across their parents. Networks with different numbers of blocks "
                    f"share a batch by the types of each block: use "
                    f"nfn_graph.transforms.FillBiases.to_largest(graphs) instead."
                )
            self._join(neuron.name, neuron.name if neuron.fixed else self.name)
        for weight in self.spec.weights:
            if self.spec.is_self(weight):
                raise UserError(
                    f"Expected weights between two layers (got the self weight {weight.key}, "
                    f"which role types cannot tell from one between hidden layers)"
                )
            block = (self.number(weight.target), self.number(weight.source))
            key = self._weight_role(weight, block)
            self._join(weight.key, key)
            self.blocks.setdefault(key, []).append(block)

    def number(self, key: Key) -> int:
        """The number of the layer, or tensor, of a type within its role."""
        return self.members[self.role[key]].index(key)

    def _join(self, key: Key, role: Key) -> None:
        self.role[key] = role
        self.members.setdefault(role, []).append(key)

    def _weight_role(self, weight: WeightType, block: tuple[int, int]) -> WeightKey:
        """The first role type whose last tensor comes before this one at both ends.

        The edges of a neuron that have one type are then contiguous. Tensors at branches and
        junctions get types of their own.
        """
        source, target = self.role[weight.source], self.role[weight.target]
        key = (str(source), weight.name, str(target))
        for number in itertools.count(2):
            last = self.blocks.get(key, [(-1, -1)])[-1]
            if last[0] < block[0] and last[1] < block[1]:
                break
            key = (str(source), f"{weight.name}{number}", str(target))
        return key
