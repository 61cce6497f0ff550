"""Checks of names, counts and nesting: a spec that exists is valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

from torch import nn

from nfn_graph.messages import UserError

# A spec calls these checks when it is constructed.
if TYPE_CHECKING:
    from nfn_graph.spec._types import NetworkSpec

# Names that are reserved for modules, graphs and the site of the network.
_RESERVED = (
    frozenset(dir(nn.ParameterDict()))
    | frozenset(dir(nn.ModuleDict()))
    | {"network", "layout", "y"}
)


def check_name(name: str, what: str) -> None:
    """Raises an error unless a type can have that name."""
    if not isinstance(name, str) or not name.isidentifier() or "__" in name or name in _RESERVED:
        raise UserError(
            f"Expected the name of a {what} to be a Python identifier without '__', not 'y', "
            f"'layout', 'network' or an attribute of torch.nn.ModuleDict (got {name!r})"
        )


def check_count(value: int, least: int, what: str) -> int:
    """Raises an error unless the value is an integer that is large enough."""
    if not isinstance(value, SupportsIndex) or value.__index__() < least:
        raise UserError(f"Expected {what} to be an integer of at least {least} (got {value!r})")
    return value


def check_unique(names: Sequence[object], what: str) -> None:
    """Raises an error if a name occurs twice."""
    repeated = sorted(repr(name) for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise UserError(f"Expected the names of {what} to differ (got {', '.join(repeated)} twice)")


def check_nesting(spec: NetworkSpec) -> None:
    """Raises an error unless the parents and children of a spec are consistent."""
    place = {name: i for i, name in enumerate(spec.neuron)}
    for i, neuron in enumerate(spec.neurons):
        if not neuron.parents:
            continue
        what = f"neuron type '{neuron.name}'"
        known = all(place.get(name, i) < i for name in neuron.parents)
        if not known or len(neuron.parents) > 2 or len(set(neuron.parents)) < len(neuron.parents):
            raise UserError(
                f"Expected one or two parents of {what}, which the spec lists before it "
                f"(got {neuron.parents})"
            )
        parents = [spec.neuron[name] for name in neuron.parents]
        if any(n.role for n in (neuron, *parents)):
            raise UserError(
                f"Expected {what} and its parents to be single layers (got a role type)"
            )
        if len(parents) == 2 and neuron.fixed:
            raise UserError(f"Expected the pairs of {what} to be free (got a fixed type)")
        if len(parents) == 1 and parents[0].fixed and not neuron.fixed:
            raise UserError(
                f"Expected a free parent of the free {what} (got '{parents[0].name}', whose "
                f"neurons keep their order). Use one type for the neurons inside each of them."
            )
    for weight in spec.weights:
        ends = [spec.neuron[weight.source], spec.neuron[weight.target]]
        if any(n.role for n in ends) and any(n.parents for n in ends):
            raise UserError(
                f"Expected weight type {weight.key} to connect role types or nested types (got one "
                f"of each). A nested type belongs to one layer, and a role type to several."
            )
        if weight.source == weight.target and spec.neuron[weight.source].parents:
            raise UserError(
                f"Expected weight type {weight.key} to connect two neuron types, or one without "
                f"parents to itself (got '{weight.source}', which has parents)"
            )
