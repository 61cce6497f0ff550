"""Transforms that bring networks together: equivalent networks, exact inverses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from networks import chain, residual_spec, self_spec
from nfn_graph import (
    NFN,
    Batch,
    IOEncoding,
    NetworkSpec,
    NeuronType,
    NFLinear,
    WeightGraph,
    WeightType,
)
from nfn_graph.converters import from_module
from nfn_graph.data import Layout, Placement, Shape
from nfn_graph.testing import assert_complete, assert_equivariant, assert_invariant, random_graph
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes, ScaleByFanIn


def run_cnn(tensors: dict[str, torch.Tensor], x: torch.Tensor, kernels) -> torch.Tensor:
    """Convolutions padded for their kernels, a global mean, and a linear layer."""
    for i, (height, width) in enumerate(kernels):
        pads = ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)
        bias = tensors.get(f"{i}.bias")
        x = torch.tanh(F.conv2d(F.pad(x, pads), tensors[f"{i}.weight"], bias))
    last = len(kernels)
    return F.linear(x.mean((2, 3)), tensors[f"{last}.weight"], tensors.get(f"{last}.bias"))


def assert_same_tensors(first: WeightGraph, second: WeightGraph) -> None:
    assert first.spec == second.spec
    assert list(first.to_tensors()) == list(second.to_tensors())
    for key, tensor in first.to_tensors().items():
        assert torch.equal(tensor, second.to_tensors()[key]), key


@pytest.mark.parametrize("kernels", [[(3, 3), (3, 3)], [(1, 3), (5, 1)], [(3, 5), (1, 1)]])
def test_grown_kernels_compute_the_same_and_come_back(kernels):
    graph = chain((2, 4, 5, 3), kernels=[*kernels, ()])
    transform = GrowKernels((5, 7))
    grown = transform(graph)
    assert grown.spec.weight["input", "weight", "hidden1"].taps == 35
    assert grown.to_tensors()["0.weight"].shape == (4, 2, 5, 7)
    x = torch.randn(2, 2, 9, 8).double()
    before = run_cnn(graph.to_tensors(), x, kernels)
    after = run_cnn(grown.to_tensors(), x, [(5, 7)] * 2)
    assert (before - after).abs().max() < 1e-12
    assert_same_tensors(transform.inverse(grown), graph)


def test_even_growth_puts_the_additional_zero_last():
    graph = WeightGraph.from_tensors([torch.ones(1, 1, 2)])
    assert GrowKernels((3,))(graph).to_tensors()["0.weight"].flatten().tolist() == [1, 1, 0]
    assert GrowKernels((5,))(graph).to_tensors()["0.weight"].flatten().tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("size", [(3,), (4,), (5,), (6,)])
def test_any_growth_is_undone(size):
    graph = chain((2, 3, 4), kernels=[(2,), (3,)])
    grow = GrowKernels(size)
    assert_same_tensors(grow.inverse(grow(graph)), graph)


def test_kernels_of_a_sliced_tensor_grow():
    """A convolution that reads a concatenation of two layers: one tensor in two stores."""
    weight = torch.randn(3, 5, 3, 3)
    shape, axes = (3, 5, 3, 3), ("target", "source", "tap", "tap")
    parts = [("a", 0, 2), ("b", 2, 5)]
    placements = tuple(
        Placement(
            ("conv.weight",), shape, weight.dtype, (name, "weight", "out"), shape, axes,
            (0, begin, 0, 0), (3, end, 3, 3),
        )
        for name, begin, end in parts
    )  # fmt: skip
    spec = NetworkSpec(
        (NeuronType("a", 0), NeuronType("b", 0), NeuronType("out", 0)),
        (WeightType("a", "out", 9), WeightType("b", "out", 9)),
    )
    layout = Layout(spec, Shape(((2,), (3,), (3,)), (((0, 0),), ((0, 0),))), placements)
    graph = WeightGraph.from_placements(layout, {"conv.weight": weight})
    grow = GrowKernels((5, 5))
    assert torch.equal(grow(graph).to_tensors()["conv.weight"], F.pad(weight, (1, 1, 1, 1)))
    assert_same_tensors(grow.inverse(grow(graph)), graph)


def test_kernels_grow_to_the_largest_of_each_type():
    graphs = [
        chain((2, 4, 3), kernels=[(3, 1), ()]),
        chain((2, 5, 3), kernels=[(1, 5), ()]),
    ]
    with pytest.raises(ValueError, match="GrowKernels"):
        Batch.from_data_list(graphs)
    grow = GrowKernels.to_largest(graphs)
    batch = Batch.from_data_list([grow(g) for g in graphs])
    assert batch.spec.weight["input", "weight", "hidden1"].taps == 15
    for i, graph in enumerate(graphs):
        assert_same_tensors(grow.inverse(batch[i]), graph)


def test_filled_biases_compute_the_same_and_come_back():
    kernels = [(3, 3), (3, 3)]
    graph = chain((2, 4, 5, 3), kernels=[*kernels, ()], biases=(True, False, False))
    filled = FillBiases()(graph)
    assert [n.taps for n in filled.spec.neurons] == [0, 1, 1, 1]
    assert set(filled.to_tensors()) == {f"{i}.{k}" for i in range(3) for k in ("weight", "bias")}
    x = torch.randn(2, 2, 6, 6).double()
    before = run_cnn(graph.to_tensors(), x, kernels)
    assert (before - run_cnn(filled.to_tensors(), x, kernels)).abs().max() == 0
    assert_same_tensors(FillBiases().inverse(filled), graph)
    batch = Batch.from_data_list([filled, chain((2, 3, 3, 3), kernels=[*kernels, ()])])
    assert_same_tensors(FillBiases().inverse(batch[0]), graph)


def normed(input_taps: int, output_taps: int) -> WeightGraph:
    """A network whose inputs and outputs have values, such as those of norm layers."""
    neurons = (
        NeuronType("input", input_taps, 2),
        NeuronType("hidden1"),
        NeuronType("output", output_taps, 3),
    )
    weights = (WeightType("input", "hidden1"), WeightType("hidden1", "output"))
    return random_graph(NetworkSpec(neurons, weights))


def test_the_transform_that_a_union_names_brings_any_biases_together():
    graphs = [normed(4, 1), normed(0, 5), chain((2, 3, 3))]
    with pytest.raises(ValueError, match=r"FillBiases\.to_largest\(graphs\)"):
        Batch.from_data_list(graphs)
    fill = FillBiases.to_largest(graphs)
    batch = Batch.from_data_list([fill(graph) for graph in graphs])
    assert [neuron.taps for neuron in batch.spec.neurons] == [4, 1, 5]
    for i, graph in enumerate(graphs):
        before, after = graph.features(), fill.inverse(batch[i]).features()
        assert all(torch.equal(after[key], x) for key, x in before.tensors())


def test_the_transform_that_role_types_name_makes_room_for_them():
    graph = chain((2, 3, 3, 3), biases=(True, False, True))
    assert RoleTypes()(FillBiases({"hidden2": 1})(graph)).spec.neuron["hidden"].taps == 1


@pytest.mark.parametrize("kernels", [[(), (4,)], [(), ()]])
def test_weights_that_cannot_grow_are_named(kernels):
    """After a flatten, the taps of a linear layer are positions."""
    fc = torch.randn(4, 3 * 9)
    whole = chain((2, 3, 4), kernels=[(), (9,)])
    placed = whole.layout.placements
    flat = [
        replace(p, shape=tuple(fc.shape), view=(4, 3, 9)) if p.keys[0] == "1.weight" else p
        for p in placed
    ]
    tensors = {**whole.to_tensors(), "1.weight": fc.double()}
    behind = WeightGraph.from_placements(replace(whole.layout, placements=tuple(flat)), tensors)
    other = chain((2, 3, 4), kernels=kernels)
    with pytest.raises(ValueError, match=r"GrowKernels\.to_largest\(graphs\)"):
        Batch.from_data_list([behind, other])
    with pytest.raises(ValueError, match=r"'1\.weight' .* Only the kernels of convolutions can"):
        GrowKernels.to_largest([behind, other])


def split_layer(kernel: int, biases: int) -> WeightGraph:
    """A kernel over two layers, and a further one over the first of them, with some biases."""
    sizes = {"input": 2, "a": 3, "b": 4, "c": 5}
    tensors = {"up.weight": torch.randn(7, 2, kernel, kernel).double()}
    tensors |= {"down.weight": torch.randn(5, 3, 3, 3).double()}
    tensors |= {f"bias{i}": torch.randn(3).double() for i in range(biases)}
    up, down = tensors["up.weight"], tensors["down.weight"]
    axes = ("target", "source", "tap", "tap")
    whole = Placement.whole("up.weight", up, ("input", "weight", "a"), axes)
    placements = [
        replace(whole, stop=(3, 2, kernel, kernel)),
        replace(whole, store=("input", "weight", "b"), start=(3, 0, 0, 0)),
        Placement.whole("down.weight", down, ("a", "weight", "c"), axes),
        *(Placement.whole(f"bias{i}", torch.empty(3), "a", ["neuron"], i) for i in range(biases)),
    ]
    placements = [replace(p, dtype=torch.float64) for p in placements]
    spec = NetworkSpec(
        (
            NeuronType("input", 0, 2),
            NeuronType("a", biases),
            NeuronType("b", 0),
            NeuronType("c", 0),
        ),
        (
            WeightType("input", "a", kernel**2),
            WeightType("input", "b", kernel**2),
            WeightType("a", "c", 9),
        ),
    )
    shape = Shape(tuple((n,) for n in sizes.values()), (((0, 0),),) * 3)
    return WeightGraph.from_placements(Layout(spec, shape, tuple(placements)), tensors)


def test_types_that_share_a_tensor_grow_alike():
    small = split_layer(3, 1)
    large = WeightGraph.from_placements(
        Layout(
            NetworkSpec(
                (NeuronType("input", 0, 2), NeuronType("a", 0)), (WeightType("input", "a", 25),)
            ),
            Shape(((2,), (3,)), (((0, 0),),)),
            (
                Placement.whole(
                    "w",
                    torch.empty(3, 2, 5, 5),
                    ("input", "weight", "a"),
                    ("target", "source", "tap", "tap"),
                ),
            ),
        ),
        {"w": torch.randn(3, 2, 5, 5)},
    )
    grow = GrowKernels.to_largest([small, large])
    assert grow.sizes == {
        ("input", "weight", "a"): (5, 5),
        ("input", "weight", "b"): (5, 5),
        ("a", "weight", "c"): (3, 3),
    }
    grown = grow(small)
    expected = F.pad(small.to_tensors()["up.weight"], (1, 1, 1, 1))
    assert torch.equal(grown.to_tensors()["up.weight"], expected)
    assert_same_tensors(grow.inverse(grown), small)
    with pytest.raises(ValueError, match="one kernel size for all types that hold a part of 'up"):
        GrowKernels({("input", "weight", "a"): (5, 5)})(small)


def test_biases_are_filled_up_to_a_number():
    few, many = split_layer(3, 1), split_layer(3, 3)
    fill = FillBiases(3)
    filled, same = fill(few), fill(many)
    assert filled.spec == same.spec
    assert [filled.spec.taps[name] for name in ("input", "a", "b", "c")] == [0, 3, 3, 3]
    before, after = few.to_tensors(), filled.to_tensors()
    assert {"a.bias2", "a.bias3", "up.bias", "down.bias", "b.bias2"} <= set(after)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert not any(x.any() for key, x in after.items() if key not in before)
    batch = Batch.from_data_list([filled, same])
    assert_same_tensors(fill.inverse(batch[0]), few)
    assert_same_tensors(fill.inverse(batch[1]), many)


def test_role_types_refuse_nested_neurons():
    """In a single type, the channels of a group would be permuted across groups."""
    neurons = (
        NeuronType("input", 0, 3),
        NeuronType("group", 1),
        NeuronType("inner", 1, parents=("group",)),
        NeuronType("output", 1, 2),
    )
    weights = (WeightType("input", "inner", 1), WeightType("inner", "output", 1))
    graph = random_graph(NetworkSpec(neurons, weights), {"group": 2, "inner": 6})
    with pytest.raises(ValueError, match=r"'inner'.*nested in 'group'.*FillBiases\.to_largest"):
        RoleTypes()(graph)


def test_role_types_join_hidden_layers_and_come_back():
    graph = chain((2, 4, 5, 6, 3))
    roles = RoleTypes()
    joined = roles(graph)
    assert [n.name for n in joined.spec.neurons] == ["input", "hidden", "output"]
    assert [w.key for w in joined.spec.weights] == [
        ("input", "weight", "hidden"),
        ("hidden", "weight", "hidden"),
        ("hidden", "weight", "output"),
    ]
    assert joined["hidden"].x.shape[0] == 15
    assert joined["hidden", "weight", "hidden"].edge_attr.shape[0] == 5 * 4 + 6 * 5
    for key, tensor in graph.to_tensors().items():
        assert torch.equal(joined.to_tensors()[key], tensor)
    assert_same_tensors(roles.inverse(joined), graph)
    source, target = joined.materialize()["hidden", "weight", "hidden"].edge_index
    assert source.tolist() == [0, 1, 2, 3] * 5 + [4, 5, 6, 7, 8] * 6
    assert target.unique().tolist() == list(range(4, 15))


def test_role_types_of_branching_networks_keep_tensors_apart():
    graph = FillBiases()(random_graph(residual_spec(), {"r": 3, "h": 4}))
    roles = RoleTypes()
    joined = roles(graph)
    back = roles.inverse(joined)
    for (key, x), (_, y) in zip(back.features().tensors(), graph.features().tensors(), strict=True):
        assert torch.equal(x, y), key
    layer = NFLinear(joined.spec.fold("np"), 1, 2).double()
    assert_equivariant(layer, joined, "np")


def test_role_types_of_tensors_that_branch_off_get_types_of_their_own():
    """hidden1 leads to both hidden2 and hidden3: its edges of one type must be one run."""
    spec = NetworkSpec(
        (NeuronType("input", 0, size=2), *(NeuronType(f"hidden{i}") for i in (1, 2, 3))),
        (
            WeightType("input", "hidden1"),
            WeightType("hidden1", "hidden2"),
            WeightType("hidden1", "hidden3"),
            WeightType("hidden2", "hidden3"),
        ),
    )
    graph = random_graph(spec, {"hidden1": 2, "hidden2": 3, "hidden3": 4})
    joined = RoleTypes()(graph)
    keys = [w.key for w in joined.spec.weights]
    assert keys[1:] == [("hidden", "weight", "hidden"), ("hidden", "weight2", "hidden")]
    blocks = dict(zip(keys, joined.layout.shape.blocks, strict=True))
    assert blocks["hidden", "weight", "hidden"] == ((1, 0), (2, 1))
    assert blocks["hidden", "weight2", "hidden"] == ((2, 0),)
    assert_equivariant(NFLinear(joined.spec.fold("np"), 1, 2).double(), joined, "np")
    back = RoleTypes().inverse(joined)
    for (key, x), (_, y) in zip(back.features().tensors(), graph.features().tensors(), strict=True):
        assert torch.equal(x, y), key


@settings(max_examples=30)
@given(data=st.data())
def test_random_mixes_of_width_depth_and_kernel_equal_singles(data):
    """With all three transforms, any chain can share a batch with any other."""
    graphs = []
    for _ in range(data.draw(st.integers(1, 4))):
        depth = data.draw(st.integers(1, 4))
        sizes = [data.draw(st.integers(1, 5)) for _ in range(depth + 1)]
        kernel = st.tuples(st.integers(1, 3), st.integers(1, 3))
        kernels = [data.draw(kernel) for _ in range(depth)]
        biases = [data.draw(st.booleans()) for _ in range(depth)]
        graphs.append(chain(sizes, kernels, biases))
    grow, fill, roles = GrowKernels((3, 3)), FillBiases(), RoleTypes()
    for transforms in ([grow, fill], [grow, fill, roles]):
        same = []
        for graph in graphs:
            for transform in transforms:
                graph = transform(graph)
            same.append(graph)
        spec = NetworkSpec.union(g.spec for g in same)
        editor = NFN(spec, (3, 1), "np", io_encoding="sinusoidal").double()
        batch = Batch.from_data_list(same)
        edited = editor(batch).to_graph()
        for i, graph in enumerate(same):
            alone = editor(graph).to_graph().to_tensors()
            for key, tensor in edited[i].to_tensors().items():
                assert (tensor - alone[key]).abs().max() < 1e-12, key
            back = batch[i]
            for transform in reversed(transforms):
                back = transform.inverse(back)
            assert_same_tensors(back, graphs[i])


def test_role_layers_are_equivariant_not_complete():
    spec = RoleTypes()(chain((2, 3, 4, 2))).spec.fold("np")
    layer = NFLinear(spec, 1, 1)
    batch = Batch.from_data_list(
        [RoleTypes()(chain((2, *w, 2))) for w in [(3,), (4, 2), (3, 3, 5)]]
    )
    assert_equivariant(NFLinear(batch.spec.fold("np"), 1, 2).double(), batch, "np")
    model = NFN(batch.spec, (3, 2), "np", out_features=1, head=(4,)).double()
    assert_invariant(model, batch, "np", folded=False)
    with pytest.raises(AssertionError, match="such a layer is equivariant, not complete"):
        assert_complete(layer, spec)


def test_role_layers_give_each_end_a_mean_and_a_message_of_its_own():
    """A hidden neuron receives separate messages from its inputs and from its outputs."""
    graph = RoleTypes()(chain((2, 3, 4, 2)))
    spec = graph.spec.fold("np")
    hidden = spec.site["hidden"]
    middle = ("hidden", "weight", "hidden")
    ends = [part.kept for part in hidden.parts if part.key == middle]
    assert ends == [("hidden",), ("hidden'",)]
    assert hidden.summary_taps == 1 + 4


def test_hnp_refuses_role_types_with_the_reason():
    spec = RoleTypes()(chain((2, 3, 4, 2))).spec
    with pytest.raises(ValueError, match=r"depth types for 'hnp' \(got the role type 'hidden'"):
        spec.fold("hnp")


def test_one_role_model_serves_any_depth():
    graphs = [RoleTypes()(chain((2, *[4] * depth, 1))) for depth in (1, 2, 5)]
    spec = NetworkSpec.union(g.spec for g in graphs)
    model = NFN(spec, (4, 4), "np", out_features=1, head=(4,), io_encoding="learned").double()
    assert isinstance(model.before[0], IOEncoding)
    deeper = RoleTypes()(chain((2, 3, 3, 3, 3, 3, 3, 3, 1)))
    assert model(Batch.from_data_list([*graphs, deeper])).shape == (4, 1)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: GrowKernels((3, 3))(chain((2, 3), kernels=[(5, 5)])),
            r"at '0.weight' \(got \(5, 5\)\)",
        ),
        (lambda: GrowKernels((3,))(chain((2, 3), kernels=[(3, 3)])), "kernel of 1 axes"),
        (
            lambda: GrowKernels.to_largest([chain((2, 3), kernels=[k]) for k in [(3,), (3, 3)]]),
            "kernel of 1 axes",
        ),
        (lambda: FillBiases().inverse(chain((2, 3))), "got one whose last transform is none"),
        (lambda: RoleTypes().inverse(FillBiases()(chain((2, 3)))), "last transform is FillBiases"),
        (
            lambda: RoleTypes("a").inverse(RoleTypes("b")(chain((2, 3, 3)))),
            r"made by RoleTypes\('a'\) \(got one whose last transform is RoleTypes\('b'\)",
        ),
        (lambda: GrowKernels((3,))(RoleTypes()(chain((2, 3, 3)))), "Apply RoleTypes last"),
        (
            lambda: NetworkSpec.union(
                [
                    NetworkSpec(
                        (NeuronType("hidden", role=flag),), (WeightType("hidden", "hidden"),)
                    )
                    for flag in (True, False)
                ]
            ),
            "role=True and role=False",
        ),
        (
            lambda: RoleTypes()(chain((2, 3, 3, 3), biases=(True, False, True))),
            r"FillBiases\({'hidden2': 1}\) first",
        ),
        (
            lambda: RoleTypes()(chain((2, 3, 3, 3, 3), kernels=[(), (3,), (5,), ()])),
            r"GrowKernels\({.*: \(5,\), .*: \(5,\)}\) first",
        ),
        (
            lambda: RoleTypes()(chain((2, 3, 3, 3, 3), kernels=[(), (3,), (), ()])),
            "not all of these are such kernels",
        ),
        (lambda: RoleTypes()(RoleTypes()(chain((2, 3, 3)))), "without role types"),
        (lambda: RoleTypes()(random_graph(self_spec())), "self weight"),
        (lambda: RoleTypes("output")(chain((2, 3, 4))), r"no fixed layer has \(got 'output'\)"),
    ],
)
def test_what_transforms_refuse(use, message):
    with pytest.raises(ValueError, match=message):
        use()


def test_transforms_take_single_networks():
    batch = Batch.from_data_list([FillBiases()(chain((2, 3)))])
    for use in (FillBiases(), FillBiases().inverse):
        with pytest.raises(TypeError, match="before batching"):
            use(batch)
    with pytest.raises(TypeError, match=r"such as \(5, 5\) \(got 5\)"):
        GrowKernels(5)


def relu_network(*widths: int, convolutional: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Conv2d(a, b, 2) if convolutional else nn.Linear(a, b), nn.ReLU()]
    if convolutional:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:])).double()


def widened(network: nn.Sequential, times: int) -> nn.Sequential:
    """Returns the same function with several copies of every hidden neuron."""
    layers = [m for m in network if hasattr(m, "weight")]
    widths = [layers[0].weight.shape[1], *(m.weight.shape[0] for m in layers)]
    widths[1:-1] = [n * times for n in widths[1:-1]]
    wide = relu_network(*widths, convolutional=isinstance(layers[0], nn.Conv2d))
    for old, new in zip(layers, (m for m in wide if hasattr(m, "weight")), strict=True):
        is_first, is_last = old is layers[0], old is layers[-1]
        weight = old.weight if is_first else old.weight.repeat_interleave(times, 1) / times
        new.weight.data = weight if is_last else weight.repeat_interleave(times, 0)
        new.bias.data = old.bias if is_last else old.bias.repeat_interleave(times)
    return wide


@pytest.mark.parametrize("convolutional", [False, True])
@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("times", [2, 3])
def test_widened_networks_look_alike_by_fan_in(convolutional, symmetry, times):
    torch.manual_seed(0)
    network = relu_network(2, 4, 5, 3, convolutional=convolutional)
    x = torch.randn(4, 2, 5, 5).double() if convolutional else torch.randn(4, 2).double()
    example = [x] if convolutional else []
    small, wide = (from_module(n, *example) for n in (network, widened(network, times)))
    assert (small.run(x) - wide.run(x)).abs().max() < 1e-12
    scale = ScaleByFanIn()
    model = NFN(small.spec, (8, 8), symmetry, out_features=2, head=(32,)).double()
    outputs = [model(graph) for graph in (small, wide, scale(small), scale(wide))]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
    assert (outputs[2] - outputs[3]).abs().max() < 1e-12
    for graph in (small, wide):
        assert (scale(graph).run(x) - graph.run(x)).abs().max() < 1e-12
        back = scale.inverse(scale(graph))
        assert back.layout == graph.layout and back.layout.computation == graph.layout.computation
        for key, tensor in graph.to_tensors().items():
            torch.testing.assert_close(back.to_tensors()[key], tensor, rtol=4e-16, atol=0)
    batch = Batch.from_data_list([scale(small), scale(wide)])
    assert (batch.run(x)[0] - batch.run(x)[1]).abs().max() < 1e-12


def test_fan_in_leaves_weights_from_fixed_neurons_and_refuses_wild_exponents():
    graph = chain((3, 4, 5))
    scaled = ScaleByFanIn(0.5)(graph).to_tensors()
    assert scaled["0.weight"].equal(graph.to_tensors()["0.weight"])
    torch.testing.assert_close(scaled["1.weight"], graph.to_tensors()["1.weight"] * 2)
    for bad in (float("nan"), 9, "1", True):
        with pytest.raises(ValueError, match="exponent"):
            ScaleByFanIn(bad)
