"""State dicts to graphs and back: readings, refusals, prefixes, dtypes, channels."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from architectures import ResNet18
from comparing import assert_same, equal_bits
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    to_module,
    to_state_dict,
)
from nfn_graph.converters.channels import cast

S = nn.Sequential


class Named(nn.Module):
    """A plain CNN with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(12, 4)
        self.fc1 = nn.Linear(16, 12)
        self.bn2, self.bn1 = nn.BatchNorm2d(16), nn.BatchNorm2d(8)
        self.conv2, self.conv1 = nn.Conv2d(8, 16, 3), nn.Conv2d(3, 8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.mean((2, 3)))))


CHAINS: dict[str, nn.Module] = {
    "mlp": S(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
    "equal widths": S(*(nn.Linear(8, 8, bias=i != 2) for i in range(5))),
    "one layer": S(nn.Linear(4, 3)),
    "cnn": S(
        nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ),
    "norm first": S(nn.BatchNorm1d(5), nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7)),
    "prelu": S(nn.Linear(3, 6), nn.PReLU(6), nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 2)),
    "depthwise": S(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    ),
    "1d": S(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 3, 5)),
    "nested": S(S(nn.Linear(3, 6), nn.LayerNorm(6)), S(nn.Linear(6, 6), nn.LayerNorm(6))),
    "named": Named(),
}  # fmt: skip

FLAT = S(
    nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 5),
    nn.BatchNorm1d(5), nn.Linear(5, 3),
)  # fmt: skip


def in_any_order(state_dict: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same tensors as stored, sorted by name, reversed, and in three random orders."""
    items = list(state_dict.items())
    orders = [items, sorted(items, key=lambda item: item[0]), items[::-1]]
    orders += [random.Random(seed).sample(items, len(items)) for seed in range(3)]
    return [dict(order) for order in orders]


@pytest.mark.parametrize("module", CHAINS.values(), ids=CHAINS.keys())
def test_a_chain_is_read_alike_in_any_order_of_its_keys(module: nn.Module) -> None:
    """Alternatively it is refused, but not in its stored order and not if keys are sorted."""
    expected = from_module(module)
    for i, state_dict in enumerate(in_any_order(module.state_dict())):
        try:
            graph = from_state_dict(state_dict)
        except ConversionError as error:
            assert i > 1
            assert re.search("stored|can have", str(error))
            continue
        assert graph.spec == expected.spec
        same_features(graph, expected)
        assert_same(to_state_dict(graph), state_dict)


@pytest.mark.parametrize("order", [0, 1, 2, 4, 5])
def test_sizes_that_occur_once_tell_the_order_of_any_keys(order: int) -> None:
    module = S(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6, 5),
        nn.PReLU(5), nn.Linear(5, 2),
    )  # fmt: skip
    names = {"0": "first", "1": "norm", "2": "second", "4": "dense", "5": "slope", "6": "last"}
    state_dict = {
        f"{names[key[0]]}{key[1:]}": tensor for key, tensor in module.state_dict().items()
    }
    modules = random.Random(order).sample(list(names.values()), len(names))
    items = sorted(state_dict.items(), key=lambda item: modules.index(item[0].partition(".")[0]))
    same_features(from_state_dict(dict(items)), from_module(module))


def test_the_order_of_equal_layers_is_that_of_their_numbers() -> None:
    """As text, ten comes before nine, which would be another network."""
    for numbers in ((2, 9, 10, 11), (10, 11, 2, 9)):
        state_dict = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in numbers}
        graph = from_state_dict(state_dict)
        assert [float(e.edge_attr[0]) for e in graph.edge_stores] == [2.0, 9.0, 10.0, 11.0]


@pytest.mark.parametrize("keys", ["layers.{}.weight", "dec{}.weight", "fc{}.0.weight"])
def test_equal_layers_stored_against_their_numbers_are_refused(keys: str) -> None:
    """`dec3, dec2, dec1` counts down, and a Sequential runs in the order of its insertions."""
    state_dict = {keys.format(i): torch.randn(4, 4) for i in (3, 2, 1)}
    with pytest.raises(ConversionError, match=r"(1.* -> .*3).* by name.*(3.* -> .*1).* as stored"):
        from_state_dict(state_dict)


def autoencoder(**sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Weights and biases by name."""
    found = {}
    for name, size in sizes.items():
        found |= {f"{name}.0.weight": torch.randn(size), f"{name}.0.bias": torch.randn(size[0])}
    return found


def test_a_decoder_that_counts_down_is_not_read_in_the_order_of_its_numbers() -> None:
    """Sorted by number, its convolutions and those of the encoder would alternate."""
    state_dict = autoencoder(
        enc1=(10, 3, 3, 3), enc2=(20, 10, 3, 3), enc3=(2, 180), dec3=(180, 2),
        dec2=(10, 20, 3, 3), dec1=(3, 10, 3, 3),
    )  # fmt: skip
    for tensors in (state_dict, dict(sorted(state_dict.items()))):
        for flatten in (None, "channels_first"):
            with pytest.raises(ConversionError, match="determine the order of the layers"):
                from_state_dict(tensors, flatten=flatten)  # type: ignore[arg-type]


def test_a_convolution_behind_a_linear_layer_is_not_moved_to_the_front() -> None:
    """The only chain of plain layers differs from the order of the file, which may unflatten."""
    state_dict = autoencoder(one=(8, 3, 3, 3), code=(2, 72), back=(72, 2), out=(4, 8, 3, 3))
    with pytest.raises(ConversionError, match=r"one\.0\.weight -> code.*as stored"):
        from_state_dict(state_dict, flatten="channels_first")


@pytest.mark.parametrize(
    "names",
    [
        ["W1", "b1", "W2", "b2"],
        ["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
        ["dense/kernel:0", "dense/bias:0", "dense_1/kernel:0", "dense_1/bias:0"],
        ["alpha", "beta", "gamma", "delta"],
    ],
)
def test_any_key_names(names: list[str]) -> None:
    tensors = [torch.randn(5, 2), torch.randn(5), torch.randn(3, 5), torch.randn(3)]
    expected = WeightGraph.from_tensors(tensors[::2], tensors[1::2])
    for keys in (names, names[::-1]):
        pairs = dict(zip(names, tensors, strict=True))
        graph = from_state_dict({key: pairs[key] for key in keys})
        assert graph.spec == expected.spec
        same_features(graph, expected)


def test_flatten_is_never_guessed() -> None:
    state_dict = FLAT.state_dict()
    with pytest.raises(
        ConversionError, match=r"If the layers are 0\.weight -> .*36 entries .* 4 channels times 9"
    ) as error:
        from_state_dict(state_dict)
    assert "channels_first" in str(error.value)
    assert "channels_last" in str(error.value)
    expected = from_module(FLAT)
    first = from_state_dict(state_dict, flatten="channels_first")
    same_features(first, expected)
    same_features(from_state_dict(state_dict, arch=FLAT), expected)
    last = from_state_dict(state_dict, flatten="channels_last")
    assert last.spec == expected.spec
    key = ("hidden1", "weight", "hidden2")
    assert not torch.equal(last[key].edge_attr, first[key].edge_attr)
    entries = last[key].edge_attr.view(5, 4, 9).mT.reshape(5, 36)
    assert torch.equal(entries, state_dict["4.weight"])
    assert_same(to_state_dict(last), state_dict)
    with pytest.raises(ValueError, match="'channels_first' or 'channels_last'"):
        from_state_dict(state_dict, flatten="rows")  # type: ignore[arg-type]


def zeros(*shapes: tuple[int, ...], keys: str = "abcdef") -> dict[str, Tensor]:
    """Weights of given shapes."""
    return {f"{k}.weight": torch.randn(s) for k, s in zip(keys, shapes, strict=False)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "order": (
        zeros((4, 4), (4, 4)), r"a\.weight -> b\.weight; or b\.weight -> a\.weight"
    ),
    "autoencoder": (
        {k: v for n, m in (("enc", S(nn.Linear(6, 4), nn.Linear(4, 2))),
                           ("dec", S(nn.Linear(2, 4), nn.Linear(4, 6))))
         for k, v in m.state_dict(prefix=f"{n}.").items()},
        r"dec\.0\.weight -> dec\.1\.weight -> enc.*enc\.0\.weight -> enc\.1\.weight -> dec",
    ),
    "no chain": (zeros((4, 3), (4, 5)), r"'a\.weight' \[4, 3\], 'b\.weight' \[4, 5\]"),
    "transposed": (zeros((3, 4), (4, 5), keys="01"), r"\[out, in, \.\.\.\]"),
    "residual": (ResNet18(4).state_dict(), r"downsample.*arch"),
    "recurrent": (nn.LSTM(3, 4).state_dict(), r"weight_.h_l0.*recurrence"),
    "attention": (nn.MultiheadAttention(4, 2).state_dict(), r"in_proj_weight.*attention"),
    "norm of unknown place": (
        {**zeros((4, 3), (4, 4), keys="01"), "norm.weight": torch.randn(4)},
        r"'norm\.weight' of 4.*after '0\.weight' or after '1\.weight'",
    ),
    "bias of another size": (
        {"0.weight": torch.randn(4, 3), "0.bias": torch.randn(5)}, r"'0\.bias' to have 4.*got 5"
    ),
    "norm of another size": (
        {**zeros((4, 3), keys="0"), **zeros((2, 4), keys="2"), "1.weight": torch.randn(5)},
        r"'1\.weight' to have 4.*got 5",
    ),
    "integers": (
        {"0.weight": torch.ones(4, 3, dtype=torch.int8)}, r"'0\.weight' of torch\.int8"
    ),
    "complex": (zeros((4, 3)) | {"b": torch.ones(4, dtype=torch.cfloat)}, r"'b' of torch\.complex"),
    "empty tensor": (zeros((0, 3)), r"'a\.weight' of shape \[0, 3\]"),
    "only vectors": ({"a": torch.randn(3)}, r"at least two axes"),
    "empty": ({}, r"no tensors"),
    "no state dict": ({"epoch": 3}, r"no tensors"),
    "two state dicts": ({"first": zeros((2, 2)), "ema": zeros((2, 2))}, r"\['first', 'ema'\]"),
    "other values": (zeros((2, 2)) | {"b": object()}, r"'b' .*object"),
}  # fmt: skip


@pytest.mark.parametrize(("state_dict", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_single_reading_is_refused(state_dict: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversionError, match=f"(?s){reason}"):
        from_state_dict(state_dict)


class Reshaping(nn.Module):
    """Its linear layer reads the entries in an order that depends on the shape of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Channels first for wide pictures, last for high ones."""
        x = self.conv(x)
        return self.fc((x if x.shape[3] == 2 else x.permute(0, 2, 3, 1)).flatten(1))


def test_another_example_input_is_followed_anew() -> None:
    """What was learned for one input must not be used for another."""
    module = Reshaping()
    key = ("hidden1", "weight", "output")
    for _ in range(2):
        for shape, order in (((1, 2, 1, 2), (2, 3, 2)), ((1, 2, 2, 1), (2, 2, 3))):
            graph = from_state_dict(
                module.state_dict(), arch=module, example_input=torch.randn(shape)
            )
            entries = module.fc.weight.detach().view(order)
            entries = entries if order == (2, 3, 2) else entries.mT
            assert torch.equal(graph[key].edge_attr[..., 0].view(2, 3, 2), entries)


def test_shared_memory_needs_the_network() -> None:
    shared = nn.Linear(4, 4)
    module = S(nn.Linear(3, 4), shared, nn.ReLU(), shared, nn.Linear(4, 2))
    with pytest.raises(ConversionError, match=r"'1\.weight' and '3\.weight'.*arch"):
        from_state_dict(module.state_dict())
    graph = from_state_dict(module.state_dict(), arch=module)
    assert_same(to_state_dict(graph), module.state_dict())
    other = {**module.state_dict(), "3.weight": torch.randn(4, 4)}
    with pytest.raises(ConversionError, match=r"'3\.weight' to be the same tensor as '1\.weight'"):
        from_state_dict(other, arch=module)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
@pytest.mark.parametrize("with_arch", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_wrappers(prefix: str, with_arch: bool, inside: bool) -> None:
    module = Named()
    state_dict = {prefix + key: tensor for key, tensor in module.state_dict().items()}
    checkpoint: dict[str, Any] = {"epoch": 3, "state_dict": state_dict, "optimizer_states": []}
    graph = from_state_dict(
        checkpoint if inside else state_dict, arch=module.to("meta") if with_arch else None
    )
    assert_same(to_state_dict(graph), state_dict)
    loaded = to_module(graph, Named())
    assert_same(
        loaded.state_dict(), dict(zip(module.state_dict(), state_dict.values(), strict=True))
    )


@pytest.mark.parametrize("place", ["state_dict", "model_state_dict", "model", "anything"])
def test_a_state_dict_inside_is_found_beside_other_things(place: str) -> None:
    state_dict = zeros((4, 2), (1, 4))
    beside: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}, "loss": 0.5}
    if place != "anything":
        beside |= {"epoch": torch.tensor(3), "ema": zeros((4, 2), (1, 4))}
    assert_same(to_state_dict(from_state_dict({**beside, place: state_dict})), state_dict)


def test_keys_that_collide_without_their_prefix_are_refused() -> None:
    module = S(nn.Linear(2, 3), nn.Linear(3, 1))
    state_dict = module.state_dict()
    both = {**state_dict, "0._orig_mod.weight": torch.randn(3, 2)}
    with pytest.raises(ConversionError, match=r"'0\.weight' and '0\._orig_mod\.weight'"):
        from_state_dict(both, arch=module)


def test_values_beside_the_tensors_are_carried() -> None:
    state_dict = {**zeros((4, 2), (1, 4)), "label": 7, "count": torch.tensor(3)}
    back = to_state_dict(from_state_dict(state_dict))
    assert list(back) == list(state_dict)
    assert back["label"] == 7
    assert torch.equal(back["count"], torch.tensor(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_comes_back(dtype: torch.dtype) -> None:
    module = Named().to(dtype)
    state_dict = module.state_dict()
    state_dict["conv2.bias"] = state_dict["conv2.bias"].double()  # Mixed within one layer.
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
    state_dict["fc1.weight"][0, :4] = special
    for graph in (from_state_dict(state_dict), from_state_dict(state_dict, arch=Named())):
        back = to_state_dict(graph)
        assert list(back) == list(state_dict)
        for key, tensor in state_dict.items():
            assert back[key].dtype == tensor.dtype
            assert back[key].shape == tensor.shape
            assert equal_bits(back[key], tensor), key


SIGNALLING = {
    torch.float16: (torch.int16, 0x7C01),
    torch.bfloat16: (torch.int16, 0x7F81),
    torch.float32: (torch.int32, 0x7F800001),
    torch.float64: (torch.int64, 0x7FF0000000000001),
}


@pytest.mark.parametrize("dtype", SIGNALLING, ids=str)
def test_signalling_nans_come_back_from_mixed_types(dtype: torch.dtype) -> None:
    """A cast by the processor would make them quiet."""
    integer, pattern = SIGNALLING[dtype]
    state_dict = S(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype).state_dict()
    lowest = torch.iinfo(integer).min
    for key in ("0.bias", "1.weight", "2.weight"):
        state_dict[key].view(integer).view(-1)[:2] = torch.tensor([pattern, pattern + lowest])
    state_dict["1.bias"] = state_dict["1.bias"].to(
        torch.float16 if dtype == torch.bfloat16 else torch.float64
    )
    graph = from_state_dict(state_dict, channels={"twin": dict(state_dict)})
    for back in (to_state_dict(graph), to_state_dict(graph, channel="twin")):
        for key, tensor in state_dict.items():
            assert back[key].dtype == tensor.dtype
            assert equal_bits(back[key], tensor), key


def test_a_nan_stays_a_nan_in_a_narrower_type() -> None:
    """Its last bits are cut off; without any left it would be infinite."""
    nan = torch.tensor([0x7FF0000000000001], dtype=torch.int64).view(torch.float64)
    assert bool(cast(nan, torch.float16).isnan())


def test_weights_may_stay_views_of_the_checkpoint() -> None:
    state_dict = S(nn.Linear(3, 5), nn.Linear(5, 2)).state_dict()
    graph = from_state_dict(state_dict)
    edges = graph["input", "weight", "hidden1"].edge_attr
    assert edges.data_ptr() == state_dict["0.weight"].data_ptr()
    back = to_state_dict(graph)
    assert back["0.weight"].data_ptr() != state_dict["0.weight"].data_ptr()


def test_equal_shapes_are_not_mixed_up() -> None:
    """The second state dict is read with what was learned from the first."""
    for _ in range(2):
        state_dict = CHAINS["cnn"].state_dict()
        for key in state_dict:
            state_dict[key] = (torch.randn(state_dict[key].shape) * 9).to(state_dict[key].dtype)
        assert_same(to_state_dict(from_state_dict(state_dict)), state_dict)
        assert_same(to_state_dict(from_state_dict(state_dict, arch=CHAINS["cnn"])), state_dict)


def test_an_architecture_must_fit() -> None:
    state_dict = Named().state_dict()
    with pytest.raises(ConversionError, match=r"without \['0\.weight'.*unknown \['fc2\.weight'"):
        from_state_dict(state_dict, arch=CHAINS["mlp"])
    state_dict["fc1.bias"] = torch.randn(13)
    with pytest.raises(ConversionError, match=r"'fc1\.bias' of shape \(12,\).*got \(13,\)"):
        from_state_dict(state_dict, arch=Named())


def test_channels_come_back_by_name() -> None:
    module = Named()
    state_dict = module.state_dict()
    channels = {
        "grad": {
            key: torch.randn(t.shape, dtype=torch.float64) for key, t in module.named_parameters()
        },
        "mask": {"conv2.weight": torch.rand(16, 8, 3, 3) > 0.5},
        "other": {key: t + 1 for key, t in state_dict.items() if t.is_floating_point()},
    }
    graph = from_state_dict(state_dict, channels=channels)
    assert graph["hidden1"].x.shape == (8, 4, 4)
    assert float(graph["hidden1"].x[..., 2].abs().max()) == 0.0
    assert_same(to_state_dict(graph), state_dict)
    for name, values in channels.items():
        assert_same(to_state_dict(graph, channel=name), values)
    with pytest.raises(ValueError, match=r"\['weights', 'grad', 'mask', 'other'\].*'moment'"):
        to_state_dict(graph, channel="moment")


def test_channels_must_fit() -> None:
    state_dict = zeros((4, 2), (1, 4))
    with pytest.raises(ConversionError, match=r"'a\.weight' of channel 'grad' of shape \(4, 2\)"):
        from_state_dict(state_dict, channels={"grad": {"a.weight": torch.randn(2, 4)}})
    with pytest.raises(ConversionError, match=r"channel 'grad' .*'c\.weight'"):
        from_state_dict(state_dict, channels={"grad": {"c.weight": torch.randn(2, 4)}})
    graph = from_state_dict(state_dict)
    wide = graph.features().map(lambda x: x.expand(-1, -1, 3)).to_graph()
    with pytest.raises(ConversionError, match=r"1 channel.*got 3"):
        to_state_dict(wide)


def test_edited_weights_come_back() -> None:
    """A network of another class that works on features can still be restored."""
    graph = from_state_dict(state_dict := Named().state_dict())
    doubled = graph.features("hnp").map(lambda x: 2 * x).to_graph()
    back = to_state_dict(doubled)
    assert torch.equal(back["conv2.weight"], 2 * state_dict["conv2.weight"])
    assert torch.equal(back["bn1.running_var"], 2 * state_dict["bn1.running_var"])
    assert torch.equal(back["bn1.num_batches_tracked"], state_dict["bn1.num_batches_tracked"])


def test_networks_come_back_from_a_batch() -> None:
    state_dicts = [Named().state_dict() for _ in range(2)]
    batch = Batch.from_data_list([from_state_dict(s) for s in state_dicts])
    with pytest.raises(ValueError, match="batch"):
        to_state_dict(batch)
    for i, state_dict in enumerate(state_dicts):
        assert_same(to_state_dict(batch[i]), state_dict)


def test_to_module_refuses_another_network() -> None:
    graph = from_state_dict(CHAINS["mlp"].state_dict())
    with pytest.raises(ConversionError, match="Named"):
        to_module(graph, Named())
    with torch.device("meta"):
        empty = S(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    assert_same(to_module(graph, empty).state_dict(), CHAINS["mlp"].state_dict())


def test_a_graph_without_tensors_has_no_state_dict() -> None:
    from nfn_graph.testing import random_graph

    spec = from_state_dict(zeros((4, 2), (1, 4))).spec
    with pytest.raises(ConversionError, match="made from tensors"):
        to_state_dict(random_graph(spec))


def test_gradients_flow_through_the_way_back() -> None:
    graph = from_state_dict(S(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict())
    graph["hidden1"].x.requires_grad_()
    to_state_dict(graph)["0.bias"].square().sum().backward()
    assert graph["hidden1"].x.grad is not None


def same_features(actual: WeightGraph, expected: WeightGraph) -> None:
    """The same values at the same places."""
    pairs = zip(actual.features().tensors(), expected.features().tensors(), strict=True)
    for (key, x), (other, y) in pairs:
        assert key == other
        assert torch.equal(x, y), key
