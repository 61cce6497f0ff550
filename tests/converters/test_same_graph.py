"""One network in five formats is one graph, except for the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from comparing import check_same_graph
from onnx import helper
from torch import nn

from nfn_graph.converters.io import load, read_tensors, save
from nfn_graph.converters.layout_changes import permuted
from nfn_graph.data import Placement


def conv_layers(model: nn.Sequential) -> dict[str, dict[str, Any]]:
    """The layers of `checkpoints.cnn` with Keras's names and axis orders."""
    first, norm, second, dense = model[0], model[1], model[3], model[7]
    return {
        "conv2d": {
            "kernel": first.weight.detach().permute(2, 3, 1, 0).contiguous(),
            "bias": first.bias.detach(),
        },
        "batch_normalization": {
            "gamma": norm.weight.detach(),
            "beta": norm.bias.detach(),
            "moving_mean": norm.running_mean,
            "moving_variance": norm.running_var,
        },
        "conv2d_1": {"kernel": second.weight.detach().permute(2, 3, 1, 0).contiguous()},
        "dense": {"kernel": dense.weight.detach().T.contiguous(), "bias": dense.bias.detach()},
    }


def conv_config() -> dict[str, Any]:
    last = {"data_format": "channels_last"}
    return checkpoints.sequential(
        ("InputLayer", "input_1", {}),
        ("Conv2D", "conv2d", last),
        ("BatchNormalization", "batch_normalization", {}),
        ("ReLU", "re_lu", {}),
        ("Conv2D", "conv2d_1", last),
        ("GlobalAveragePooling2D", "pool", last),
        ("Dense", "dense", {}),
    )


def conv_onnx(model: nn.Sequential) -> bytes:
    names = {"0.weight": "a", "0.bias": "b", "3.weight": "c", "7.weight": "d", "7.bias": "e"}
    norm = {"1.weight": "s", "1.bias": "t", "1.running_mean": "m", "1.running_var": "v"}
    state = model.state_dict()
    tensors = {new: state[old] for old, new in {**names, **norm}.items()}
    nodes = [
        helper.make_node("Conv", ["x", "a", "b"], ["1"]),
        helper.make_node("BatchNormalization", ["1", "s", "t", "m", "v"], ["2"]),
        helper.make_node("Relu", ["2"], ["3"]),
        helper.make_node("Conv", ["3", "c"], ["4"]),
        helper.make_node("GlobalAveragePool", ["4"], ["5"]),
        helper.make_node("Flatten", ["5"], ["6"]),
        helper.make_node("Gemm", ["6", "d", "e"], ["y"], transB=1),
    ]
    return checkpoints.onnx_model(nodes, tensors, {"x": ["N", 2, 9, 9]}, ["y"]).SerializeToString()


def export(model: nn.Sequential, folder: Path) -> dict[str, Path]:
    """The network in every format, written with the formats' own libraries."""
    paths = {s: folder / f"net.{s}" for s in ("pt", "safetensors", "npz", "onnx", "h5")}
    tensors = dict(model.state_dict())
    torch.save(tensors, paths["pt"])
    checkpoints.write_safetensors(paths["safetensors"], tensors)
    checkpoints.write_npz(paths["npz"], tensors)
    if isinstance(model[0], nn.Linear):
        paths["onnx"].write_bytes(checkpoints.onnx_mlp(model).SerializeToString())
        checkpoints.write_keras(paths["h5"], checkpoints.keras_mlp(model))
    else:
        paths["onnx"].write_bytes(conv_onnx(model))
        checkpoints.write_keras(paths["h5"], conv_layers(model), conv_config())
    return paths


@pytest.mark.parametrize("make", [checkpoints.mlp, checkpoints.cnn])
@pytest.mark.parametrize("with_arch", [False, True])
def test_same_graph_from_every_format(make, with_arch: bool, tmp_path: Path) -> None:
    model = make()
    paths = export(model, tmp_path)
    arch = model if with_arch else None
    expected = load(paths["pt"], arch=arch)
    for format_, path in paths.items():
        graph = load(path, arch=arch)
        check_same_graph(graph, expected)
        # The tensors of the file are restored bit for bit, with keys and axes in the same order.
        original = read_tensors(path)
        again = path.with_stem("again")
        save(graph, again, template=path if format_ in ("onnx", "h5") else None)
        written = read_tensors(again)
        assert list(written) == list(original)
        for key, tensor in original.items():
            assert written[key].dtype == tensor.dtype
            assert written[key].shape == tensor.shape
            assert written[key].numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("make", [checkpoints.mlp, checkpoints.cnn])
def test_a_torch_network_becomes_a_keras_file(make, tmp_path: Path) -> None:
    torch.save(make().state_dict(), tmp_path / "x.pt")
    graph = load(tmp_path / "x.pt")
    save(graph, tmp_path / "x.h5")
    check_same_graph(load(tmp_path / "x.h5"), graph)


@pytest.mark.parametrize(
    ("order", "flatten", "is_last"),
    [
        ("channels_last", "channels_last", True),
        # Keras moves channels to the end before it flattens, so the weights are the same.
        ("channels_first", "channels_first", True),
        ("channels_first", "channels_last", False),
    ],
)
def test_flatten_in_keras_follows_the_configuration(
    order: str, flatten: str, is_last: bool, tmp_path: Path
) -> None:
    """The dense kernel's rows are positions times channels, or channels times positions."""
    kernel = np.random.default_rng(0).normal(size=(3, 3, 2, 4)).astype("f4")
    dense = np.random.default_rng(1).normal(size=(2 * 3 * 4, 5)).astype("f4")
    layers = {"conv": {"kernel": kernel}, "dense": {"kernel": dense}}
    config = checkpoints.sequential(
        ("Conv2D", "conv", {"data_format": order}),
        ("Flatten", "flatten", {"data_format": flatten}),
        ("Dense", "dense", {}),
    )
    checkpoints.write_keras(tmp_path / "x.h5", layers, config)
    graph = load(tmp_path / "x.h5")
    edges = graph["hidden1", "weight", "output"].edge_attr
    assert edges.shape == (5 * 4, 6, 1)
    entries = torch.tensor(dense).reshape((6, 4, 5) if is_last else (4, 6, 5))
    permuted = entries.permute(2, 1, 0) if is_last else entries.permute(2, 0, 1)
    assert torch.equal(edges[..., 0], permuted.reshape(20, 6))
    save(graph, tmp_path / "y.h5")
    assert np.array_equal(read_tensors(tmp_path / "y.h5")["dense/dense/kernel:0"], dense)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_placements_of_permuted_tensors(order: tuple[int, ...]) -> None:
    """A tensor with one axis split, and a part of another taken, converted with axes permuted."""
    x = torch.randn(5, 6, 7)
    shape = tuple(x.permute(order).shape)
    for axis, size in enumerate(shape):
        if size != 6:
            continue
        view = (*shape[:axis], 2, 3, *shape[axis + 1 :])
        cut = tuple((1, n) if n == 7 else (0, n) for n in shape)
        view = tuple(6 if n == 7 else n for n in view)
        axes = [("target", "source", "tap", "tap")[i] for i in range(4)]
        placement = Placement(
            ("t",), shape, x.dtype, ("a", "weight", "b"), view, tuple(axes), (0, 1, 0, 0), view,
            cut=cut,
        )  # fmt: skip
        original = permuted(placement, order, ("x",))
        assert original.shape == tuple(x.shape)
        assert original.keys == ("x",)
        taken = placement.take(x.permute(order))
        rows = {tuple(sorted(row)) for row in original.take(x).tolist()}
        assert rows == {tuple(sorted(row)) for row in taken.tolist()}
        back = torch.zeros(5, 6, 7, 1, dtype=x.dtype)
        original.put(original.take(x)[..., None], back)
        assert int((back[..., 0] == x).sum()) == taken.numel()


def test_depthwise_and_separable_kernels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    layers = {
        "conv": {"kernel": generator.normal(size=(1, 1, 2, 4))},
        "depthwise": {
            "depthwise_kernel": generator.normal(size=(3, 2, 4, 1)),
            "bias": generator.normal(size=4),
        },
        "separable": {
            "depthwise_kernel": generator.normal(size=(2, 2, 4, 1)),
            "pointwise_kernel": generator.normal(size=(1, 1, 4, 3)),
            "bias": generator.normal(size=3),
        },
    }
    arch = nn.Sequential(
        nn.Conv2d(2, 4, 1, bias=False),
        nn.Conv2d(4, 4, (3, 2), groups=4),
        nn.Conv2d(4, 4, 2, groups=4, bias=False),
        nn.Conv2d(4, 3, 1),
    )
    checkpoints.write_keras(tmp_path / "x.h5", layers)
    graph = load(tmp_path / "x.h5", arch=arch)
    assert graph.spec.neuron["hidden1"].taps == 6 + 1 + 4
    expected = torch.tensor(layers["depthwise"]["depthwise_kernel"][..., 0]).permute(2, 0, 1)
    assert torch.equal(graph["hidden1"].x[:, :6, 0], expected.reshape(4, 6))
    save(graph, tmp_path / "y.h5")
    for key, tensor in read_tensors(tmp_path / "x.h5").items():
        assert torch.equal(read_tensors(tmp_path / "y.h5")[key], tensor)
