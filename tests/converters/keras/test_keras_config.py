"""The configuration of a Keras model: how its layers are connected, and what they compute."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from comparing import check_same_graph
from keras_networks import Layers, conv, dense, free_sizes, functional, keras2, keras3, layer, norm
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters import ConversionError, from_module, load
from nfn_graph.converters.io import read_tensors, save


def read(path: Path, layers: Layers, config: dict[str, Any]) -> WeightGraph:
    """The graph of a file with a configuration, the same from `.h5` and from `.keras`."""
    h5, archive = path / "x.h5", path / "x.keras"
    checkpoints.write_keras(h5, layers, config)
    checkpoints.write_keras_archive(archive, layers, config)
    graph = load(h5)
    check_same_graph(load(archive), graph)
    for file in (h5, archive):
        original, again = read_tensors(file), file.with_stem("again")
        save(load(file), again, template=file)
        written = read_tensors(again)
        assert list(written) == list(original)
        assert all(torch.equal(written[key], original[key]) for key in original)
    return graph


def test_layers_follow_one_another_as_configured(tmp_path: Path) -> None:
    """Names and sizes leave the order of the first two open."""
    first, second, last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    layers = {"d2": dense(first), "d1": dense(second), "out": dense(last)}
    config = checkpoints.sequential(*(("Dense", name, {"activation": "tanh"}) for name in layers))
    graph = read(tmp_path, layers, config)
    check_same_graph(graph, from_module(nn.Sequential(first, second, last)))


@pytest.mark.parametrize("with_config", [True, False])
def test_a_norm_belongs_to_the_layer_before_it(with_config: bool, tmp_path: Path) -> None:
    a, b, c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    values = norm(nn.BatchNorm1d(8))
    layers = {"dense": dense(a), "dense_1": dense(b), "norm": values, "dense_2": dense(c)}
    classes = ("Dense", "Dense", "BatchNormalization", "Dense")
    config = checkpoints.sequential(
        *((kind, name, {}) for kind, name in zip(classes, layers, strict=True))
    )
    if with_config:
        graph = read(tmp_path, layers, config)
    else:
        checkpoints.write_keras(tmp_path / "w.h5", layers)
        graph = load(tmp_path / "w.h5")
    taps = [graph.spec.neuron[name].taps for name in ("hidden1", "hidden2", "output")]
    assert taps == [1, 5, 1]
    expected = torch.stack([b.bias.detach(), *values.values()], 1)
    assert torch.equal(graph["hidden2"].x[..., 0], expected)


@pytest.mark.parametrize("inbound", [keras2, keras3])
def test_an_addition_ties(inbound: Any, tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 4)
            self.d, self.e = nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.a(x)
            x = x + self.c(self.b(x).relu())
            return self.d(x), self.e(x)

    module = Residual()
    layers = {name: dense(part) for name, part in module.named_children()}
    config = functional(
        inbound,
        ["x"],
        ["d", "e"],
        (layer("x", "InputLayer", batch_shape=[None, 3]), []),
        (layer("a"), ["x"]),
        # The order of the file is not that of the computation.
        (layer("add", "Add"), ["a", "c"]),
        (layer("b", activation="relu"), ["a"]),
        (layer("c"), ["b"]),
        (layer("d"), ["add"]),
        (layer("e"), ["add"]),
    )
    graph = load_only(tmp_path, layers, config)
    assert free_sizes(graph) == [4, 5]
    check_same_graph(graph, from_module(module, torch.empty(2, 3)))


def load_only(path: Path, layers: Layers, config: dict[str, Any]) -> WeightGraph:
    checkpoints.write_keras(path / "x.h5", layers, config)
    return load(path / "x.h5")


@pytest.mark.parametrize("inbound", [keras2, keras3])
def test_concatenation_joins_and_a_shared_layer_is_one(inbound: Any, tmp_path: Path) -> None:
    """Both inputs go through one layer, whose neurons are the same in both halves."""
    shared, last = nn.Linear(3, 4), nn.Linear(8, 2)
    config = functional(
        inbound,
        ["x", "y"],
        ["last"],
        (layer("x", "InputLayer", batch_input_shape=[None, 3]), []),
        (layer("y", "InputLayer", batch_input_shape=[None, 3]), []),
        (layer("shared"), ["x"]),
        (layer("both", "Concatenate", axis=-1), ["shared", "shared"]),
        (layer("last"), ["both"]),
    )
    described = config["config"]["layers"]
    described[2]["inbound_nodes"] += inbound("y")
    second = described[3]["inbound_nodes"][0]
    if inbound is keras2:
        second[1][1] = 1
    else:
        second["args"][0][1]["config"]["keras_history"][1] = 1
    graph = read(tmp_path, {"shared": dense(shared), "last": dense(last)}, config)
    assert free_sizes(graph) == [4]
    halves = last.weight.detach().reshape(2, 2, 4).transpose(1, 2).reshape(8, 2)
    assert torch.equal(graph["hidden1", "weight", "output"].edge_attr[..., 0], halves)


@pytest.mark.parametrize(("factors", "is_read"), [(2.0, True), ([1.0, 2.0, 3.0, 4.0], False)])
def test_numbers_beside_a_value(factors: Any, is_read: bool, tmp_path: Path) -> None:
    """`2 * x` keeps every symmetry; one factor per neuron does not, and is not in the file."""
    config = functional(
        keras3,
        ["x"],
        ["b"],
        (layer("x", "InputLayer", batch_shape=[None, 3]), []),
        (layer("a"), ["x"]),
        (layer("times", "Multiply"), ["a"]),
        (layer("b"), ["times"]),
    )
    config["config"]["layers"][2]["inbound_nodes"][0]["args"].append(factors)
    layers = {"a": dense(nn.Linear(3, 4)), "b": dense(nn.Linear(4, 2))}
    if is_read:
        assert free_sizes(load_only(tmp_path, layers, config)) == [4]
    else:
        with pytest.raises(ConversionError, match=r"'times' .Multiply.*4 other arguments"):
            load_only(tmp_path, layers, config)


def test_models_inside_models(tmp_path: Path) -> None:
    a, b, c, d = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 6)
    encoder = checkpoints.sequential(("Dense", "first", {}), ("Dense", "second", {}))
    decoder = checkpoints.sequential(("Dense", "third", {}), ("Dense", "fourth", {}))
    encoder["config"]["name"], decoder["config"]["name"] = "encoder", "decoder"
    for item in (encoder, decoder):
        item["name"] = item["config"]["name"]
    config = functional(
        keras2,
        ["x"],
        ["decoder"],
        (layer("x", "InputLayer", batch_input_shape=[None, 6]), []),
        (encoder, ["x"]),
        (decoder, ["encoder"]),
    )
    # Keras 2 counts the call that made a model inside.
    config["config"]["layers"][2]["inbound_nodes"][0][0][1] = 1
    config["config"]["output_layers"][0][1] = 1
    path = tmp_path / "x.h5"
    layers = {"first": dense(a), "second": dense(b), "third": dense(c), "fourth": dense(d)}
    nested = {
        "encoder": {f"{n}/{k}": v for n in ("first", "second") for k, v in layers[n].items()},
        "decoder": {f"{n}/{k}": v for n in ("third", "fourth") for k, v in layers[n].items()},
    }
    checkpoints.write_keras(path, nested, config)
    checkpoints.write_keras_archive(tmp_path / "x.keras", layers, config)
    expected = from_module(nn.Sequential(a, b, c, d))
    check_same_graph(load(path), expected)
    check_same_graph(load(tmp_path / "x.keras"), expected)
    assert len(read_tensors(path)) == 8


def test_a_decoder(tmp_path: Path) -> None:
    """A reshape of dense neurons, upsampling, a transposed convolution, and back again."""
    first, up, last = nn.Linear(4, 24), nn.ConvTranspose2d(6, 5, 3), nn.Conv2d(5, 2, 3)
    layers = {"dense": dense(first), "up": conv(up), "last": conv(last)}
    config = checkpoints.sequential(
        ("InputLayer", "x", {"batch_shape": [None, 4]}),
        ("Dense", "dense", {"activation": "relu"}),
        ("Reshape", "reshape", {"target_shape": [2, 2, 6]}),
        ("UpSampling2D", "larger", {"size": [2, 2]}),
        ("Conv2DTranspose", "up", {"activation": {"class_name": "LeakyReLU", "config": {}}}),
        ("Conv2D", "last", {}),
    )
    graph = read(tmp_path, layers, config)
    assert free_sizes(graph) == [6, 5]
    edges = graph["hidden1", "weight", "hidden2"].edge_attr[..., 0]
    assert torch.equal(edges, up.weight.detach().permute(1, 0, 2, 3).reshape(30, 9))
    kernel = first.weight.detach().T.reshape(4, 4, 6)
    expected = kernel.permute(2, 0, 1).reshape(24, 4)
    assert torch.equal(graph["input", "weight", "hidden1"].edge_attr[..., 0], expected)


@pytest.mark.parametrize(
    ("shape", "shared", "taps"),
    [((4,), [1, 2], 1), ((1, 1, 4), [1, 2], 1), ((3, 3, 4), None, 9)],
    ids=["dense", "shared", "of every position"],
)
def test_prelu(shape: tuple[int, ...], shared: Any, taps: int, tmp_path: Path) -> None:
    alpha = torch.randn(shape)
    is_dense = len(shape) == 1
    first, last = (
        (dense(nn.Linear(2, 4)), dense(nn.Linear(4, 2)))
        if is_dense
        else (conv(nn.Conv2d(2, 4, 2)), conv(nn.Conv2d(4, 2, 2)))
    )
    kind = "Dense" if is_dense else "Conv2D"
    config = checkpoints.sequential(
        (kind, "first", {"padding": "valid"}),
        ("PReLU", "act", {"shared_axes": shared}),
        (kind, "last", {}),
    )
    layers = {"first": first, "act": {"alpha": alpha}, "last": last}
    checkpoints.write_keras(tmp_path / "x.h5", layers, config)
    checkpoints.write_keras(tmp_path / "w.h5", layers)
    for name in ("x.h5", "w.h5"):
        graph = load(tmp_path / name)
        assert graph.spec.neuron["hidden1"].taps == 1 + taps
        expected = alpha.reshape(taps, 4).T
        assert torch.equal(graph["hidden1"].x[:, 1:, 0], expected)
        save(graph, tmp_path / "y.h5", template=tmp_path / name)
        for key, tensor in read_tensors(tmp_path / name).items():
            assert torch.equal(read_tensors(tmp_path / "y.h5")[key], tensor)


def test_embedding(tmp_path: Path) -> None:
    """A table of rows is a linear map of one-hot inputs, as in PyTorch."""
    table, last = nn.Embedding(7, 4), nn.Linear(4, 2)
    layers = {"words": {"embeddings": table.weight.detach()}, "last": dense(last)}
    config = checkpoints.sequential(
        ("InputLayer", "x", {"batch_shape": [None, 5]}),
        ("Embedding", "words", {}),
        ("GlobalAveragePooling1D", "mean", {}),
        ("Dense", "last", {"activation": "softmax"}),
    )
    graph = read(tmp_path, layers, config)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = table, last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table(x).mean(1))

    check_same_graph(graph, from_module(Words(), torch.zeros(1, 5, dtype=torch.long)))
    checkpoints.write_keras(tmp_path / "w.h5", {"embedding": layers["words"], "d": layers["last"]})
    check_same_graph(load(tmp_path / "w.h5"), graph)


def test_depthwise_results_of_every_channel(tmp_path: Path) -> None:
    kernel = torch.randn(2, 2, 3, 2)
    layers = {
        "depthwise": {"depthwise_kernel": kernel, "bias": torch.randn(6)},
        "last": conv(nn.Conv2d(6, 2, 1)),
    }
    config = checkpoints.sequential(
        ("Conv2D", "first", {}), ("DepthwiseConv2D", "depthwise", {}), ("Conv2D", "last", {})
    )
    graph = read(tmp_path, {"first": conv(nn.Conv2d(1, 3, 1)), **layers}, config)
    assert free_sizes(graph) == [3, 6]
    expected = kernel.permute(2, 3, 0, 1).reshape(6, 4)
    assert torch.equal(graph["hidden1"].x[:, :4, 0].sort(1)[0], expected.sort(1)[0])


REFUSED = {
    "attention": (layer("a", "MultiHeadAttention"), "'a' .MultiHeadAttention.*attention"),
    "recurrence": (layer("memory", "ConvLSTM2D"), "'memory' .ConvLSTM2D.*a recurrence over time"),
    "without tensors": (layer("memory", "LSTM"), "'memory' .LSTM.*a tensor 'kernel'"),
    "both ways": (layer("memory", "Bidirectional"), "'memory' .Bidirectional.*a recurrent layer"),
    "code": (layer("code", "Lambda"), "'code' .Lambda.*never run"),
    "unknown": (layer("new", "Newest"), "'new' .Newest.*not known.*arch="),
    "registered": (
        {**layer("own"), "registered_name": "mine>Dense"},
        "'own' .Dense.*custom.*arch=",
    ),
    "of a package": ({**layer("own"), "module": "mine.layers"}, "'own' .Dense.*custom"),
    "function": (layer("f", "Activation", activation="mine"), "'f' .Activation.*'mine'"),
    "scales": (layer("r", "Rescaling", scale=[1, 2, 3, 4]), "'r' .Rescaling.*one scale"),
    "no weights": (layer("n", "BatchNormalization"), "'n' .BatchNorm.*'moving_mean'"),
    "axes": (layer("n", "BatchNormalization", axis=[1, 2]), "'n' .BatchNorm.*one axis"),
    "numbers": (layer("s", "Softmax", axis="last"), "'axis' of layer 's'.*'last'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_refused(name: str, tmp_path: Path) -> None:
    wrong, message = REFUSED[name]
    first = checkpoints.sequential(("Dense", "first", {}))
    first["config"]["layers"].append(wrong)
    with pytest.raises(ConversionError, match=rf"x\.h5.*{message}"):
        load_only(tmp_path, {"first": dense(nn.Linear(3, 4))}, first)


def test_channels_of_groups_are_nested(tmp_path: Path) -> None:
    config = checkpoints.sequential(
        ("Conv2D", "a", {}), ("Conv2D", "b", {"groups": 2}), ("Conv2D", "c", {})
    )
    layers = {
        "a": conv(nn.Conv2d(2, 4, 1)),
        "b": conv(nn.Conv2d(4, 4, 1, groups=2)),
        "c": conv(nn.Conv2d(4, 2, 1)),
    }
    graph = read(tmp_path, layers, config)
    assert graph.spec.neuron["hidden1"].parents == ("group1",)


def test_every_tensor_has_a_use(tmp_path: Path) -> None:
    config = checkpoints.sequential(("Dense", "a", {}))
    more = {"a": {**dense(nn.Linear(3, 4)), "lora_kernel_a": torch.randn(3, 2)}}
    with pytest.raises(ConversionError, match=r"'a' .Dense.*'a/a/lora_kernel_a:0'"):
        load_only(tmp_path, more, config)
    with pytest.raises(ConversionError, match=r"belong to a layer.*'b/b/kernel:0' and 1 more"):
        load_only(tmp_path, {n: dense(nn.Linear(3, 3)) for n in "ab"}, config)
    model = {"class_name": "MyModel", "config": {"units": 3}}
    with pytest.raises(ConversionError, match="'MyModel'"):
        load_only(tmp_path, {"a": dense(nn.Linear(3, 4))}, model)


def test_a_functional_model_without_an_end_is_refused(tmp_path: Path) -> None:
    config = functional(keras3, ["x"], ["a"], (layer("x", "InputLayer"), []), (layer("a"), ["a"]))
    with pytest.raises(ConversionError, match="'a', which reads values that are never computed"):
        load_only(tmp_path, {"a": dense(nn.Linear(3, 4))}, config)
    config["config"]["output_layers"] = []
    config["config"]["layers"][1]["inbound_nodes"] = keras3("x")
    with pytest.raises(ConversionError, match="outputs that are computed"):
        load_only(tmp_path, {"a": dense(nn.Linear(3, 4))}, config)


def test_damaged_configurations_are_refused_or_read(tmp_path: Path) -> None:
    """Any configuration gives a graph or a `ConversionError`."""
    generator = random.Random(0)
    first, last = nn.Conv2d(1, 4, 3), nn.Linear(16, 2)
    layers = {
        "c": conv(first),
        "n": norm(nn.BatchNorm1d(4)),
        "p": {"alpha": torch.randn(1, 1, 4)},
        "d": dense(last),
    }
    good = functional(
        keras3,
        ["x"],
        ["d"],
        (layer("x", "InputLayer", batch_shape=[None, 4, 4, 1]), []),
        (layer("c", "Conv2D", padding="valid", strides=[1, 1], activation="relu"), ["x"]),
        (layer("n", "BatchNormalization", axis=[-1]), ["c"]),
        (layer("p", "PReLU", shared_axes=[1, 2]), ["n"]),
        (layer("f", "Flatten"), ["p"]),
        (layer("r", "Reshape", target_shape=[16]), ["f"]),
        (layer("d"), ["r"]),
    )
    assert free_sizes(read(tmp_path, layers, good)) == [4]
    outcomes = set()
    for _ in range(300):
        config = json.loads(json.dumps(good))
        _damage(config, generator)
        try:
            load_only(tmp_path, layers, config)
            outcomes.add("read")
        except ConversionError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


_ODD = [None, -1, 0, 2**40, 1.5, "x", [], {}, True, [[1]], float("nan"), "channels_first"]


def _damage(value: Any, generator: random.Random) -> None:
    """Replaces one entry, somewhere inside."""
    while True:
        key = generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if not inner or not isinstance(inner, dict | list) or generator.random() < 0.2:
            odd = [
                None,
                -1,
                0,
                2**40,
                1.5,
                "x",
                [],
                {},
                True,
                [[1]],
                float("nan"),
                "channels_first",
            ]
            value[key] = generator.choice(odd)
            return
        value = inner


def test_numpy_is_what_keras_writes() -> None:
    """The helpers above turn axes as Keras has them: `(height, width, in, out)`."""
    assert np.shape(conv(nn.Conv2d(2, 4, (3, 5)))["kernel"]) == (3, 5, 2, 4)
    assert np.shape(conv(nn.ConvTranspose2d(2, 4, (3, 5)))["kernel"]) == (3, 5, 4, 2)
