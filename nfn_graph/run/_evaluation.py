"""The evaluation of a computation on plain tensors, which defines the result of faster ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

    def apply(number: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return OPERATIONS[computation.steps[number].operation](*args, **kwargs)

    def constant(value: Any) -> Tensor:
        return torch.tensor(value, dtype=inputs[0].dtype).to(inputs[0].device)

    return carried_out(computation, parameters, inputs, constant, apply)


def carried_out(
    computation: Computation,
    parameters: Mapping[int, Any],
    inputs: Sequence[Any],
    constant: Callable[[Any], Any],
    apply: Callable[[int, list[Any], dict[str, Any]], Any],
    kept: Collection[int] | None = None,
) -> list[Any]:
    """Computes the results of all steps, whatever values stand for tensors.

    Args:
        computation: The steps to carry out.
        parameters: The values of the tensors by number.
        inputs: The values of the inputs.
        constant: The function that makes the value of a constant.
        apply: The function from the number of a step and its arguments to the result.
        kept: The steps whose results are wanted; others become None after their last use.
    """
    results: list[Any] = []
    for number, step in enumerate(computation.steps):
        given: Any = step.args[0] if step.args else None
        if step.operation == "input":
            results.append(inputs[given])
        elif step.operation == "parameter":
            results.append(parameters[given])
        elif step.operation == "constant":
            results.append(constant(given))
        else:
            args = [_resolved(arg, results) for arg in step.args]
            kwargs = {name: _resolved(arg, results) for name, arg in step.kwargs}
            results.append(apply(number, args, kwargs))
        if kept is not None:
            # Recently used memory is the fastest to use again.
            for done in computation.last_uses[number]:
                if done not in kept:
                    results[done] = None
    return results


def _resolved(value: Any, results: Sequence[Any]) -> Any:
    """Replaces the references in an argument by results."""
    if isinstance(value, Ref):
        return results[value.step]
    if isinstance(value, Range):
        bounds = (value.start, value.stop, value.step)
        return slice(*(_resolved(bound, results) for bound in bounds))
    if isinstance(value, tuple):
        return tuple(_resolved(item, results) for item in value)
    return value
