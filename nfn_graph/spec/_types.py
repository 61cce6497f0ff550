"""The description of a family of networks by neuron types and weight types.

A :class:`NetworkSpec` plays the part of the irreps of an e3nn layer: it is immutable, hashable,
free of tensors and printable, and the parameters of a layer depend on nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from nfn_graph.messages import UserError
from nfn_graph.spec._checks import check_count, check_name, check_nesting, check_unique

# The fold is built from a spec, which offers it as a method.
if TYPE_CHECKING:
    from nfn_graph.spec._sites import FoldedSpec

Symmetry = Literal["np", "hnp"]
WeightKey = tuple[str, str, str]
Key = str | WeightKey

#: Marks the second of two layers of one type, at the source of a self or role weight.
PRIME = "'"


def module_name(key: Key) -> str:
    """The name of a type in a module's parameters.

    Example:
        >>> module_name(("input", "weight", "hidden1"))
        'input__weight__hidden1'
    """
    return key if isinstance(key, str) else "__".join(key)


def type_label(key: Key) -> str:
    """How a type is printed; the name of a tensor distinguishes parallel ones.

    Example:
        >>> type_label(("input", "weight", "hidden1")), type_label(("a", "skip", "b"))
        ('input->hidden1', 'a->b(skip)')
    """
    if isinstance(key, str):
        return key
    source, name, target = key
    return f"{source}->{target}" + ("" if name == "weight" else f"({name})")


@dataclass(frozen=True)
class NeuronType:
    """A layer of neurons; its biases and norm parameters are `taps` values per neuron.

    Args:
        name: A Python identifier; also the name of the node store of a graph.
        taps: The number of values per neuron (0 without a bias).
        size: The number of neurons, for a layer whose neurons keep their order
            (inputs, outputs). None for a layer that may be permuted.
        fixed: Whether the neurons keep their order. It is implied by `size`; without a size, it
            describes networks whose sizes differ.
        role: Whether several layers of one network share this type.
        parents: The types that these neurons are nested in. With one parent, such as the head
            of an attention dimension or the group of a channel, every parent neuron holds
            the same number of these neurons and takes them along when it is permuted. With two,
            these neurons are the pairs of both parents (the queries of grouped-query attention:
            query heads times dimensions), and only the parents move them. The size of a fixed type
            counts the neurons inside one parent.

    Example:
        >>> from nfn_graph import NeuronType
        >>> NeuronType("hidden1", taps=3).taps  # a bias, and the scale and shift of a norm
        3
    """

    name: str
    taps: int = 1
    size: int | None = None
    fixed: bool = False
    role: bool = False
    parents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))
        check_name(self.name, "neuron type")
        check_count(self.taps, 0, f"taps of neuron type '{self.name}'")
        if self.size is not None:
            check_count(self.size, 1, f"size of neuron type '{self.name}'")
            object.__setattr__(self, "fixed", True)

    def __str__(self) -> str:
        size = "" if not self.fixed else f"[{'*' if self.size is None else self.size}]"
        parents = f"{'*'.join(self.parents)}>" if self.parents else ""
        return f"{parents}{self.name}{size}:{self.taps}"


@dataclass(frozen=True)
class WeightType:
    """A weight tensor between two neuron types, with `taps` values per pair of neurons.

    Neuron types with a common parent are connected within that parent only, as by the kernel of a
    grouped convolution. The taps of a convolution are the `h * w` entries of one kernel. `name`
    distinguishes tensors between the same pair of layers.

    Example:
        >>> from nfn_graph import WeightType
        >>> WeightType("hidden1", "hidden2", taps=9).key  # a 3x3 convolution
        ('hidden1', 'weight', 'hidden2')
    """

    source: str
    target: str
    taps: int = 1
    name: str = "weight"

    def __post_init__(self) -> None:
        check_name(self.name, "weight type")
        check_count(self.taps, 1, f"taps of weight type {self.key}")

    @property
    def key(self) -> WeightKey:
        """The edge type in a graph: `(source, name, target)`."""
        return (self.source, self.name, self.target)

    def __str__(self) -> str:
        return f"{type_label(self.key)}:{self.taps}"


@dataclass(frozen=True)
class NetworkSpec:
    """The types that layers and models are built from.

    Args:
        neurons: The neuron types.
        weights: The weight types between them.

    Example:
        >>> print(NetworkSpec.chain(3, input_size=2, output_size=1))
        NetworkSpec(input[2]:0, hidden1:1, hidden2:1, output[1]:1 | input->hidden1:1, \
hidden1->hidden2:1, hidden2->output:1)
    """

    neurons: tuple[NeuronType, ...]
    weights: tuple[WeightType, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "neurons", tuple(self.neurons))
        object.__setattr__(self, "weights", tuple(self.weights))
        check_unique([n.name for n in self.neurons], "neuron types")
        check_unique([w.key for w in self.weights], "weight types")
        if not self.weights:
            raise UserError("Expected at least one weight type (got none)")
        names = {n.name for n in self.neurons}
        for weight in self.weights:
            for end in (weight.source, weight.target):
                if end not in names:
                    raise UserError(
                        f"Expected the ends of weight type {weight.key} to be neuron types "
                        f"of the spec (got '{end}', known: {sorted(names)})"
                    )
        check_nesting(self)

    @classmethod
    def chain(
        cls,
        num_layers: int,
        *,
        taps: int | Sequence[int] = 1,
        biases: bool | Sequence[bool] = True,
        input_size: int | None = None,
        output_size: int | None = None,
    ) -> NetworkSpec:
        """The spec of a chain of `num_layers` weight tensors: an MLP or a plain CNN.

        Args:
            num_layers: The number of weight tensors.
            taps: The number of values per connection, for all weights or for each.
            biases: Whether there are biases, for all layers or for each.
            input_size: The number of inputs; None leaves it open.
            output_size: The number of outputs; None leaves it open.
        """
        check_count(num_layers, 1, "num_layers")
        tap_list = [taps] * num_layers if isinstance(taps, int) else list(taps)
        bias_list = [biases] * num_layers if isinstance(biases, bool) else list(biases)
        for name, values in (("taps", tap_list), ("biases", bias_list)):
            if len(values) != num_layers:
                raise UserError(f"Expected {num_layers} values of '{name}' (got {len(values)})")
        hidden = [NeuronType(f"hidden{i}", int(b)) for i, b in enumerate(bias_list[:-1], 1)]
        first = NeuronType("input", 0, input_size, fixed=True)
        last = NeuronType("output", int(bias_list[-1]), output_size, fixed=True)
        neurons = (first, *hidden, last)
        pairs = zip(pairwise(neurons), tap_list, strict=True)
        return cls(neurons, tuple(WeightType(s.name, t.name, k) for (s, t), k in pairs))

    @classmethod
    def union(cls, specs: Iterable[NetworkSpec]) -> NetworkSpec:
        """The smallest spec that holds every type of `specs`.

        A network that lacks one of the types contributes nothing to it. Types with the same name
        must agree, except for the sizes of fixed types, which are left open if they differ. The
        order of the types does not depend on the order of the specs.
        """
        unique = list(dict.fromkeys(specs))
        if not unique:
            raise UserError("Expected at least one spec to unite (got none)")
        if len(unique) == 1:
            return unique[0]
        neurons: dict[str, NeuronType] = {}
        weights: dict[WeightKey, WeightType] = {}
        for spec in unique:
            for name, neuron in spec.neuron.items():
                known = neurons.setdefault(name, neuron)
                if known != neuron:
                    neurons[name] = _unite(known, neuron)
            for key, weight in spec.weight.items():
                if weights.setdefault(key, weight) != weight:
                    raise UserError(
                        f"Expected one number of taps for weight type {key} "
                        f"(got {weights[key].taps} and {weight.taps}). Use "
                        f"nfn_graph.transforms.GrowKernels.to_largest(graphs)."
                    )
        return _in_order(neurons, weights.values())

    def fold(self, symmetry: Symmetry) -> FoldedSpec:
        """This spec as the layers see it under a symmetry group.

        Under `"np"`, all neurons may be permuted and fixed sizes are ignored. Under `"hnp"`, the
        neurons of fixed types keep their order and their axes become taps.
        """
        from nfn_graph.spec._sites import FoldedSpec

        return FoldedSpec.of(self, symmetry)

    @cached_property
    def neuron(self) -> dict[str, NeuronType]:
        """The neuron types by name."""
        return {n.name: n for n in self.neurons}

    @cached_property
    def weight(self) -> dict[WeightKey, WeightType]:
        """The weight types by key."""
        return {w.key: w for w in self.weights}

    @cached_property
    def taps(self) -> dict[Key, int]:
        """The taps of every type."""
        return {**{w.key: w.taps for w in self.weights}, **{n.name: n.taps for n in self.neurons}}

    @cached_property
    def unsized(self) -> NetworkSpec:
        """The same types with the sizes of fixed types left open."""
        return NetworkSpec(tuple(replace(n, size=None) for n in self.neurons), self.weights)

    @cached_property
    def free(self) -> NetworkSpec:
        """The same types, all of them permutable."""
        return NetworkSpec(
            tuple(replace(n, size=None, fixed=False) for n in self.neurons), self.weights
        )

    def indices(self, key: Key) -> tuple[str, ...]:
        """The indices that number the rows of a type, slowest first: parents, then children.

        A bias has the indices of its neurons, a weight those of its target and then those of
        its source that are not among them.
        """
        return self._indices[key]

    def is_self(self, weight: WeightType) -> bool:
        """Whether both axes of a weight tensor belong to the same layer of neurons."""
        return weight.source == weight.target and not self.neuron[weight.source].role

    def difference(self, other: NetworkSpec) -> str:
        """Describes how `other` differs, by the names of types ('' if it does not)."""
        mine, theirs = self.types, other.types
        parts = [f"{key} is missing" for key in mine if key not in theirs]
        parts += [f"{key} is not known" for key in theirs if key not in mine]
        for key in mine:
            if theirs.get(key, mine[key]) != mine[key]:
                parts.append(f"expected {mine[key]} (got {theirs[key]})")
        if not parts and self != other:
            parts.append("the types are in another order")
        return "; ".join(parts)

    @cached_property
    def types(self) -> dict[Key, NeuronType | WeightType]:
        """All types by key."""
        types: list[NeuronType | WeightType] = [*self.neurons, *self.weights]
        return {t.name if isinstance(t, NeuronType) else t.key: t for t in types}

    @cached_property
    def _indices(self) -> dict[Key, tuple[str, ...]]:
        found: dict[Key, tuple[str, ...]] = {}
        for neuron in self.neurons:
            inherited = [index for parent in neuron.parents for index in found[parent]]
            own = [] if len(neuron.parents) == 2 else [neuron.name]
            found[neuron.name] = tuple(dict.fromkeys(inherited + own))
        for w in self.weights:
            prime = PRIME if w.source == w.target else ""
            source = tuple(index + prime for index in found[w.source])
            found[w.key] = tuple(dict.fromkeys(found[w.target] + source))
        return found

    @cached_property
    def _hash(self) -> int:
        return hash((self.neurons, self.weights))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Hashes of strings differ between processes, so cached values are not pickled.
        return {"neurons": self.neurons, "weights": self.weights}

    def __str__(self) -> str:
        return (
            f"NetworkSpec({', '.join(map(str, self.neurons))} | "
            f"{', '.join(map(str, self.weights))})"
        )


class Shape(NamedTuple):
    """The sizes of one network, in the order of a spec's types.

    Attributes:
        sizes: For every neuron type, the sizes of its layers: one size, none if the network lacks
            the type, or several for a role type.
        blocks: For every weight type, the `(target, source)` layers that each of its tensors
            connects, as positions in the `sizes` of those types.

    Example:
        >>> Shape(sizes=((2,), (4,), (1,)), blocks=(((0, 0),), ((0, 0),))).sizes  # an MLP 2-4-1
        ((2,), (4,), (1,))
    """

    sizes: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...]


def _in_order(neurons: Mapping[str, NeuronType], weights: Collection[WeightType]) -> NetworkSpec:
    """Orders the types canonically: sources first, sinks last, the others by name in between."""
    targets = {w.target for w in weights if w.source != w.target}
    sources = {w.source for w in weights if w.source != w.target}

    def place(name: str) -> tuple[int, list[tuple[int, str]]]:
        kind = 0 if name not in targets else 2 if name not in sources else 1
        parts = re.split(r"(\d+)", name)
        return kind, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    ordered: dict[str, NeuronType] = {}

    def add(name: str) -> None:
        for parent in neurons[name].parents:
            add(parent)
        ordered.setdefault(name, neurons[name])

    for name in sorted(neurons, key=place):
        add(name)
    number = {name: i for i, name in enumerate(ordered)}
    by_ends = sorted(weights, key=lambda w: (number[w.source], number[w.target], w.name))
    return NetworkSpec(tuple(ordered.values()), tuple(by_ends))


def _unite(first: NeuronType, second: NeuronType) -> NeuronType:
    name = first.name
    if first.taps != second.taps:
        raise UserError(
            f"Expected one number of taps for neuron type '{name}' (got {first.taps} and "
            f"{second.taps}). Use nfn_graph.transforms.FillBiases.to_largest(graphs)."
        )
    for field in ("fixed", "role", "parents"):
        if getattr(first, field) != getattr(second, field):
            raise UserError(
                f"Expected neuron type '{name}' to be the same in all networks "
                f"(got {field}={getattr(first, field)} and {field}={getattr(second, field)})"
            )
    return replace(first, size=None)
