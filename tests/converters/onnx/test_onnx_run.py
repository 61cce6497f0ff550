"""Graphs of ONNX files run as ONNX's own runtime computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx_models import node, run, weights, write

from nfn_graph.converters import load

IMAGE = (2, 3, 8, 8)
NETWORKS: dict[str, tuple[list[onnx.NodeProto], dict[str, torch.Tensor], tuple[int, ...]]] = {
    "gemm": (
        [
            node("Gemm", "x a b", "h", transB=1),
            node("LeakyRelu", "h", "g", alpha=0.3),
            node("Gemm", "g c", "y"),
        ],
        weights(a=(5, 3), b=(5,), c=(5, 2)),
        (4, 3),
    ),
    "matmul": (
        [
            node("MatMul", "x a", "h"),
            node("Add", "h b", "g"),
            node("Mul", "g two", "s"),
            node("Sin", "s", "t"),
            node("MatMul", "t c", "u"),
            node("Softmax", "u", "y", axis=-1),
        ],
        weights(a=(3, 5), b=(5,), c=(5, 2)) | {"two": torch.tensor([2.0])},
        (4, 3),
    ),
    "convolutions": (
        [
            node("Conv", "x a b", "h", strides=[2, 1], pads=[1, 0, 1, 0]),
            node("BatchNormalization", "h s o m v", "n", epsilon=1e-3),
            node("Relu", "n", "r"),
            node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", "p", "f"),
            node("Gemm", "f c", "y", transB=1),
        ],
        weights(a=(4, 3, 3, 3), b=(4,), s=(4,), o=(4,), m=(4,), v=(4,), c=(2, 4 * 2 * 3)),
        IMAGE,
    ),
    "sides of their own": (
        [
            node("Conv", "x a", "h", pads=[0, 1, 2, 0], dilations=[1, 2]),
            node("AveragePool", "h", "p", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            node("Elu", "p", "e", alpha=0.5),
            node("GlobalAveragePool", "e", "g"),
            node("Reshape", "g shape", "f"),
            node("Gemm", "f c", "y", transB=1),
        ],
        weights(a=(4, 3, 3, 3), c=(2, 4)) | {"shape": torch.tensor([2, 4])},
        IMAGE,
    ),
    "branches": (
        [
            node("Conv", "x a", "h"),
            node("Conv", "x b", "g"),
            node("Concat", "h g", "j", axis=1),
            node("Transpose", "j", "t", perm=[0, 2, 3, 1]),
            node("MatMul", "t c", "y"),
        ],
        weights(a=(4, 3, 1, 1), b=(2, 3, 1, 1), c=(6, 2)),
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_computes_what_the_file_computes(name: str, tmp_path: Path) -> None:
    nodes, tensors, shape = NETWORKS[name]
    path = write(tmp_path / "x.onnx", nodes, tensors, shape)
    x = torch.randn(shape)
    found: Any = load(path).run(x)
    assert torch.allclose(found, run(path, x)[0], atol=1e-5, rtol=1e-4)


def test_any_number_of_inputs_is_run(tmp_path: Path) -> None:
    nodes, tensors, shape = NETWORKS["sides of their own"]
    graph = load(write(tmp_path / "x.onnx", nodes, tensors, shape))
    x = torch.randn(6, *shape[1:])
    parts = [graph.run(x[i : i + 2]) for i in (0, 2, 4)]
    assert torch.allclose(graph.run(x), torch.cat(parts), atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("Conv", "x a", "h", auto_pad="SAME_UPPER")], "the padding of its convolutions"),
        ([node("Conv", "x a", "g"), node("Selu", "g", "h")], "'Selu' of ONNX"),
        ([node("Conv", "x a", "g"), node("Reshape", "g shape", "h")], "one batch size"),
    ],
)
def test_what_cannot_run_says_why(nodes: list[onnx.NodeProto], reason: str, tmp_path: Path) -> None:
    tensors = weights(a=(4, 3, 1, 1)) | {"shape": torch.tensor([2, 4, -1, 8])}
    path = write(tmp_path / "x.onnx", [*nodes, node("Relu", "h", "y")], tensors, IMAGE)
    graph = load(path)
    with pytest.raises(ValueError, match=reason):
        graph.run(torch.randn(IMAGE))
