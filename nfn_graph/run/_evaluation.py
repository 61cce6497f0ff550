"""The evaluation of a computation on plain tensors, which defines the result of faster ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nfn_graph.data import Computation, Range, Ref
from nfn_graph.run._operations import OPERATIONS


def evaluate(
    computation: Computation, parameters: Mapping[int, Tensor], inputs: Sequence[Tensor]
) -> list[Any]:
    """Computes the results of all steps of one network.

    Args:
        computation: The steps to carry out.
        parameters: The tensors of the network by number.
        inputs: The inputs of the network.
    """
    results: list[Any] = []
    for step in computation.steps:
        if step.operation == "input":
            results.append(inputs[number_in(step.args)])
        elif step.operation == "parameter":
            results.append(parameters[number_in(step.args)])
        elif step.operation == "constant":
            results.append(torch.tensor(step.args[0], dtype=inputs[0].dtype).to(inputs[0].device))
        else:
            args = [resolved(arg, results.__getitem__) for arg in step.args]
            kwargs = {name: resolved(arg, results.__getitem__) for name, arg in step.kwargs}
            results.append(OPERATIONS[step.operation](*args, **kwargs))
    return results


def number_in(args: Sequence[Any]) -> int:
    """The number of an input or parameter."""
    return int(args[0])


def resolved(value: Any, result: Callable[[int], Any]) -> Any:
    """Replaces the references in an argument by results."""
    if isinstance(value, Ref):
        return result(value.step)
    if isinstance(value, Range):
        bounds = (value.start, value.stop, value.step)
        return slice(*(resolved(bound, result) for bound in bounds))
    if isinstance(value, tuple):
        return tuple(resolved(item, result) for item in value)
    return value
