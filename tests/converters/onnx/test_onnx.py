"""ONNX models: which neurons their nodes tie, and what is refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import checkpoints
import onnx
import pytest
import torch
from onnx_cases import Case, cases
from onnx_models import node, run, weights, write
from torch import nn

from nfn_graph import WeightGraph, symmetry
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.io import load, save
from nfn_graph.converters.module import from_module
from nfn_graph.converters.state_dict import to_state_dict


@pytest.mark.parametrize("name", cases())
def test_permuting_neurons_keeps_the_outputs(name: str, tmp_path: Path) -> None:
    nodes, tensors, shape, outputs = cases()[name]
    path = write(tmp_path / "x.onnx", nodes, tensors, shape, outputs)
    graph = load(path)
    moved = symmetry.sample(graph, "hnp").apply(graph)
    save(moved, tmp_path / "moved.onnx", template=path)
    x = torch.randn(shape)
    before, after = run(path, x), run(tmp_path / "moved.onnx", x)
    assert path.read_bytes() != (tmp_path / "moved.onnx").read_bytes()
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two)
    save(graph, tmp_path / "same.onnx", template=path)
    assert onnx.load(path) == onnx.load(tmp_path / "same.onnx")


def test_a_template_without_types_is_refused(tmp_path: Path) -> None:
    nodes, tensors, shape, outputs = next(iter(cases().values()))
    path = write(tmp_path / "x.onnx", nodes, tensors, shape, outputs)
    graph = load(path)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.data_type = onnx.TensorProto.UNDEFINED
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError, match=r"complete ONNX model in .*x\.onnx"):
        save(graph, tmp_path / "out.onnx", template=path)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", cases())
def test_all_free_layers_are_free(name: str, tmp_path: Path) -> None:
    """Permuting one tensor without its ties changes the outputs."""
    nodes, tensors, shape, outputs = cases()[name]
    path = write(tmp_path / "x.onnx", nodes, tensors, shape, outputs)
    graph = load(path)
    x = torch.randn(shape)
    before = run(path, x)
    for key in graph.spec.weight:
        if graph.spec.neuron[key[2]].fixed:
            continue
        rolled = graph.clone()
        sources = graph[key[0]].x.shape[0]
        rolled[key].edge_attr = rolled[key].edge_attr.roll(sources, 0)
        save(rolled, tmp_path / "rolled.onnx", template=path)
        after = run(tmp_path / "rolled.onnx", x)
        different = [not torch.allclose(a, b) for a, b in zip(before, after, strict=True)]
        assert any(different), key


REFUSED = (*("Gather", "CumSum", "Pad", "Gemm", "MaxPool", "Concat"),)


def refused(kind: str) -> Case:
    hidden = node("MatMul", "x w", "h")
    square = weights(w=(4, 4), b=(4, 1, 3, 3), v=(4,))
    table: dict[str, Case] = {
        "Concat": ([hidden, node("Concat", "h h", "y")], square, (4, 4), "y"),
        "Gather": (
            [hidden, node("Gather", "h i", "y", axis=1)],
            {**square, "i": torch.tensor([2, 0])},
            (4, 4),
            "y",
        ),
        "CumSum": (
            [hidden, node("CumSum", "h i", "y")],
            {**square, "i": torch.tensor(1)},
            (4, 4),
            "y",
        ),
        "Pad": (
            [hidden, node("Pad", "h i", "y")],
            {**square, "i": torch.tensor([0, 1, 0, 0])},
            (4, 4),
            "y",
        ),
        "Gemm": ([node("Gemm", "x w", "y", transA=1)], square, (4, 4), "y"),
        "MaxPool": ([node("MaxPool", "x", "y z", kernel_shape=[1, 1])], {}, (1, 4, 5, 5), "y"),
    }
    return table[kind]


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_the_node_and_the_reason(kind: str, tmp_path: Path) -> None:
    nodes, tensors, shape, outputs = refused(kind)
    model = checkpoints.onnx_model(nodes, tensors, {"x": shape}, outputs.split())
    (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError, match=rf"node '{kind}_1' \({kind}\).*Expected.*got"):
        load(tmp_path / "x.onnx")


def _sparse() -> onnx.SparseTensorProto:
    values, places = (
        onnx.numpy_helper.from_array(torch.tensor(x).numpy()) for x in ([1.0, 2.0], [1, 3])
    )
    return onnx.helper.make_sparse_tensor(values, places, [4])


@pytest.mark.parametrize(
    "attribute",
    [
        {"value_floats": [1.0, 2.0, 3.0, 4.0]},
        {"sparse_value": _sparse()},
        {"value_float": 2.0},
        {"value_floats": [2.0]},
    ],
    ids=lambda attribute: str(next(iter(attribute))),
)
def test_constants_in_nodes_keep_neurons_in_order(
    attribute: dict[str, Any], tmp_path: Path
) -> None:
    """Different numbers distinguish the neurons; one number for all of them does not."""
    constant = onnx.helper.make_node("Constant", [], ["c"], **attribute)
    nodes = [
        constant, node("MatMul", "x w", "h"), node("Mul", "h c", "i"), node("MatMul", "i v", "y")
    ]  # fmt: skip
    path = write(tmp_path / "x.onnx", nodes, weights(w=(3, 4), v=(4, 2)), (2, 3))
    free = [neuron for neuron in load(path).spec.neurons if not neuron.fixed]
    assert len(free) == (attribute in ({"value_float": 2.0}, {"value_floats": [2.0]}))


def test_rows_of_an_open_size_may_be_neurons(tmp_path: Path) -> None:
    """[-1, 8] makes one row per channel if there are eight positions, and one per image if two."""
    nodes = [node("Conv", "x w", "h"), node("Reshape", "h s", "i"), node("MatMul", "i v", "y")]
    tensors = {**weights(w=(4, 3, 1), v=(8, 2)), "s": torch.tensor([-1, 8])}
    path = write(tmp_path / "x.onnx", nodes, tensors, ("N", 3, "L"))
    with pytest.raises(ConversionError, match=r"Reshape_1.*example_input"):
        load(path)
    with pytest.raises(ConversionError, match=r"Reshape_1"):
        load(path, example_input=torch.randn(2, 3, 8))
    graph = load(path, example_input=torch.randn(2, 3, 2))
    assert graph["hidden1"].x.shape[0] == 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.side = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(12 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.cat([y + self.block(y), self.side(x)], 1)
        return self.head(nn.functional.max_pool2d(y, 2).flatten(1))


@pytest.mark.parametrize("optimize", [False, True])
def test_an_export_of_torch_is_the_module(optimize: bool, tmp_path: Path) -> None:
    model = Residual().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    x = torch.randn(2, 3, 8, 8)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (x,),
                tmp_path / "x.onnx",
                dynamo=True,
                optimize=optimize,
                verbose=False,
                external_data=False,
            )
    finally:
        logging.disable(logging.NOTSET)
    graph, expected = load(tmp_path / "x.onnx"), from_module(model, x)
    assert isinstance(graph, WeightGraph)
    assert [n.size for n in graph.spec.neurons] == [n.size for n in expected.spec.neurons]
    if not optimize:
        assert graph.spec == expected.spec
        for key in expected.spec.weight:
            assert torch.equal(graph[key].edge_attr, expected[key].edge_attr)


def test_bits_of_mixed_types_are_kept(tmp_path: Path) -> None:
    """A signalling NaN of float16 is restored unchanged from a store of float32."""
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(4).half(), "c": torch.rand(4)}
    tensors["d"] = torch.rand(4, 2)
    tensors["b"].view(torch.int16)[0] = 0x7C01
    nodes = [
        node("MatMul", "x a", "h"),
        node("Cast", "h", "half", to=10),
        node("Add", "half b", "moved"),
        node("Cast", "moved", "whole", to=1),
        node("Add", "whole c", "again"),
        node("MatMul", "again d", "y"),
    ]
    graph = load(write(tmp_path / "x.onnx", nodes, tensors, (None, 3)))
    assert graph["hidden1"].x.shape == (4, 2, 1)
    found = to_state_dict(graph)
    assert found["b"].dtype == torch.float16
    assert torch.equal(found["b"].view(torch.int16), tensors["b"].view(torch.int16))
    assert all(torch.equal(found[key], tensors[key]) for key in "acd")
