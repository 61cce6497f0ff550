"""All networks of a graph run at once: what computes alike runs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Computation, Layout, WeightGraph, stored_tensors
from nfn_graph.messages import UserError
from nfn_graph.ops import sum_dtype, without_autocast
from nfn_graph.run._evaluation import evaluate
from nfn_graph.run._ragged import NotRaggedError, Stored, as_rows, as_same, evaluate_ragged
from nfn_graph.run._tensors import Stores, read_flat, read_tensors, rows_of
from nfn_graph.spec import Key

Inputs = Tensor | Sequence[Tensor]
Outputs = Tensor | tuple[Tensor, ...]


@dataclass
class Group:
    """Networks that run together.

    Args:
        networks: Their places in the batch, or in the group that they are a part of.
        layouts: Their layouts.
        stores: Their entries, `[rows, taps]`, network after network.
        counts: How many rows of every store each of them has.
    """

    networks: list[int]
    layouts: list[Layout]
    stores: dict[Key, Tensor]
    counts: dict[Key, list[int]]

    @property
    def computation(self) -> Computation:
        """What all of them compute."""
        return self.layouts[0].computation

    @property
    def is_uniform(self) -> bool:
        """Whether all of them have the same sizes."""
        first = self.layouts[0]
        return all(layout is first or layout == first for layout in self.layouts[1:])

    def part(self, members: Sequence[int]) -> Group:
        """Some of the networks, by their places in this group."""
        if len(members) == len(self.layouts):
            return Group(list(members), self.layouts, self.stores, self.counts)
        stores = {
            key: x.index_select(0, rows_of(self.counts[key], members, x.device))
            for key, x in self.stores.items()
        }
        counts = {key: [rows[i] for i in members] for key, rows in self.counts.items()}
        return Group(list(members), [self.layouts[i] for i in members], stores, counts)


@dataclass
class Results:
    """What a group of networks returns.

    Args:
        outputs: The outputs, each `[networks, ...]`.
        activations: The activations of neuron types, `[neurons, ...]`, network after network.
    """

    outputs: list[Tensor]
    activations: dict[str, Tensor]


def run(
    graph: WeightGraph,
    inputs: Inputs,
    *,
    per_network: bool = False,
    return_activations: bool = False,
) -> Outputs | tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every network of a graph; see :meth:`nfn_graph.WeightGraph.run`."""
    layouts = graph.layouts
    _check_known(layouts)
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    like = graph[graph.spec.weights[0].key].edge_attr
    dtype = sum_dtype(like.dtype)
    given = [x.to(like.device, dtype if x.is_floating_point() else None) for x in given]
    _check_inputs(layouts, given, per_network)
    with without_autocast(like.device):
        groups = _groups(graph, dtype)
        results = [
            _run_group(group, [x[group.networks] if per_network else x for x in given], per_network)
            for group in groups
        ]
    is_single = isinstance(graph.layout, Layout)
    outputs = _joined_outputs(groups, results)
    found = tuple(x[0] for x in outputs) if is_single else tuple(outputs)
    returned: Outputs = found[0] if len(found) == 1 else found
    if not return_activations:
        return returned
    return returned, _joined_activations(layouts, groups, results)


def _check_known(layouts: Sequence[Layout]) -> None:
    for number, layout in {id(x): (i, x) for i, x in enumerate(layouts)}.values():
        reason = layout.computation.reason
        if reason is not None:
            which = "the network" if len(layouts) == 1 else f"network {number}"
            raise UserError(
                f"Expected a graph that knows what its network computes (got none for {which}: "
                f"{reason}). Convert a module, or a checkpoint with arch=, that can be followed."
            )


def _check_inputs(layouts: Sequence[Layout], inputs: Sequence[Tensor], per_network: bool) -> None:
    expected = {layout.computation.num_inputs for layout in layouts}
    if expected != {len(inputs)}:
        raise UserError(f"Expected {sorted(expected)} inputs (got {len(inputs)})")
    for x in inputs:
        if per_network and (x.dim() < 1 or x.shape[0] != len(layouts)):
            raise UserError(
                f"Expected inputs [{len(layouts)}, ...], a set for each network (got "
                f"{list(x.shape)})"
            )


def _groups(graph: WeightGraph, dtype: torch.dtype) -> list[Group]:
    """The networks of a graph by what they compute."""
    layouts = graph.layouts
    computations: dict[Computation, list[int]] = {}
    # Networks of one kind share their layout, and comparing computations takes time.
    known: dict[int, list[int]] = {}
    for number, layout in enumerate(layouts):
        if id(layout) not in known:
            known[id(layout)] = computations.setdefault(layout.computation, [])
        known[id(layout)].append(number)
    stored = stored_tensors(graph, graph.spec)
    stores = {key: x[..., 0].to(dtype) for key, x in stored.items()}
    counts = {key: [layout.num_rows(key) for layout in layouts] for key in stores}
    whole = Group(list(range(len(layouts))), layouts, stores, counts)
    return [whole.part(networks) for networks in computations.values()]


def _run_group(group: Group, inputs: Sequence[Tensor], per_network: bool) -> Results:
    if group.is_uniform:
        return _run_uniform(group, inputs, per_network)
    try:
        return _run_ragged(group, inputs, per_network)
    except NotRaggedError:
        return _run_by_sizes(group, inputs, per_network)


def _run_ragged(group: Group, inputs: Sequence[Tensor], per_network: bool) -> Results:
    """Networks of different sizes, by message passing."""
    count, computation = len(group.layouts), group.computation

    def tensors(number: int) -> Stored:
        shapes = tuple(layout.sources[number][0].shape for layout in group.layouts)
        return Stored(read_flat(group.layouts, number, group.stores), shapes)

    given = [x if per_network else x.unsqueeze(0) for x in inputs]
    with _checked(inputs):
        results = evaluate_ragged(computation, tensors, given, count)
        outputs = [as_same(results[ref.step], count).data for ref in computation.outputs]
        activations = {
            n.name: as_rows(results[n.value.step], n.axis, count).data
            for n in computation.activations
        }
    return Results([x.expand(count, *x.shape[1:]) for x in outputs], activations)


def _run_by_sizes(group: Group, inputs: Sequence[Tensor], per_network: bool) -> Results:
    """Networks of different sizes, those of equal sizes together."""
    kinds: dict[Layout, list[int]] = {}
    for i, layout in enumerate(group.layouts):
        kinds.setdefault(layout, []).append(i)
    groups = [group.part(networks) for networks in kinds.values()]
    results = [
        _run_uniform(part, [x[networks] if per_network else x for x in inputs], per_network)
        for part, networks in zip(groups, kinds.values(), strict=True)
    ]
    return Results(
        _joined_outputs(groups, results), _joined_activations(group.layouts, groups, results)
    )


def _run_uniform(group: Group, inputs: Sequence[Tensor], per_network: bool) -> Results:
    """Networks of equal sizes, with their tensors stacked."""
    count, layout = len(group.layouts), group.layouts[0]
    computation = layout.computation
    stores: Stores = {
        key: x.reshape(count, layout.num_rows(key), x.shape[1]) for key, x in group.stores.items()
    }
    tensors = read_tensors(layout, stores)

    def run_one(tensors: dict[int, Tensor], *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        results = evaluate(computation, tensors, inputs)
        activations = [results[n.value.step].movedim(n.axis, 0) for n in computation.activations]
        return [results[ref.step] for ref in computation.outputs], activations

    with _checked(inputs):
        if count == 1:
            one = {number: x[0] for number, x in tensors.items()}
            own = [x[0] if per_network else x for x in inputs]
            outputs, activations = run_one(one, *own)
            outputs = [x.unsqueeze(0) for x in outputs]
        else:
            axis = 0 if per_network else None
            together: Any = torch.vmap(run_one, (0, *[axis] * len(inputs)), randomness="error")
            outputs, activations = together(tensors, *inputs)
            activations = [x.flatten(0, 1) for x in activations]
    names = [neurons.name for neurons in computation.activations]
    return Results(outputs, dict(zip(names, activations, strict=True)))


@contextmanager
def _checked(inputs: Sequence[Tensor]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"Expected inputs that the networks take (got {[list(x.shape) for x in inputs]}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def _joined_outputs(groups: Sequence[Group], results: Sequence[Results]) -> list[Tensor]:
    """The outputs of all groups in the order of the networks."""
    if len({len(result.outputs) for result in results}) > 1:
        raise UserError(
            f"Expected networks with as many outputs (got "
            f"{[len(result.outputs) for result in results]}). Run batch[i] one by one."
        )
    order = [i for group in groups for i in group.networks]
    back = sorted(range(len(order)), key=order.__getitem__)
    joined = []
    for parts in zip(*(result.outputs for result in results), strict=True):
        shapes = [list(x.shape[1:]) for x in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise UserError(
                f"Expected outputs of one shape (got {shapes}). Run batch[i] one by one."
            )
        joined.append(parts[0] if len(parts) == 1 else torch.cat(parts)[back])
    return joined


def _joined_activations(
    layouts: Sequence[Layout], groups: Sequence[Group], results: Sequence[Results]
) -> dict[str, Tensor]:
    """The activations of all groups, network after network."""
    if len(groups) == 1:
        return results[0].activations
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for result in results for name in result.activations):
        parts: dict[int, Tensor] = {}
        owners = [i for i, layout in enumerate(layouts) if layout.num_rows(name)]
        for group, result in zip(groups, results, strict=True):
            if name in result.activations:
                split = result.activations[name].split(group.counts[name])
                parts.update(zip(group.networks, split, strict=True))
        if all(i in parts for i in owners):
            shapes = {parts[i].shape[1:] for i in owners}
            if len(shapes) > 1:
                raise UserError(
                    f"Expected activations of '{name}' at equally many positions (got "
                    f"{sorted(map(list, shapes))}). Run batch[i] one by one."
                )
            found[name] = torch.cat([parts[i] for i in owners])
    return found
