"""ONNX models that compute sizes, find positions or return stored tensors, and correct reasons."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx_cases import FREE, SIZED_CASES, SizedCase
from onnx_models import node, run, weights, write
from permuting import moving

from nfn_graph.converters import ConversionError, load, save, summary


@pytest.mark.parametrize("name", SIZED_CASES)
@pytest.mark.parametrize("batch", ["known", "open", "negative"])
def test_all_is_in_the_graph_and_symmetric(name: str, batch: str, tmp_path: Path) -> None:
    nodes, tensors, shape, open_shape = SIZED_CASES[name]
    given = {
        "known": shape,
        "open": open_shape,
        "negative": [-1 if size == FREE else size for size in open_shape],
    }
    outputs = "m d" if "policy" in name else "y"
    path = write(tmp_path / "x.onnx", nodes, tensors, given[batch], outputs)
    graph = load(path)
    used = {key for key, t in tensors.items() if t.is_floating_point()} - {"scales"}
    assert used <= graph.layout.placed
    assert {*graph.layout.placed, *summary(graph).left_out} == set(tensors)
    save(moving(graph).apply(graph), tmp_path / "moved.onnx", template=path)
    x = torch.randn(shape)
    for one, two in zip(run(path, x), run(tmp_path / "moved.onnx", x), strict=True):
        torch.testing.assert_close(one, two)
    save(graph, tmp_path / "same.onnx", template=path)
    assert onnx.load(path) == onnx.load(tmp_path / "same.onnx")


def test_places_of_the_deviations(tmp_path: Path) -> None:
    nodes, tensors, shape, _ = SIZED_CASES["the deviations of a policy"]
    graph = load(write(tmp_path / "x.onnx", nodes, tensors, shape, "m d"))
    assert next(p.store for p in graph.layout.placements if "log_std" in p.keys) == "output"
    nodes, tensors, shape, _ = SIZED_CASES["a temperature, and a bound"]
    graph = load(write(tmp_path / "x.onnx", nodes, tensors, shape))
    stores = {p.keys[0]: p.store for p in graph.layout.placements}
    assert stores["temperature"] == stores["most"] == "scalars"


def test_an_example_says_what_the_file_leaves_open(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x a", "h"),
        node("Shape", "h", "s"),
        node("Slice", "s two four", "hw"),
        node("Concat", "minus four_channels hw", "t", axis=0),
        node("Reshape", "h t", "i"),
        node("ReduceMean", "i", "j", axes=[2, 3], keepdims=0),
        node("MatMul", "j b", "y"),
    ]
    tensors = {
        **weights(a=(4, 2, 1, 1), b=(4, 3)), "two": torch.tensor([2]), "four": torch.tensor([4]),
        "minus": torch.tensor([-1]), "four_channels": torch.tensor([4]),
    }  # fmt: skip
    path = write(tmp_path / "x.onnx", nodes, tensors, [None, 2, None, None])
    with pytest.raises(ConversionError, match=r"'Reshape_1'.*Pass an example_input"):
        load(path)
    assert load(path, example_input=torch.zeros(1, 2, 3, 5)).spec.neuron["hidden1"].taps == 0
    with pytest.raises(ConversionError, match=r"example_input that fits input 'x'.*\[1, 3, 3, 5\]"):
        load(path, example_input=torch.zeros(1, 3, 3, 5))
    with pytest.raises(ConversionError, match=r"one tensor as example_input for each.*\['x'\]"):
        load(path, example_input=(torch.zeros(1, 2, 3, 5), 3))


def attention() -> SizedCase:
    """A model of an attention with two heads."""
    nodes = [
        *(node("MatMul", f"x {name}", f"{name}0") for name in "qkv"),
        *(node("Reshape", f"{name}0 heads", f"{name}1") for name in "qkv"),
        *(node("Transpose", f"{name}1", f"{name}2", perm=[0, 2, 1, 3]) for name in "qv"),
        node("Transpose", "k1", "k2", perm=[0, 2, 3, 1]),
        node("MatMul", "q2 k2", "scores"),
        node("Softmax", "scores", "a"),
        node("MatMul", "a v2", "y"),
    ]
    tensors = {**weights(q=(4, 4), k=(4, 4), v=(4, 4)), "heads": torch.tensor([0, 0, 2, 2])}
    return nodes, tensors, (2, 3, 4), [FREE, None, 4]


def test_heads_of_an_attention_are_nested(tmp_path: Path) -> None:
    nodes, tensors, shape, open_shape = attention()
    nodes[-1:] = [
        node("MatMul", "a v2", "b"), node("Transpose", "b", "c", perm=[0, 2, 1, 3]),
        node("Reshape", "c flat", "d"), node("MatMul", "d o", "y"),
    ]  # fmt: skip
    tensors = {**tensors, **weights(o=(4, 3)), "flat": torch.tensor([0, 0, 4])}
    spec = load(write(tmp_path / "x.onnx", nodes, tensors, shape)).spec
    assert [n.parents for n in spec.neurons] == [(), (), ("group1",), ("group1",), ()]
    with pytest.raises(ConversionError, match="example_input"):
        load(write(tmp_path / "x.onnx", nodes, tensors, open_shape))


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    nodes = [
        node("Cast", "w", "f", to=onnx.TensorProto.FLOAT),
        node("MatMul", "x f", "h"),
        node("MatMul", "h b", "y"),
    ]
    tensors = {"w": torch.ones(3, 8, dtype=torch.int8), **weights(b=(8, 2))}
    with pytest.raises(ConversionError, match=r"MatMul.*'w' of torch.int8.*quantised"):
        load(write(tmp_path / "x.onnx", nodes, tensors, (2, 3)))


def test_quantised_operations_are_called_so(tmp_path: Path) -> None:
    nodes = [node("DequantizeLinear", "w s", "f"), node("MatMul", "x f", "y")]
    tensors = {"w": torch.ones(3, 8, dtype=torch.int8), "s": torch.tensor(0.5)}
    with pytest.raises(ConversionError, match=r"\(DequantizeLinear\).*quantised.*floating point"):
        load(write(tmp_path / "x.onnx", nodes, tensors, (2, 3)))


def test_sizes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    wrong = {
        "a step of 0": node("Slice", "s zero one zero zero", "t"),
        "a division by 0": node("Div", "s zero", "t"),
        "an index beyond": node("Gather", "s many", "t"),
    }
    _, tensors, shape, _ = SIZED_CASES["a part of a shape"]
    for proto in wrong.values():
        nodes = [node("Conv", "x a", "r"), node("Shape", "r", "s"), proto]
        nodes += [node("Reshape", "r t", "i"), node("Gemm", "i b", "y")]
        with pytest.raises(ConversionError, match=r"node '\w+_1' \(\w+\) of"):
            load(write(tmp_path / "x.onnx", nodes, tensors, shape))


def test_names_with_line_breaks_are_shown_in_one_line(tmp_path: Path) -> None:
    proto = node("MatMul", "x w", "y")
    proto.input[0] = "a\nb"
    with pytest.raises(ConversionError, match=r"input 'a b' to be known"):
        load(write(tmp_path / "x.onnx", [proto], weights(w=(3, 2)), (2, 3)))
