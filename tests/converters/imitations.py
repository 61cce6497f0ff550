"""Zoos on the disk that imitate published ones, from networks with known outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters import to_module
from nfn_graph.converters.zoos import Zoo


@dataclass
class Imitation:
    """A zoo on the disk and what its networks compute.

    Attributes:
        path: Its folder.
        inputs: What the networks are run on.
        networks: The published networks, by the file or record that they are in.
    """

    path: Path
    inputs: Tensor
    networks: dict[Any, nn.Module] = field(default_factory=dict)

    def outputs(self, name: Any) -> Tensor:
        """What a network computes, in float64."""
        with torch.no_grad():
            return self.networks[name].double()(self.inputs)


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A network with random weights, biases among them, in float32 as zoos keep it."""
    torch.manual_seed(seed)
    network = build()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network.eval()


def save(path: Path, content: Any) -> None:
    """A file of torch.save, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def assert_computes(zoo: Zoo, imitation: Imitation) -> None:
    """Checks that every network is there once and computes the published outputs in float64."""
    names = [row.get("path", i) for i, row in enumerate(map(zoo.row, range(len(zoo))))]
    assert sorted(names) == sorted(imitation.networks)
    for i, name in enumerate(names):
        with torch.no_grad():
            actual = zoo.module(i).double()(imitation.inputs)
        torch.testing.assert_close(actual, imitation.outputs(name), rtol=0, atol=1e-9)


def assert_loads(graph: WeightGraph, network: nn.Module, imitation: Imitation, name: str) -> None:
    """Checks that a graph can be loaded into the published module again."""
    to_module(graph, network)
    with torch.no_grad():
        actual = network.double()(imitation.inputs)
    torch.testing.assert_close(actual, imitation.outputs(name), rtol=0, atol=1e-9)


def paths(zoo: Zoo) -> list[str]:
    return zoo.column("path")
