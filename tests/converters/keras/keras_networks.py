"""Keras models as their files describe them: layers, arrays and configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nfn_graph import WeightGraph

Layers = dict[str, dict[str, Any]]


def layer(name: str, kind: str = "Dense", **options: Any) -> dict[str, Any]:
    return {"class_name": kind, "name": name, "config": {"name": name, **options}}


def keras2(*parents: str) -> list[Any]:
    """`inbound_nodes` as Keras 2 writes them."""
    return [[[parent, 0, 0, {}] for parent in parents]] if parents else []


def keras3(*parents: str) -> list[Any]:
    """`inbound_nodes` as Keras 3 writes them."""
    tensors = [
        {"class_name": "__keras_tensor__", "config": {"keras_history": [parent, 0, 0]}}
        for parent in parents
    ]
    args = [tensors] if len(tensors) > 1 else tensors
    return [{"args": args, "kwargs": {"mask": None}}] if parents else []


def functional(
    inbound: Any, inputs: list[str], outputs: list[str], *layers: tuple[dict[str, Any], list[str]]
) -> dict[str, Any]:
    described = [{**item, "inbound_nodes": inbound(*parents)} for item, parents in layers]
    return {
        "class_name": "Functional",
        "config": {
            "name": "model",
            "layers": described,
            "input_layers": [[name, 0, 0] for name in inputs],
            "output_layers": [[name, 0, 0] for name in outputs],
        },
    }


def dense(module: nn.Linear) -> dict[str, Any]:
    return {"kernel": module.weight.detach().T.contiguous(), "bias": module.bias.detach()}


def conv(module: nn.Conv2d | nn.ConvTranspose2d) -> dict[str, Any]:
    bias = {} if module.bias is None else {"bias": module.bias.detach()}
    return {"kernel": module.weight.detach().permute(2, 3, 1, 0).contiguous(), **bias}


def norm(module: nn.BatchNorm1d) -> dict[str, Any]:
    values = (module.weight, module.bias, module.running_mean, module.running_var)
    names = ("gamma", "beta", "moving_mean", "moving_variance")
    return dict(zip(names, (torch.rand_like(x.detach()) for x in values), strict=True))


def free_sizes(graph: WeightGraph) -> list[int]:
    sizes = dict(zip(graph.spec.neuron, graph.layout.shape.sizes, strict=True))
    return [sizes[n.name][0] for n in graph.spec.neurons if n.size is None]
