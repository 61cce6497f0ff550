"""Computes the shapes of all results in a traced module, for an example input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.utils import stateless

from nfn_graph.converters.errors import ConversionError

Shapes = Mapping[fx.Node, Any]


def as_inputs(example_input: Any) -> tuple[Any, ...]:
    """Returns an example input as a tuple of arguments."""
    return example_input if isinstance(example_input, tuple) else (example_input,)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Applies a function to each tensor in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def to_meta(value: Any) -> Any:
    """Moves inputs to the meta device."""
    return map_tensors(lambda tensor: tensor.to("meta"), value)


class _ShapeInterpreter(fx.Interpreter):
    """Runs a graph and records the shape of every result, on the meta device if possible."""

    def __init__(self, module: fx.GraphModule, on_meta: bool) -> None:
        super().__init__(module)
        self.on_meta = on_meta
        self.shapes: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        found = super().fetch_attr(target)
        return found.to("meta") if self.on_meta and isinstance(found, Tensor) else found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.shapes[n] = shape_of(result)
        return result


def shape_of(result: Any) -> Any:
    """Returns the shape of a tensor, a list of shapes for several, and sizes unchanged."""
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return [shape_of(item) for item in result]
    return result if isinstance(result, int | torch.Size) else None


def shapes_in(module: fx.GraphModule, example: tuple[Any, ...]) -> Shapes:
    """Returns the shape of every node's result."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    interpreter = _ShapeInterpreter(module, on_meta=True)
    try:
        with torch.no_grad(), stateless._reparametrize_module(module, meta):
            interpreter.run(*to_meta(example))
    except Exception as error:  # The network's own code may raise anything.
        if not any(tensor.is_meta for tensor in tensors.values()):
            return _real_shapes(module, example)
        raise _wrong_example(example, error) from error
    return interpreter.shapes


def _real_shapes(module: fx.GraphModule, example: tuple[Any, ...]) -> Shapes:
    """Computes shapes for networks with tensors that cannot be moved to the meta device."""
    interpreter = _ShapeInterpreter(module, on_meta=False)
    try:
        with torch.no_grad():
            interpreter.run(*example)
    except Exception as error:
        raise _wrong_example(example, error) from error
    return interpreter.shapes


def _wrong_example(example: tuple[Any, ...], error: Exception) -> ConversionError:
    return ConversionError(
        f"Expected an example_input that the network accepts (got {shape_of(example)}: {error})"
    )
