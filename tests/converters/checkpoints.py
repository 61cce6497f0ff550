"""Checkpoints for the tests, written with the libraries of the formats instead of our own code."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import safetensors.torch
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn


def mlp(sizes: Sequence[int] = (3, 5, 4, 2), dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """An MLP with tanh in between."""
    layers: list[nn.Module] = []
    for in_, out in pairwise(sizes):
        layers += [nn.Linear(in_, out, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Two convolutions with kernels that are not square, batch norm, pooling, a dense layer."""
    model = nn.Sequential(
        nn.Conv2d(2, 5, (3, 2)),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, (2, 3), bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor).abs() if "var" in name else torch.randn(()))
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    return model


def all_types() -> dict[str, Tensor]:
    """One tensor of every dtype that weights and buffers have, in an unusual order."""
    return {
        "z.weight": torch.randn(4, 3),
        "half": torch.randn(5).half(),
        "a.bfloat": torch.randn(2, 3).bfloat16(),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
        "odd": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    }


def write_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes an .npz file with NumPy."""
    np.savez(path, **{key: x.numpy() for key, x in tensors.items()})


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a .safetensors file with its library."""
    safetensors.torch.save_file(tensors, path)


def write_keras(
    path: Path, layers: dict[str, dict[str, Any]], config: dict[str, Any] | None = None
) -> None:
    """Writes a file like `model.save("x.h5")`, or like `save_weights` without a configuration."""
    with h5py.File(path, "w") as file:
        root = file if config is None else file.create_group("model_weights")
        root.attrs["layer_names"] = [name.encode() for name in layers]
        root.attrs["backend"] = b"tensorflow"
        for layer, weights in layers.items():
            group = root.create_group(layer)
            group.attrs["weight_names"] = [f"{layer}/{name}:0".encode() for name in weights]
            for name, value in weights.items():
                group.create_dataset(f"{layer}/{name}:0", data=np.asarray(value))
        if config is not None:
            file.attrs["model_config"] = json.dumps(config)


def write_keras_archive(
    path: Path, layers: dict[str, dict[str, Any]], config: dict[str, Any], pack: int = 0
) -> None:
    """A file as `model.save("x.keras")` writes it: layers are counted, class by class.

    Args:
        path: The file.
        layers: The weights of every layer, by its name in the configuration.
        config: The configuration; models inside have their layers in `layers`, too.
        pack: The compression method of the archive.
    """
    data = io.BytesIO()
    with h5py.File(data, "w") as file:
        _write_counted(file.create_group("layers"), layers, config)
        file.create_dataset("optimizer/vars/0", data=np.zeros(3))
    with zipfile.ZipFile(path, "w", pack) as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.1.1"}))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", data.getvalue())


# How Keras names layers of some classes.
_STEMS = {
    "PReLU": "p_re_lu",
    "Conv2DTranspose": "conv2d_transpose",
    "GlobalAveragePooling1D": "global_average_pooling1d",
    "DepthwiseConv2D": "depthwise_conv2d",
}


def _write_counted(group: Any, layers: dict[str, dict[str, Any]], config: dict[str, Any]) -> None:
    counts: dict[str, int] = {}
    for layer in config["config"]["layers"]:
        kind = layer["class_name"]
        stem = _STEMS.get(kind) or re.sub("([a-z])([A-Z])", r"\1_\2", kind).lower()
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        inner = group.create_group(f"{stem}_{number}" if number else stem)
        variables = inner.create_group("vars")
        for i, value in enumerate(layers.get(layer["config"]["name"], {}).values()):
            variables.create_dataset(str(i), data=np.asarray(value))
        if "layers" in layer["config"]:
            _write_counted(inner.create_group("layers"), layers, layer)


def sequential(*layers: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """The configuration of a Keras Sequential model: class, name and options of its layers."""
    return {
        "class_name": "Sequential",
        "config": {
            "name": "sequential",
            "layers": [
                {"class_name": class_name, "config": {"name": name, **options}}
                for class_name, name, options in layers
            ],
        },
    }


def keras_mlp(model: nn.Sequential) -> dict[str, dict[str, Any]]:
    """The dense layers of an MLP with Keras's names, kernels as `(in, out)`."""
    dense = [layer for layer in model if isinstance(layer, nn.Linear)]
    return {
        f"dense_{i}": {
            "kernel": np.ascontiguousarray(layer.weight.detach().numpy().T),
            "bias": layer.bias.detach().numpy(),
        }
        for i, layer in enumerate(dense)
    }


def onnx_model(
    nodes: list[onnx.NodeProto],
    tensors: dict[str, Tensor],
    inputs: dict[str, Sequence[int | str | None]],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """An ONNX model of nodes and initialisers."""
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(x.detach().numpy(), key) for key, x in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def onnx_mlp(model: nn.Sequential) -> onnx.ModelProto:
    """An MLP as one Gemm with transB, one without, then MatMul and Add."""
    dense = [layer for layer in model if isinstance(layer, nn.Linear)]
    nodes, tensors, value = [], {}, "x"
    for i, layer in enumerate(dense):
        weight, bias = layer.weight.detach(), layer.bias.detach()
        tensors[f"w{i}"] = weight if i % 3 == 0 else weight.T.contiguous()
        tensors[f"b{i}"] = bias
        if i % 3 == 2:
            nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"], f"product{i}"))
            nodes.append(helper.make_node("Add", [f"m{i}", f"b{i}"], [f"y{i}"]))
        else:
            transposed = {"transB": 1} if i % 3 == 0 else {}
            inputs = [value, f"w{i}", f"b{i}"]
            nodes.append(helper.make_node("Gemm", inputs, [f"y{i}"], f"gemm{i}", **transposed))
        value = f"y{i}"
        if i < len(dense) - 1:
            nodes.append(helper.make_node("Tanh", [value], [f"h{i}"]))
            value = f"h{i}"
    return onnx_model(nodes, tensors, {"x": ["N", dense[0].in_features]}, [value])
