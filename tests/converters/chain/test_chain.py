"""Chains inferred from keys: names that indicate another network, and names that only seem to."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, from_state_dict, to_state_dict
from nfn_graph.converters.chain.names import Name
from nfn_graph.converters.chain.order import ChainLayer, _orders

S = nn.Sequential


def named(*pairs: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights by name and shape, between a stem and a head that fit into a chain."""
    ends = ("stem.weight", (8, 3)), ("last.weight", (2, 8))
    return {key: torch.randn(shape) for key, shape in (ends[0], *pairs, ends[1])}


CONV = (8, 8, 3, 3)
NOT_CHAINS: dict[str, dict[str, Tensor]] = {
    "block of one": named(("block.0.weight", (8, 8))),
    "block of two": named(("block1.fc1.weight", (4, 8)), ("block1.fc2.weight", (8, 4))),
    "one block": named(("block.fc1.weight", (4, 8)), ("block.fc2.weight", (8, 4))),
    "blocks": {
        f"blocks.{i}.net.{j}.weight": torch.randn(8, 8) for i in range(2) for j in (0, 2)
    },
    "torchvision": {
        f"layer1.{i}.conv{j}.weight": torch.randn(CONV) for i in (0, 1) for j in (1, 2)
    },
    "sequential of blocks": {
        f"{i}.conv{j}.weight": torch.randn(CONV) for i in (0, 1) for j in (1, 2)
    },
    "res": named(("res1.weight", (8, 8))),
    "resBlock": named(("resBlock.weight", (8, 8))),
    "residual": named(("residual.0.weight", (8, 8))),
    "embedding": named(("embedding.weight", (3, 8)), ("fc.weight", (8, 3))),
    "emb": {"emb.weight": torch.randn(20, 8), "fc.weight": torch.randn(4, 20)},
    "ensemble": {
        f"nets.{i}.{j}.weight": torch.randn(shape)
        for i in range(2) for j, shape in ((0, (8, 2)), (2, (2, 8)))
    },
    "ensemble of one layer": {f"nets.{i}.weight": torch.randn(4, 4) for i in range(3)},
    "numbered networks": {
        f"mlp{i}.{j}.weight": torch.randn(shape)
        for i in range(2) for j, shape in ((0, (8, 2)), (2, (2, 8)))
    },
    "critics": named(("critic1.weight", (8, 8)), ("critic2.weight", (8, 8))),
    "list of heads": named(("head.0.weight", (8, 8)), ("head.1.weight", (8, 8))),
    "heads": named(("head1.weight", (8, 8)), ("head2.weight", (8, 8))),
    "two networks": {
        "generator.0.weight": torch.randn(8, 2), "generator.2.weight": torch.randn(5, 8),
        "discriminator.0.weight": torch.randn(8, 5), "discriminator.2.weight": torch.randn(1, 8),
    },
    "actor and critic": named(("policy.weight", (8, 8)), ("value.weight", (8, 8))),
    "action and value": named(("action_net.weight", (8, 8)), ("value_net.weight", (8, 8))),
    "pi and vf": named(("pi.weight", (8, 8)), ("vf.weight", (8, 8))),
    "dueling": named(("adv.weight", (8, 8)), ("val.weight", (8, 8))),
    "layers with ways around": {
        "lin_in.weight": torch.randn(8, 3),
        **{f"layers.{i}.weight": torch.randn(8, 8) for i in range(2)},
        "lin_out.weight": torch.randn(2, 8),
    },
    "one layer with a way around": {
        "proj_in.weight": torch.randn(8, 3), "fc1.weight": torch.randn(8, 8),
        "out_proj.weight": torch.randn(2, 8),
    },
    **{
        name: {
            f"{name}.0.weight": torch.randn(8, 8, 4, 4), f"{name}.2.weight": torch.randn(8, 8, 4, 4)
        }
        for name in ("decoder", "up", "gen", "generator", "net.upBlock")
    },
    "i2h": {"i2h.weight": torch.randn(8, 3), "h2h.weight": torch.randn(8, 8),
            "h2o.weight": torch.randn(2, 8)},
    "cell": {"cell.weight_ih": torch.randn(8, 3), "cell.weight_hh": torch.randn(8, 8)},
    "W_hh": {"W_xh": torch.randn(8, 3), "W_hh": torch.randn(8, 8)},
    "gate": named(("gate.weight", (8, 8))),
    "deconv": named(("deconv1.weight", (8, 8))),
    "weight norm": {"0.weight_v": torch.randn(4, 1), "0.weight_g": torch.randn(1, 4)},
}  # fmt: skip


@pytest.mark.parametrize("state_dict", NOT_CHAINS.values(), ids=NOT_CHAINS.keys())
def test_names_of_another_topology_need_the_network(state_dict: dict[str, Tensor]) -> None:
    """All of their shapes fit into a chain."""
    with pytest.raises(ConversionError, match=r"Expected a chain of layers \(got '.*as arch"):
        from_state_dict(state_dict)


@pytest.mark.parametrize(
    "keys",
    [
        "net.{}.linear.weight",  # SIREN
        "layers.{}.weight",
        "{}.0.weight",
        "model.{}.0.weight",
        "hidden{}.weight",
        "encoder.{}.conv.weight",
        "features.{}.weight",
        "resolution{}.weight",  # Words that only start like others.
        "present.{}.weight",
        "second{}.weight",
        "block{}_fc.weight",
        "decoder.{}.weight",  # linear
        "update.{}.weight",
        "action_value.{}.weight",  # All of these belong to one network.
    ],
)
def test_names_of_plain_layers_are_a_chain(keys: str) -> None:
    state_dict = {keys.format(i): torch.full((4, 4), float(i)) for i in (0, 1, 2)}
    graph = from_state_dict(state_dict)
    assert [float(e.edge_attr[0]) for e in graph.edge_stores] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["critic", "actor", "head", "branch", "policy.tower"])
def test_a_sequential_that_is_named_as_a_branch_is_a_chain(name: str) -> None:
    """The activations between its weights leave gaps in the numbers."""
    module = S(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    state_dict = module.state_dict(prefix=f"{name}.")
    assert from_state_dict(state_dict).spec == from_module(module).spec


def test_blocks_without_a_way_around_are_a_chain() -> None:
    """No addition fits around them, because they return more or fewer neurons than they read."""
    sizes = {"block1.conv1": (4, 3), "block1.conv2": (6, 4), "block2.conv1": (8, 6)}
    graph = from_state_dict({f"{k}.weight": torch.randn(*s, 3, 3) for k, s in sizes.items()})
    assert graph.layout.shape.sizes == ((3,), (4,), (6,), (8,))


def test_a_decoder_that_chains_one_way_is_a_chain() -> None:
    """Transposed convolutions would store these channels in the opposite order."""
    sizes = {"decoder.0.weight": (6, 8, 3, 3), "decoder.2.weight": (4, 6, 3, 3)}
    graph = from_state_dict({key: torch.randn(size) for key, size in sizes.items()})
    assert graph.layout.shape.sizes == ((8,), (6,), (4,))


def test_ends_with_names_around_other_widths_are_a_chain() -> None:
    sizes = {"lin_in": (8, 3), "layers.0": (6, 8), "layers.1": (5, 6), "lin_out": (2, 5)}
    graph = from_state_dict({f"{key}.weight": torch.randn(size) for key, size in sizes.items()})
    assert graph.layout.shape.sizes == ((3,), (8,), (6,), (5,), (2,))


def test_a_first_convolution_of_one_channel_is_not_guessed() -> None:
    plain = S(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    depthwise = S(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    state_dict = plain.state_dict()
    with pytest.raises(ConversionError, match=r"of 1 channel, or a depthwise one of 4.*arch"):
        from_state_dict(state_dict)
    for channels, module in ((1, plain), (4, depthwise)):
        expected = from_module(module)
        example = torch.empty(1, channels, 9, 9, device="meta")
        module.load_state_dict(state_dict)
        for graph in (
            from_state_dict(state_dict, arch=module),
            from_state_dict(state_dict, example_input=example),
        ):
            assert graph.spec == expected.spec
            back = to_state_dict(graph)
            assert all(torch.equal(back[key], tensor) for key, tensor in state_dict.items())
    # Two copies of each of two channels.
    assert from_state_dict(state_dict, example_input=torch.empty(1, 2, 9, 9)).spec.neurons
    for shape in ((1, 3, 9, 9), (1, 1, 9), (1,), ()):
        with pytest.raises(ConversionError, match=r"can read \(got shape"):
            from_state_dict(state_dict, example_input=torch.empty(shape))


def test_a_first_convolution_of_one_channel_and_many_maps() -> None:
    """Networks for grey images look like this; few maps or a pointwise layer leave it open."""
    sizes = [(8, 1, 3, 3), (6, 8, 3, 3)]
    state_dict = {f"{i}.weight": torch.randn(size) for i, size in enumerate(sizes)}
    assert from_state_dict(state_dict).layout.shape.sizes == ((1,), (8,), (6,))
    state_dict["1.weight"] = torch.randn(6, 8, 1, 1)
    with pytest.raises(ConversionError, match="depthwise one of 8"):
        from_state_dict(state_dict)


def test_an_example_input_must_fit_the_first_layer() -> None:
    state_dict = {"a.weight": torch.randn(4, 6), "b.weight": torch.randn(1, 4)}
    for shape in ((1, 6), (2, 5, 6), (1, 2, 3)):
        from_state_dict(state_dict, example_input=torch.empty(shape))
    with pytest.raises(ConversionError, match=r"'a\.weight' of shape \[4, 6\].*\[1, 5\]"):
        from_state_dict(state_dict, example_input=torch.empty(1, 5))


@pytest.mark.parametrize("order", range(4))
def test_vectors_are_placed_alike_in_any_order_of_their_keys(order: int) -> None:
    """The taps of a norm follow the roles of its tensors, not the order of the keys."""
    module = S(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU(4), nn.Linear(4, 2))
    for i, tensor in enumerate(module.state_dict().values()):
        tensor.fill_(i)
    items = list(module.state_dict().items())
    random.Random(order).shuffle(items)
    items.sort(key=lambda item: item[0].partition(".")[0])
    graph = from_state_dict(dict(items))
    taps = graph["hidden1"].x[0, :, 0].tolist()
    assert taps == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]  # bias, norm, PReLU; 6 counts the batches


def vectors(**sizes: int) -> dict[str, Tensor]:
    """Vectors by key, with dots for underscores between words."""
    return {key.replace("_", "."): torch.randn(size) for key, size in sizes.items()}


LEFT_OVER: dict[str, dict[str, Tensor]] = {
    "lists of vectors": {
        "layer.logits": torch.randn(8, 2), "leaf.P": torch.randn(8, 8),
        **{f"weights.{i}": torch.randn(2) for i in range(20)},
        **{f"biases.{i}": torch.randn(1) for i in range(20)},
    },
    "statistics of inputs": {
        **named(("fc.weight", (8, 8))), "median": torch.randn(3), "factor": torch.randn(3)
    },
    "a vector of the size of outputs": {**named(), "std": torch.randn(2)},
    "a temperature": {**named(), "temperature": torch.tensor(0.5)},
    "a bias without its weight": {**named(), "other.bias": torch.randn(8)},
    "a mean without its variance": {
        **named(), **vectors(bn_weight=8, bn_bias=8), "bn.running_mean": torch.randn(8)
    },
    "a second bias": {**named(), **vectors(stem_bias=8), "stem.b": torch.randn(8)},
    "a mask in a module": {**named(), **vectors(stem_mask=8)},
    "sizes that differ": {**named(), **vectors(bn_weight=8, bn_bias=2)},
}  # fmt: skip


@pytest.mark.parametrize("state_dict", LEFT_OVER.values(), ids=LEFT_OVER.keys())
def test_a_chain_explains_every_tensor(state_dict: dict[str, Tensor]) -> None:
    left = next(key for key in list(state_dict)[2:] if key not in named(("fc.weight", (8, 8))))
    with pytest.raises(
        ConversionError, match=r"explains every tensor .*left over.*as arch"
    ) as error:
        from_state_dict(state_dict)
    if left != "stem.bias":
        assert f"'{left}'" in str(error.value)


def test_a_bias_of_several_axes_is_no_layer() -> None:
    """The shapes 1 -> 1 -> 4 would also fit behind the weights."""
    sizes = {"W1": (4, 3), "b1": (4, 1), "W2": (1, 4), "b2": (1, 1)}
    with pytest.raises(ConversionError, match=r"'b1' to be a vector, the bias of 'W1' .*\[4, 1\]"):
        from_state_dict({key: torch.randn(size) for key, size in sizes.items()})


def test_the_copy_of_a_tensor_needs_the_network() -> None:
    weight, bias = torch.randn(8, 8), torch.randn(8)
    for copies in (
        {"0.weight": weight, "2.weight": weight.clone()},
        {"0.weight": weight, "0.bias": bias, "2.weight": torch.randn(8, 8), "2.bias": bias.clone()},
    ):
        with pytest.raises(ConversionError, match=r"'0\..*' and '2\..*' with the same values"):
            from_state_dict(copies)
    zeros = {f"{i}.weight": torch.zeros(8, 8) for i in (0, 2)}
    assert from_state_dict(zeros).layout.shape.sizes == ((8,), (8,), (8,))


def test_a_transposed_weight_is_called_that() -> None:
    linear = {
        "0.weight": torch.randn(3, 5),
        "0.bias": torch.randn(5),
        "1.weight": torch.randn(2, 5),
    }
    with pytest.raises(ConversionError, match=r"'0\.weight' as \[out, in\] .*it is transposed"):
        from_state_dict(linear)
    kernel = {"0.weight": torch.randn(2, 8, 3, 3), "0.bias": torch.randn(8)}
    with pytest.raises(ConversionError, match=r"'0\.bias': a transposed convolution"):
        from_state_dict(kernel)


def normed(*keys: str, width: int = 4) -> dict[str, Tensor]:
    """Weights from 3 to equal widths, and norms, in the order of the keys."""
    found: dict[str, Tensor] = {}
    inputs = 3
    for key in keys:
        is_weight = key.startswith("fc")
        found[f"{key}.weight"] = torch.randn((width, inputs) if is_weight else width)
        found[f"{key}.bias"] = torch.randn(width)
        inputs = width if is_weight else inputs
    return found


def test_a_norm_between_equal_widths_is_read_if_order_and_names_agree() -> None:
    state_dict = normed("fc1", "bn1", "fc2", "bn2", "fc3")
    graph = from_state_dict(state_dict)
    assert [graph[f"hidden{i}"].x.shape[1] for i in (1, 2)] == [3, 3]
    assert torch.equal(graph["hidden2"].x[:, 1, 0], state_dict["bn2.weight"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        # The number counts the norms, not the layers.
        (("fc1", "fc2", "bn1", "fc3"), r"after 'fc1\.weight' by name; after 'fc2\.weight' as s"),
        (("fc1", "bn2", "fc2", "bn1", "fc3"), "by name.*as stored"),
        (("fc1", "fc2", "fc3", "bn1", "bn2"), "by name.*as stored"),
        (("fc1", "fc2", "norm", "fc3"), "by size"),
    ],
)  # fmt: skip
def test_a_norm_between_equal_widths_is_refused_else(keys: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConversionError, match=rf"'(bn|norm).*of 4 entries.*{reason}.*as arch"):
        from_state_dict(normed(*keys))


def test_sorted_keys_leave_it_to_complete_names() -> None:
    """Safetensors stores keys like this; if not every layer has a norm, numbers may count norms."""
    state_dict = normed("fc1", "bn1", "fc2", "bn2")
    graph = from_state_dict(dict(sorted(state_dict.items())))
    assert torch.equal(graph["output"].x[:, 1, 0], state_dict["bn2.weight"])
    with pytest.raises(ConversionError, match="by name"):
        from_state_dict(dict(sorted(normed("fc1", "bn1", "fc2").items())))


NAMES = ["a1", "a2", "a2.w", "a3", "b1", "b3/w", "c"]


@pytest.mark.parametrize("precedes", [Name.precedes, Name.is_indexed_before])
@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(1, 2), st.integers(1, 2)),
        max_size=5,
        unique_by=lambda layer: layer[0],
    )
)
def test_orders_are_all_that_names_and_shapes_allow(precedes, layers):
    """Compares with all permutations, in their order."""
    found = [ChainLayer(key, (out, read), Name.of(key)) for key, out, read in layers]
    found.sort(key=lambda n: (n.name.template, n.name.numbers))
    expected = [
        [n.key for n in order]
        for order in permutations(found)
        if all(b.follows(a) for a, b in pairwise(order))
        and not any(precedes(b.name, a.name) for a, b in combinations(order, 2))
    ]
    assert [[n.key for n in order] for order in _orders(found, precedes)] == expected


def test_deep_chains_do_not_take_more_than_their_length():
    """Ten times as many layers check ten times as many candidates, not a hundred times."""

    def candidates(count: int) -> int:
        layers = [ChainLayer(f"{i}.weight", (3, 3), Name.of(f"{i}.weight")) for i in range(count)]
        with patch.object(ChainLayer, "follows", return_value=True) as follows:
            assert next(_orders(layers, Name.precedes)) == layers
        return follows.call_count

    assert candidates(500) <= 10 * candidates(50) + 10
