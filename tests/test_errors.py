"""Bad input raises a typed error that says what was expected and what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from networks import chain, parallel_spec
from nfn_graph import (
    NFN,
    Activation,
    Batch,
    ChannelNorm,
    Dropout,
    Fold,
    FourierFeatures,
    IOEncoding,
    NetworkSpec,
    NFLinear,
    Pool,
    Residual,
    Standardize,
    WeightGraph,
)
from nfn_graph.data import Layout, Shape
from nfn_graph.testing import random_graph
from nfn_graph.transforms import RoleTypes

SPEC = chain((2, 3, 4)).spec


@pytest.mark.parametrize(
    ("weights", "biases", "message"),
    [
        ([], None, r"at least one weight tensor \(got none\)"),
        (
            [torch.ones(3, 2), torch.ones(4, 5)],
            None,
            r"'1.weight' to have 3 inputs, the outputs of '0.weight' \(got 5\)",
        ),
        ([torch.ones(3)], None, r"'0.weight' to be a floating-point tensor .* \(got \[3\]"),
        ([torch.ones(3, 2).long()], None, r"floating-point.*torch.int64"),
        ([torch.ones(3, 0)], None, r"got \[3, 0\]"),
        ([torch.ones(3, 2)], [torch.ones(2)], r"'0.bias' to be .* \[3\] \(got \[2\]"),
        ([torch.ones(3, 2)], [], "equal numbers of weights, biases and keys"),
    ],
)
def test_tensors_that_are_no_chain(weights, biases, message):
    with pytest.raises(ValueError, match=message):
        WeightGraph.from_tensors(weights, biases)


def test_keys_that_repeat():
    keys = [("a", "x"), ("a", "z")]
    with pytest.raises(ValueError, match=r"to differ \(got 'a' twice\)"):
        WeightGraph.from_tensors([torch.ones(2, 2)] * 2, keys=keys)


PLACED = chain((2, 3, 4)).layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": Shape(((2,), (3,)), ((), ()))}, "sizes of 3 neuron types"),
        (
            {"shape": Shape(((2,), (3, 3), (4,)), PLACED.shape.blocks)},
            "one layer of neuron type 'hidden1'",
        ),
        (
            {"shape": Shape(((5,), (3,), (4,)), PLACED.shape.blocks)},
            r"2 neurons of the fixed type 'input' \(got 5\)",
        ),
        ({"shape": Shape(PLACED.shape.sizes, (((0, 0),), ((0, 1),)))}, r"layers below \(1, 1\)"),
        ({"placements": PLACED.placements[:-1]}, "all 1 taps of 'output', each once"),
        ({"placements": PLACED.placements * 2}, "each once"),
        (
            {"shape": Shape(((2,), (4,), (4,)), PLACED.shape.blocks)},
            r"'0.weight' to have {'target': 4, 'source': 2}.*\(got {'target': 3, 'source': 2}\)",
        ),
        (
            {"placements": (replace(PLACED.placements[0], block=1), *PLACED.placements[1:])},
            r"'0.weight' in a block of \('input', 'weight', 'hidden1'\) below 1 \(got 1\)",
        ),
        (
            {"placements": (replace(PLACED.placements[0], store="no"), *PLACED.placements[1:])},
            "'0.weight' in a type of the spec",
        ),
        (
            {"placements": (replace(PLACED.placements[0], shape=(3, 3)), *PLACED.placements[1:])},
            r"all 9 entries of '0.weight' to be placed once \(got 6\)",
        ),
    ],
)
def test_layouts_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(PLACED, **changes)


def test_role_blocks_must_come_in_order():
    joined = RoleTypes()(chain((2, 3, 3, 3, 4))).layout
    for blocks in (((2, 1), (1, 0)), ((1, 0), (2, 0)), ((1, 0), (1, 1))):
        wrong = Shape(joined.shape.sizes, (joined.shape.blocks[0], blocks, joined.shape.blocks[2]))
        with pytest.raises(ValueError, match="to connect different pairs of layers, in order"):
            Layout(joined.spec, wrong)


def test_layouts_and_tensors_must_come_together():
    with pytest.raises(ValueError, match=r"Expected tensors \['0.bias'"):
        WeightGraph.from_placements(PLACED, {"0.weight": torch.ones(3, 2)})
    with pytest.raises(ValueError, match="with placements of tensors"):
        WeightGraph.from_placements(Layout(PLACED.spec, PLACED.shape), {})
    with pytest.raises(ValueError, match="got one made from features"):
        random_graph(SPEC).to_tensors()


def test_wrong_number_of_channels():
    layer = NFLinear(SPEC.fold("np"), 2, 3)
    with pytest.raises(ValueError, match=r"of 2 channels \(got 1\)"):
        layer(chain((2, 3, 4)).features("np"))


@pytest.mark.parametrize(
    ("graph", "view", "message"),
    [
        (chain((2, 3, 4)), "np", "folded for 'np'"),
        (chain((2, 3, 4)), None, r"before the fold; use features.fold\('hnp'\)"),
        (chain((2, 3, 3, 4)), "hnp", "hidden2 is not known"),
        (chain((3, 3, 4)), "hnp", r"expected input\[2\]:0 \(got input\[3\]:0\)"),
        (chain((2, 3, 4), kernels=[(3,), ()]), "hnp", "input->hidden1:1 .got input->hidden1:3"),
        (chain((2, 3, 4), biases=False), "hnp", "hidden1:1 .got hidden1:0"),
    ],
)
def test_features_of_another_spec_name_the_type(graph, view, message):
    layer = NFLinear(SPEC.fold("hnp"), 1, 1).double()
    with pytest.raises(ValueError, match=message):
        layer(graph.features(view))


def test_layers_ask_for_folded_specs_and_features():
    for build in (lambda: NFLinear(SPEC, 1, 1), lambda: Pool(SPEC)):
        with pytest.raises(TypeError, match=r"folded spec \(got NetworkSpec\).*spec.fold"):
            build()
    with pytest.raises(TypeError, match="own NetworkSpec, before the fold"):
        IOEncoding(SPEC.fold("np"), 1)
    with pytest.raises(TypeError, match=r"Expected WeightFeatures \(got Tensor\)"):
        NFLinear(SPEC.fold("np"), 1, 1)(torch.ones(3))
    with pytest.raises(ValueError, match=r"after the fold; use features\.unfold"):
        Standardize(SPEC, 1)(chain((2, 3, 4)).features("np"))


def test_hnp_with_differing_input_sizes_names_the_type():
    batch = Batch.from_data_list([chain((2, 3, 4)), chain((5, 3, 4))])
    with pytest.raises(ValueError, match="one size of the fixed neuron type 'input' for 'hnp'"):
        batch.features("hnp")
    model = NFN(SPEC, (2,), "hnp", out_features=1).double()
    with pytest.raises(ValueError, match=r"2 neurons of the fixed neuron type 'input' \(got diff"):
        model(batch)
    with pytest.raises(ValueError, match=r"'input' \(got 5\)\. Use 'np' and NetworkSpec\.union"):
        model(chain((5, 3, 4)))


def test_models_name_the_type_that_they_do_not_know():
    model = NFN(SPEC, (2,), "np", out_features=1).double()
    with pytest.raises(ValueError, match=r"one without 'hidden2'\)\. Use NetworkSpec\.union"):
        model(chain((2, 3, 3, 4)))
    with pytest.raises(ValueError, match=r"'weight', 'hidden1'\) as in the spec: .*:1 \(got .*:9"):
        model(chain((2, 3, 4), kernels=[(3, 3), ()]))


def test_batches_of_nothing_or_of_other_things():
    with pytest.raises(ValueError, match=r"at least one graph to batch \(got none\)"):
        Batch.from_data_list([])
    with pytest.raises(TypeError, match=r"Expected WeightGraphs to batch \(got Tensor"):
        Batch.from_data_list([torch.ones(2)])
    with pytest.raises(TypeError, match="got Batch"):
        Batch.from_data_list([Batch.from_data_list([chain((2, 3, 4))])])
    with pytest.raises(ValueError, match=r"1 channels of every graph.*\(got 2 in graph 1\)"):
        Batch.from_data_list([chain((2, 3, 4)), chain((2, 3, 4), channels=2)])
    with pytest.raises(ValueError, match="GrowKernels"):
        Batch.from_data_list([chain((2, 3, 4)), chain((2, 3, 4), kernels=[(3,), ()])])
    with pytest.raises(ValueError, match="FillBiases"):
        Batch.from_data_list([chain((2, 3, 4)), chain((2, 3, 4), biases=False)])


def test_a_layer_too_large_is_refused_before_it_is_allocated():
    spec = NetworkSpec.chain(3, input_size=784, output_size=10)
    message = (
        r"at most 268,435,456 parameters \(got 5,\d+,\d+,\d+, of which 2,\d+,\d+,\d+ at "
        r"(the network|neuron type 'hidden1')\)"
    )
    with pytest.raises(ValueError, match=message):
        NFLinear(spec.fold("hnp"), 64, 64)
    NFLinear(spec.fold("np"), 64, 64)
    with pytest.raises(ValueError, match="at most 10 parameters"):
        NFLinear(SPEC.fold("np"), 1, 1, max_parameters=10)


def test_graphs_that_were_changed_by_hand_are_checked():
    graph = chain((2, 3, 4))
    graph["hidden1"].x = torch.ones(4, 1, 1)
    with pytest.raises(ValueError, match=r"\[3, 1, channels\] of neuron type 'hidden1' \(got \[4"):
        graph.features()
    graph["hidden1"].x = torch.ones(3, 1, 2)
    with pytest.raises(ValueError, match=r"channels of neuron type 'hidden1', as of the others"):
        graph.features()
    del graph["hidden1"]
    with pytest.raises(ValueError, match="Expected a tensor 'x' of neuron type 'hidden1'"):
        graph.features()
    with pytest.raises(ValueError, match="without a layout"):
        _ = WeightGraph().spec
    with pytest.raises(ValueError, match="got a batch; take batch"):
        Batch.from_data_list([chain((2, 3, 4))]).to_tensors()
    with pytest.raises(TypeError, match="Expected no argument except spec"):
        chain((2, 3, 4)).to_homogeneous(add_node_type=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NFLinear(SPEC.fold("np"), 1, 1, aggr="max"), r"\['mean', 'sum'\] \(got 'max'\)"),
        (lambda: Pool(SPEC.fold("np"), aggr="min"), r"\(got 'min'\)"),
        (lambda: Dropout(1.0), r"in \[0, 1\) \(got 1.0\)"),
        (lambda: IOEncoding(SPEC, 1, "fourier"), r"\(got 'fourier'\)"),
        (lambda: IOEncoding(SPEC.unsized, 1, "learned"), "kind='sinusoidal'"),
        (lambda: NFN(SPEC, ()), "at least one NF-Layer"),
        (lambda: NFN(SPEC, (2.5,)), r"out_channels to be an integer of at least 1 \(got 2.5\)"),
        (lambda: NFN(SPEC, (2,), in_channels=0), r"in_channels to be .* at least 1 \(got 0\)"),
        (lambda: NFLinear(SPEC.fold("np"), 0, 1), r"in_channels to be .* at least 1 \(got 0\)"),
        (lambda: NFLinear(SPEC.fold("np"), 1, -1), r"out_channels to be .* 1 \(got -1\)"),
        (lambda: ChannelNorm(SPEC, 0), r"Expected channels to be .* 1 \(got 0\)"),
        (lambda: Standardize(SPEC, 0), r"Expected channels to be .* 1 \(got 0\)"),
        (lambda: IOEncoding(SPEC, 0), r"in_channels to be .* 1 \(got 0\)"),
        (lambda: FourierFeatures(1, 0), r"num_features to be .* 1 \(got 0\)"),
        (lambda: random_graph(SPEC, {"hiden1": 3}), r"'hidden1', .*\(got one of 'hiden1'\)"),
        (lambda: NFN(SPEC, (1,), act="Rectified"), r"activation of .* \(got 'Rectified'\)"),
        (lambda: NFN(SPEC, (1,), act="Softmax"), r"activation of .* \(got 'Softmax'\)"),
        (
            lambda: NFN(SPEC, (2,), edit_scale=0.1),
            "1 output channels of a model that edits",
        ),
        (lambda: NFN(SPEC, (8,), max_parameters=10), "at most 10 parameters"),
        (lambda: Activation(nn.ReLU(inplace=True)), "keeps its input"),
        (lambda: Activation("softmax"), r"activation of .* \(got 'softmax'\)"),
        (lambda: Fold("nph"), r"\['np', 'hnp'\] \(got 'nph'\)"),
        (lambda: Standardize(SPEC, 1).fit([]), "at least one graph"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_uses_of_layers_and_models():
    features = chain((2, 3, 4), channels=2).features("np")
    with pytest.raises(ValueError, match=r"keeps the 2 channels of its input \(got 3\)"):
        Residual(NFLinear(features.spec, 2, 3).double())(features)
    model = NFN(SPEC, (1,), out_features=1).double()
    for function in (nn.ReLU, 3, None):
        with pytest.raises(TypeError, match=r"name of an activation or a function of a tensor"):
            Activation(function)
    batch = Batch.from_data_list([chain((2, 3, 4), channels=2)])
    with pytest.raises(TypeError, match=r'\(got Batch\)\. Use graph\.features\("np"\)'):
        NFLinear(features.spec, 2, 3)(batch)
    with pytest.raises(TypeError, match=r"\(got Batch\)\. Use graph\.features\(\)"):
        Standardize(batch.spec, 2)(batch)
    with pytest.raises(TypeError, match="Expected out_features with head="):
        NFN(SPEC, (1,), head=(8,))
    with pytest.raises(TypeError, match=r"no out_features with edit_scale= \(got 2\)"):
        NFN(SPEC, (1,), out_features=2, edit_scale=0.1)
    with pytest.raises(TypeError, match=r"a Batch or WeightFeatures \(got list\).*from_data_list"):
        model([chain((2, 3, 4))])
    with pytest.raises(ValueError, match="Expected features of 3 channels"):
        ChannelNorm(features.spec, 3)(features)


def test_tensors_that_share_edges_must_come_together():
    spec = parallel_spec()
    part = NetworkSpec(spec.neurons, tuple(w for w in spec.weights if w.name != "back"))
    batch = Batch.from_data_list([random_graph(spec), random_graph(part)])
    with pytest.raises(ValueError, match=r"network 1 to have all or none of .*got \[1, 1, 0\]"):
        batch.features("np")


def test_nan_passes_through():
    graph = chain((2, 3, 4))
    graph["hidden1"].x = torch.full((3, 1, 1), float("nan")).double()
    for symmetry in ("np", "hnp"):
        out = NFLinear(graph.spec.fold(symmetry), 1, 1).double()(graph.features(symmetry))
        assert all(x.isnan().any() for _, x in out.tensors() if x.numel())
        assert Pool(out.spec, "max")(out).isnan().any()
