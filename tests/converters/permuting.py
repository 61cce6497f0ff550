"""Compares permuted networks with the function that the network computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph, symmetry
from nfn_graph.converters import to_module
from nfn_graph.converters.pytorch import tracing


def moving(graph: WeightGraph, name: str | None = None) -> symmetry.Permutation:
    """Returns a random element of the group that moves some neuron, or one of the given layer."""
    for _ in range(100):
        permutation = symmetry.sample(graph, "hnp")
        index = permutation.index if name is None else {name: permutation.index[name]}
        if not symmetry.Permutation(index).is_identity:
            return permutation
    raise AssertionError("Expected a network with a layer to permute")


def moving_only(graph: WeightGraph, name: str) -> symmetry.Permutation | None:
    """Moves one index and what is nested in it; None if it has one neuron."""
    sizes = symmetry.layer_sizes(graph, "hnp")[name]
    if max(sizes, default=1) < 2:
        return None
    places = torch.cat([torch.arange(size).roll(1) for size in sizes])
    return symmetry.from_places(graph, {name: places})


def outputs_of(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Concatenates all outputs of a network."""
    with torch.no_grad():
        return torch.cat([x.double().flatten() for x in _tensors(module(*inputs))])


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((x - y).abs().max() / max(1.0, float(y.abs().max())))


def only_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets networks be followed by torch.export, as if torch.fx could not follow them."""

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(tracing, "_symbolic_trace", fail)


def free_sizes(graph: WeightGraph) -> tuple[int, ...]:
    """The sizes of the layers that may be permuted, in their order."""
    sizes = dict(zip(graph.spec.neuron, graph.layout.shape.sizes, strict=True))
    return tuple(sizes[n.name][0] for n in graph.spec.neurons if not n.fixed)


def assert_symmetric(graph: WeightGraph, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Checks that permuted neurons compute the same, in float64; the module is not changed."""
    expected = outputs_of(module, inputs)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    for _ in range(3):
        to_module(moving(graph).apply(graph), module)
        assert any(not torch.equal(t, before[k]) for k, t in module.state_dict().items())
        assert distance(outputs_of(module, inputs), expected) <= 1e-9
    module.load_state_dict(before)


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if is_dataclass(outputs):
        outputs = [getattr(outputs, f.name) for f in fields(outputs)]
    items = outputs.values() if isinstance(outputs, Mapping) else outputs
    return [tensor for item in items for tensor in _tensors(item)]
