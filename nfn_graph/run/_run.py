"""Runs all networks of a graph; those with the same computation run together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Layout, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.ops import sum_dtype, without_autocast
from nfn_graph.run._evaluation import evaluate
from nfn_graph.run._plan import Group, Plan, plan_of, read_entries
from nfn_graph.run._ragged import NotRaggedError, as_rows, as_same, evaluate_ragged
from nfn_graph.spec import Key

#: An upper estimate of the number of entries of a layer's results that are computed at once.
_CACHED = 2**24
#: Networks are padded to fewer sizes if their inputs have at least this many entries.
_FEWEST_ENTRIES = 2**14

Inputs = Tensor | Sequence[Tensor]
Outputs = Tensor | tuple[Tensor, ...]


#: The outputs `[networks, ...]` by number, and by neuron type the activations `[neurons, ...]`,
#: network after network.
Results = dict[int | str, Tensor]


@dataclass(frozen=True)
class Task:
    """The entries `[rows, taps]` of all networks by store, and what to run them on.

    If `per_network`, the inputs have a first axis of networks.
    """

    stores: Mapping[Key, Tensor]
    inputs: Sequence[Tensor]
    per_network: bool
    has_activations: bool

    def inputs_of(self, networks: Sequence[int]) -> list[Tensor]:
        """The inputs of some networks."""
        if not self.per_network or list(networks) == list(range(self.inputs[0].shape[0])):
            return list(self.inputs)
        return [x[torch.tensor(networks, device=x.device)] for x in self.inputs]


def run(
    graph: WeightGraph,
    inputs: Inputs,
    *,
    per_network: bool = False,
    return_activations: bool = False,
) -> Outputs | tuple[Outputs, dict[str, Tensor]]:
    """Computes the outputs of every network of a graph; see :meth:`nfn_graph.WeightGraph.run`."""
    plan = plan_of(graph)
    _check_known(plan)
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    like = graph[plan.like].edge_attr
    dtype = sum_dtype(like.dtype)
    given = [x.to(like.device, dtype if x.is_floating_point() else None) for x in given]
    _check_inputs(plan, given, per_network)
    stores = {
        key: graph[key]["x" if isinstance(key, str) else "edge_attr"][..., 0].to(dtype)
        for key in plan.keys
    }
    task = Task(stores, given, per_network, return_activations)
    with without_autocast(like.device):
        results = _of_all_groups(plan, [_run_group(group, task) for group in plan.groups])
    is_single = isinstance(graph.layout, Layout)
    found = tuple(x[0] if is_single else x for key, x in results.items() if isinstance(key, int))
    returned: Outputs = found[0] if len(found) == 1 else found
    if not return_activations:
        return returned
    return returned, {name: x for name, x in results.items() if isinstance(name, str)}


def _check_known(plan: Plan) -> None:
    if plan.unknown is not None:
        number, reason = plan.unknown
        which = "the network" if len(plan.layouts) == 1 else f"network {number}"
        raise UserError(
            f"Expected a graph that records what its network computes (got no record for {which}: "
            f"{reason}). Convert a module, or a checkpoint with arch=, that can be followed."
        )


def _check_inputs(plan: Plan, inputs: Sequence[Tensor], per_network: bool) -> None:
    expected = {group.computation.num_inputs for group in plan.groups}
    if expected != {len(inputs)}:
        raise UserError(f"Expected {sorted(expected)} inputs (got {len(inputs)})")
    for x in inputs:
        if per_network and (x.dim() < 1 or x.shape[0] != len(plan.layouts)):
            raise UserError(
                f"Expected inputs [{len(plan.layouts)}, ...], a set for each network (got "
                f"{list(x.shape)})"
            )


@contextmanager
def _checked(inputs: Sequence[Tensor]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"Expected inputs that the networks take (got {[list(x.shape) for x in inputs]}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def _run_group(group: Group, task: Task) -> Results:
    """Chooses how the networks of a group are run, and runs them."""
    # For stacked networks, torch's own convolutions are faster than ours; its linear layers are
    # not.
    is_wanted = len(group.kinds) > 1 or (group.count > 1 and group.is_dense)
    # Only torch's own operations take inputs without entries, such as batches of no images.
    if group.is_ragged and is_wanted and all(x.numel() for x in task.inputs):
        is_padded = group.padded is not None and _is_worth_padding(task)
        try:
            return _run_ragged(group, task, is_padded)
        except NotRaggedError:
            # An operation that mixes neurons would also read those that were added by padding.
            if is_padded:
                group.padded = None
            else:
                group.is_ragged = False
            return _run_group(group, task)
    return _run_by_sizes(group, task)


def _is_worth_padding(task: Task) -> bool:
    """Whether torch's convolutions of padded networks are faster than ours without padding."""
    entries = max(x.numel() / (x.shape[0] if task.per_network else 1) for x in task.inputs)
    # Padding does not pay off for small images, and our derivatives in the inputs are faster.
    return entries >= _FEWEST_ENTRIES and not any(x.requires_grad for x in task.inputs)


def _run_ragged(group: Group, task: Task, is_padded: bool) -> Results:
    """Runs networks of different sizes by message passing, as many at once as fit in the cache."""
    computation = group.computation
    inputs = task.inputs_of(group.networks)
    counts = group.parts(_networks_at_once(group, inputs, task.per_network), is_padded)
    numbers = computation.parameters
    tensors = [group.tensor(n, task.stores, is_padded).split(counts) for n in numbers]
    shares = [x.split(counts) for x in inputs] if task.per_network else []
    neurons = computation.activations if task.has_activations else ()
    wanted = [*computation.outputs, *(n.value for n in neurons)]
    parts: list[Results] = []
    for place, count in enumerate(counts):
        given = [own[place] for own in shares] or [x.unsqueeze(0) for x in inputs]
        own = {number: split[place] for number, split in zip(numbers, tensors, strict=True)}
        with _checked(inputs):
            results = evaluate_ragged(computation, own, given, wanted)
        part: Results = {}
        for i, ref in enumerate(computation.outputs):
            x = as_same(results[ref.step]).data
            part[i] = x.expand(count, *x.shape[1:])
        for n in neurons:
            rows = as_rows(results[n.value.step], n.axis, count)
            part[n.name] = rows.without_padding().contiguous()
        parts.append(part)
    return _one_after_the_other(parts)


def _networks_at_once(group: Group, inputs: Sequence[Tensor], per_network: bool) -> int:
    """The number of networks to run together; on a CPU, their results should stay in its cache."""
    if inputs[0].device.type != "cpu":
        return group.count
    layout = group.kinds[-1][0]
    neurons = [layout.num_rows(name) for name in layout.spec.neuron]
    # Most networks have no more positions anywhere than in their input.
    entries = max(x.numel() for x in inputs) / (group.count if per_network else 1)
    each = entries / max(neurons[0], 1) * max(neurons)
    return max(1, min(group.count, int(_CACHED / max(each, 1))))


def _run_by_sizes(group: Group, task: Task) -> Results:
    """Runs networks of equal sizes together, with their tensors stacked."""
    counts = [count for _, count in group.kinds]
    inputs = [
        x.split(counts) if task.per_network else [x] * len(counts)
        for x in task.inputs_of(group.networks)
    ]
    stores = {
        key: group.rows(key, x).split([n * layout.num_rows(key) for layout, n in group.kinds])
        for key, x in task.stores.items()
    }
    results = []
    for i, (layout, count) in enumerate(group.kinds):
        own = {
            key: parts[i].reshape(count, layout.num_rows(key), parts[i].shape[1])
            for key, parts in stores.items()
        }
        results.append(_run_stacked(layout, own, count, [x[i] for x in inputs], task))
    return _one_after_the_other(results)


def _run_stacked(
    layout: Layout,
    stores: Mapping[Key, Tensor],
    count: int,
    inputs: Sequence[Tensor],
    task: Task,
) -> Results:
    computation = layout.computation
    tensors = {n: read_entries(layout, n, stores) for n in range(len(layout.sources))}
    neurons = computation.activations if task.has_activations else ()

    def run_one(tensors: dict[int, Tensor], *inputs: Tensor) -> list[Tensor]:
        results = evaluate(computation, tensors, inputs)
        outputs = [results[ref.step] for ref in computation.outputs]
        return outputs + [results[n.value.step].movedim(n.axis, 0) for n in neurons]

    axis = 0 if task.per_network else None
    together: Any = torch.vmap(run_one, (0, *[axis] * len(inputs)), randomness="error")
    if count == 1:
        inputs = [x[0] if task.per_network else x for x in inputs]
    with _checked(inputs):
        if count == 1:
            one = {number: x[0] for number, x in tensors.items()}
            found = [x.unsqueeze(0) for x in run_one(one, *inputs)]
        else:
            found = together(tensors, *inputs)
    results: Results = dict(enumerate(found[: len(computation.outputs)]))
    for n, x in zip(neurons, found[len(results) :], strict=True):
        results[n.name] = x.flatten(0, 1)
    return results


def _one_after_the_other(parts: Sequence[Results]) -> Results:
    """Concatenates the results of networks with the same computation."""
    return {key: _cat(key, [part[key] for part in parts]) for key in parts[0]}


def _of_all_groups(plan: Plan, results: Sequence[Results]) -> Results:
    """The results of all groups in the order of the networks."""
    numbers = [len(group.computation.outputs) for group in plan.groups]
    if len(set(numbers)) > 1:
        raise UserError(
            f"Expected networks with one number of outputs (got {numbers}). Run each batch[i]."
        )
    found: Results = {}
    for key in dict.fromkeys(key for own in results for key in own):
        owners = [
            own
            for group, own in zip(plan.groups, results, strict=True)
            if isinstance(key, int) or any(layout.num_rows(key) for layout, _ in group.kinds)
        ]
        # Types whose activations are not known in all networks that have them are left out.
        if all(key in own for own in owners):
            found[key] = plan.restored(key, _cat(key, [own[key] for own in owners]))
    return found


def _cat(key: int | str, parts: Sequence[Tensor]) -> Tensor:
    """Concatenates an output, or the activations of a neuron type, of several networks."""
    if len(parts) == 1:
        return parts[0]
    shapes = [list(shape) for shape in dict.fromkeys(x.shape[1:] for x in parts)]
    if len(shapes) > 1:
        what = "outputs of one shape"
        if isinstance(key, str):
            what = f"activations of '{key}' at one number of positions"
        raise UserError(f"Expected {what} (got {shapes}). Run each batch[i].")
    return torch.cat(list(parts))
