"""Graphs of Keras files compute what Keras computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters import load, save
from nfn_graph.run import _run

Weights = dict[str, dict[str, Tensor]]


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        role: torch.rand(shape, dtype=torch.float64) + (0.2 if "variance" in role else -0.5)
        for role, shape in shapes.items()
    }


def dense(inputs: int, outputs: int) -> dict[str, Tensor]:
    return tensors(kernel=(inputs, outputs), bias=(outputs,))


def write(
    path: Path, layers: list[tuple[str, str, dict[str, Any]]], weights: Weights, shape: list[Any]
) -> list[WeightGraph]:
    """The graphs of an `.h5` and of a `.keras` file of a model."""
    first = (layers[0][0], layers[0][1], {**layers[0][2], "batch_input_shape": shape})
    config = checkpoints.sequential(first, *layers[1:])
    known = {name: weights.get(name, {}) for _, name, _ in layers}
    checkpoints.write_keras(path / "x.h5", known, config)
    checkpoints.write_keras_archive(path / "x.keras", known, config)
    return [load(path / "x.h5"), load(path / "x.keras")]


def same(x: Tensor, window: int, stride: int, value: float = 0.0) -> Tensor:
    """The padding "same", by its definition: as many positions as windows fit at that distance."""
    pads = []
    for size in reversed(x.shape[2:]):
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def conv(x: Tensor, w: dict[str, Tensor], stride: int, padding: str, dilation: int = 1) -> Tensor:
    kernel = w["kernel"].permute(3, 2, 0, 1)
    x = x.permute(0, 3, 1, 2)
    if padding == "same":
        x = same(x, (kernel.shape[-1] - 1) * dilation + 1, stride)
    return F.conv2d(x, kernel, w["bias"], stride, 0, dilation).permute(0, 2, 3, 1)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(
    ("window", "stride", "dilation"), [(3, 2, 1), (2, 1, 1), (4, 3, 1), (3, 1, 2)]
)
@pytest.mark.parametrize("size", [9, 10])
def test_convolutions_are_padded_as_in_keras(
    padding: str, window: int, stride: int, dilation: int, size: int, tmp_path: Path
) -> None:
    weights = {"a": tensors(kernel=(window, window, 3, 4), bias=(4,)), "b": dense(4, 2)}
    options = {"strides": [stride] * 2, "padding": padding, "dilation_rate": [dilation] * 2}
    layers = [
        ("Conv2D", "a", {**options, "activation": "elu"}),
        ("GlobalAveragePooling2D", "pool", {}),
        ("Dense", "b", {"activation": "softmax"}),
    ]
    x = torch.randn(2, size, size, 3, dtype=torch.float64)
    y = F.elu(conv(x, weights["a"], stride, padding, dilation)).mean((1, 2))
    expected = (y @ weights["b"]["kernel"] + weights["b"]["bias"]).softmax(-1)
    for graph in write(tmp_path, layers, weights, [None, None, None, 3]):
        assert torch.allclose(graph.run(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (2, 1), (4, 3)])
@pytest.mark.parametrize("kind", ["Max", "Average"])
def test_pooling_leaves_out_what_is_padded(
    kind: str, padding: str, window: int, stride: int, tmp_path: Path
) -> None:
    weights = {"a": tensors(kernel=(1, 1, 2, 3), bias=(3,)), "b": dense(3, 2)}
    options = {"pool_size": [window] * 2, "strides": [stride] * 2, "padding": padding}
    layers = [
        ("Conv2D", "a", {}), (f"{kind}Pooling2D", "pool", options),
        ("GlobalMaxPooling2D", "most", {}), ("Dense", "b", {}),
    ]  # fmt: skip
    x = torch.randn(2, 7, 8, 2, dtype=torch.float64)
    y = conv(x, weights["a"], 1, "valid").permute(0, 3, 1, 2)
    if padding == "same":
        y = same(y, window, stride, torch.nan)
    windows = y.unfold(2, window, stride).unfold(3, window, stride).flatten(4)
    y = windows.nan_to_num(-torch.inf).amax(-1) if kind == "Max" else windows.nanmean(-1)
    expected = y.amax((2, 3)) @ weights["b"]["kernel"] + weights["b"]["bias"]
    for graph in write(tmp_path, layers, weights, [None, 7, 8, 2]):
        assert torch.allclose(graph.run(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (1, 2), (4, 1), (5, 2)])
def test_transposed_convolutions_are_transposed(
    padding: str, window: int, stride: int, tmp_path: Path
) -> None:
    """The derivative of the convolution that leads the other way."""
    weights = {"a": tensors(kernel=(window, window, 3, 2), bias=(3,))}
    layers = [("Conv2DTranspose", "a", {"strides": [stride] * 2, "padding": padding})]
    x = torch.randn(2, 5, 4, 2, dtype=torch.float64)
    sizes = [n * stride + (max(window - stride, 0) if padding == "valid" else 0) for n in (5, 4)]
    image = torch.zeros(2, *sizes, 3, dtype=torch.float64, requires_grad=True)
    turned = {"kernel": weights["a"]["kernel"], "bias": torch.zeros(2, dtype=torch.float64)}
    (expected,) = torch.autograd.grad(conv(image, turned, stride, padding), image, x)
    expected = expected + weights["a"]["bias"]
    for graph in write(tmp_path, layers, weights, [None, 5, 4, 2]):
        assert torch.allclose(graph.run(x), expected, rtol=0, atol=1e-12)


def _norms(w: Weights, x: Tensor) -> Tensor:
    n = w["norm"]
    y = conv(x, w["a"], 1, "valid")
    y = (y - n["moving_mean"]) / (n["moving_variance"] + 0.01).sqrt() * n["gamma"] + n["beta"]
    y = torch.where(y > 0, y, y * w["slopes"]["alpha"])
    y = y.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, 1:, :-1]
    y = F.pad(y, (0, 0, 1, 0, 0, 2)).flatten(1)
    y = F.leaky_relu(y @ w["b"]["kernel"] + w["b"]["bias"], 0.3)
    y = F.layer_norm(y, (4,), w["last"]["gamma"], w["last"]["beta"], 1e-3)
    return y @ w["c"]["kernel"]


def test_layers_compute_what_their_options_say(tmp_path: Path) -> None:
    weights = {
        "a": tensors(kernel=(2, 2, 2, 3), bias=(3,)),
        "norm": tensors(gamma=(3,), beta=(3,), moving_mean=(3,), moving_variance=(3,)),
        "slopes": tensors(alpha=(1, 1, 3)),
        "b": dense(3 * 9 * 10, 4),
        "last": tensors(gamma=(4,), beta=(4,)),
        "c": tensors(kernel=(4, 2)),
    }
    layers: list[tuple[str, str, dict[str, Any]]] = [
        ("Conv2D", "a", {"padding": "valid"}),
        ("BatchNormalization", "norm", {"epsilon": 0.01, "axis": [-1]}),
        ("PReLU", "slopes", {"shared_axes": [1, 2]}),
        ("UpSampling2D", "up", {"size": [2, 2], "interpolation": "nearest"}),
        ("Cropping2D", "crop", {"cropping": [[1, 0], [0, 1]]}),
        ("ZeroPadding2D", "zeros", {"padding": [[0, 2], [1, 0]]}),
        ("Flatten", "flatten", {}),
        ("Dense", "b", {}),
        ("LeakyReLU", "leaky", {}),
        ("Dropout", "drop", {"rate": 0.5}),
        ("LayerNormalization", "last", {"axis": [-1]}),
        ("Dense", "c", {"use_bias": False}),
    ]
    x = torch.randn(2, 5, 6, 2, dtype=torch.float64)
    for graph in write(tmp_path, layers, weights, [None, 5, 6, 2]):
        assert torch.allclose(graph.run(x), _norms(weights, x), rtol=0, atol=1e-12)
        again = tmp_path / "again.safetensors"
        save(graph, again, as_graph=True)
        assert load(again).layout.computation == graph.layout.computation


def test_files_of_several_widths_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 6, 6, 2, dtype=torch.float64)
    graphs, expected = [], []
    for width in (3, 5, 3, 4):
        weights = {
            "a": tensors(kernel=(3, 3, 2, width), bias=(width,)),
            "norm": tensors(
                **dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), (width,))
            ),
            "b": dense(9 * width, 2),
        }
        layers = [
            ("Conv2D", "a", {"strides": [2, 2], "padding": "same", "activation": "tanh"}),
            ("BatchNormalization", "norm", {"axis": [-1]}),
            ("Flatten", "flatten", {}),
            ("Dense", "b", {}),
        ]
        graphs.append(write(tmp_path, layers, weights, [None, 6, 6, 2])[0])
        expected.append(graphs[-1].run(x))
    monkeypatch.setattr(_run, "_run_by_sizes", None)
    outputs = Batch.from_data_list(graphs).run(x)
    assert torch.allclose(outputs, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "hard_sigmoid"}, "differs between versions"),
        ({"activation": "sparsemax"}, "not known"),
    ],
)
def test_what_cannot_run_says_why(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    layers = [("Dense", "a", options), ("Dense", "b", {})]
    for graph in write(tmp_path, layers, {"a": dense(3, 4), "b": dense(4, 2)}, [None, 3]):
        with pytest.raises(ValueError, match=reason):
            graph.run(torch.randn(5, 3))


def test_weights_alone_do_not_say_what_is_computed(tmp_path: Path) -> None:
    checkpoints.write_keras(tmp_path / "w.h5", {"dense": dense(3, 4), "dense_1": dense(4, 2)})
    with pytest.raises(ValueError, match="only weights"):
        load(tmp_path / "w.h5").run(torch.randn(5, 3))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "selu": F.selu, "gelu": F.gelu, "swish": F.silu, "mish": F.mish,
    "softplus": F.softplus, "softsign": F.softsign, "exponential": torch.exp, "relu6": F.relu6,
    "log_softmax": lambda x: x.log_softmax(-1), "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_those_of_keras(name: str, tmp_path: Path) -> None:
    weights = {"a": dense(3, 4), "b": dense(4, 2)}
    layers = [("Dense", "a", {"activation": name}), ("Dense", "b", {"activation": "linear"})]
    x = torch.randn(5, 3, dtype=torch.float64)
    hidden = FUNCTIONS[name](x @ weights["a"]["kernel"] + weights["a"]["bias"])
    expected = hidden @ weights["b"]["kernel"] + weights["b"]["bias"]
    for graph in write(tmp_path, layers, weights, [None, 3]):
        assert torch.allclose(graph.run(x), expected, rtol=0, atol=1e-12)
